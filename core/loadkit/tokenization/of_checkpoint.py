"""The tokenizer that belongs to a checkpoint, wherever its format keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loadkit.tokenization.tokenizer_json import from_source

if TYPE_CHECKING:
    from loadkit.sources.base import Source
    from loadkit.tokenization.base import Tokenizer

__all__ = ["tokenizer_for"]


def tokenizer_for(source: Source, loader: object) -> Tokenizer:
    """The tokenizer of a checkpoint.

    A loader whose files hold their tokenizer has ``read_tokenizer(source)``; for all others it is
    tokenizer.json in the checkpoint's folder.

    Args:
        source: the open checkpoint.
        loader: the loader, or its class.

    Raises:
        FormatError: ``E_TOKENIZER``, there is none, or it is broken.
        NotInstalledError: the library it needs is not installed.
    """
    read: Any = getattr(loader, "read_tokenizer", None)
    if read is None:
        return from_source(source)
    tokenizer: Tokenizer = read(source)
    return tokenizer
