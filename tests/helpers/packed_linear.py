"""The numbers that a bitsandbytes model's weights stand for, without importing the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["check_ranks", "numbers_of", "shards_by_name"]

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_BY_COLUMNS = ("o_proj", "down_proj")


def is_packed(module: torch.nn.Module) -> bool:
    """Whether its weight is quantised by one of our methods."""
    return callable(getattr(getattr(module, "quant_method", None), "dequantised", None))


def numbers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters under the names and in the dtype of a plain load."""
    found: dict[str, torch.Tensor] = {}
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point() and p.itemsize < 8)
    seen: set[int] = set()  # a tied head has the embedding's
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        own = {name: param for name, param in own.items() if id(param) not in seen}
        seen.update(map(id, own.values()))
        if is_packed(module) and own:
            method: Any = module.quant_method
            found[f"{path}.weight"] = method.dequantised(module).to(dtype)
            own = {name: param for name, param in own.items() if name == "bias"}
        for name, param in own.items():
            found[f"{path}.{name}" if path else name] = param.detach()
    return found


def shards_by_name(models: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """What the ranks of a model hold together, as the checkpoint's matrices."""
    found: dict[str, torch.Tensor] = {}
    for path, first in models[0].named_modules():
        if not is_packed(first) or not hasattr(first, "output_shards"):
            continue
        modules: list[Any] = [model.get_submodule(path) for model in models]
        numbers = [module.quant_method.dequantised(module) for module in modules]
        stem, _, last = path.rpartition(".")
        if last in _BY_COLUMNS:
            found[f"{path}.weight"] = torch.cat(numbers, dim=1)
            continue
        for index, part in enumerate(_PARTS.get(last, (last,))):
            shards = [module.output_shards[index] for module in modules]
            rows = [n[s.offset : s.offset + s.size] for n, s in zip(numbers, shards, strict=True)]
            found[f"{stem}.{part}.weight"] = torch.cat(rows[:: shards[0].replicas])
    return found


def check_ranks(models: Sequence[torch.nn.Module], expected: Mapping[str, torch.Tensor]) -> None:
    """The ranks hold exactly those matrices."""
    found = shards_by_name(models)
    assert found, "nothing is quantised"
    for name, numbers in found.items():
        assert torch.equal(numbers, expected[name]), name
