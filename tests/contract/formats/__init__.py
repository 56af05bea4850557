"""One module per load format: how it is written, and its row of the table in the docs."""

from __future__ import annotations

import importlib
import pkgutil

from contract.formats.base import MatrixFormat

__all__ = ["FORMATS", "MatrixFormat"]


def _found() -> list[MatrixFormat]:
    formats: list[MatrixFormat] = []
    for info in pkgutil.iter_modules(__path__):
        if info.name not in ("base", "table"):
            module = importlib.import_module(f"{__name__}.{info.name}")
            formats += module.FORMATS
    return sorted(formats, key=lambda one: one.name)


FORMATS = _found()
