"""A quantisation that shows whether a loader uses the seam: it doubles weights after loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from loadkit.quantization_base import QuantizationConfig
from loadkit.testing.checkpoint import METHOD
from loadkit.testing.model import PlainMethod

__all__ = ["DoublingConfig"]


class DoublingMethod(PlainMethod):
    """Weights that are twice what the checkpoint says once they are processed."""

    layout_version = 1

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight: Any = layer.weight
        weight.data.mul_(2)


class DoublingConfig(QuantizationConfig):
    """``{"quant_method": "loadkit_contract"}``."""

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DoublingConfig:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> DoublingMethod | None:
        return DoublingMethod() if prefix.endswith("_proj") else None
