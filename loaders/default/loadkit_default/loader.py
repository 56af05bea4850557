"""``DefaultModelLoader``: safetensors and ``torch.save``'s archives, single, indexed or sharded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from loadkit.base_loader import BaseModelLoader, Checksum
from loadkit.errors import FormatError
from loadkit.file_checks import show
from loadkit.load_strategy import SAFETENSORS_OPTIONS
from loadkit.multithread import MULTITHREAD_OPTIONS, multithread
from loadkit.options import OptionSpec
from loadkit.safetensors_format import read_header
from loadkit.secondary_weights import WeightSource
from loadkit.tensor_info import TensorInfo, bits_of
from loadkit.torch_archive.tensors import Archive
from loadkit.tracing.lazy_tensor import Offered
from loadkit_default.pt.archive import read_archive
from loadkit_default.pt.options import check_map_location, refuse_idle
from loadkit_default.secondary import joined, refuse_clashes, secondary_of
from loadkit_default.weight_files import WeightFiles, check_against_index, find_weight_files

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loadkit.config import LoadConfig
    from loadkit.model_config import ModelConfig
    from loadkit.sources.base import File
    from loadkit.sources.moved import MovedSource
    from loadkit_default.weight_index import Header

__all__ = ["DefaultModelLoader"]

logger = logging.getLogger(__name__)

_ARCHIVES = (".bin", ".pt", ".pth")


class DefaultModelLoader(BaseModelLoader):
    """Reads the headers of a source's weight files and offers every tensor once.

    A safetensors file says what it holds in its header, an archive of ``torch.save`` in a pickle
    that is read and never run (``loadkit_default.pt``).

    Attributes:
        weight_files: the files that were chosen and why, once ``catalogue`` has run.
        ties: names that an archive holds as the same elements of one storage.
    """

    options: ClassVar[Mapping[str, OptionSpec]] = MULTITHREAD_OPTIONS
    load_options: ClassVar[frozenset[str]] = SAFETENSORS_OPTIONS | {
        "allow_patterns_overrides",
        "ignore_index",
        "ignore_patterns",
    }

    archive_options: ClassVar[frozenset[str]] = frozenset({"pt_load_map_location", "weights_key"})

    Source: ClassVar[type[WeightSource]] = WeightSource
    """What a model's ``secondary_weights`` is made of."""

    weight_files: WeightFiles | None = None
    ties: tuple[tuple[str, ...], ...] = ()
    _headers: Sequence[Header] | None = None
    _infos: Sequence[TensorInfo] | None = None

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        check_map_location(load_config)
        self.multithread = multithread(load_config, self.extra_config)
        if self.multithread is not None:
            self.load_config = replace(load_config, num_threads=self.multithread.threads)

    def follows(self) -> frozenset[str]:
        """Archives have two options more; safetensors files would ignore them."""
        if self.load_config.load_format == "safetensors":
            return self.load_options
        return self.load_options | self.archive_options

    @classmethod
    def read_header(cls, file: File, weights_key: str | None = None) -> Archive:
        """One archive's tensors, and what it says of itself, for people."""
        return read_archive(file, weights_key)

    def download_model(self, model_config: ModelConfig) -> None:
        """Choose the files and read their headers, so that what is missing is known first."""
        self._read_headers()

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Give the model every tensor of the files, through its own ``load_weights``."""
        weights = self.get_all_weights(model_config, model)
        model.load_weights(weights)  # type: ignore[operator]  # every model has it

    def catalogue(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the chosen files, file by file, in the order they lie in.

        Raises:
            NoWeightsError: no file of the load format.
            IndexFileError: the index and the files disagree; all disagreements are listed.
            FormatError: a header breaks a rule; a name is in two files and no index says which
                counts (E_DUPLICATE); torch lacks a dtype (E_DTYPE).
        """
        for name, offer in self.offers(model_config):
            yield name, offer.tensor() if isinstance(offer, Offered) else offer

    def offers(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor | Offered]]:
        yield from self._entries("")
        for moved in secondary_of(self.source):
            yield from moved.loader._entries(moved.prefix)

    def _entries(self, prefix: str) -> Iterator[tuple[str, torch.Tensor | Offered]]:
        """This checkpoint's own tensors, under a prefix."""
        infos = self.infos()
        odd = {
            (header.file.name, name): tensor
            for header in self._read_headers()
            if isinstance(header, Archive)
            for name, tensor in header.odd.items()
        }
        for info in infos:
            named = replace(info, name=prefix + info.name) if prefix else info
            own = odd.get((info.file.name, info.name))
            if own is None:
                yield named.name, Offered(_as_torch_counts(named))
            else:
                yield named.name, replace(own, info=replace(own.info, name=named.name)).tensor()

    def attach(self, sources: Sequence[WeightSource]) -> None:
        """Read the headers of other checkpoints; ``catalogue`` has their tensors from now on.

        Raises:
            LoadkitError: one cannot be opened or read.
            FormatError: E_DUPLICATE, a name is in two of them, prefixes included.
        """
        others = secondary_of(self.source)
        if not others:
            self._read_headers()
            source = joined(self.source, sources, self.load_config, DefaultModelLoader)
            others = secondary_of(source)
            try:
                refuse_clashes(self, others)
            except BaseException:
                for moved in others:
                    moved.close()
                raise
            self.source = source
        for moved in others:
            self._take(moved)

    def _take(self, moved: MovedSource) -> None:
        """What the other checkpoint's loader knows of its files is this one's too, once."""
        inner = moved.loader
        files = [f"{moved.folder}/{name}" for name in inner.files]
        self.files += [name for name in files if name not in self.files]
        for name, why in inner.skipped_files.items():
            self.skipped_files[f"{moved.folder}/{name}"] = why
        for name, why in inner.skipped_tensors.items():
            self.skipped_tensors[moved.prefix + name] = why

    def checksums(self, name: str) -> Sequence[Checksum]:
        headers = (header for header in self._read_headers() if header.file.name == name)
        header = next(headers, None)
        if header is None:
            found = (moved.loader.checksums(name) for moved in secondary_of(self.source))
            return next(filter(None, found), ())
        return header.checksums if isinstance(header, Archive) else ()

    def infos(self) -> Sequence[TensorInfo]:
        """The header entries of this checkpoint's own tensors, in the order of ``catalogue``; with
        the same errors.
        """
        if self._infos is None:
            self._infos = self._of_headers()
        return self._infos

    def _of_headers(self) -> list[TensorInfo]:
        headers = self._read_headers()
        index = self.weight_files.index if self.weight_files else None
        found: dict[str, TensorInfo] = {}
        for header in headers:
            for info in header.tensors:
                if index is not None and index[info.name] != info.file.name:
                    kept = index[info.name]
                    self.skipped_tensors[f"{info.name} in {info.file.name}"] = (
                        f"the index names {kept} for it"
                    )
                    continue
                other = found.setdefault(info.name, info)
                if other is not info:
                    raise _in_two_files(other, info)
        return list(found.values())

    def _read_headers(self) -> Sequence[Header]:
        """Every chosen file's header, once; all are checked before any tensor is offered."""
        if self._headers is None:
            chosen = find_weight_files(self.source, self.load_config, self.load_config.load_format)
            headers = [self._header(self.source.open(name)) for name in chosen.files]
            archives = [header for header in headers if isinstance(header, Archive)]
            if not archives:
                refuse_idle(self.load_config, chosen.files)
            check_against_index(headers, chosen)
            self.weight_files, self._headers = chosen, headers
            self.files = list(chosen.files)
            self.skipped_files.update(chosen.skipped)
            for archive in archives:
                self._note(archive)
        return self._headers

    def _header(self, file: File) -> Header:
        """By its name: a parser is never chosen by what a file holds."""
        if file.name.endswith(_ARCHIVES) or self.load_config.load_format == "pt":
            return read_archive(file, self.load_config.weights_key)
        return read_header(file)

    def _note(self, archive: Archive) -> None:
        """What an archive holds beside tensors, and which of them are one."""
        self.ties += archive.ties
        self.skipped_tensors.update(archive.skipped)
        for names in archive.ties:
            logger.info("%s: one storage: %s", show(archive.file.name), " = ".join(names))


def _as_torch_counts(info: TensorInfo) -> TensorInfo:
    """The entry; two packed 4-bit elements are one element in torch."""
    if bits_of(info.dtype) != 4:
        return info
    return replace(info, shape=(*info.shape[:-1], info.shape[-1] // 2))


def _in_two_files(first: TensorInfo, second: TensorInfo) -> FormatError:
    return FormatError(
        f"tensor {show(first.name)} is in {show(first.file.name)} and in "
        f"{show(second.file.name)}, and no index says which counts",
        code="E_DUPLICATE",
        file=second.file.name,
        tensor=first.name,
        offset=second.offset,
        detail={"files": [first.file.name, second.file.name]},
        hint="name the right files in allow_patterns_overrides",
    )
