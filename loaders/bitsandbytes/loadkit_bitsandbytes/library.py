"""The library, imported when something is computed with it."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from loadkit.errors import NotInstalledError, PluginError
from loadkit.known_names import pip_line
from loadkit.text import printable

__all__ = ["functional", "require"]


def require() -> None:
    """Refuse to go on without the library; imports nothing.

    Raises:
        NotInstalledError: says the pip line.
    """
    if find_spec("bitsandbytes") is None:
        raise NotInstalledError(
            "load format and quantization 'bitsandbytes' need the package bitsandbytes",
            hint=pip_line("bitsandbytes"),
        )


def functional() -> Any:
    """``bitsandbytes.functional``; its operators are in ``torch.ops.bitsandbytes`` then.

    Raises:
        NotInstalledError: it is not installed.
        PluginError: it is, and cannot be imported.
    """
    require()
    try:
        return importlib.import_module("bitsandbytes").functional
    except Exception as error:
        raise PluginError(
            f"bitsandbytes cannot be imported: {type(error).__name__}: {printable(error)}",
            hint="python -m bitsandbytes says more",
        ) from error
