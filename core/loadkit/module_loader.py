"""Loads a module that knows nothing of loadkit: by its own names, or a mapper's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from loadkit.auto_weights_loader import AutoWeightsLoader
from loadkit.base_loader import BaseModelLoader

if TYPE_CHECKING:
    from loadkit.config import ModelConfig
    from loadkit.mapper import WeightsMapper

__all__ = ["ModuleLoader"]


class ModuleLoader:
    """Stands in for ``BaseModelLoader.load_weights`` in ``loadkit.load_into``."""

    def __init__(self, loader: BaseModelLoader, mapper: WeightsMapper | None) -> None:
        self._loader = loader
        self._mapper = mapper

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Give the catalogue to the model's own ``load_weights``, or place it by names."""
        if self._loader.by_key and self._mapper is None:
            type(self._loader).load_weights(self._loader, model, model_config)
            return
        weights = self._loader.get_all_weights(model_config, model)
        own = getattr(model, "load_weights", None)
        if callable(own) and self._mapper is None:
            own(weights)
            return
        AutoWeightsLoader(model).load_weights(weights, mapper=self._mapper)
