"""What a started rank says of its place: importable, so that its process finds it."""

from __future__ import annotations

from loadkit.config import ParallelConfig
from loadkit.rank_worker import Rank

__all__ = ["place"]


def place(rank: Rank) -> ParallelConfig:
    """Where this rank stands."""
    return rank.parallel
