"""Ranks that load together: each step ends when all have said how it went, for better or worse.

One rank's failure is every rank's error, of the same type and naming the rank. Without a process
group a load is on its own and nothing of this happens.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.errors import DistributedError, LoadkitError, OptionError
from loadkit.rank_board import Board, PeerLost, RankFailed
from loadkit.rank_failures import Failure, broke_off, describe, name_of, root_cause

if TYPE_CHECKING:
    from loadkit.config import LoadConfig, ParallelConfig

__all__ = ["ALONE", "LoadGroup", "load_group"]

_ENDING = 0.5  # seconds from the end of a process's connections to its own


class LoadGroup:
    """The ranks that load together, as one of them sees it.

    Attributes:
        size: how many.
        rank: this one.
        board: what they tell each other; None for a load on its own.
        parallels: every rank's place, in rank order.
        store: of this load; what else the ranks need it for takes a prefix of its own.
    """

    def __init__(self, board: Board | None = None, store: Any = None) -> None:
        self.board = board
        self.store = store
        self.size = 1 if board is None else board.size
        self.rank = 0 if board is None else board.rank
        self.parallels: list[ParallelConfig] = []
        self._told: LoadkitError | None = None

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step that is done when every rank has done it.

        Raises:
            LoadkitError: it failed on some rank; the same on all of them.
        """
        if self.board is None:
            yield
            return
        try:
            yield
            self.board.exchange(f"step {name}")
        except Exception as error:
            told = self._agreed(error)
            if told is error:
                raise
            raise told from told.__cause__
        except BaseException as error:
            self.tell(error)
            raise

    def tell(self, error: BaseException) -> None:
        """Tell the others of an error at once, before the step that it ends does."""
        if self.board is not None and self._told is None:
            failure = self._own(error)
            if failure is not None:
                self.board.fail(failure)

    def _own(self, error: BaseException) -> Failure | None:
        """What this rank has to tell about an error; None where it only heard of it."""
        if isinstance(error, PeerLost):
            pid = None if self.board is None else self.board.pid_of(error.peer, _ENDING)
            return broke_off(error.peer, error.message, pid)
        return None if isinstance(error, RankFailed) else describe(error, self.rank)

    def exchange(self, what: str, mine: bytes) -> list[bytes]:
        """Every rank's answer to one question; alone, one's own."""
        return [mine] if self.board is None else self.board.exchange(what, mine)

    def check(self) -> None:
        """Raise if a rank has failed; takes no time."""
        if self.board is not None:
            self.board.check()

    def meet(self, parallel: ParallelConfig) -> None:
        """Wait for all ranks, and know who they are.

        Raises:
            DistributedError: one did not come, or places are taken twice.
        """
        board = self.board
        if board is None:
            return
        mine = json.dumps({"at": _machine(), "pid": os.getpid(), "parallel": parallel.to_dict()})
        found = board.exchange("enter", mine.encode(), patience=board.timeout)
        every = [json.loads(each) for each in found]
        self.parallels = [type(parallel).from_dict(each["parallel"]) for each in every]
        self._require_places()
        here = _machine()
        pids = {rank: each["pid"] for rank, each in enumerate(every) if each["at"] == here}
        board.know(self._names(), pids)

    def _require_places(self) -> None:
        """Refuse a layout of as many places as ranks, in which two ranks have one place."""
        taken: dict[int, int] = {}
        for rank, each in enumerate(self.parallels):
            if each.world_size != self.size:
                continue  # not all ranks of a layout, or replicas that nobody counted
            first = taken.setdefault(each.rank, rank)
            if first != rank:
                error = DistributedError(
                    f"ranks {first} and {rank} both are rank {each.rank} of the layout ("
                    f"{name_of(each)})",
                    code="E_RANK_MISMATCH",
                    detail={"ranks": [first, rank], "place": each.rank},
                    hint="give each rank its own place: ParallelConfig.for_rank(rank, tp_size=...)",
                )
                error.rank = rank
                raise error

    def _names(self) -> list[str]:
        """What each rank is called: by its place in the layout, where that says the same."""
        return [
            name_of(each)
            if each.world_size == self.size and each.rank == rank
            else f"rank {rank} of {self.size}"
            for rank, each in enumerate(self.parallels)
        ]

    def _agreed(self, error: Exception) -> LoadkitError:
        """The error that all ranks raise, when this one met ``error``."""
        board = self.board
        if board is None or error is self._told:
            return self._told or describe(error, self.rank).error
        own = self._own(error)
        try:
            if own is not None:
                board.fail(own)
            told = board.cause()
        except DistributedError as lost:
            told = lost if own is None else root_cause([own], [], board.names)
            if lost.rank is not None and (own is None or own.indirect):
                told = lost  # it is known whose process took the store along
        if own is not None and told.rank == own.rank == self.rank:
            # its own object, where the traceback and the cause are
            own.error.message, own.error.rank = told.message, told.rank
            own.error.args = told.args
            told = own.error
        self._told = told
        return told


ALONE = LoadGroup()


@contextmanager
def load_group(
    process_group: Any, parallel: ParallelConfig | None, load_config: LoadConfig | None
) -> Iterator[LoadGroup]:
    """The ranks of a process group, gathered for one load; ``ALONE`` without one.

    Every rank of the group enters it, in the same order as its other loads.

    Raises:
        OptionError: that is no process group; or options that need one were given without.
        DistributedError: a rank did not come.
    """
    from loadkit.config import LoadConfig, ParallelConfig

    load_config = load_config if isinstance(load_config, LoadConfig) else LoadConfig()
    parallel = parallel if isinstance(parallel, ParallelConfig) else ParallelConfig()
    if process_group is None:
        _refuse_alone(load_config)
        yield ALONE
        return
    store = _store_of(process_group)
    rank, size = process_group.rank(), process_group.size()
    import torch.distributed as dist

    count = store.add(f"loadkit/{rank}", 1)  # all ranks count the same
    store = dist.PrefixStore(f"loadkit/load {count}", store)  # type: ignore[attr-defined]
    board = Board(store, rank, size, timeout=load_config.rank_timeout)
    group = LoadGroup(board, store)
    try:
        with group.step("enter"):
            group.meet(parallel)
        yield group
    except BaseException as error:
        group.tell(error)
        raise
    finally:
        board.close()


def _refuse_alone(load_config: LoadConfig) -> None:
    """Refuse options that say how ranks load together, where only one loads."""
    spec = load_config.options()
    for name in ("distribute", "rank_timeout"):
        value = getattr(load_config, name)
        if value != spec[name].default:
            raise OptionError(
                f"LoadConfig.{name} = {value!r} is about ranks that load together, and this load "
                "was given no process_group",
                detail={"option": name},
                hint="give every rank's load its torch.distributed process group: "
                "process_group=torch.distributed.group.WORLD",
            )


def _store_of(process_group: Any) -> Any:
    """The store that a process group was made with.

    Raises:
        OptionError: it is no process group, or of other ranks.
    """
    import torch.distributed as dist

    if not dist.is_available() or not isinstance(process_group, dist.ProcessGroup):
        raise OptionError(
            f"process_group is {type(process_group).__name__}; accepted: a "
            "torch.distributed.ProcessGroup that this process is a rank of",
            hint="torch.distributed.group.WORLD is the default group",
        )
    if hasattr(process_group, "get_group_store"):
        return process_group.get_group_store()
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_process_group_store(process_group)  # torch before 2.8


def _machine() -> str:
    """What is equal for two processes exactly if a pid means the same to both."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115 - it leads to no path
    except OSError:
        parts.append("")
    return " ".join(parts)
