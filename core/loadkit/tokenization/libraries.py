"""The tokenizer libraries, imported when first needed; their failures as errors of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from loadkit.errors import FormatError, NotInstalledError
from loadkit.known_names import pip_line
from loadkit.text import printable

__all__ = ["need", "refused"]


def need(library: str, purpose: str) -> Any:
    """The library's module.

    Raises:
        NotInstalledError: it is not installed.
    """
    if find_spec(library) is None:
        raise NotInstalledError(
            f"{purpose} needs the library {library!r}, which is not installed",
            detail={"library": library, "extra": "generate"},
            hint=pip_line("generate"),
        )
    return import_module(library)


@contextmanager
def refused(what: str, *, file: str | None) -> Iterator[None]:
    """Turns what the Rust library raises on bad data into a FormatError with E_TOKENIZER.

    It has no exception type of its own, and where it panics (a limit of its regex engine, a broken
    table) that is no ``Exception`` either.
    """
    try:
        yield
    except MemoryError:
        raise
    except BaseException as problem:
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":
            raise
        raise FormatError(
            f"{what}: {printable(problem)}", code="E_TOKENIZER", file=file
        ) from problem
