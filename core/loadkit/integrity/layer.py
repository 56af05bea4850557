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
        self.mode = load_config.verify
        self.warnings: list[str] = []
        self._digests: dict[int, FileDigests] = {}
        self._sidecars: dict[int, Sidecar] = {}
        self._tensors: dict[int, list[tuple[int, int, str]]] = {}
        self._tally = Tally()
        self._loader, self._load_config, self._model_config = loader, load_config, model_config
        self._also: frozenset[str] = frozenset()
        self._files: list[File] = []
        self.add(files)

    def add(self, files: Iterable[File]) -> None:
        """Know more files: what others need of them may be this rank's to read.

        Raises:
            IntegrityError, ManifestError: as when it is made.
        """
        known = set(map(id, self._files))
        more = [file for file in files if id(file) not in known]
        if not more:
            return
        self._files += more
        source = self._loader.source
        if self.mode != "off":
            check_sizes(source, more)
        every = {id(own.file): own for own in self._loader.own_digests(more)}
        if self.mode == "digest":
            places = sidecars(more, self._load_config)
            found, warnings = expected_digests(
                source, more, places, self._loader.checksums, every.keys()
            )
            self._sidecars |= places
            self._digests |= found
            self.warnings += warnings
        for key, own in every.items():
            at = self._digests.get(key)
            if at is None or (at.whole is None and at.origin != MANIFEST):
                self._digests[key] = own
            self.warnings += [own.remark] if own.remark else []

    def around(self, reader: Reader, also: Iterable[str] = ()) -> Reader:
        """The reader, verifying if that was asked for, or if the format always does.

        Args:
            reader: who reads.
            also: tensors, by checkpoint name, whose bytes are used and do not pass through it.
        """
        reads = self._files or self._load_config.distribute  # perhaps for others alone
        if not self._digests and not (self.mode == "digest" and reads):
            return reader
        layer = VerifyingReader(reader, self._digests, self._names, self._tally, self._keep)
        self._index()
        self._also = frozenset(also)
        for found, units in self.apart(self._files):
            layer.touch(found, units)
        return layer

    def apart(self, files: Iterable[File]) -> list[tuple[FileDigests, range]]:
        """What who uses these files has to verify and does not read to fill a parameter: headers,
        and what loader code looked at.
        """
        out: list[tuple[FileDigests, range]] = []
        for file in files:
            found, tensors = self._digests.get(id(file)), self._tensors.get(id(file), [])
            if found is None or not tensors:
                continue
            out.append((found, found.touching(0, tensors[0][0])))
            out += [(found, found.touching(a, b)) for a, b, name in tensors if name in self._also]
        return out

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
