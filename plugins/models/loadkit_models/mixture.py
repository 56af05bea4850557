"""A feed-forward part that is a mixture of experts: a gate that chooses, and the experts.

# T tokens, D model width, E experts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loadkit.config import LoadkitConfig
from loadkit.mapper import WeightsMapper
from loadkit_layers.fused_moe import FusedMoE, Router
from loadkit_layers.linear import ReplicatedLinear
from loadkit_models.building import join, layer_options
from loadkit_models.config_fields import count

__all__ = ["Mixture", "MixtureSpec", "mapper_of", "num_experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSpec:
    """What a layer's mixture is made of, beyond the model's sizes.

    Attributes:
        router: how many experts there are, and how they are chosen.
        inner: an expert's inner width, over all ranks.
        disk_names: what checkpoints call an expert's gate, up and down.
    """

    router: Router
    inner: int
    disk_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


class Mixture(nn.Module):
    """``gate`` scores the experts of each token, ``experts`` runs the best ones."""

    def __init__(
        self, hidden: int, spec: MixtureSpec, act: str, *, config: LoadkitConfig, prefix: str
    ) -> None:
        super().__init__()
        options = layer_options(config)
        plain = {**options, "quant_config": None}  # checkpoints leave the gate as it is
        self.gate = ReplicatedLinear(
            hidden,
            spec.router.num_experts,
            False,
            prefix=join(prefix, "gate"),
            return_bias=False,
            **plain,
        )
        self.experts = FusedMoE(
            spec.router,
            hidden,
            spec.inner,
            activation=act,
            prefix=join(prefix, "experts"),
            disk_names=spec.disk_names,
            **options,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, D]`` to ``[T, D]``."""
        out: torch.Tensor = self.experts(hidden, self.gate(hidden))
        return out


def num_experts(hf_config: Any, default: int) -> int:
    """E, under either of the names that config.json has for it.

    Raises:
        ConfigFileError: E_CONFIG, it is no count.
    """
    other = getattr(hf_config, "num_local_experts", None)
    return count(hf_config, "num_experts" if other is None else "num_local_experts", default)


def mapper_of(dense: WeightsMapper) -> WeightsMapper:
    """A dense family's mapper, its rules for the feed-forward part kept out of the experts.

    ``FusedMoE`` knows the names of an expert's tensors itself.
    """
    stacked = dict(dense.orig_to_new_stacked)
    for part in ("gate_proj", "up_proj"):
        target = stacked.pop(part, None)
        if target is not None:
            stacked[f"mlp.{part}"] = (f"mlp.{target[0]}", target[1])
    return WeightsMapper(
        dense.orig_to_new_prefix,
        dense.orig_to_new_suffix,
        dense.orig_to_new_substr,
        dense.orig_to_new_regex,
        dense.orig_to_new_rename,
        stacked,
    )
