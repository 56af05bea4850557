"""The progress bar: counts bytes landed, from any thread."""

from __future__ import annotations

import sys
import threading
from typing import Any, Self

__all__ = ["Progress"]


class Progress:
    """A tqdm bar of bytes on stderr; nothing at all where that is no terminal."""

    def __init__(self, total: int, *, shown: bool, what: str = "loading") -> None:
        self._total = total
        self._shown = shown
        self._what = what
        self._lock = threading.Lock()
        self._bar: Any = None

    def __enter__(self) -> Self:
        # Asked here and not by tqdm, whose first bar starts a thread that stays, shown or not.
        if self._shown and sys.stderr is not None and sys.stderr.isatty():
            from tqdm.auto import tqdm

            class Bar(tqdm):  # type: ignore[type-arg]
                monitor_interval = 0  # no thread of its own, which would outlive the bar

            self._bar = Bar(
                total=self._total,
                desc=self._what,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                leave=False,
            )
        return self

    def landed(self, nbytes: int) -> None:
        """Count bytes that arrived."""
        if self._bar is not None:
            with self._lock:
                self._bar.update(nbytes)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
