"""What the families' tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.four_ranks import FourRanks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[FourRanks]:
    """Four gloo processes that run cases."""
    from helpers.four_ranks import FourRanks

    ranks = FourRanks()
    yield ranks
    ranks.close()
