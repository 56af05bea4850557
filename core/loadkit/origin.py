"""What a model remembers of where it came from, so that it can be saved the same way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from loadkit.tracing.expressions import Src
from loadkit.tracing.program import walk

if TYPE_CHECKING:
    from torch import nn

    from loadkit.config import LoadkitConfig
    from loadkit.load_plan import LoadPlan, Row
    from loadkit.mapper import WeightsMapper
    from loadkit.tracing.given import Given

__all__ = ["Origin", "origin_of", "remember", "remember_load", "with_plan"]

_ATTRIBUTE = "loadkit_origin"

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Origin:
    """A model's config and, where it was loaded, what its parameters were made of.

    Attributes:
        config: the bundle it was built from.
        architecture: the architecture that was resolved; "" for a module the user built.
        mapper: the mapper that ``load_into`` was given.
        offered: names under which tensors were given to the model.
        shapes: checkpoint tensor -> its shape in the file.
        rows: parameter or buffer -> the plan's rows that wrote it.
        sizes: parameter or buffer -> its shape when it was loaded.
        buffers: the buffers among them.
        given: what the model's ``load_weights`` was given, by name.
        indirect: the last load did not read checkpoint tensors: ``rows`` say nothing of them.
    """

    config: LoadkitConfig
    architecture: str = ""
    mapper: WeightsMapper | None = None
    offered: frozenset[str] = frozenset()
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    rows: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    sizes: Mapping[str, Shape] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    given: Mapping[str, Given] = field(default_factory=dict)
    indirect: bool = False

    @property
    def is_loaded(self) -> bool:
        """Whether a load into the model was finished, post-processing included."""
        return bool(self.sizes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self  # frozen, and as true of the copy


def origin_of(model: nn.Module) -> Origin | None:
    """What a model remembers; None if loadkit neither built nor loaded it."""
    found = model.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Origin) else None


def remember(model: nn.Module, origin: Origin) -> None:
    """Keep an origin with its model; a deep copy or a pickle of the model has it too."""
    model.__dict__[_ATTRIBUTE] = origin


def remember_load(
    model: nn.Module,
    config: LoadkitConfig,
    plan: LoadPlan,
    offered: Iterable[str],
    *,
    architecture: str,
    given: Mapping[str, Given] | None = None,
    indirect: bool = False,
) -> None:
    """Note a load that is done; of several loads into one module, the last word per parameter.

    Args:
        model: the model that was loaded.
        config: its bundle.
        plan: the plan that was executed.
        offered: the names under which tensors were given to the model's ``load_weights``.
        architecture, given, indirect: as in ``Origin``.
    """
    new = with_plan(Origin(config, architecture), plan, offered)
    new = replace(new, given=dict(given or {}), indirect=indirect)
    old = origin_of(model)
    if old is not None:
        new = replace(
            new,
            offered=old.offered | new.offered,
            shapes={**old.shapes, **new.shapes},
            rows={**old.rows, **new.rows},
            sizes={**old.sizes, **new.sizes},
            buffers=old.buffers | new.buffers,
            given={**old.given, **new.given},
        )
    remember(model, new)


def with_plan(origin: Origin, plan: LoadPlan, offered: Iterable[str]) -> Origin:
    """An origin whose rows, shapes, sizes and buffers are a plan's."""
    rows: dict[str, list[Row]] = {}
    for row in plan.rows:
        if row.parameter is not None:
            rows.setdefault(row.parameter, []).append(row)
    shapes: dict[str, Shape] = {}
    sizes: dict[str, Shape] = {}
    for target in plan.targets:
        for _, expr in target.pieces:
            for item in (expr,) if isinstance(expr, Src) else walk(expr):
                if isinstance(item, Src):
                    shapes[item.leaf.name] = item.leaf.size
        for name in target.names:
            sizes[name] = target.view.size
            rows.setdefault(name, rows.get(target.names[0], []))
    return replace(
        origin,
        offered=frozenset(offered),
        shapes=shapes,
        rows={name: tuple(found) for name, found in rows.items()},
        sizes=sizes,
        buffers=frozenset(t.names[0] for t in plan.targets if not t.is_parameter),
    )
