"""Whose a tensor is, decided once for every loader: below a missing layer it is another stage's.

``AutoWeightsLoader`` asks modules under mapped names. A model that loops over names on its own gets
only names that it has, because those of missing layers are taken out before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import nn

from loadkit.module_walk import any_says, attribute_of, named_modules
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
        for name, module in (named_modules(model) if any_says(model, _SAYS) else ())
        if attribute_of(module, _SAYS) is True
    }
    for name, weight in weights:
        reason = _elsewhere(name, missing) if missing else None
        if reason is None:
            yield name, weight
        else:
            report_misfit("SKIPPED", name=name, target=name, message=reason)


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
