"""While a plan is made nothing is collected, and what it made counts as old afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from loadkit.plan import collector_paused

MANY, FEW = 200_000, 1000


@pytest.fixture
def thawed() -> Iterator[None]:
    """Nothing is frozen, as in a process of one's own."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.freeze()


def young_after(count: int) -> int:
    """How many objects are young after ``count`` were made."""
    gc.collect(0)
    with collector_paused():
        assert not gc.isenabled()
        made = [[i] for i in range(count)]
    young = gc.get_count()[0]
    assert gc.isenabled()
    assert len(made) == count
    return young


@pytest.mark.usefixtures("thawed")
def test_many_objects_are_old_afterwards_and_none_is_frozen() -> None:
    assert young_after(MANY) < FEW
    assert gc.get_freeze_count() == 0


def test_what_somebody_froze_stays_frozen() -> None:
    before = gc.get_freeze_count()
    assert before > FEW
    young_after(MANY)
    assert gc.get_freeze_count() >= before - FEW  # some of it may have ended


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_few_objects_are_not_worth_counting_what_is_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def counted() -> int:
        raise AssertionError("it looks at every frozen object")

    monkeypatch.setattr(gc, "get_freeze_count", counted)
    young_after(FEW)
    with pytest.raises(AssertionError, match="every frozen object"):
        young_after(MANY)
    gc.enable()
