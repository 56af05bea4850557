"""Plain checkpoints quantised while they load: after the tp slice, one module at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("bitsandbytes")

import loadkit
from helpers.bitsandbytes_files import SIZES, dequantised, pack, pack_eight, quantised
from helpers.checkpoints import llama_sd, write_cfg, write_llama, write_st
from helpers.packed_linear import numbers_of, shards_by_name
from helpers.ranks import parallel_of
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import ConfigFileError, ModelError, PlanError, ShardedError, UsageError
from loadkit_bitsandbytes.options import QuantOptions

QUIET = LoadConfig(use_tqdm_on_load=False)
DQ = {"bnb_4bit_use_double_quant": True}
WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "nf4": ({}, pack),
    "nf4-dq": (DQ, partial(pack, compress_statistics=True)),
    "fp4-128": (
        {"bnb_4bit_quant_type": "fp4", "bnb_4bit_blocksize": 128},
        partial(pack, quant_type="fp4", blocksize=128),
    ),
    "int8": ({"load_in_8bit": True}, pack_eight),
}
ways = pytest.mark.parametrize(("options", "make"), WAYS.values(), ids=WAYS.keys())
CONFIG = {"hidden_size": 256, "intermediate_size": 512}


def config_of(options: dict[str, Any]) -> LoadConfig:
    return LoadConfig(
        load_format="bitsandbytes", use_tqdm_on_load=False, model_loader_extra_config=options
    )


def load(path: Path, parallel: ParallelConfig | None = None, **options: Any) -> Any:
    options = {"load_config": QUIET, **options}
    return loadkit.load(path, parallel=parallel or ParallelConfig(), **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_cfg(folder, **CONFIG)
    write_st(folder / "model.safetensors", llama_sd(seed=3, **SIZES))
    return folder


def part(name: str, weight: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """A rank's slice of a linear layer's weight."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return weight.chunk(tp, dim=1)[rank].contiguous()
    pieces = min(tp, 2) if name.endswith(("k_proj.weight", "v_proj.weight")) else tp
    return weight.chunk(pieces, dim=0)[rank * pieces // tp].contiguous()


@pytest.mark.parametrize(
    ("way", "tp"),
    [("nf4-dq", 1), ("nf4-dq", 4), ("nf4", 2), ("fp4-128", 2), ("int8", 4), ("int8", 1)],
)
def test_each_slice_is_quantised_as_bitsandbytes_would(way: str, tp: int, plain: Path) -> None:
    options, make = WAYS[way]
    weights = llama_sd(seed=3, **SIZES)
    for rank, parallel in enumerate(parallel_of(tp)):
        result = load(plain, parallel, load_config=config_of(options))
        found = shards_by_name([result.model])
        assert len(found) == 14
        for name, numbers in found.items():
            own = part(name, weights[name], tp, rank)
            assert torch.equal(numbers, dequantised(make(name, own))[name]), (rank, name)
        held = sum(p.numel() * p.itemsize for p in result.model.parameters())
        assert result.plan.parameter_bytes == result.report.parameter_bytes == held
        assert result.plan.bytes_to_read == result.report.bytes_read


@pytest.mark.parametrize(("options", "make"), [WAYS["nf4"], WAYS["int8"]], ids=["nf4", "int8"])
def test_any_load_format_quantises_where_it_is_asked_to(
    options: dict[str, Any], make: Any, plain: Path
) -> None:
    expected = numbers_of(load(plain, load_config=config_of(options)).model)
    stated = {"quantization_config": {"quant_method": "bitsandbytes", **options}}
    for load_format in ("auto", "safetensors"):
        model = load(plain, load_format=load_format, hf_overrides=stated).model
        found = numbers_of(model)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    if not options:
        found = numbers_of(load(plain, quantization="bitsandbytes").model)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_dummy_weights_are_quantised_too(plain: Path) -> None:
    write = load(plain, load_format="dummy", quantization="bitsandbytes").model
    assert write.model.layers[0].mlp.down_proj.weight.dtype == torch.uint8


@ways
def test_a_model_of_16_bits_is_quantised_from_16_bits(
    options: dict[str, Any], make: Any, plain: Path
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    model = load(plain, dtype="bfloat16", load_config=config_of(options)).model
    layer = model.model.layers[1].mlp.down_proj
    weight = llama_sd(seed=3, **SIZES)[name].to(torch.bfloat16)
    expected = dequantised(make(name, weight))[name]
    found = layer.quant_method.dequantised(layer)
    assert found.dtype == expected.dtype and torch.equal(found, expected)


@ways
def test_what_is_saved_is_what_bitsandbytes_makes_of_the_checkpoint(
    options: dict[str, Any], make: Any, plain: Path, tmp_path: Path
) -> None:
    model = load(plain, load_config=config_of(options)).model
    loadkit.save(model, tmp_path / "out")
    expected = quantised(llama_sd(seed=3, **SIZES), make)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if ".quant_state." in name:
            one, other = (json.loads(bytes(t.tolist())) for t in (tensor, found[name]))
            assert one == other
        else:
            assert torch.equal(found[name], tensor), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["load_in_8bit"] == bool(options.get("load_in_8bit"))
    again = load(tmp_path / "out")
    assert again.plan.load_format == "bitsandbytes"
    one, other = numbers_of(again.model), numbers_of(model)
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(
    ("options", "make"), [WAYS["nf4-dq"], WAYS["int8"]], ids=["nf4-dq", "int8"]
)
def test_SS_04_rank_files_keep_the_quantised_layout(
    options: dict[str, Any], make: Any, plain: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    models = [load(plain, p, load_config=config_of(options)).model for p in parallel_of(2)]
    for model in models:
        loadkit.save(model, out, save_format="sharded_state")
    manifest = json.loads((out / "loadkit_manifest.json").read_text())
    assert manifest["layout"] == "runtime-processed"
    assert set(manifest["layout_versions"].values()) == {"1"}
    for parallel, model in zip(parallel_of(2), models, strict=True):
        found = load(out, parallel).model
        state, expected = found.state_dict(), model.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        layer = found.model.layers[0].self_attn.o_proj
        assert torch.isfinite(layer.quant_method.apply(layer, torch.randn(2, 128))).all()
    with pytest.raises(ShardedError, match="cannot be cut anew"):
        load(out)


# -- what is left out --------------------------------------------------------------------------


def test_names_in_a_skip_list_are_runs_of_whole_components() -> None:
    options = QuantOptions(llm_int8_skip_modules=("lm_head", "layers.1.mlp", "o_proj"))
    assert options.skips("lm_head") and options.skips("model.layers.1.mlp.down_proj")
    assert options.skips("model.layers.0.self_attn.o_proj")
    for name in ("lm_head2", "model.layers.11.mlp.x", "model.layers.1.mlp2", "model.no_proj"):
        assert not options.skips(name)


def test_the_head_and_embeddings_stay_plain_by_default(plain: Path) -> None:
    model = load(plain, quantization="bitsandbytes").model
    assert model.lm_head.weight.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == torch.float32
    options = {"llm_int8_skip_modules": ["layers.1", "gate_proj", "up_proj"]}
    model = load(plain, load_config=config_of(options)).model
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    assert dtypes["lm_head.weight"] == torch.uint8  # the list is the caller's: all of it
    assert dtypes["model.layers.0.self_attn.o_proj.weight"] == torch.uint8
    assert dtypes["model.layers.0.mlp.gate_up_proj.weight"] == torch.float32
    assert not [n for n, d in dtypes.items() if "layers.1." in n and d == torch.uint8]
    head = model.lm_head
    expected = dequantised(pack("w", llama_sd(seed=3, **SIZES)["lm_head.weight"]))["w"]
    assert torch.equal(head.quant_method.dequantised(head), expected)


def test_Q_03_parts_of_a_fused_layer_that_disagree_are_an_error(plain: Path) -> None:
    options = {"llm_int8_skip_modules": ["q_proj"]}
    plan = loadkit.plan(plain, load_config=config_of(options))
    (problem,) = plan.problems
    assert problem.code == "SKIP_DISAGREES" and "q_proj" in problem.message
    with pytest.raises(ModelError, match="holds all of"):
        load(plain, load_config=config_of(options))


def test_options_that_cannot_be_are_refused(plain: Path) -> None:
    for options in (
        {"load_in_4bit": True, "load_in_8bit": True},
        {"load_in_4bit": False, "load_in_8bit": False},
        {"bnb_4bit_blocksize": 48},
    ):
        with pytest.raises(ConfigFileError):
            loadkit.plan(plain, load_config=config_of(options))
    for stated in ({"bnb_4bit_quant_type": "int4"}, {"llm_int8_threshold": -1.0}):
        given = {"quantization_config": {"quant_method": "bitsandbytes", **stated}}
        with pytest.raises(ConfigFileError, match=next(iter(stated))):
            loadkit.plan(plain, hf_overrides=given, load_config=QUIET)


def test_a_bias_is_added_and_kept(tmp_path: Path) -> None:
    write_cfg(tmp_path, **CONFIG, attention_bias=True)
    state = llama_sd(seed=3, **SIZES)
    for name in [n for n in state if "self_attn" in n]:
        state[name.replace("weight", "bias")] = torch.randn(state[name].shape[0])
    write_st(tmp_path / "model.safetensors", state)
    for options, _ in WAYS.values():
        model = load(tmp_path, load_config=config_of(options)).model
        layer = model.model.layers[0].self_attn.qkv_proj
        x = torch.randn(5, 256)
        with_bias = layer(x)
        plain_output = layer.quant_method.apply(layer, x)
        assert torch.allclose(with_bias, plain_output + layer.bias, atol=1e-4)
        loadkit.save(model, tmp_path / "out")
        found = load_file(tmp_path / "out" / "model.safetensors")
        name = "model.layers.0.self_attn.k_proj.bias"
        assert torch.equal(found[name], state[name])


def test_a_missing_weight_is_a_problem_of_the_plan(tmp_path: Path) -> None:
    state = llama_sd(seed=3, **SIZES)
    del state["model.layers.1.mlp.down_proj.weight"]
    write_cfg(tmp_path, **CONFIG)
    write_st(tmp_path / "model.safetensors", state)
    with pytest.raises(PlanError) as caught:
        load(tmp_path, quantization="bitsandbytes")
    (problem,) = caught.value.problems
    assert (problem.code, problem.parameter) == ("MISSING", "model.layers.1.mlp.down_proj.weight")


# -- memory ------------------------------------------------------------------------------------

SCRIPT = """
import json, sys, torch, loadkit
from loadkit.config import LoadConfig, ParallelConfig
torch.set_num_threads(2)
folder, warm, tp, options = sys.argv[1:]
config = LoadConfig(load_format="bitsandbytes", use_tqdm_on_load=False,
                    model_loader_extra_config=json.loads(options))
loadkit.load(warm, load_config=config)  # imports, thread pools
last = ParallelConfig(tp_size=int(tp), tp_rank=int(tp) - 1)
result = loadkit.load(folder, parallel=last, load_config=config)
model = result.model
shapes = [m.output_size_per_partition * m.input_size_per_partition * 4
          for m in model.modules() if hasattr(m, "input_size_per_partition")]
print(json.dumps({
    "predicted": result.plan.predicted_peak_bytes,
    "measured": result.report.peak["host_anonymous_bytes"],
    "held": sum(p.numel() * p.itemsize for p in model.parameters()) - result.report.aliased_bytes,
    "largest": max(shapes), "raw": sum(shapes)}))
"""
BIG = {"hidden": 1024, "heads": 16, "kv_heads": 4, "ffn": 2816, "vocab": 2048, "layers": 8}
MIB = 1 << 20


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = tmp_path_factory.mktemp("big"), tmp_path_factory.mktemp("small")
    write_llama(folders[0], **BIG)
    write_llama(folders[1], **SIZES)
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("options", [{}, DQ, {"load_in_8bit": True}], ids=["nf4", "dq", "int8"])
def test_MEM_01_the_peak_is_the_quantised_model_and_one_module(
    options: dict[str, Any], tp: int, big: tuple[Path, Path]
) -> None:
    command = [sys.executable, "-c", SCRIPT, *map(str, big), str(tp), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    # What quantising some blocks takes beside its result, and what the C library keeps.
    slack = 32 * MIB
    assert found["measured"] <= found["held"] + 2 * found["largest"] + slack, found
    assert found["raw"] > found["held"] + 2 * found["largest"] + slack or tp == 2, found
    assert found["measured"] <= found["predicted"] + slack, found


def test_a_conversion_does_not_call_plain_weights_quantised(plain: Path, tmp_path: Path) -> None:
    """A load quantises; what a conversion writes was read before that."""
    for asked in ({"load_format": "bitsandbytes"}, {"quantization": "bitsandbytes"}):
        with pytest.raises(UsageError, match="quantised when a model is loaded") as caught:
            loadkit.convert(plain, tmp_path / "out", **asked)
        assert caught.value.code == "QUANTIZED"
        assert not (tmp_path / "out").exists()
    ranks = tmp_path / "ranks"
    report = loadkit.convert(plain, ranks, to="sharded_state", tp=2, load_format="bitsandbytes")
    assert any("are quantised by each load" in warning for warning in report.warnings)
    for rank in range(2):
        parallel = ParallelConfig(tp_size=2, tp_rank=rank)
        found = load(ranks, parallel).model.state_dict()
        wanted = load(plain, parallel, load_format="bitsandbytes").model.state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("save_format", ["dcp", "tensorizer"])
def test_what_was_saved_in_another_format_is_told_how_it_loads(
    plain: Path, tmp_path: Path, save_format: str
) -> None:
    pytest.importorskip(save_format if save_format == "tensorizer" else "loadkit_dcp")
    model = load(plain, load_format="bitsandbytes").model
    loadkit.save(model, tmp_path / "out", save_format=save_format)
    with pytest.raises(ConfigFileError) as caught:
        load(tmp_path / "out")
    assert "asked for" not in caught.value.message
    extra = {"weights_from": save_format}
    assert caught.value.hint == (
        f"load_format='bitsandbytes' with model_loader_extra_config={extra}"
    )
    again = load(tmp_path / "out", load_config=config_of(extra)).model
    ids = torch.arange(5)
    with torch.inference_mode():
        assert torch.equal(again(ids, ids), model(ids, ids))
