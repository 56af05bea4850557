"""``NpcacheModelLoader``: the default loader's tensors, read from a cache of numpy files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from loadkit.base_loader import BaseModelLoader, Checksum
from loadkit.errors import OptionError
from loadkit.tracing.lazy_tensor import Offered
from loadkit_default.loader import DefaultModelLoader
from loadkit_default.npcache.cache import Cache, cache_of
from loadkit_default.weight_files import find_weight_files

if TYPE_CHECKING:
    import torch

    from loadkit.config import LoadConfig
    from loadkit.model_config import ModelConfig
    from loadkit.tensor_info import TensorInfo

__all__ = ["NpcacheModelLoader"]


class NpcacheModelLoader(DefaultModelLoader):
    """Makes the cache where it is missing, and then reads nothing else.

    The weights are chosen as by ``hf``: safetensors, else archives of ``torch.save``. The numpy
    files are aligned, so parameters may be views of them whatever the checkpoint's own files allow.

    Attributes:
        cache: the cache, once ``catalogue`` has run.
    """

    load_options: ClassVar[frozenset[str]] = DefaultModelLoader.load_options | {"cache_dir"}

    attach = BaseModelLoader.attach  # a cache is of one checkpoint

    cache: Cache | None = None
    _cached: list[TensorInfo] | None = None

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        if load_config.stream:
            raise OptionError(
                "LoadConfig.stream keeps no local copy, and load format 'npcache' makes one",
                detail={"options": ["stream", "load_format"]},
                hint="leave one of them out",
            )

    def download_model(self, model_config: ModelConfig) -> None:
        """Make the cache, if it is not there, and read what it says it holds."""
        self._read_cache(model_config)

    def offers(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor | Offered]]:
        return ((info.name, Offered(info)) for info in self._read_cache(model_config))

    def checksums(self, name: str) -> Sequence[Checksum]:
        return ()

    def _read_cache(self, model_config: ModelConfig) -> list[TensorInfo]:
        """Where the cache's tensors lie.

        Raises:
            LoadkitError: as the default loader, while the cache is made.
            FormatError: E_NPY, E_NAME, E_LAYOUT: the cache is damaged.
            WriteError: it cannot be written.
        """
        if self._cached is None:
            chosen = find_weight_files(self.source, self.load_config, "hf")
            opened = [self.source.open(name) for name in chosen.files]
            cache = cache_of(self.source, opened, self.load_config)
            if not cache.exists:
                loader = DefaultModelLoader(replace(self.load_config, load_format="hf"))
                loader.source = self.source
                tensors = dict(loader.catalogue(model_config))
                cache.make(tensors, loader.skipped_tensors)
            self._cached, skipped = cache.read(self.source)
            self.cache, self.weight_files = cache, chosen
            self.files = sorted({info.file.name for info in self._cached})
            self.skipped_tensors.update(skipped)
            self.skipped_files.update(chosen.skipped)
        return self._cached
