"""How long a transfer may take, and when it is tried again."""

from __future__ import annotations

import email.utils
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from loadkit.errors import DownloadError

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["RETRIED", "Patience", "retry_after"]

logger = logging.getLogger(__name__)

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses that may pass
SLOWEST = 64 << 10  # bytes a second; a transfer that goes slower uses up its deadline
FIRST_WAIT = 0.25  # seconds before the second attempt; doubled for each later one
LONGEST_WAIT = 20.0  # seconds between two attempts, where the server does not ask for more
LEAST_TIMEOUT = 0.05  # seconds


class Patience:
    """The deadline of one transfer, all its attempts together; bytes that arrive move it on.

    Args:
        load_config: ``network_timeout`` and ``network_deadline`` count.
        what: what is transferred, for errors; without secrets.
        clock: monotonic seconds.
        sleep: waits for seconds.
    """

    def __init__(
        self,
        load_config: LoadConfig,
        what: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.what = what
        self.attempts = 0
        self._timeout = load_config.network_timeout
        self._deadline = load_config.network_deadline
        self._clock, self._sleep = clock, sleep
        self._until = clock() + self._deadline

    def arrived(self, nbytes: int) -> None:
        """Bytes came: the deadline moves by the time that they may take."""
        self._until += nbytes / SLOWEST
        self.attempts = 0

    def timeout(self) -> float:
        """Seconds that the next step of the connection may take.

        Raises:
            DownloadError: E_TIMEOUT, the deadline has passed.
        """
        left = self._until - self._clock()
        if left <= 0:
            raise self.over("nothing came in time")
        return max(min(self._timeout, left), LEAST_TIMEOUT)

    def pause(self, why: str, asked: float | None = None, *, most: int | None = None) -> None:
        """Wait before another attempt.

        Args:
            why: what went wrong, for the log and the error.
            asked: the seconds that the server asks for.
            most: attempts without a byte, after which it is given up.

        Raises:
            DownloadError: E_TIMEOUT, the wait would pass the deadline; E_DOWNLOAD, ``most``.
        """
        self.attempts += 1
        if most is not None and self.attempts >= most:
            raise DownloadError(
                f"{self.what}: {why}, {self.attempts} times",
                detail={"attempts": self.attempts},
                hint="see whether the server can be reached, and try again",
            )
        wait = min(FIRST_WAIT * 2 ** min(self.attempts - 1, 20), LONGEST_WAIT)
        wait = max(wait, asked or 0.0)
        if self._clock() + wait >= self._until:
            told = f"{why}; the server asks for {asked:g} s" if asked else why
            raise self.over(told)
        logger.info("%s: %s; attempt %d in %.2f s", self.what, why, self.attempts + 1, wait)
        self._sleep(wait)

    def over(self, why: str) -> DownloadError:
        """The error of a deadline that has passed."""
        return DownloadError(
            f"{self.what} was given up after {self._deadline:g} s: {why}",
            code="E_TIMEOUT",
            detail={"network_deadline": self._deadline, "network_timeout": self._timeout},
            hint="try again, or raise LoadConfig.network_deadline",
        )


def retry_after(value: str | None, now: float | None = None) -> float | None:
    """The seconds that a ``Retry-After`` header asks for: a number, or until a date."""
    text = (value or "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        at = email.utils.parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return max(0.0, at - (time.time() if now is None else now))
