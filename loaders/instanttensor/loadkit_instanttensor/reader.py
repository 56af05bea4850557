"""The reader ``instanttensor``: whole tensors onto a CUDA device, parts of them where they belong.

InstantTensor gives tensors, one after the other in the order of the file. Every tensor of which a
read wants a part is brought whole, and counts whole. The last one stays on the device: the next
read often wants more of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

from loadkit.errors import LoadkitError
from loadkit.options import OptionSpec, validate_options
from loadkit.readers.base import Extent, Place, Reader, Survey
from loadkit.readers.extents import check_extent
from loadkit.readers.windows import by_file
from loadkit_instanttensor.options import OPTIONS
from loadkit_instanttensor.stream import InstantTensor
from loadkit_instanttensor.tensors import Located, Tensors, total

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["InstantTensorReader"]

Item = TypeVar("Item", Extent, Place)


class InstantTensorReader(Reader):
    """Reads safetensors files of this machine. Keeps one tensor on the device until ``close``.

    Raises:
        UsageError: there is no CUDA.
        NotInstalledError: the package is not installed.
    """

    name: ClassVar[str] = "instanttensor"
    options: ClassVar[Mapping[str, OptionSpec]] = OPTIONS
    onto_device = True

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        given = load_config.reader_options if load_config.reader == self.name else {}
        chosen = validate_options(self.options, given, f"reader {self.name!r}")
        self._library = InstantTensor(chosen)
        self._tensors = Tensors()
        self._planned: Located | None = None  # what a read of all that was surveyed would hold
        self._held: tuple[Located, torch.Tensor] | None = None

    def survey(self, places: Iterable[Place]) -> Survey:
        """The tensors that the places are parts of, but for the one that is there already."""
        nbytes = requests = 0
        for part in by_file(places):
            groups = list(self._groups(part))
            wanted = [one for one, _ in groups if one != self._planned]
            nbytes, requests = nbytes + total(wanted), requests + bool(wanted)
            self._planned = groups[-1][0]
        return Survey(nbytes, requests)

    def read(self, extents: Sequence[Extent], landed: Callable[[int], None] | None = None) -> int:
        """Fill every destination, file by file; ``landed`` gets each tensor's bytes.

        Raises:
            ValueError: an extent does not fit its destination; nothing was read.
            TruncatedError: a file ended early.
            ReadError: the library failed, or a file is not of its kind.
        """
        for extent in extents:
            check_extent(extent, devices=True)
        return sum(self._file(part, landed) for part in by_file(extents))

    def close(self) -> None:
        self._held = self._planned = None

    def _file(self, extents: Sequence[Extent], landed: Callable[[int], None] | None) -> int:
        """Extents of one file; the bytes that were brought."""
        groups = list(self._groups(extents))
        last, held = groups[-1][0], self._held
        if held is not None:
            for one, parts in groups:
                if one == held[0]:
                    _hand_out(held[1], one, parts)
            groups = [group for group in groups if group[0] != held[0]]
        device = _device(extents)
        if held is None or held[0] != last:
            self._held = None
        if groups:
            try:
                self._bring(groups, last, device, landed)
            except LoadkitError:
                extents[0].file.check_unchanged()  # one that was cut or replaced: another error
                raise
        self._library.finish(device)
        return total([one for one, _ in groups])

    def _bring(
        self,
        groups: Sequence[tuple[Located, list[Extent]]],
        last: Located,
        device: torch.device,
        landed: Callable[[int], None] | None,
    ) -> None:
        """Bring tensors and hand out their parts; the ``last`` one is kept."""
        with self._library.tensors([one for one, _ in groups], device) as given:
            for (one, parts), (_, flat) in zip(groups, given, strict=True):
                _hand_out(flat, one, parts)
                if one == last:
                    self._held = one, flat.clone()
                if landed is not None:
                    landed(one.end - one.start)

    def _groups(self, items: Sequence[Item]) -> Iterator[tuple[Located, list[Item]]]:
        """The tensors that items of one file are parts of, in file order, each with its items."""
        found: dict[int, tuple[Located, list[Item]]] = {}
        for item in items:
            one = self._tensors.of(item)
            found.setdefault(one.start, (one, []))[1].append(item)
        for start in sorted(found):
            yield found[start]


def _hand_out(flat: torch.Tensor, one: Located, extents: Sequence[Extent]) -> None:
    """Copy the parts of a tensor's bytes to where they belong."""
    for extent in extents:
        size = extent.rows, extent.row_bytes
        at = flat.storage_offset() + extent.offset - one.start
        source = flat.as_strided(size, (extent.file_stride, 1), at)
        dest = extent.dest
        dest.as_strided(size, (extent.dest_stride, 1), dest.storage_offset()).copy_(source)


def _device(extents: Sequence[Extent]) -> torch.device:
    """Where the tensors are brought: the device of the first destination that is on one."""
    for extent in extents:
        if extent.dest.device.type != "cpu":
            return extent.dest.device
    return torch.device("cuda", torch.cuda.current_device())
