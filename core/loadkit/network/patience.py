"""How long a transfer may take, and when a failed request is made again."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

from loadkit.errors import DownloadError
from loadkit.network.answers import Transient

__all__ = ["MAX_ATTEMPTS", "MAX_UNREACHED", "MIN_RATE", "Deadline", "Retries", "retry_after"]

logger = logging.getLogger(__name__)

MIN_RATE = 64 << 10  # bytes a second; a transfer that goes slower uses up its deadline
MAX_ATTEMPTS = 10  # in a row without a byte
MAX_UNREACHED = 3  # the same, where the server was not even reached
FIRST_WAIT = 0.25  # seconds before the second attempt; doubled for each later one
LONGEST_WAIT = 20.0  # seconds between two attempts, where the server does not ask for more
_LATER = frozenset({429, 503})  # the server is there and says "later": the deadline alone counts


class Deadline:
    """When one transfer has to be done, however often it is tried; bytes that arrive move it on.

    Args:
        seconds: from now on, beside the time that the bytes take.
        clock: seconds of a clock that nobody sets.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def arrived(self, nbytes: int) -> None:
        """Bytes came: they may take as long as they do at ``MIN_RATE``."""
        self._end += nbytes / MIN_RATE

    def left(self) -> float:
        """Seconds that are left; at least 0."""
        return max(0.0, self._end - self._clock())


class Retries:
    """The failures of one transfer: counts, waits, and says when it is enough.

    Args:
        what: what is fetched, for people, without secrets.
        file: the file's name, for errors.
        deadline: the transfer's.
        sleep: waits for seconds.
    """

    def __init__(
        self,
        what: str,
        file: str | None,
        deadline: Deadline,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.what = what
        self.file = file
        self.deadline = deadline
        self._sleep = sleep
        self._failures = 0

    def progressed(self, nbytes: int) -> None:
        """Bytes arrived: what failed before is forgiven."""
        self._failures = 0
        self.deadline.arrived(nbytes)

    def failed(self, error: Transient, offset: int | None = None) -> None:
        """Wait until the next attempt.

        Raises:
            DownloadError: E_TIMEOUT, the deadline has passed or would; E_OFFLINE, the server is
                not reached; E_DOWNLOAD, it fails again and again.
        """
        self._failures += 1
        most = MAX_UNREACHED if error.unreached else MAX_ATTEMPTS
        if self._failures >= most and error.status not in _LATER:
            code = "E_OFFLINE" if error.unreached else "E_DOWNLOAD"
            raise self._given_up(f"failed {self._failures} times: {error}", code, error, offset)
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self._failures - 1, 20))
        wait = max(wait * random.uniform(0.5, 1.0), error.retry_after or 0.0)
        if wait >= self.deadline.left():
            seconds = f"{self.deadline.seconds:.1f} s"
            asked = f"; it asks to wait {error.retry_after:.0f} s" if error.retry_after else ""
            raise self._given_up(
                f"was not done within {seconds}: {error}{asked}", "E_TIMEOUT", error, offset
            )
        logger.warning(
            "%s: attempt %d failed: %s; again in %.1f s", self.what, self._failures, error, wait
        )
        self._sleep(wait)

    def _given_up(
        self, problem: str, code: str, error: Transient, offset: int | None
    ) -> DownloadError:
        hints = {
            "E_OFFLINE": "see that the address is right, the network is there, and proxies are set",
            "E_TIMEOUT": "try again, or give it longer: network_deadline, network_timeout",
            "E_DOWNLOAD": "try again later; the server or the way to it is at fault",
        }
        return DownloadError(
            f"{self.what} {problem}",
            code=code,
            file=self.file,
            offset=offset,
            detail={"attempts": self._failures, "status": error.status},
            hint=hints[code],
        )


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that a server asks to wait: a number, or until a date.

    Args:
        headers: of its answer.
        now: seconds since 1970, where that is not the clock's.
    """
    said = headers.get("Retry-After", "").strip()
    if said.isascii() and said.isdigit() and len(said) < 10:
        return float(said)
    try:
        when = parsedate_to_datetime(said)
    except (ValueError, TypeError, OverflowError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, when.timestamp() - (time.time() if now is None else now))
