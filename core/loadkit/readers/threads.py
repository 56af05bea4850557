"""A few threads draw tasks from one list: the first error stops all, and all are joined."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadkit.load_config import LoadConfig

__all__ = ["default_threads", "run_tasks", "threads_for"]

Task = Callable[[], int]


def default_threads(asked: int, most: int, local_ranks: int = 0) -> int:
    """How many threads one rank uses.

    Args:
        asked: the answer, where it is not 0.
        most: else, most threads that pay.
        local_ranks: ranks of this machine that share its CPUs; 0: what the launcher (torchrun and
            its like) says in ``LOCAL_WORLD_SIZE``, else one.
    """
    if asked > 0:
        return asked
    if not local_ranks:
        said = os.environ.get("LOCAL_WORLD_SIZE", "")
        local_ranks = max(1, int(said)) if said.isascii() and said.isdigit() else 1
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    return max(1, min(most, usable // local_ranks))


def threads_for(load_config: LoadConfig, most: int) -> int:
    """``default_threads`` as a load's options have it."""
    return default_threads(load_config.num_threads, most, load_config.local_ranks)


def run_tasks(
    tasks: Iterator[Task], threads: int, landed: Callable[[int], None] | None = None
) -> int:
    """Run every task on the calling thread and up to ``threads - 1`` others; the sum of results.

    ``landed`` gets each task's result, from the thread that ran it. When a task or ``landed``
    raises, or the caller is interrupted, no further task starts; every thread has ended before
    this function returns or raises.

    Raises:
        BaseException: the first error any thread met; an interrupt of the caller comes first.
    """
    crew = _Crew(tasks, landed)
    helpers: list[_Helper] = []
    try:
        for _ in range(threads - 1):
            helper = _Helper(crew)
            helpers.append(helper)
            try:
                helper.start()
            except RuntimeError:  # the machine's thread limit: go on with those there are
                helpers.pop()
                break
        crew.work()
    except BaseException as interrupt:
        crew.fail(interrupt)
        raise
    finally:
        interrupt_in_join = _join(helpers, crew)
    if interrupt_in_join is not None:
        raise interrupt_in_join
    if crew.error is not None:
        try:
            raise crew.error
        finally:
            crew.error = None  # an error whose traceback holds its own holder is a cycle
    return crew.total


class _Crew:
    """What the threads of one call share."""

    def __init__(self, tasks: Iterator[Task], landed: Callable[[int], None] | None) -> None:
        self.tasks = tasks
        self.landed = landed
        self.lock = threading.Lock()
        self.stopped = False
        self.error: BaseException | None = None
        self.total = 0

    def fail(self, error: BaseException) -> None:
        """Stop. The first error is kept, but an interrupt (no ``Exception``) replaces it."""
        with self.lock:
            self.stopped = True
            if self.error is None or not isinstance(error, Exception):
                self.error = error

    def work(self) -> None:
        """Draw and run tasks until there are none, or until somebody failed."""
        try:
            while True:
                with self.lock:
                    task = None if self.stopped else next(self.tasks, None)
                if task is None:
                    return
                moved = task()
                with self.lock:
                    self.total += moved
                if self.landed is not None:
                    self.landed(moved)
        except BaseException as error:  # noqa: BLE001 - run_tasks raises it
            self.fail(error)


class _Helper(threading.Thread):
    def __init__(self, crew: _Crew) -> None:
        super().__init__(name="loadkit-reader", daemon=True)
        self.crew: _Crew | None = crew
        self.ended = threading.Event()

    def run(self) -> None:
        crew, self.crew = self.crew, None
        try:
            if crew is not None:
                crew.work()
        finally:
            crew = None  # the traceback of an error keeps this frame, as the caller of its first
            self.ended.set()


def _join(helpers: list[_Helper], crew: _Crew) -> BaseException | None:
    """Wait for every helper, whatever is thrown meanwhile; gives back what was thrown.

    ``Thread.join`` alone is not enough: interrupted once, it takes the thread for ended.
    """
    thrown: BaseException | None = None
    for helper in helpers:
        while not helper.ended.is_set():
            try:
                if not helper.ended.wait(1.0) and helper.ident is None:
                    break  # interrupted before it was started
            except BaseException as error:  # noqa: BLE001 - run_tasks raises it
                thrown = error
                crew.fail(error)
        if helper.ended.is_set():
            helper.join()
    return thrown
