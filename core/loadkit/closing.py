"""What is closed when a ``with`` block over it ends."""

from __future__ import annotations

from typing import Self

__all__ = ["Closing"]


class Closing:
    """A context manager by its ``close``, however the block ends."""

    def close(self) -> None:
        """Let go of what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
