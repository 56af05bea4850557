"""A model whose weights lie in two checkpoints, and the job of loading it in a process."""

from __future__ import annotations

from typing import Any

import torch

import loadkit
from helpers import loading_jobs
from loadkit.config import LoadkitConfig
from loadkit.mapper import WeightsMapper
from loadkit_layers.linear import ColumnParallelLinear
from loadkit_models.building import layer_options
from loadkit_models.llama import LlamaForCausalLM

__all__ = ["ENCODER", "PREFIX", "WithEncoder", "load", "register"]

PREFIX = "encoder."
# The second checkpoint, under its own names.
ENCODER = {
    "weight": torch.arange(24 * 16, dtype=torch.float32).reshape(24, 16),
    "bias": torch.arange(24.0),
}


class WithEncoder(LlamaForCausalLM):
    """Llama, and a projection whose weights lie in a checkpoint of their own.

    Which one, the config's ``secondary`` says.
    """

    hf_to_loadkit_mapper = LlamaForCausalLM.hf_to_loadkit_mapper | WeightsMapper(
        orig_to_new_prefix={PREFIX: PREFIX}
    )

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        self.encoder = ColumnParallelLinear(
            16, 24, True, prefix="encoder", **layer_options(config), return_bias=False
        )
        stated = config.model_config.hf_config.secondary.to_dict()
        patterns = stated.pop("allow_patterns_overrides", None)
        self._stated = loadkit.WeightSource(
            **{"prefix": PREFIX, **stated},
            allow_patterns_overrides=None if patterns is None else tuple(patterns),
        )

    @property
    def secondary_weights(self) -> list[loadkit.WeightSource]:
        """The encoder's checkpoint."""
        return [self._stated]


def register() -> None:
    """Make the class known to this process."""
    loadkit.ModelRegistry.register_model("WithEncoder", WithEncoder)


def load(rank: int, group: Any, **options: Any) -> dict[str, Any]:
    """``loading_jobs.load`` where the class is known."""
    register()
    return loading_jobs.load(rank, group, **options)
