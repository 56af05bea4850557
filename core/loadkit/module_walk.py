"""The modules of a model in one list: torch's generators recurse once per module and level."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["attribute_of", "named_modules"]


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What ``model.named_modules()`` gives: dotted names and modules, parents first, each once."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
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
