"""A replica's memory as a plan sees it: one file, its tensors one after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from loadkit.errors import ChangedError, ReadError
from loadkit.sources.base import File, FileInfo, Source
from loadkit.text import printable
from loadkit_modelexpress.calls import Deadline, typed
from loadkit_modelexpress.library import library
from loadkit_modelexpress.p2p.descriptors import Described
from loadkit_modelexpress.p2p.transfer import Link, LinkOptions

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit_modelexpress.p2p.finding import Replica

__all__ = ["ReplicaFile", "ReplicaSource"]


class ReplicaFile(File):
    """Read by the reader ``nixl`` and by no other.

    Args:
        replica: whose memory it is; closed with the file.
        load_config: ``network_timeout`` counts.
        options: of the transfer.
    """

    reader: ClassVar[str] = "nixl"

    def __init__(self, replica: Replica, load_config: LoadConfig, options: LinkOptions) -> None:
        self.replica = replica
        self.name = f"replica {printable(replica.worker_id, 60)}"
        self.size = sum(one.nbytes for one in replica.tensors)
        self._load_config, self._options = load_config, options
        self._starts = [one.start for one in replica.tensors]
        self._link: Link | None = None

    @property
    def buffer_bytes(self) -> int:
        """Bytes that one transfer brings at most."""
        return self._options.buffer

    def at(self, offset: int) -> tuple[Described, int]:
        """The tensor that a byte is of, and the byte's address on the replica."""
        one = self.replica.tensors[bisect_right(self._starts, offset) - 1]
        return one, one.address + offset - one.start

    def link(self, device: torch.device) -> Link:
        """The way to it, opened when the first bytes are wanted.

        Raises:
            UsageError: memory of this device is not reached from where the replica's is.
            LoadkitError: as ``Link``.
        """
        if self._link is None:
            self._link = Link(self.replica, device, self._options)
        return self._link

    def read(self, offset: int, nbytes: int) -> bytes:
        raise ReadError(
            f"{self.name} is memory of another process: its bytes go into parameters alone",
            file=self.name,
            offset=offset,
        )

    def check_unchanged(self) -> None:
        """Ask the replica again, by the package's own call: it holds what it held.

        Raises:
            ChangedError: it does not.
            DownloadError: it is gone.
        """
        import grpc

        replica, seconds = self.replica, self._load_config.network_timeout
        try:
            tensors, _ = library("metadata.worker_server").fetch_tensor_manifest(
                replica.grpc_endpoint, replica.source_id, timeout=seconds,
                worker_id=replica.worker_id,
            )  # fmt: skip
        except grpc.RpcError as error:
            deadline = Deadline(self._load_config, f"a last look at {self.name}")
            raise typed(error, deadline, replica.grpc_endpoint) from error
        except RuntimeError as error:
            raise self._changed(printable(error, 200)) from error
        now = [(one.name, one.addr, one.size) for one in tensors]
        if now != [(one.name, one.address, one.nbytes) for one in replica.tensors]:
            raise self._changed("it holds other tensors, or elsewhere")

    def _changed(self, why: str) -> ChangedError:
        return ChangedError(
            f"{self.name} changed while it was read: {why}",
            file=self.name,
            hint="load again; nothing of what was read can be used",
        )

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self.replica.close()


class ReplicaSource(Source):
    """Another source's config and tokenizer, and a replica's memory.

    Args:
        first: where everything else lies; closed with this one.
        file: the replica's memory; it becomes this one's own.
    """

    def __init__(self, first: Source, file: ReplicaFile) -> None:
        super().__init__(first.uri, first.load_config)
        self.first, self.file = first, file
        self.remarks = first.remarks

    @property
    def bytes_fetched(self) -> int:  # type: ignore[override]
        return self.first.bytes_fetched

    def list(self) -> Sequence[FileInfo]:
        return self.first.list()

    def open(self, name: str) -> File:
        return self.first.open(name)

    def opened(self) -> Sequence[File]:
        return [*self.first.opened(), self.file]

    def make_local(self, names: Sequence[str]) -> None:
        self.first.make_local([name for name in names if name != self.file.name])

    def close(self) -> None:
        self.file.close()
        self.first.close()
