"""Values made by a few threads ahead of who takes them, in order and within a budget of bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["read_ahead"]

Item = TypeVar("Item")
Value = TypeVar("Value")


def read_ahead(
    items: Iterator[Item],
    makers: list[Callable[[Item], Value]],
    nbytes: Callable[[Item], int],
    budget: int,
) -> Iterator[Value]:
    """What the makers make of the items, in the items' order.

    Each maker has a thread of its own. What was begun and not taken yet never adds up to more than
    ``budget`` bytes, but for a single item that is larger: it is made when nothing else is held.

    Args:
        items: drawn by one thread at a time, as there is room.
        makers: one function per thread.
        nbytes: the bytes an item takes once made.
        budget: bytes.

    Raises:
        BaseException: what the first item, in order, that failed met; all before it were given.
            No further item is begun after a failure. However this generator ends (exhausted,
            failed, closed early), every thread has ended by then and what was made is let go.
    """
    crew: _Crew[Item, Value] = _Crew(items, nbytes, budget)
    try:
        for maker in makers:
            try:
                crew.start(maker)
            except RuntimeError:  # the machine's thread limit: go on with those there are
                if not crew.threads:
                    raise
                break
        while (slot := crew.take()) is not None:
            if slot.error is not None:
                try:
                    raise slot.error
                finally:
                    slot.error = None  # an error whose traceback holds its holder is a cycle
            yield slot.made.pop()
    finally:
        crew.stop()


class _Slot(Generic[Value]):
    """The place of one item in the order."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.made: list[Value] = []
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return bool(self.made) or self.error is not None


class _Crew(Generic[Item, Value]):
    """What the threads and the taker share."""

    def __init__(self, items: Iterator[Item], nbytes: Callable[[Item], int], budget: int) -> None:
        self.items = items
        self.nbytes = nbytes
        self.budget = budget
        self.held = 0  # bytes begun and not taken
        self.order: deque[_Slot[Value]] = deque()
        self.next: list[Item] = []  # drawn, and waiting for room
        self.ended = False  # no further item will be begun
        self.threads: list[threading.Thread] = []
        self.running = 0
        self.moved = threading.Condition()

    def start(self, maker: Callable[[Item], Value]) -> None:
        """One more thread."""
        thread = threading.Thread(
            target=self._run, args=(maker,), name="loadkit-ahead", daemon=True
        )
        with self.moved:
            self.running += 1
        try:
            thread.start()
        except BaseException:
            with self.moved:
                self.running -= 1
            raise
        self.threads.append(thread)

    def _run(self, maker: Callable[[Item], Value]) -> None:
        try:
            self._work(maker)
        finally:
            with self.moved:
                self.running -= 1
                self.moved.notify_all()

    def _work(self, maker: Callable[[Item], Value]) -> None:
        while (drawn := self._draw()) is not None:
            slot, item = drawn
            made: list[Value] = []
            error: BaseException | None = None
            try:
                made.append(maker(item[0]))
            except BaseException as met:  # noqa: BLE001 - the taker raises it
                error = met
            del item, drawn
            with self.moved:
                slot.made, slot.error = made, error
                self.ended = self.ended or error is not None
                self.moved.notify_all()
            del slot, made, error

    def _draw(self) -> tuple[_Slot[Value], list[Item]] | None:
        """The next item as soon as there is room for it; None when there is nothing to do."""
        with self.moved:
            while not self.ended:
                if not self.next:
                    try:
                        self.next = [next(self.items)]
                    except StopIteration:
                        break
                    except BaseException as error:  # noqa: BLE001 - the taker raises it
                        failed: _Slot[Value] = _Slot(0)
                        failed.error = error
                        self.order.append(failed)
                        break
                size = self.nbytes(self.next[0])
                if not self.held or self.held + size <= self.budget:
                    self.held += size
                    slot: _Slot[Value] = _Slot(size)
                    self.order.append(slot)
                    item, self.next = self.next, []
                    return slot, item
                self.moved.wait()
            self.ended = True
            self.moved.notify_all()
            return None

    def take(self) -> _Slot[Value] | None:
        """The next slot in order once it is done; None when there are no more."""
        with self.moved:
            while True:
                if self.order and self.order[0].done:
                    slot = self.order.popleft()
                    self.held -= slot.nbytes
                    self.moved.notify_all()
                    return slot
                if self.ended and not self.order:
                    return None
                self.moved.wait()

    def stop(self) -> None:
        """No further item; wait for the threads; let go of everything."""
        thrown: BaseException | None = None
        while True:  # not Thread.join alone: interrupted once, it takes the thread for ended
            try:
                with self.moved:
                    self.ended = True
                    self.moved.notify_all()
                    while self.running:
                        self.moved.wait()
                break
            except BaseException as interrupt:  # noqa: BLE001 - raised when all have ended
                thrown = interrupt
        for thread in self.threads:
            thread.join()
        self.order.clear()
        self.next.clear()
        with suppress(AttributeError):
            self.items.close()  # type: ignore[attr-defined]  # a generator's
        if thrown is not None:
            raise thrown
