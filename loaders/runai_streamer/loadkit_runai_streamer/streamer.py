"""The streamer as a reader needs it: ranges in, one answer for each range out.

Its answers carry codes, and nothing is raised for a wrong one. It reads its settings from the
environment when it starts: they are there for that call alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from loadkit.errors import NotInstalledError, ReadError
from loadkit.readers.library import library
from loadkit.readers.ranges import Range
from loadkit.text import printable

__all__ = ["PLUGINS", "Streamer", "knows"]

PLUGINS = {"s3": "s3", "gs": "gcs", "az": "azure"}  # scheme -> part of the plugin's name
_WAIT = 1000  # milliseconds in which a waiting thread sees an interrupt
_environment = threading.Lock()


def knows(address: str) -> bool:
    """Whether the streamer's plugin for an address is there.

    Raises:
        NotInstalledError: there is one, and it is not installed.
    """
    plugin = PLUGINS.get(address.partition("://")[0])
    if plugin is None:
        return False
    if find_spec(f"runai_model_streamer_{plugin}") is None:
        package = f"runai-model-streamer-{plugin}"
        raise NotInstalledError(
            f"the reader 'runai' needs the package {package} for {printable(address)}",
            detail={"package": package},
            hint=f"pip install {package}",
        )
    return True


class Streamer:
    """A streamer that starts with its first request.

    Args:
        concurrency: how many requests it has under way; None: its own default.

    Raises:
        NotInstalledError: the package is not installed.
        PluginError: it cannot be imported.
    """

    def __init__(self, concurrency: int | None) -> None:
        self._calls: Any = library(
            "runai_model_streamer.libstreamer.libstreamer",
            package="runai-model-streamer",
            extra="runai-streamer",
        )
        self._settings: dict[str, str] = {}
        if concurrency is not None:
            self._settings["RUNAI_STREAMER_CONCURRENCY"] = str(concurrency)
        self._handle: Any = None

    def answers(
        self, wanted: Sequence[Range], paths: Mapping[int, str]
    ) -> Iterator[tuple[Range, str | None]]:
        """Submit ranges; gives each with its failure, or None, as it is done.

        The memory must stay until all were given, or until ``end``.

        Args:
            wanted: the ranges.
            paths: what their files are called, by ``id(file)``.

        Raises:
            ReadError: the streamer refuses the request, or gives up.
        """
        files: dict[int, list[Range]] = {}
        for item in wanted:
            files.setdefault(id(item.file), []).append(item)
        groups = list(files.values())
        flat = [item for group in groups for item in group]
        try:
            with _settings(self._settings):
                if self._handle is None:
                    self._handle = self._calls.runai_start()
                self._calls.runai_request(
                    self._handle,
                    [paths[number] for number in files],
                    [len(group) for group in groups],
                    [item.offset for item in flat],
                    [item.nbytes for item in flat],
                    [item.address for item in flat],
                )
        except (ValueError, OSError) as error:
            raise _gave_up(flat[0], str(error)) from error
        for _ in range(len(flat)):
            code, file, index = self._next(flat[0])
            item = groups[file][index]
            yield item, None if code == self._calls.SUCCESS_ERROR_CODE else self._text(code)

    def end(self) -> None:
        """End it; it has written its last byte when this returns. May be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._calls.runai_end(handle)

    def _next(self, some: Range) -> tuple[int, int, int]:
        """Code, file and range of the next answer."""
        while True:
            try:
                answer = self._calls.runai_response(self._handle, _WAIT)
            except TimeoutError:
                continue
            if answer is None:
                raise _gave_up(some, "it has ended")
            code, _, file, index, _ = answer
            return code, file, index

    def _text(self, code: int) -> str:
        said = self._calls.runai_response_str(code)
        return said.decode(errors="replace") if isinstance(said, bytes) else str(said)


def _gave_up(item: Range, said: str) -> ReadError:
    return ReadError(
        f"the Run:ai model streamer does not take a request: {printable(said)}",
        file=item.file.name,
        tensor=item.extent.tensor,
        offset=item.offset,
        hint="look at the RUNAI_STREAMER_* variables and the limit of open files (ulimit -n), or "
        "name another reader: reader='pread'",
    )


@contextmanager
def _settings(values: Mapping[str, str]) -> Iterator[None]:
    """Variables of the environment that are set inside, and are as before afterwards."""
    if not values:
        yield
        return
    with _environment:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
