"""What a reader is: extents of files go straight into memory. It knows nothing of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch

    from loadkit.config import LoadConfig
    from loadkit.options import OptionSpec
    from loadkit.sources.base import File


@dataclass(frozen=True, slots=True)
class Extent:
    """``rows`` runs of ``row_bytes`` bytes each, from a file to memory.

    Row i is read from ``offset + i * file_stride`` and lands at byte ``i * dest_stride`` of
    ``dest``: a 1-d uint8 CPU tensor whose first byte is the first row's first byte. All of it in
    bytes. A contiguous piece has ``rows == 1``: rows that touch are read as rows. ``tensor`` is
    the checkpoint tensor's name, for errors.
    """

    file: File
    offset: int
    row_bytes: int
    rows: int
    file_stride: int
    dest: torch.Tensor
    dest_stride: int
    tensor: str


class Place(NamedTuple):
    """Where an extent lies in its file: an ``Extent`` without its destination, in bytes."""

    file: File
    offset: int
    row_bytes: int
    rows: int
    file_stride: int
    tensor: str = ""


class Survey(NamedTuple):
    """What reading some places takes: bytes of the files, and in how many requests."""

    nbytes: int
    requests: int


class Reader(ABC):
    """Moves extents. Registered with ``@register_reader(name)``; one instance per load.

    Attributes:
        streaming: set by who goes forward through files in many small calls and has no plan of
            them (``iter_weights``). A reader may then keep bytes between calls, and what
            ``survey`` says need not hold.
        options: the keys of ``LoadConfig.reader_options`` that it accepts.
        joins: it asks at once for what is side by side in a file and in memory too, so that many
            small tensors are few requests: they are given memory in file order.
        onto_device: it fills memory of an accelerator too: what goes there is read into buffers
            on the device, not into pinned ones of the host.
        remarks: sentences for the report's warnings.
    """

    name: ClassVar[str]
    aliases: ClassVar[bool] = False  # whether ``view`` works
    overlays: ClassVar[bool] = False  # whether ``overlay`` works
    joins: ClassVar[bool] = False
    concurrent: ClassVar[bool] = False  # whether several threads may call ``read`` at once
    options: ClassVar[Mapping[str, OptionSpec]] = {}
    streaming: bool = False
    onto_device: bool = False

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config
        self.remarks: list[str] = []

    @abstractmethod
    def survey(self, places: Iterable[Place]) -> Survey:
        """What one ``read`` of these places would take: gaps and alignment included.

        Places come as extents do, sorted by file and offset. Nothing is read. ``nbytes`` is exact;
        so is ``requests`` where no read is cut short.

        Raises:
            ReadError: this reader cannot read one of the files.
        """

    @abstractmethod
    def read(self, extents: Sequence[Extent], landed: Callable[[int], None] | None = None) -> int:
        """Fill every extent's destination; returns the bytes read from files, as surveyed.

        Extents come sorted by file, then offset. ``landed`` is called with byte counts as they
        arrive (from any thread). On an error the remaining work is cancelled, threads are joined
        and the first error is raised.

        Raises:
            TruncatedError: a file ended early.
            ReadError: the operating system failed; ``errno``, ``file``, ``tensor``, ``offset`` set.
        """

    def reads_remote(self, file: File) -> bool:
        """Whether it reads a file that is not on this machine, from where that is."""
        return False

    def view(self, file: File, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 view [nbytes] of a private mapping, for readers with ``aliases``."""
        raise NotImplementedError(f"reader {self.name!r} cannot alias")

    def overlay(self, file: File, offset: int, into: torch.Tensor) -> None:
        """Have memory of ``pages.reserve`` be a private mapping, for readers with ``overlays``.

        Args:
            file: whose bytes.
            offset: of the first one, a multiple of the page size.
            into: uint8, whole pages of the memory.

        Raises:
            LoadkitError: as ``view``.
        """
        raise NotImplementedError(f"reader {self.name!r} cannot overlay")

    def maps(self, place: Place) -> bool:
        """Whether work may be done on a view of such a place instead of on a copy of it."""
        return self.aliases

    def bring(self, place: Place) -> None:  # noqa: B027
        """Have a place in memory before a view of it is worked on, where ``maps`` says so.

        Raises:
            LoadkitError: as ``read``.
        """

    def buffer_bytes(self) -> int:
        """Memory that it takes beside the destinations, at most; small change need not count."""
        return 0

    def expect_view(self, file: File, offset: int, nbytes: int) -> None:  # noqa: B027
        """Told while a plan is counted: ``view`` or ``overlay`` will be called so."""

    def survey_end(self) -> Survey:
        """What ``end`` will take after everything that was surveyed and expected.

        A survey that comes later begins a new plan.
        """
        return Survey(0, 0)

    def end(self, landed: Callable[[int], None] | None = None) -> int:
        """Do what is left when everything was read and viewed; returns the bytes read for it.

        Called once, before a model is handed out, and not after an error.

        Raises:
            LoadkitError: what was read cannot be used.
        """
        return 0

    def verified(self) -> dict[str, Any]:
        """What was compared with digests, for the report; empty where nothing was."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release threads and mappings that nothing uses any more; may be called twice."""
