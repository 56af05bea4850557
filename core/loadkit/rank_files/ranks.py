"""How the ranks of one save know of each other."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist

from loadkit.errors import DistributedError, OptionError
from loadkit.manifest import Topology

__all__ = ["Ranks"]

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

# Saves of this process that are under way: (folder, topology) -> save id.
_under_way: dict[tuple[str, Topology], str] = {}


class Ranks:
    """The ranks that save together.

    With torch.distributed set up over as many processes as there are ranks, they agree by it.
    Otherwise ranks that one process saves in turn belong together, or those that were given one
    ``save_id``.

    Args:
        path: the folder that is saved into.
        topology: of the ranks.
        processes: how many there are if each is a process, those that write nothing included.
        save_id: the caller's word for this save, or "".

    Raises:
        OptionError: the word could be no part of a name.
    """

    def __init__(
        self, path: str | os.PathLike[str], topology: Topology, processes: int, save_id: str
    ) -> None:
        if save_id and not _ID.fullmatch(save_id):
            raise OptionError(
                f"save_id is {save_id!r}; accepted: 1 to 64 letters, digits, '-' and '_'"
            )
        self._key = os.path.realpath(Path(path).expanduser()), topology
        ready = dist.is_available() and dist.is_initialized()
        self.together = processes > 1 and ready and dist.get_world_size() == processes
        if self.together:
            self.save_id = str(self._from_first(save_id or uuid.uuid4().hex[:12]))
        elif save_id:
            self.save_id = save_id
        else:
            self.save_id = _under_way.setdefault(self._key, uuid.uuid4().hex[:12])

    @staticmethod
    def _from_first(value: Any) -> Any:
        """Rank 0's value, on every rank."""
        found = [value]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def done(self) -> None:
        """The save is in place: the next one into this folder is another."""
        _under_way.pop(self._key, None)

    def share(self, error: BaseException | None) -> None:
        """Wait for every rank; any rank's failure is everybody's.

        Raises:
            DistributedError: another rank failed; names it.
        """
        if not self.together:
            return
        said = None if error is None else f"{type(error).__name__}: {error}"
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, said)
        bad = {rank: text for rank, text in enumerate(found) if text is not None}
        if error is None and bad:
            rank, text = next(iter(bad.items()))
            raise DistributedError(
                f"rank {rank} could not save its part: {text}",
                detail={"ranks": sorted(bad)},
                hint="nothing was put in place; the old folder is as it was",
            )
