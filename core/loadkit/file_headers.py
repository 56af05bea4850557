"""One weight file's header, of whatever format its name says it is."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["header_of", "takes_weights_key"]

_SAFETENSORS = frozenset({"safetensors", "sharded_state", "mistral"})


def header_of(file: File, kind: str | None, weights_key: str | None = None) -> Any:
    """An object with ``tensors`` and ``metadata``; None where no installed loader reads it.

    Args:
        file: an open file.
        kind: its format. The loader of that name is asked, if it has a class method
            ``read_header(file)`` like the function for safetensors.
        weights_key: ``LoadConfig.weights_key``; for formats whose ``read_header`` takes it too.

    Raises:
        LoadkitError: the header breaks a rule, or could not be read.
    """
    if kind in _SAFETENSORS:
        from loadkit.safetensors_format import read_header

        return read_header(file)
    from loadkit import tables

    if kind is None or kind not in tables.loaders.names():
        return None
    reader: Any = getattr(tables.loaders.lookup(kind), "read_header", None)
    if reader is None or not takes_weights_key(kind):
        return None if reader is None else reader(file)
    return reader(file, weights_key)


def takes_weights_key(kind: str | None) -> bool:
    """Whether the tensors of a format may lie under a key in its files."""
    from loadkit import tables

    if kind is None or kind in _SAFETENSORS or kind not in tables.loaders.names():
        return False
    reader: Any = getattr(tables.loaders.lookup(kind), "read_header", None)
    return reader is not None and "weights_key" in signature(reader).parameters
