"""Mixtures of experts in 4 bits and int8: stored, and quantised while they load; tp and ep."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("bitsandbytes")

import loadkit
from helpers.bitsandbytes_files import dequantised, pack, pack_eight, quantised
from helpers.checkpoints import write_st
from helpers.tiny_families import FAMILIES, write_family
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import PlanError

QUIET = LoadConfig(use_tqdm_on_load=False)
SIZES = {"hidden_size": 64, "moe_intermediate_size": 128, "num_experts": 4, "num_hidden_layers": 1}
EXPERTS = "model.layers.0.mlp.experts"
NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
MAKERS = {"nf4-dq": partial(pack, compress_statistics=True), "int8": pack_eight}
OPTIONS: dict[str, dict[str, Any]] = {
    "nf4-dq": {"bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
LAYOUTS = {
    "tp1": [ParallelConfig()],
    "tp2": [ParallelConfig(tp_size=2, tp_rank=r) for r in range(2)],
    "ep2": [ParallelConfig.for_rank(r, tp_size=2, ep_size=2) for r in range(2)],
}
each_way = pytest.mark.parametrize("way", MAKERS)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("plain"), "qwen3_moe", **SIZES)


def load(path: Path, parallel: ParallelConfig | None = None, **options: Any) -> Any:
    options = {"load_config": QUIET, **options}
    return loadkit.load(path, parallel=parallel or ParallelConfig(), **options)


def is_expert(name: str) -> bool:
    return ".experts." in name


def write_packed(folder: Path, plain: Path, way: str) -> dict[str, torch.Tensor]:
    import json

    folder.mkdir()
    tensors = quantised(load_file(plain / "model.safetensors"), MAKERS[way], is_expert)
    eight = way == "int8"
    stated = {"quant_method": "bitsandbytes", "load_in_4bit": not eight, "load_in_8bit": eight}
    config = {**FAMILIES["qwen3_moe"], **SIZES, "quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(config))
    write_st(folder / "model.safetensors", tensors)
    return tensors


def own_part(weight: torch.Tensor, part: str, layer: Any) -> torch.Tensor:
    """A rank's part of one expert's matrix."""
    dim = 1 if part == "w2" else 0
    return weight.chunk(layer.tp_size, dim=dim)[layer.tp_rank].contiguous()


def experts_of(layer: Any) -> dict[tuple[int, str], torch.Tensor]:
    """What a rank holds: (expert, part) -> numbers."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    for expert, slots in layer._slots.items():
        method = layer.quant_method
        gate, up = method.dequantised(layer, "w13", slots[0]).chunk(2)
        found |= {(expert, "w1"): gate, (expert, "w3"): up}
        found[expert, "w2"] = method.dequantised(layer, "w2", slots[0])
    return found


@each_layout
@each_way
def test_BNB_01_stored_experts_are_what_bitsandbytes_dequantises(
    way: str, layout: str, plain: Path, tmp_path: Path
) -> None:
    expected = dequantised(write_packed(tmp_path / "q", plain, way))
    seen: set[int] = set()
    for parallel in LAYOUTS[layout]:
        result = load(tmp_path / "q", parallel)
        assert result.plan.bytes_to_read == result.report.bytes_read
        layer = result.model.get_submodule(EXPERTS)
        for (expert, part), numbers in experts_of(layer).items():
            whole = expected[f"{EXPERTS}.{expert}.{NAMES[part]}.weight"]
            assert torch.equal(numbers, own_part(whole, part, layer)), (expert, part)
            seen.add(expert)
        held = sum(p.numel() * p.itemsize for p in result.model.parameters())
        assert result.plan.parameter_bytes == held
    assert seen == {0, 1, 2, 3}


@each_layout
@each_way
def test_experts_are_quantised_after_they_were_cut(way: str, layout: str, plain: Path) -> None:
    weights = load_file(plain / "model.safetensors")
    config = LoadConfig(
        load_format="bitsandbytes", use_tqdm_on_load=False, model_loader_extra_config=OPTIONS[way]
    )
    for parallel in LAYOUTS[layout]:
        result = load(plain, parallel, load_config=config)
        layer = result.model.get_submodule(EXPERTS)
        for (expert, part), numbers in experts_of(layer).items():
            own = own_part(weights[f"{EXPERTS}.{expert}.{NAMES[part]}.weight"], part, layer)
            assert torch.equal(numbers, dequantised(MAKERS[way]("w.weight", own))["w.weight"])
        held = sum(p.numel() * p.itemsize for p in result.model.parameters())
        assert result.plan.parameter_bytes == held


@each_way
def test_a_forward_is_that_of_the_dequantised_experts(
    way: str, plain: Path, tmp_path: Path
) -> None:
    expected = dequantised(write_packed(tmp_path / "q", plain, way))
    packed, exact = load(tmp_path / "q").model, load(plain).model
    mine, theirs = packed.get_submodule(EXPERTS), exact.get_submodule(EXPERTS)
    for expert in range(4):
        for part, name in NAMES.items():
            param = theirs.w2_weight if part == "w2" else theirs.w13_weight
            whole = expected[f"{EXPERTS}.{expert}.{name}.weight"]
            rows = (
                slice(None) if part == "w2" else slice(0, 128) if part == "w1" else slice(128, 256)
            )
            param.data[expert][rows] = whole
    x, scores = torch.randn(6, 64), torch.randn(6, 4)
    one, other = mine(x, scores), theirs(x, scores)
    bound = 1e-4 if way != "int8" else 0.05 * float(other.abs().max())
    assert (one - other).abs().max() <= bound


@each_way
def test_experts_are_saved_as_they_were(way: str, plain: Path, tmp_path: Path) -> None:
    written = write_packed(tmp_path / "q", plain, way)
    loadkit.save(load(tmp_path / "q").model, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in written.items())
    online = LoadConfig(
        load_format="bitsandbytes",
        use_tqdm_on_load=False,
        model_loader_extra_config={
            **OPTIONS[way],
            "llm_int8_skip_modules": ["self_attn", "lm_head"],
        },
    )
    loadkit.save(load(plain, load_config=online).model, tmp_path / "again")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert {n for n in found if is_expert(n)} == {n for n in written if is_expert(n)}
    for name in found:
        if is_expert(name) and ".quant_state." not in name:
            assert torch.equal(found[name], written[name]), name


@each_way
def test_SS_04_rank_files_hold_experts_too(way: str, plain: Path, tmp_path: Path) -> None:
    write_packed(tmp_path / "q", plain, way)
    config = LoadConfig(
        load_format="bitsandbytes", use_tqdm_on_load=False, model_loader_extra_config=OPTIONS[way]
    )
    for source, given in ((tmp_path / "q", QUIET), (plain, config)):
        out = tmp_path / f"out-{source.name}"
        models = [load(source, p, load_config=given).model for p in LAYOUTS["tp2"]]
        for model in models:
            loadkit.save(model, out, save_format="sharded_state")
        for parallel, model in zip(LAYOUTS["tp2"], models, strict=True):
            found = load(out, parallel).model.state_dict()
            expected = model.state_dict()
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_experts_cut_inside_a_block_are_problems(plain: Path, tmp_path: Path) -> None:
    write_packed(tmp_path / "q", plain, "nf4-dq")
    with pytest.raises(PlanError) as caught:
        load(tmp_path / "q", ParallelConfig(tp_size=4))
    codes = {problem.code for problem in caught.value.problems}
    assert codes == {"BNB_MISALIGNED"} and len(caught.value.problems) == 4  # every expert's down
    assert "legal: tp 1, 2" in caught.value.problems[0].message
