"""The modules of a model in one list: torch's generators recurse once per module and level."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Modules", "any_says", "attribute_of", "named_modules", "named_paths"]

Modules = list[tuple[str, nn.Module]]
"""Dotted names and modules, parents first."""


def named_modules(model: nn.Module) -> Modules:
    """What ``model.named_modules()`` gives: each module once."""
    found: Modules = []
    seen: set[nn.Module] = set()
    waiting: Modules = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        found.append((name, module))
        if module._modules:
            above = f"{name}." if name else ""
            waiting += [
                (above + child, part)
                for child, part in reversed(module._modules.items())
                if part is not None
            ]
    return found


def named_paths(model: nn.Module) -> Modules:
    """What ``model.named_modules(remove_duplicate=False)`` gives: a shared one at each place.

    A module that stands below itself is not entered again: torch's walk would not end.
    """
    found: Modules = [("", model)]
    above = {model}  # those between the root and here
    entered = [("", model, iter(model._modules.items()))]
    while entered:
        prefix, module, children = entered[-1]
        for name, part in children:
            if part is None or part in above:
                continue
            found.append((prefix + name, part))
            if part._modules:
                above.add(part)
                entered.append((f"{prefix}{name}.", part, iter(part._modules.items())))
                break
        else:
            entered.pop()
            above.discard(module)
    return found


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


def any_says(model: nn.Module, name: str) -> bool:
    """Whether any module may have an attribute of its own, or of its class, of that name.

    Told without putting dotted names together: for what few models have.
    """
    seen: set[nn.Module] = set()
    silent: set[type] = set()  # kinds of modules that do not have it
    waiting = [model]
    while waiting:
        module = waiting.pop()
        kind = type(module)
        if kind not in silent:
            if hasattr(kind, name) or kind.__getattr__ is not nn.Module.__getattr__:
                return True
            silent.add(kind)
        if name in module.__dict__:
            return True
        if module._modules and module not in seen:
            seen.add(module)
            waiting += [part for part in module._modules.values() if part is not None]
    return False
