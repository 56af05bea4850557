"""Which layouts post-processing made of a model's weights."""

from __future__ import annotations

from itertools import chain

from torch import nn

from loadkit.processed_layout import processors_of, version_of

__all__ = ["layout_versions"]


def layout_versions(model: nn.Module) -> dict[str, str]:
    """Class of each method or module that changes weights after loading -> its layout's version.

    What does not say its version has "". A module without weights has nothing to change.
    """
    found: dict[str, str] = {}
    for module in model.modules():
        if next(chain(module.parameters(), module.buffers()), None) is None:
            continue
        for processor in processors_of(module):
            version = version_of(processor)
            if version != 0:
                cls = type(processor)
                said = "" if version is None else str(version)
                found[f"{cls.__module__}:{cls.__qualname__}"] = said
    return found
