"""Values made ahead: in order, within the budget, and with nothing left when it ends."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from helpers.watching import loadkit_threads
from loadkit.read_ahead import read_ahead


class Value:
    """Something that can be watched."""

    def __init__(self, number: int) -> None:
        self.number = number


class Maker:
    """Makes values, and knows how many live and how many bytes were begun and not taken."""

    def __init__(self, sizes: list[int], fails: int = -1, pause: float = 0.0) -> None:
        self.sizes, self.fails, self.pause = sizes, fails, pause
        self.live: weakref.WeakSet[Value] = weakref.WeakSet()
        self.begun = self.taken = self.most = self.count = 0
        self.lock = threading.Lock()

    def __call__(self, number: int) -> Value:
        with self.lock:
            self.count += 1
            self.begun += self.sizes[number]
            self.most = max(self.most, self.begun - self.taken)
        if self.pause:
            time.sleep(self.pause * (1 + number % 3))
        if number == self.fails:
            raise OSError(f"no {number}")
        value = Value(number)
        self.live.add(value)
        return value

    def run(self, threads: int, budget: int) -> Iterator[Value]:
        items = iter(range(len(self.sizes)))
        return read_ahead(items, [self] * threads, self.sizes.__getitem__, budget)

    def take(self, value: Value) -> int:
        with self.lock:
            self.taken += self.sizes[value.number]
        return value.number


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_values_come_in_order_whoever_made_them(threads: int) -> None:
    maker = Maker([1] * 40, pause=0.0005)
    assert [maker.take(value) for value in maker.run(threads, 5)] == list(range(40))
    assert not loadkit_threads()


def test_what_was_not_taken_stays_within_the_budget() -> None:
    maker = Maker([30, 10, 20, 40, 10, 10, 30] * 6)
    seen = 0
    for value in maker.run(4, 60):
        time.sleep(0.002)  # a slow caller: the threads would run away
        seen += 1
        maker.take(value)
    assert seen == 42
    # A value counts as taken when it is handed out, which this caller notes only afterwards.
    assert maker.most <= 60 + 40


def test_a_value_larger_than_the_budget_is_made_alone() -> None:
    maker = Maker([5, 500, 5, 500])
    alone = []
    for value in maker.run(3, 10):
        time.sleep(0.002)
        alone.append(maker.begun - maker.taken)
        maker.take(value)
    assert alone[1] in (500, 505)  # the next small one may have been begun once it was handed out
    assert maker.taken == 1010


def test_all_before_the_failure_is_given_and_nothing_after_it() -> None:
    maker = Maker([1] * 50, fails=9, pause=0.0005)
    given: list[int] = []
    values = maker.run(4, 8)
    with pytest.raises(OSError, match="no 9") as caught:
        given.extend(map(maker.take, values))  # a loop variable would hold the last value
    assert given == list(range(9))
    assert maker.count < 9 + 4 + 8  # those under way when it happened, and no more
    assert not loadkit_threads()
    assert not maker.live  # also while somebody holds the error
    assert caught.value is not None


def test_of_two_failures_the_first_in_order_is_raised() -> None:
    def make(number: int) -> int:
        time.sleep(0.03 if number == 0 else 0)
        raise OSError(f"no {number}")

    with pytest.raises(OSError, match="no 0"):
        list(read_ahead(iter(range(9)), [make] * 3, lambda _: 1, 100))


def test_closing_early_ends_the_threads_and_lets_go_of_everything() -> None:
    maker = Maker([1] * 1000)
    values = maker.run(4, 16)
    assert next(values).number == 0
    values.close()  # type: ignore[attr-defined]
    assert not loadkit_threads()
    assert not maker.live
    assert maker.count <= 18


def test_an_iterator_that_fails_fails_after_what_it_gave() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise ValueError("the catalogue is broken")

    given: list[int] = []
    values = read_ahead(items(), [lambda n: n] * 3, lambda _: 1, 3)
    with pytest.raises(ValueError, match="catalogue"):
        given.extend(values)
    assert given == [0, 1, 2, 3, 4]
    assert not loadkit_threads()


def test_nothing_gives_nothing() -> None:
    assert list(read_ahead(iter(()), [lambda n: n] * 3, lambda _: 1, 3)) == []
    assert not loadkit_threads()
