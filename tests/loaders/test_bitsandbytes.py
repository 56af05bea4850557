"""Checkpoints that bitsandbytes quantised: the same numbers as its own, at every tp.

Weights are compared, never outputs of its Linear4bit: that repacks them at the first forward.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("bitsandbytes")

import loadkit
from helpers.bitsandbytes_files import SIZES, dequantised, pack, pack_eight, write_quantised
from helpers.checkpoints import llama_sd, write_cfg, write_st
from helpers.packed_linear import check_ranks, numbers_of
from helpers.ranks import parallel_of
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import ConfigFileError, ModelError, NotInstalledError, OptionError, PlanError
from loadkit_bitsandbytes.online import OnlineFourBitMethod
from loadkit_bitsandbytes.stored import StoredLinearMethod

QUIET = LoadConfig(use_tqdm_on_load=False)
MAKERS = {
    "nf4": pack,
    "nf4-dq": partial(pack, compress_statistics=True),
    "fp4-32": partial(pack, quant_type="fp4", blocksize=32),
    "int8": pack_eight,
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def load(path: Path, parallel: ParallelConfig | None = None, **options: Any) -> Any:
    options = {"load_config": QUIET, **options}
    return loadkit.load(path, parallel=parallel or ParallelConfig(), **options)


def with_options(**options: Any) -> LoadConfig:
    return LoadConfig(
        load_format="bitsandbytes", use_tqdm_on_load=False, model_loader_extra_config=options
    )


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        hidden = model(torch.tensor([1, 5, 9, 2]), torch.arange(4))
        found: torch.Tensor = model.compute_logits(hidden)
    return found


def same_state(a: Any, b: Any) -> None:
    one, other = a.state_dict(), b.state_dict()
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "tp"),
    [("nf4-dq", 1), ("nf4-dq", 2), ("nf4-dq", 4), ("nf4", 2), ("fp4-32", 4), ("int8", 4)],
)
def test_BNB_01_the_ranks_hold_what_bitsandbytes_dequantises(
    way: str, tp: int, tmp_path: Path
) -> None:
    written = write_quantised(tmp_path, MAKERS[way])
    results = [load(tmp_path, parallel) for parallel in parallel_of(tp)]
    check_ranks([result.model for result in results], dequantised(written))
    for result in results:
        assert result.plan.bytes_to_read == result.report.bytes_read
        held = sum(p.numel() * p.itemsize for p in result.model.parameters())
        assert result.plan.parameter_bytes == held
        assert {row.exact for row in result.plan.rows} == {"exact"}


@makers
def test_a_forward_is_that_of_the_dequantised_model(make: Any, tmp_path: Path) -> None:
    written = write_quantised(tmp_path / "q", make)
    write_cfg(tmp_path / "plain", hidden_size=256, intermediate_size=512)
    write_st(tmp_path / "plain" / "model.safetensors", dequantised(written))
    packed, plain = load(tmp_path / "q").model, load(tmp_path / "plain").model
    before = {name: tensor.clone() for name, tensor in packed.state_dict().items()}
    found, expected = logits_of(packed), logits_of(plain)
    if make is not pack_eight:
        assert torch.allclose(found, expected, atol=1e-3, rtol=0)  # the order of sums
    else:  # int8 products quantise their inputs too: bitsandbytes' own kernels
        assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    for name, tensor in packed.state_dict().items():
        assert torch.equal(tensor, before[name]), f"a forward changed {name}"


def test_four_bits_are_multiplied_in_the_compute_dtype(tmp_path: Path) -> None:
    write_quantised(tmp_path, stated={"bnb_4bit_compute_dtype": "float32"})
    model = load(tmp_path, dtype="bfloat16").model
    layer = model.model.layers[0].self_attn.o_proj
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    expected = x.float() @ layer.quant_method.dequantised(layer).t()
    assert torch.equal(layer(x), expected.to(torch.bfloat16))


def test_BNB_02_quant_storage_is_bytes_whatever_its_dtype(tmp_path: Path) -> None:
    for name in ("uint8", "bfloat16", "float32"):
        make = partial(pack, quant_storage=getattr(torch, name))
        stated = {"bnb_4bit_quant_storage": name}
        written = write_quantised(tmp_path / name, make, stated=stated)
        for tp in (1, 2):
            models = [load(tmp_path / name, p).model for p in parallel_of(tp)]
            check_ranks(models, dequantised(written))


def test_BNB_01_a_code_of_the_files_own_is_followed(tmp_path: Path) -> None:
    """The case's own checkpoint: nf4 by name, and another code in quant_map."""
    code = torch.linspace(-1, 1, 16)

    def make(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        found = pack(name, weight)
        absmax = weight.reshape(-1, 64).abs().amax(1)
        scaled = (weight.reshape(-1, 64) / absmax[:, None]).unsqueeze(-1)
        index = scaled.sub(code).abs().argmin(-1).reshape(-1)
        codes = (index[0::2] << 4 | index[1::2]).to(torch.uint8).unsqueeze(1)
        return {**found, name: codes, f"{name}.absmax": absmax, f"{name}.quant_map": code.clone()}

    written = write_quantised(tmp_path, make)
    expected: dict[str, torch.Tensor] = {}
    for name, shape in {n: t.shape for n, t in llama_sd(**SIZES).items()}.items():
        if f"{name}.absmax" in written:
            codes = written[name].view(-1)
            index = torch.stack((codes >> 4, codes & 15), -1).view(-1, 64).long()
            expected[name] = (code[index] * written[f"{name}.absmax"][:, None]).view(shape)
    for tp in (1, 2):
        check_ranks([load(tmp_path, p).model for p in parallel_of(tp)], expected)


def test_what_no_layer_holds_packed_is_decoded(tmp_path: Path) -> None:
    written = write_quantised(tmp_path, MAKERS["nf4-dq"], chosen=lambda name: "norm" not in name)
    assert any("embed_tokens.weight.absmax" in name for name in written)
    model, expected = load(tmp_path).model, dequantised(written)
    assert torch.equal(model.model.embed_tokens.weight[:40], expected["model.embed_tokens.weight"])
    check_ranks([model], expected)  # and the head, which is a linear layer: packed
    head = model.lm_head
    assert head.weight.dtype == torch.uint8
    assert torch.equal(head.quant_method.dequantised(head), expected["lm_head.weight"])
    assert logits_of(model).shape == (4, 40)
    for parallel in parallel_of(2):
        found = load(tmp_path, parallel)
        rows = [r for r in found.plan.rows if r.parameter == "model.embed_tokens.weight"]
        kinds = {(row.exact, row.kind) for row in rows if row.tensor}
        assert {kind for _, kind in kinds} == ({"compute"} if not parallel.tp_rank else set())
        table = found.model.model.embed_tokens
        rows = expected["model.embed_tokens.weight"][table.vocab_start_index :][: len(table.weight)]
        assert torch.equal(table.weight[: len(rows)], rows)


def test_a_plain_module_gets_numbers(tmp_path: Path) -> None:
    module = torch.nn.Module()
    module.a, module.b = torch.nn.Linear(64, 8), torch.nn.Linear(64, 8, bias=False)
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    tensors = {"a.bias": state["a.bias"], **pack("a.weight", state["a.weight"])}
    tensors |= pack_eight("b.weight", state["b.weight"])
    write_st(tmp_path / "model.safetensors", tensors)
    loadkit.load_into(module, tmp_path, load_format="bitsandbytes", load_config=QUIET)
    expected = dequantised(tensors)
    assert torch.equal(module.a.weight, expected["a.weight"])
    assert torch.equal(module.b.weight, expected["b.weight"])


def test_tensors_fused_on_disk_are_cut_from_one_state(tmp_path: Path) -> None:
    plain = llama_sd(seed=3, **SIZES)
    for layer in (0, 1):
        stem = f"model.layers.{layer}."
        parts = [plain.pop(f"{stem}self_attn.{p}_proj.weight") for p in "qkv"]
        plain[f"{stem}self_attn.qkv_proj.weight"] = torch.cat(parts)
        parts = [plain.pop(f"{stem}mlp.{p}_proj.weight") for p in ("gate", "up")]
        plain[f"{stem}mlp.gate_up_proj.weight"] = torch.cat(parts)
    written = write_quantised(tmp_path, MAKERS["nf4-dq"], state=plain)
    numbers = dequantised(written)
    expected = dict(numbers)
    for layer in (0, 1):
        stem = f"model.layers.{layer}."
        qkv = numbers[f"{stem}self_attn.qkv_proj.weight"].split([256, 128, 128])
        gate_up = numbers[f"{stem}mlp.gate_up_proj.weight"].split([512, 512])
        expected |= {f"{stem}self_attn.{p}_proj.weight": t for p, t in zip("qkv", qkv, strict=True)}
        names = (f"{stem}mlp.gate_proj.weight", f"{stem}mlp.up_proj.weight")
        expected |= dict(zip(names, gate_up, strict=True))
    for tp in (1, 2, 4):
        check_ranks([load(tmp_path, p).model for p in parallel_of(tp)], expected)


# -- the plan ----------------------------------------------------------------------------------


def test_every_tensor_is_in_the_plan_and_none_is_silent(tmp_path: Path) -> None:
    written = write_quantised(tmp_path, MAKERS["nf4-dq"])
    plan = loadkit.plan(tmp_path, load_config=QUIET)
    assert plan.ok and not plan.notes
    kinds = {row.tensor: row.kind for row in plan.rows if row.tensor}
    assert kinds.keys() == written.keys()
    assert {k for n, k in kinds.items() if ".quant_state." in n} == {"metadata"}
    assert "skipped" not in kinds.values()
    used = sum(t.numel() * t.itemsize for n, t in written.items() if ".quant_state." not in n)
    assert plan.bytes_needed == used
    assert plan.load_format == "bitsandbytes" and "quant_method" in plan.load_format_why


def test_packed_weights_that_nothing_fuses_are_views_of_the_file(tmp_path: Path) -> None:
    write_quantised(tmp_path)
    result = load(tmp_path)
    layers = [m for n, m in result.model.named_modules() if n.endswith(("o_proj", "down_proj"))]
    assert result.report.aliased_bytes >= sum(layer.weight.numel() for layer in layers)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_reads_its_own_part(tp: int, tmp_path: Path) -> None:
    written = write_quantised(tmp_path)
    plans = [loadkit.plan(tmp_path, parallel=p, load_config=QUIET) for p in parallel_of(tp)]
    packed = sum(t.numel() for n, t in written.items() if n.endswith("_proj.weight"))
    for plan in plans:
        names = {r.tensor for r in plan.rows if r.tensor and r.tensor.endswith("_proj.weight")}
        own = sum(
            math.prod(row.source.size) for row in plan.rows if row.tensor in names and row.source
        )
        kv = 2 * 2 * 128 * 256 // 2  # k and v are whole heads: more ranks than heads share them
        assert own <= packed // tp + kv


def test_BNB_01_columns_inside_a_block_are_a_problem_that_names_the_legal_tp(
    tmp_path: Path,
) -> None:
    written = write_quantised(tmp_path, partial(pack, blocksize=128))
    with pytest.raises(PlanError) as caught:
        load(tmp_path, ParallelConfig(tp_size=4))
    problem = caught.value.problems[0]
    assert {one.code for one in caught.value.problems} == {"BNB_MISALIGNED"}
    assert problem.tensor == "model.layers.0.self_attn.o_proj.weight"
    assert "tp 4 cuts inside one; legal: tp 1, 2" in problem.message
    assert "'misaligned': 'requantise'" in (problem.hint or "")
    check_ranks([load(tmp_path, p).model for p in parallel_of(2)], dequantised(written))


@pytest.mark.parametrize("way", ["decode", "requantise"])
def test_BNB_01_misaligned_layers_are_decoded_where_that_is_asked_for(
    way: str, tmp_path: Path
) -> None:
    written = write_quantised(tmp_path, partial(pack, blocksize=128))
    expected = dequantised(written)
    name = "model.layers.0.self_attn.o_proj"
    for rank, parallel in enumerate(parallel_of(4)):
        model = load(tmp_path, parallel, load_config=with_options(misaligned=way)).model
        layer = model.get_submodule(name)
        own = expected[f"{name}.weight"][:, 64 * rank : 64 * rank + 64].contiguous()
        if way == "decode":
            assert torch.equal(layer.weight, own)
            continue
        assert isinstance(layer.quant_method, OnlineFourBitMethod)
        again = dequantised(pack("w", own, blocksize=128))["w"]
        assert torch.equal(layer.quant_method.dequantised(layer), again)
        down = model.model.layers[0].mlp.down_proj  # 512 columns: whole blocks of 128
        assert isinstance(down.quant_method, StoredLinearMethod)


# -- what is asked for, and what is there --------------------------------------------------------


@makers
def test_BNB_02_auto_finds_the_format_in_the_config(make: Any, tmp_path: Path) -> None:
    write_quantised(tmp_path, make)
    plan = loadkit.plan(tmp_path, load_config=QUIET)
    assert plan.ok and plan.load_format == "bitsandbytes"
    assert not [row for row in plan.rows if row.kind == "skipped"]


def test_BNB_02_another_load_format_disagrees_with_the_config(tmp_path: Path) -> None:
    write_quantised(tmp_path)
    for name in ("safetensors", "hf"):
        with pytest.raises(ConfigFileError, match=f"'bitsandbytes', and load format '{name}'"):
            loadkit.plan(tmp_path, load_format=name, load_config=QUIET)


def test_BNB_02_another_quantisation_disagrees_with_the_config(tmp_path: Path) -> None:
    write_quantised(tmp_path)
    with pytest.raises(ConfigFileError, match="says quantisation 'bitsandbytes', and 'gguf'"):
        loadkit.plan(tmp_path, quantization="gguf", load_config=QUIET)


@pytest.mark.parametrize(
    ("make", "stated", "said"),
    [
        (pack, {"load_in_4bit": False, "load_in_8bit": True}, "load_in_8bit, and it is in 4 bits"),
        (pack_eight, {"load_in_4bit": True, "load_in_8bit": False}, "load_in_4bit, and it is int8"),
        (pack, {"bnb_4bit_quant_type": "fp4"}, "'fp4', and it is nf4"),
    ],
)
def test_BNB_02_tensors_that_are_not_what_the_config_says(
    make: Any, stated: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write_quantised(tmp_path, make, stated=stated)
    with pytest.raises(ConfigFileError, match=said) as caught:
        loadkit.plan(tmp_path, load_config=QUIET)
    assert caught.value.tensor is not None and caught.value.file == "config.json"


def test_options_cannot_quantise_a_quantised_checkpoint_again(tmp_path: Path) -> None:
    write_quantised(tmp_path)
    for options in ({"load_in_8bit": True}, {"bnb_4bit_blocksize": 128}):
        with pytest.raises(ConfigFileError, match="model_loader_extra_config says"):
            loadkit.plan(tmp_path, load_config=with_options(**options))
    assert loadkit.plan(tmp_path, load_config=with_options(load_in_4bit=True)).ok


def test_a_packed_checkpoint_without_a_word_in_its_config_is_recognised(tmp_path: Path) -> None:
    written = write_quantised(tmp_path)
    write_cfg(tmp_path, hidden_size=256, intermediate_size=512)
    model = load(tmp_path, load_config=with_options()).model
    check_ranks([model], dequantised(written))


def test_layers_that_the_checkpoint_left_plain_stay_plain(tmp_path: Path) -> None:
    def chosen(name: str) -> bool:
        return name.endswith("_proj.weight") and "down_proj" not in name

    stated = {"llm_int8_skip_modules": ["down_proj"]}
    written = write_quantised(tmp_path, chosen=chosen, stated=stated)
    model = load(tmp_path).model
    down = model.model.layers[1].mlp.down_proj
    assert torch.equal(down.weight, written["model.layers.1.mlp.down_proj.weight"])
    check_ranks([model], dequantised(written))


def test_CFG_06_options_are_ours_and_those_of_whoever_brings_the_tensors(tmp_path: Path) -> None:
    write_quantised(tmp_path)
    good = with_options(weights_from="safetensors", enable_multithread_load=True, num_threads=2)
    assert loadkit.load(tmp_path, load_config=good).report.bytes_read
    with pytest.raises(OptionError, match="did you mean 'load_in_8bit'"):
        loadkit.plan(tmp_path, load_config=with_options(load_in_8bits=True))
    for bad in ({"weights_from": "bitsandbytes"}, {"misaligned": "maybe"}, {"load_in_8bit": "x"}):
        with pytest.raises(OptionError, match=next(iter(bad))):
            loadkit.plan(tmp_path, load_config=with_options(**bad))


def test_PLG_03_a_missing_library_is_a_pip_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_quantised(tmp_path)
    monkeypatch.setattr("loadkit_bitsandbytes.library.find_spec", lambda name: None)
    with pytest.raises(NotInstalledError, match=r'pip install "loadkit\[bitsandbytes\]"'):
        loadkit.plan(tmp_path, load_config=QUIET)


# -- saved again -------------------------------------------------------------------------------


@makers
def test_saved_as_hugging_face_has_it_it_is_the_same_checkpoint(make: Any, tmp_path: Path) -> None:
    written = write_quantised(tmp_path / "source", make)
    model = load(tmp_path / "source").model
    logits_of(model)  # a forward leaves the weights alone
    loadkit.save(model, tmp_path / "out")
    loadkit.save(model, tmp_path / "named", save_format="bitsandbytes")
    files = [tmp_path / name / "model.safetensors" for name in ("out", "named")]
    assert files[0].read_bytes() == files[1].read_bytes()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert found[name].shape == tensor.shape and torch.equal(found[name], tensor), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "bitsandbytes"
    same_state(load(tmp_path / "out").model, model)


def test_a_plain_model_is_not_saved_as_a_quantised_one(tmp_path: Path) -> None:
    write_cfg(tmp_path, hidden_size=256, intermediate_size=512)
    write_st(tmp_path / "model.safetensors", llama_sd(seed=3, **SIZES))
    with pytest.raises(loadkit.LoadkitError, match="not quantised by bitsandbytes"):
        loadkit.save(load(tmp_path).model, tmp_path / "out", save_format="bitsandbytes")


def test_one_rank_is_no_checkpoint(tmp_path: Path) -> None:
    write_quantised(tmp_path)
    rank = load(tmp_path, ParallelConfig(tp_size=2)).model
    with pytest.raises(loadkit.LoadkitError, match="one rank's part"):
        loadkit.save(rank, tmp_path / "out")


@pytest.mark.parametrize("make", [MAKERS["nf4-dq"], pack_eight], ids=["nf4-dq", "int8"])
def test_SS_04_rank_files_of_packed_weights_are_loaded_and_cut_anew(
    make: Any, tmp_path: Path
) -> None:
    write_quantised(tmp_path / "source", make)
    source, out = tmp_path / "source", tmp_path / "out"
    for parallel in parallel_of(2):
        loadkit.save(load(source, parallel).model, out, save_format="sharded_state")
    for parallel in parallel_of(2):
        same_state(load(out, parallel).model, load(source, parallel).model)
    for parallel in (ParallelConfig(), *parallel_of(4)):
        found = load(out, parallel).model
        same_state(found, load(source, parallel).model)


def test_a_conversion_keeps_what_is_quantised(tmp_path: Path) -> None:
    written = write_quantised(tmp_path / "q", MAKERS["nf4-dq"])
    loadkit.convert(tmp_path / "q", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in written.items())


def test_numbers_of_a_model_are_those_of_a_plain_load(tmp_path: Path) -> None:
    written = write_quantised(tmp_path / "q")
    write_cfg(tmp_path / "p", hidden_size=256, intermediate_size=512)
    write_st(tmp_path / "p" / "model.safetensors", dequantised(written))
    plain = dict(load(tmp_path / "p").model.named_parameters())
    found = numbers_of(load(tmp_path / "q").model)
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert Counter(t.dtype for t in found.values()) == {torch.float32: len(found)}


def test_a_shape_that_is_not_the_models_is_told_as_always(tmp_path: Path) -> None:
    plain = llama_sd(seed=3, **SIZES)
    name = "model.layers.0.self_attn.o_proj.weight"
    plain[name] = torch.randn(256, 320)
    write_quantised(tmp_path, state=plain)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    (problem,) = caught.value.problems  # type: ignore[attr-defined]
    assert (problem.code, problem.tensor) == ("SHAPE_MISMATCH", name)
