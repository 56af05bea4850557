"""Whether a module's weights are those of a checkpoint, or what post-processing made of them.

A method or module that post-processes says by its class attribute ``layout_version`` what a saved
state of it is:

- ``None`` (not said): nobody could load it back, so saving it is refused;
- ``0``: post-processing leaves the weights as they were loaded;
- ``1`` and up: the version of the layout it makes. Such a state is all in the module's parameters
  and buffers, and is loaded back without post-processing. Where plain parameters of the saved
  names, shapes and dtypes are not enough, ``restore_layout(layer, tensors)`` makes the module's
  parameters; ``tensors`` maps names to meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from loadkit.turns import is_repacked

__all__ = ["is_processed_layout", "processors_of", "version_of"]


def processors_of(module: nn.Module) -> Iterator[Any]:
    """What changes a module's weights after loading: its quantisation method, itself, or both."""
    if is_repacked(module):
        yield module.quant_method
    if callable(getattr(module, "process_weights_after_loading", None)):
        yield module


def version_of(processor: Any) -> int | None:
    """The version of the layout it makes; None where it does not say."""
    found = getattr(type(processor), "layout_version", None)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def is_processed_layout(module: nn.Module) -> bool:
    """Whether a saved state of a module is one that post-processing made."""
    return any(version_of(processor) for processor in processors_of(module))
