"""Memory that ran out, as one kind of error whoever noticed it, and what a failed load took."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from loadkit.errors import ResourceError

__all__ = ["give_back", "memory_errors", "memory_given_back"]

_SAID = ("DefaultCPUAllocator", "not enough memory")  # by torch, which raises a RuntimeError


@contextmanager
def memory_errors() -> Iterator[None]:
    """Python's and torch's errors about the host's memory become a ``ResourceError``.

    Raises:
        ResourceError: E_MEMORY; what was raised is its cause.
    """
    try:
        yield
    except MemoryError as error:
        text = f"out of memory: {error}" if str(error) else "out of memory"
        raise ResourceError(text, hint=_HINT) from error
    except RuntimeError as error:
        if not any(word in str(error) for word in _SAID):
            raise
        first = str(error).partition("\n")[0]
        raise ResourceError(f"out of memory: {first}", hint=_HINT) from error


_HINT = "free memory, or load over more ranks: each then holds less"


def give_back() -> None:
    """Make freed blocks the system's again.

    The C library keeps those below 32 MiB for the next allocation; between blocks that stay they
    are of no use to a larger one.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(ctypes.c_size_t(0))


@contextmanager
def memory_given_back() -> Iterator[None]:
    """After an error inside, what was allocated is the system's again.

    After a load of many tensors, blocks that the C library would keep are most of it.
    """
    try:
        yield
    except BaseException:
        gc.collect()  # modules hold each other
        give_back()
        raise
