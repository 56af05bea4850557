"""``RawFolderLoader``: one file of raw bytes, one table that says what lies where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch

from loadkit import BaseModelLoader, OptionSpec
from loadkit.errors import NoWeightsError
from loadkit.tracing.lazy_tensor import lazy_from_info
from loadkit_example.table import DATA, TABLE, read_table

if TYPE_CHECKING:
    from torch import nn

    from loadkit.config import ModelConfig
    from loadkit.tensor_info import TensorInfo

__all__ = ["RawFolderLoader"]


class RawFolderLoader(BaseModelLoader):
    """Loads ``weights.raw``, whose tensors ``weights.json`` lists."""

    options: ClassVar[Mapping[str, OptionSpec]] = {
        "prefix": OptionSpec("prefix", str, None, "put before every tensor's name"),
    }

    _infos: list[TensorInfo] | None = None

    def download_model(self, model_config: ModelConfig) -> None:
        """Read the table, so that what is wrong is known before anything is built."""
        self._table()

    def catalogue(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor as (name, lazy tensor): no byte of the data is read."""
        prefix = self.extra_config["prefix"] or ""
        for info in self._table():
            yield f"{prefix}{info.name}", lazy_from_info(info)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Give the model every tensor, through its own ``load_weights``."""
        weights = self.get_all_weights(model_config, model)
        model.load_weights(weights)  # type: ignore[operator]  # every model has it

    def _table(self) -> list[TensorInfo]:
        if self._infos is None:
            names = {info.name for info in self.source.list()}
            if not {TABLE, DATA} <= names:
                raise NoWeightsError(
                    f"{TABLE} and {DATA} are not both in {self.source.uri}; there are "
                    f"{', '.join(sorted(names)) or 'no files'}",
                    hint="give the folder that holds both",
                )
            self._infos = read_table(self.source.open(TABLE), self.source.open(DATA))
            self.files = [DATA]
        return self._infos
