"""Calls to a server: how long they may take, when they are made again, what their errors mean."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from loadkit.errors import DownloadError, LoadkitError, PathError
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["Deadline", "again", "status_of", "typed", "watched"]

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

RETRIED = frozenset({"UNAVAILABLE", "ABORTED", "RESOURCE_EXHAUSTED"})
MOST = 5  # attempts: each begins a file anew, so bytes that came are no progress
FIRST_WAIT = 0.25  # seconds before the second attempt; doubled for each later one
SLOWEST = 64 << 10  # bytes a second; what goes slower uses up its deadline


class Deadline:
    """How long one transfer may take, all its attempts together; bytes move it on.

    Args:
        load_config: ``network_timeout`` and ``network_deadline`` count.
        what: what is transferred, for errors.
    """

    def __init__(self, load_config: LoadConfig, what: str) -> None:
        self.what = what
        self.silence = load_config.network_timeout
        self.seconds = load_config.network_deadline
        self.attempts = 0
        self._until = time.monotonic() + self.seconds
        self._heard = time.monotonic()

    def arrived(self, nbytes: int) -> None:
        """Something came."""
        self._heard = time.monotonic()
        self._until += nbytes / SLOWEST

    def begin(self) -> None:
        """Another attempt: the silence is counted anew."""
        self._heard = time.monotonic()

    def left(self) -> float:
        """Seconds until the call is given up."""
        now = time.monotonic()
        return min(self._until - now, self._heard + self.silence - now)

    def pause(self) -> bool:
        """Wait before another attempt; False: there is none."""
        self.attempts += 1
        wait = FIRST_WAIT * 2 ** (self.attempts - 1)
        if self.attempts >= MOST or time.monotonic() + wait >= self._until:
            return False
        time.sleep(wait)
        return True

    def over(self) -> DownloadError:
        """The error of a call that came to its end."""
        return DownloadError(
            f"{self.what} was given up: nothing came for {self.silence:g} s, or it took more than "
            f"{self.seconds:g} s beside its bytes",
            code="E_TIMEOUT",
            detail={"network_timeout": self.silence, "network_deadline": self.seconds},
            hint="try again, or raise LoadConfig.network_timeout and network_deadline",
        )


def again(call: Callable[[], Value], deadline: Deadline, server: str, model: str = "") -> Value:
    """A call, made again where what went wrong may pass.

    Raises:
        LoadkitError: as ``typed``.
    """
    import grpc

    while True:
        deadline.begin()
        try:
            return call()
        except grpc.RpcError as error:
            found = typed(error, deadline, server, model)
            if status_of(error) not in RETRIED or not deadline.pause():
                raise found from error
            logger.info(
                "%s: %s; attempt %d", deadline.what, status_of(error), deadline.attempts + 1
            )


def watched(call: Any, deadline: Deadline) -> Iterator[Any]:
    """The messages of a stream; it is cancelled when nothing comes, or when nobody listens.

    Raises:
        DownloadError: E_TIMEOUT.
        grpc.RpcError: the call failed.
    """
    import grpc

    ended, late = threading.Event(), threading.Event()

    def watch() -> None:
        while (left := deadline.left()) > 0:
            if ended.wait(min(left, 1.0)):
                return
        late.set()
        call.cancel()

    watcher = threading.Thread(target=watch, daemon=True, name="loadkit-modelexpress")
    watcher.start()
    try:
        for message in call:
            deadline.arrived(0)
            yield message
        if late.is_set():
            raise deadline.over()
    except grpc.RpcError:
        if late.is_set():
            raise deadline.over() from None
        raise
    finally:
        ended.set()
        call.cancel()
        watcher.join()


def status_of(error: Any) -> str:
    """The name of a call's status; ``UNKNOWN`` where it has none."""
    code = error.code() if callable(getattr(error, "code", None)) else None
    return getattr(code, "name", "UNKNOWN")


def typed(error: Any, deadline: Deadline, server: str, model: str = "") -> LoadkitError:
    """What a status means.

    Args:
        error: of grpc.
        deadline: of the call.
        server: who was asked.
        model: for what.
    """
    status = status_of(error)
    details = error.details() if callable(getattr(error, "details", None)) else ""
    said = f"; it says: {printable(details, 200)}" if details else ""
    where = f"the ModelExpress server {printable(server, 100)}"
    detail = {"status": status, "server": server, "model": model}
    if status == "DEADLINE_EXCEEDED":
        return deadline.over()
    if status == "NOT_FOUND":
        return PathError(
            f"{where} has no {printable(model or deadline.what, 200)}{said}",
            detail=detail,
            hint="check the name and the revision",
        )
    if status == "UNAVAILABLE":
        return DownloadError(
            f"{deadline.what}: {where} is not reached, or is not ready{said}",
            detail={**detail, "unreached": True, "attempts": deadline.attempts + 1},
            hint="see whether it runs; its address is the option server, else MODEL_EXPRESS_URL, "
            "MX_SERVER_ADDRESS, localhost:8001",
        )
    if status in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return DownloadError(
            f"{deadline.what}: {where} refuses these credentials{said}",
            code="E_AUTH",
            detail=detail,
            hint="MX_AUTH_TOKEN_PATH names the file of the token",
        )
    if status == "UNIMPLEMENTED":
        return DownloadError(
            f"{deadline.what}: {where} does not know this call{said}",
            detail=detail,
            hint="it is older than the package modelexpress here, or no ModelExpress server",
        )
    return DownloadError(
        f"{deadline.what}: {where} answered {status}{said}",
        detail=detail,
        hint="the server's log says more",
    )
