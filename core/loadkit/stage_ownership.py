"""Whose a tensor is, decided once for every loader: below a missing layer it is another stage's.

``AutoWeightsLoader`` asks modules under mapped names. A model that loops over names on its own gets
only names that it has, because those of missing layers are taken out before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import nn

from loadkit.module_walk import attribute_of, named_modules
from loadkit.tracing import report_misfit

__all__ = ["of_this_stage"]

Weight = TypeVar("Weight")

_SAYS = "is_missing_layer"


def of_this_stage(
    model: nn.Module, weights: Iterable[tuple[str, Weight]]
) -> Iterator[tuple[str, Weight]]:
    """The weights but those of layers that this rank does not have; these are listed as skipped."""
    missing = {
        name: module
        for name, module in (named_modules(model) if _may_miss_layers(model) else ())
        if attribute_of(module, _SAYS) is True
    }
    for name, weight in weights:
        reason = _elsewhere(name, missing) if missing else None
        if reason is None:
            yield name, weight
        else:
            report_misfit("SKIPPED", name=name, target=name, message=reason)


def _may_miss_layers(model: nn.Module) -> bool:
    """Whether any module speaks of it at all: told without putting names together."""
    seen: set[nn.Module] = set()
    silent: set[type] = set()  # kinds of modules that do not
    waiting = [model]
    while waiting:
        module = waiting.pop()
        kind = type(module)
        if kind not in silent:
            if hasattr(kind, _SAYS) or kind.__getattr__ is not nn.Module.__getattr__:
                return True
            silent.add(kind)
        if _SAYS in module.__dict__:
            return True
        if module._modules and module not in seen:
            seen.add(module)
            waiting += [part for part in module._modules.values() if part is not None]
    return False


def _elsewhere(name: str, missing: dict[str, Any]) -> str | None:
    """Why nothing of that name is here; None where no missing layer is above it."""
    at = name.find(".")
    while at != -1:
        module = missing.get(name[:at])
        if module is not None:
            skip = getattr(module, "skip_weight", None)
            reason = skip(name[at + 1 :]) if callable(skip) else None
            return str(reason or "its layer belongs to another pipeline stage")
        at = name.find(".", at + 1)
    return None
