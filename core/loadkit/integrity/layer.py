"""What ``LoadConfig.verify`` asks for, put around the reader of one load."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from loadkit.errors import WriteError
from loadkit.integrity.digests import FileDigests
from loadkit.integrity.expected import check_sizes, expected_digests, sidecars
from loadkit.integrity.reader import VerifyingReader
from loadkit.integrity.sidecar import Record, Sidecar
from loadkit.integrity.tally import Tally
from loadkit.manifest import MANIFEST
from loadkit.readers.base import Reader
from loadkit.tracing.expressions import Src
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.program import resolve, sources_of
from loadkit.tracing.storage import FileLeaf

if TYPE_CHECKING:
    from loadkit.base_loader import BaseModelLoader
    from loadkit.config import LoadConfig, ModelConfig
    from loadkit.sources.base import File

__all__ = ["Verification", "tensors_of"]

Catalogue = Iterable[tuple[str, torch.Tensor]]


class Verification:
    """One load's digests, and the records that it leaves.

    Args:
        loader: whose source the files are from, and whose catalogue says what lies in them.
        load_config: ``verify`` and ``digest_store`` count.
        model_config: the loader's.
        files: those that are read.

    Raises:
        IntegrityError: E_SIZE, the manifest knows files of other sizes.
        ManifestError: the manifest cannot be used.
    """

    def __init__(
        self,
        loader: BaseModelLoader,
        load_config: LoadConfig,
        model_config: ModelConfig,
        files: Sequence[File],
    ) -> None:
        self.mode = load_config.verify if files else "off"
        self.warnings: list[str] = []
        self._digests: dict[int, FileDigests] = {}
        self._sidecars: dict[int, Sidecar] = {}
        self._tensors: dict[int, list[tuple[int, int, str]]] = {}
        self._tally = Tally()
        self._loader, self._model_config = loader, model_config
        if self.mode != "off":
            check_sizes(loader.source, files)
        if self.mode == "digest":
            self._sidecars = sidecars(files, load_config)
            self._digests, self.warnings = expected_digests(
                loader.source, files, self._sidecars, loader.checksums
            )
        for own in loader.own_digests(files):
            known = self._digests.get(id(own.file))
            if known is None or (known.whole is None and known.origin != MANIFEST):
                self._digests[id(own.file)] = own
            self.warnings += [own.remark] if own.remark else []

    def around(self, reader: Reader, also: Iterable[str] = ()) -> Reader:
        """The reader, verifying if that was asked for, or if the format always does.

        Args:
            reader: who reads.
            also: tensors, by checkpoint name, whose bytes are used and do not pass through it.
        """
        if self.mode != "digest" and not self._digests:
            return reader
        layer = VerifyingReader(reader, self._digests, self._names, self._tally, self._keep)
        self._index()
        others = set(also)
        for found in self._digests.values():
            tensors = self._tensors.get(id(found.file), [])
            if tensors:
                layer.touch(found.file, 0, tensors[0][0])  # the header
            for start, end, name in tensors:
                if name in others:
                    layer.touch(found.file, start, end)
        return layer

    def _index(self) -> None:
        """Where every tensor of the files lies."""
        if self._tensors:
            return
        try:
            catalogue = list(self._loader.catalogue(self._model_config))
        except NotImplementedError:
            return  # nothing is known of what lies where
        for file, start, end, name in tensors_of(catalogue):
            self._tensors.setdefault(id(file), []).append((start, end, name))
        for tensors in self._tensors.values():
            tensors.sort()

    def _names(self, file: File, start: int, end: int) -> list[str]:
        """The tensors that have bytes in a range of a file, in order."""
        tensors = self._tensors.get(id(file), [])
        before = tensors[: bisect_left(tensors, (end, 0, ""))]
        return [name for low, high, name in before if high > start and low < high]

    def _keep(self, found: FileDigests) -> str:
        """Keep what a load computed; says what went wrong, if anything did.

        A load that cannot keep its digests is a good load.
        """
        sidecar = self._sidecars.get(id(found.file))
        if sidecar is None or not found.found:
            return ""
        try:
            sidecar.write(Record(found.found, found.whole))
        except WriteError as error:
            return str(error)
        return ""


def tensors_of(catalogue: Catalogue) -> Iterator[tuple[File, int, int, str]]:
    """File, first byte, byte after the last and name of all that a catalogue has in files."""
    for _, tensor in catalogue:
        if not isinstance(tensor, LazyTensor):
            continue
        for src in sources_of(resolve(tensor.lazy_value())):
            if isinstance(src, Src) and isinstance(src.leaf, FileLeaf):
                info = src.leaf.info
                yield info.file, info.offset, info.offset + info.nbytes, info.name
