"""Process groups of a layout: whoever talks between ranks makes its own, when all have joined.

Making a group takes every rank of the world at the same moment. Layers know which groups they need,
and whoever starts ranks knows the moment; neither has to know the other.
"""

from __future__ import annotations

from collections.abc import Callable

from loadkit.parallel_config import ParallelConfig

__all__ = ["make_groups", "makes_groups"]

Maker = Callable[[ParallelConfig], None]

_makers: list[Maker] = []


def makes_groups(maker: Maker) -> Maker:
    """Register (as a decorator) what makes a library's groups, once per layout."""
    if maker not in _makers:
        _makers.append(maker)
    return maker


def make_groups(parallel: ParallelConfig) -> None:
    """Make the groups of everything imported so far; every rank of the world has to call it."""
    for maker in _makers:
        maker(parallel)
