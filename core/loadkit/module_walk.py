"""The modules of a model in one list: torch's generators recurse once per module and level."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["Modules", "attribute_of", "named_modules", "named_paths"]

Modules = list[tuple[str, nn.Module]]
"""Dotted names and modules, parents first."""


def named_modules(model: nn.Module) -> Modules:
    """What ``model.named_modules()`` gives: each module once."""
    return list(_walk(model, set()))


def named_paths(model: nn.Module) -> Modules:
    """What ``model.named_modules(remove_duplicate=False)`` gives: a shared one at each place."""
    return list(_walk(model, None))


def _walk(model: nn.Module, seen: set[nn.Module] | None) -> Iterator[tuple[str, nn.Module]]:
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if seen is not None:
            if module in seen:
                continue
            seen.add(module)
        yield name, module
        if module._modules:
            above = f"{name}." if name else ""
            waiting += [
                (above + child, part)
                for child, part in reversed(module._modules.items())
                if part is not None
            ]


def attribute_of(module: nn.Module | None, name: str) -> Any:
    """``getattr(module, name, None)``, quickly: most modules lack most, and theirs raises."""
    kind = type(module)
    if getattr(kind, "__getattr__", None) is not nn.Module.__getattr__ or hasattr(kind, name):
        return getattr(module, name, None)
    own = vars(module)
    if name in own:
        return own[name]
    for registry in (own["_parameters"], own["_buffers"], own["_modules"]):
        if name in registry:
            return registry[name]
    return None
