"""In what turns a model is filled: a module that is repacked after loading gets a turn of its own.

Its weights are read, changed for good and done with before the next one's are read, so what a load
holds at once is the finished model and one raw module. Everything else is read in one turn, in
file order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from loadkit.execution import Target
from loadkit.module_walk import Modules, attribute_of
from loadkit.quantization_base import QuantizeMethodBase
from loadkit.tracing.expressions import Expr, Part
from loadkit.tracing.program import walk

__all__ = ["Turn", "is_repacked", "repacked_modules", "turns_of"]


@dataclass(frozen=True)
class Turn:
    """Targets that are read together; then ``module``, under ``name``, is post-processed."""

    targets: Sequence[Target]
    name: str = ""
    module: nn.Module | None = None

    def kept_bytes(self) -> int:
        """What the targets hold once the module is finished, as far as its method says."""
        raw = sum(target.storage.numel * target.storage.itemsize for target in self.targets)
        method = attribute_of(self.module, "quant_method")
        if not isinstance(method, QuantizeMethodBase) or self.module is None:
            return raw
        kept = method.bytes_after_loading(self.module)
        return raw if kept is None else kept


def is_repacked(module: nn.Module) -> bool:
    """Whether a module's weights are changed after loading: then they must be owned."""
    method = attribute_of(module, "quant_method")
    if method is None:
        return False
    own = getattr(type(method), "process_weights_after_loading", None)
    return own is not None and own is not QuantizeMethodBase.process_weights_after_loading


def repacked_modules(modules: Modules) -> dict[str, nn.Module]:
    """The modules whose weights are changed after loading, by name."""
    return {name: module for name, module in modules if is_repacked(module)}


def turns_of(modules: Mapping[str, nn.Module], targets: Sequence[Target]) -> list[Turn]:
    """The turns of a load: what is read in file order, then the modules one by one.

    A module's targets stay in the first turn where others share their memory, their numbers or
    their names.

    Args:
        modules: those that are repacked; none where all of it is read together.
        targets: everything that is filled.
    """
    mine: dict[str, list[Target]] = defaultdict(list)
    for target in targets if modules else ():
        homes = {name.rpartition(".")[0] for name in target.names}
        if len(homes) == 1 and (home := homes.pop()) in modules:
            mine[home].append(target)
    for home in _entangled(mine, targets) if mine else ():
        del mine[home]
    alone = {id(target) for own in mine.values() for target in own}
    turns = [Turn([target for target in targets if id(target) not in alone])]
    turns += [Turn(own, home, modules[home]) for home, own in mine.items()]
    return turns


def _entangled(mine: dict[str, list[Target]], targets: Sequence[Target]) -> set[str]:
    """Modules whose targets cannot be filled without others."""
    home_of = {id(target): home for home, own in mine.items() for target in own}
    users: dict[int, set[str]] = defaultdict(set)
    out: set[str] = set()
    for target in targets:
        home = home_of.get(id(target), "")
        for thing in _uses(target):
            users[thing].add(home)
        if home and (target.checks or target.storage.real is not None):
            out.add(home)
    return out | {home for homes in users.values() if len(homes) > 1 for home in homes if home}


def _uses(target: Target) -> Iterator[int]:
    """Ids of what a target stands on that another may stand on too."""
    yield id(target.storage)
    for _, expr in target.pieces:
        yield from _origins(walk(expr))


def _origins(exprs: Iterable[Expr]) -> Iterator[int]:
    for item in exprs:
        if isinstance(item, Part) and item.call.origin is not None:
            yield id(item.call.origin)
