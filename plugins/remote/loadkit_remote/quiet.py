"""The library that makes requests would log whole addresses, signatures too: it is not let."""

from __future__ import annotations

import logging
import threading

__all__ = ["unlogged"]

_silent = threading.local()


class unlogged:  # noqa: N801 - used like a function
    """Inside, this thread's requests are not logged by the library that makes them."""

    def __enter__(self) -> None:
        _silent.now = True

    def __exit__(self, *_: object) -> None:
        _silent.now = False


class _Filter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(_silent, "now", False)


logging.getLogger("urllib3.connectionpool").addFilter(_Filter())
