"""What a plan's targets cost with a reader: bytes to read, and memory at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from loadkit.execution import Target, expression_cost, files_of, moves_of, read_cost
from loadkit.readers import can_alias
from loadkit.readers.base import Reader
from loadkit.tracing.expressions import Const, Src
from loadkit.tracing.program import walk
from loadkit.tracing.storage import FileLeaf

if TYPE_CHECKING:
    from loadkit.resolve import Job

__all__ = ["Costs", "costs_of"]


class Costs(NamedTuple):
    """Bytes: of needed elements, to read, mapped of it, of parameters, of memory at most."""

    needed: int
    read: int
    aliased: int
    parameters: int
    peak: int


def costs_of(targets: Sequence[Target], reader: Reader, job: Job) -> Costs:
    """What filling the targets reads and holds, as the read step will do it.

    Settles ``may_alias`` of each: its file allows it, and it has its storage for itself.
    """
    aliases = reader.aliases and job.load_config.alias == "auto"
    allowed = {id(file): aliases and can_alias(file)[0] for file in files_of(list(targets))}
    needed = read = aliased = staging = 0
    shared: set[Any] = set()
    owned: dict[int, int] = {}
    host = job.device.startswith("cpu")
    users = Counter(id(target.storage) for target in targets)
    for target in targets:
        target.may_alias = (
            target.may_alias
            and host
            and users[id(target.storage)] == 1
            and all(
                allowed[id(expr.leaf.info.file)]
                for _, expr in target.pieces
                if isinstance(expr, Src) and isinstance(expr.leaf, FileLeaf)
            )
        )
        moves = moves_of(target, direct=host, alias=aliases)
        cost = read_cost(moves, type(reader), shared)
        needed += cost.needed
        read += cost.read
        aliased += cost.aliased
        staging = max(staging, cost.staging)
        for _, expr, _ in target.checks:
            check = expression_cost(expr, type(reader), shared)
            needed, read = needed + check.needed, read + check.read
            staging = max(staging, check.staging)
        if target.storage.real is None and moves.alias is None:
            owned[id(target.storage)] = target.storage.numel * target.storage.itemsize
    constants = {
        item.tensor.untyped_storage()._cdata: item.tensor.untyped_storage().nbytes()
        for target in targets
        for _, expr in target.pieces
        if not isinstance(expr, Src)
        for item in walk(expr)
        if isinstance(item, Const) and item.source is not None
    }
    parameters = sum(target.nbytes for target in targets if target.is_parameter)
    peak = staging + sum(constants.values()) + (sum(owned.values()) if host else 0)
    return Costs(needed, read, aliased, parameters, peak)
