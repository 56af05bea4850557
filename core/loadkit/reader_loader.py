"""``FilesLoader``: a load format that is safetensors; ``ReaderLoader``: by one certain reader.

Files, index, headers and names are the business of the load format ``safetensors``, whichever
distribution has it; a subclass says who moves the bytes and which options that takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from loadkit import tables
from loadkit.base_loader import BaseModelLoader
from loadkit.errors import OptionError
from loadkit.frozen import FrozenDict

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loadkit.config import LoadConfig, ModelConfig
    from loadkit.secondary_weights import WeightSource
    from loadkit.tracing.lazy_tensor import Offered

__all__ = ["FilesLoader", "ReaderLoader", "read_by"]


def read_by(reader: str, load_config: LoadConfig, options: Mapping[str, Any]) -> LoadConfig:
    """The config of a load whose format decides the reader.

    Args:
        reader: its name.
        load_config: of the load format.
        options: the reader's, from ``model_loader_extra_config``; those that are None are its
            defaults.

    Raises:
        OptionError: another reader was named, or an option was given in both places.
    """
    if load_config.reader not in ("auto", reader):
        raise OptionError(
            f"load format {load_config.load_format!r} is files read by the reader {reader!r}, and "
            f"LoadConfig.reader is {load_config.reader!r}",
            detail={"options": ["load_format", "reader"]},
            hint="leave one of them out; load_format='safetensors' takes every reader",
        )
    given = {name: value for name, value in options.items() if value is not None}
    own = load_config.reader_options
    twice = sorted(name for name in given if own.get(name, given[name]) != given[name])
    if twice:
        raise OptionError(
            f"{', '.join(twice)}: model_loader_extra_config says one thing and reader_options "
            "another",
            detail={"options": twice},
            hint="leave one of them out",
        )
    every = FrozenDict({**own, **given})
    return replace(load_config, reader=reader, reader_options=every)


class FilesLoader(BaseModelLoader):
    """Safetensors files, wherever they come from."""

    load_options: ClassVar[frozenset[str]] = frozenset(
        {"allow_patterns_overrides", "ignore_index", "ignore_patterns"}
    )
    _files_loader: BaseModelLoader | None = None

    @property
    def files_loader(self) -> BaseModelLoader:
        """The loader of safetensors: it finds the files and reads their headers."""
        if self._files_loader is None:
            plain = replace(
                self.load_config,
                load_format="safetensors",
                model_loader_extra_config=FrozenDict(),
            )
            inner = cast("type[BaseModelLoader]", tables.loaders.lookup("safetensors"))(plain)
            inner.source, inner.parallel = self.source, self.parallel
            self._files_loader = inner
        return self._files_loader

    def download_model(self, model_config: ModelConfig) -> None:
        """Choose the files and read their headers."""
        self.files_loader.download_model(model_config)
        self._take_over()

    def attach(self, sources: Sequence[WeightSource]) -> None:
        """As the loader of safetensors does."""
        self.files_loader.attach(sources)
        self.source = self.files_loader.source
        self._take_over()

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Give the model every tensor of the files, through its own ``load_weights``."""
        weights = self.get_all_weights(model_config, model)
        model.load_weights(weights)  # type: ignore[operator]  # every model has it

    def catalogue(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the files; errors are those of ``safetensors``."""
        found = self.files_loader.catalogue(model_config)
        self._take_over()
        return found

    def offers(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor | Offered]]:
        found = list(self.files_loader.offers(model_config))
        self._take_over()
        return iter(found)

    def _take_over(self) -> None:
        """What the other one knows of the files is this one's too."""
        inner = self.files_loader
        self.files, self.skipped_files = inner.files, inner.skipped_files
        self.skipped_tensors = inner.skipped_tensors


class ReaderLoader(FilesLoader):
    """The same through one reader. Subclasses give ``reader`` and ``options``.

    Attributes:
        reader: the reader's name in the table of readers.
    """

    reader: ClassVar[str]

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self.load_config = read_by(self.reader, load_config, self.reader_options())

    def reader_options(self) -> Mapping[str, Any]:
        """What of ``extra_config`` is for the reader, under its keys.

        Raises:
            OptionError: it cannot be as asked.
        """
        return self.extra_config
