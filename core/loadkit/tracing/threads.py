"""Modes are thread-local: whoever starts a thread while recording passes the recording on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadkit.tracing.recorder import Recorder

__all__ = ["new_threads_join"]


@contextmanager
def new_threads_join(recorder: Recorder) -> Iterator[None]:
    """Inside, threads that a recorded thread starts, and tasks it submits, are recorded too."""
    original = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if recorder.covers_this_thread():
            run = thread.run

            def recorded_run() -> None:
                with recorder.in_this_thread():
                    run()

            thread.run = recorded_run  # type: ignore[method-assign]
        original(thread)

    plain_submit = ThreadPoolExecutor.submit

    def submit(pool: ThreadPoolExecutor, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if not recorder.covers_this_thread():
            return plain_submit(pool, fn, *args, **kwargs)

        def recorded_task() -> Any:
            with recorder.in_this_thread():
                return fn(*args, **kwargs)

        return plain_submit(pool, recorded_task)

    threading.Thread.start = start  # type: ignore[method-assign,assignment]
    ThreadPoolExecutor.submit = submit  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        threading.Thread.start = original  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = plain_submit  # type: ignore[method-assign]
