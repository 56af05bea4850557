"""The package ``modelexpress``: its modules, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from loadkit.availability import installed_version
from loadkit.errors import NotInstalledError, PluginError
from loadkit.text import printable
from loadkit_modelexpress.availability import INSTALL, LIBRARY

__all__ = ["library"]


def library(module: str = "") -> Any:
    """A module of the package.

    Args:
        module: its name inside the package; "" is the package.

    Raises:
        NotInstalledError: the package is missing; says the pip line.
        PluginError: it is there and cannot be imported.
    """
    if installed_version(LIBRARY) is None:
        raise NotInstalledError(
            f"the package {LIBRARY} is not installed",
            detail={"package": LIBRARY, "extra": "modelexpress"},
            hint=INSTALL,
        )
    try:
        return importlib.import_module(f"{LIBRARY}.{module}" if module else LIBRARY)
    except Exception as error:
        raise PluginError(
            f"{LIBRARY} is installed and cannot be imported: {type(error).__name__}: "
            f"{printable(error)}",
            detail={"package": LIBRARY},
            hint="it needs google-crc32c, grpcio, huggingface_hub, numpy, protobuf, pydantic, "
            "torch and zstandard",
        ) from error
