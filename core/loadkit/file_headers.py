"""One weight file's header, of whatever format its name says it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["header_of"]


def header_of(file: File, kind: str | None) -> Any:
    """An object with ``tensors`` and ``metadata``; None where no installed loader reads it.

    Args:
        file: an open file.
        kind: its format. The loader of that name is asked, if it has a class method
            ``read_header(file)`` like the function for safetensors.

    Raises:
        LoadkitError: the header breaks a rule, or could not be read.
    """
    if kind in ("safetensors", "sharded_state", "mistral"):
        from loadkit.safetensors_format import read_header

        return read_header(file)
    from loadkit import tables

    if kind is None or kind not in tables.loaders.names():
        return None
    reader: Any = getattr(tables.loaders.lookup(kind), "read_header", None)
    return None if reader is None else reader(file)
