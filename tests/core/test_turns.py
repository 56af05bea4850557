"""A module that is repacked after loading is read, changed and done with in a turn of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_shards
from loadkit import LoadConfig
from loadkit.errors import ModelError
from loadkit.quantization import register_quantization_config
from loadkit.quantization_base import QuantizationConfig
from loadkit.readers.pread import PreadReader
from loadkit_layers.linear import LinearBase
from loadkit_layers.unquantized import UnquantizedLinearMethod

_log: list[str] = []


class _Halving(UnquantizedLinearMethod):
    """Keeps a weight as int8: half of what bfloat16 takes."""

    fails_at = ""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight: Any = layer.weight
        name: str = layer.prefix  # type: ignore[assignment]
        if name == self.fails_at:
            raise RuntimeError("no more")
        raw = [
            other for other in _modules if other is not layer and other.weight.dtype != torch.int8
        ]
        _log.append(f"{name}: {sum(m.weight.device.type != 'meta' for m in raw)} others are raw")
        layer.weight = nn.Parameter((weight * 100).to(torch.int8), requires_grad=False)

    def bytes_after_loading(self, layer: nn.Module) -> int | None:
        weight: Any = layer.weight
        return int(weight.numel())


_modules: list[Any] = []


class _HalvingConfig(QuantizationConfig):
    @classmethod
    def get_name(cls) -> str:
        return "halving_for_turns"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _HalvingConfig:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if not isinstance(layer, LinearBase):
            return None
        _modules.append(layer)
        return _Halving()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    register_quantization_config("halving_for_turns")(_HalvingConfig)
    write_cfg(tmp_path, quantization_config={"quant_method": "halving_for_turns"})
    write_shards(tmp_path, llama_sd(), 2)
    _modules.clear()
    _log.clear()
    return tmp_path


def test_at_most_one_module_is_raw_at_a_time(checkpoint: Path) -> None:
    result = loadkit.load(checkpoint, load_config=LoadConfig(alias="never"))
    assert len(_log) == 2 * 4  # qkv, o, gate_up, down of two layers
    assert all(line.endswith(": 0 others are raw") for line in _log)
    assert result.report.bytes_read == result.plan.bytes_to_read
    whole = {name: p for name, p in result.model.named_parameters() if p.dtype != torch.int8}
    assert "model.embed_tokens.weight" in whole


def test_numbers_are_those_of_one_turn(checkpoint: Path) -> None:
    model = loadkit.load_model(checkpoint, dtype="float32")
    weights = llama_sd()
    q, k, v = (weights[f"model.layers.1.self_attn.{n}_proj.weight"].float() for n in "qkv")
    found = dict(model.named_parameters())["model.layers.1.self_attn.qkv_proj.weight"]
    assert torch.equal(found, (torch.cat([q, k, v]) * 100).to(torch.int8))


def test_the_plan_counts_what_a_method_keeps(checkpoint: Path) -> None:
    config = LoadConfig(alias="never")
    finished = loadkit.plan(checkpoint, load_config=config).predicted_peak_bytes
    keeps = _Halving.bytes_after_loading
    _Halving.bytes_after_loading = lambda self, layer: None  # type: ignore[method-assign]
    try:
        raw = loadkit.plan(checkpoint, load_config=config).predicted_peak_bytes
    finally:
        _Halving.bytes_after_loading = keeps  # type: ignore[method-assign]
    modules = _modules[: len(_modules) // 2]
    first = raw - sum(module.weight.nbytes for module in modules)  # what has no turn of its own
    peak = kept = first
    for module in modules:
        peak = max(peak, kept + module.weight.nbytes + module.weight.numel())
        kept += module.weight.numel()
    assert finished == peak < raw


def test_a_module_that_cannot_be_finished_is_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Halving, "fails_at", "model.layers.1.mlp.down_proj")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj.*no more"):
        loadkit.load(checkpoint)


def test_turns_read_no_more_than_one_read_would(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    plain = PreadReader.read

    def read(self: PreadReader, extents: Any, landed: Any = None) -> int:
        reads.append(len(extents))
        return plain(self, extents, landed)

    monkeypatch.setattr(PreadReader, "read", read)
    result = loadkit.load(checkpoint, load_config=LoadConfig(reader="pread"))
    assert len([n for n in reads if n]) == 1 + 8
    assert result.report.bytes_read == result.plan.bytes_needed
    assert result.report.requests == result.plan.requests
