"""How long a transfer may take, and when a failed request is made again."""

from __future__ import annotations

import logging
import random
import time

from loadkit.errors import DownloadError
from loadkit_remote.answers import Transient

__all__ = ["MAX_ATTEMPTS", "MAX_UNREACHED", "MIN_RATE", "Deadline", "Retries"]

logger = logging.getLogger(__name__)

MIN_RATE = 64 << 10  # bytes a second: what a transfer's deadline grants its bytes
MAX_ATTEMPTS = 10  # in a row without a byte
MAX_UNREACHED = 3  # the same, where the server was not even reached
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 10.0  # seconds


class Deadline:
    """When one transfer has to be done, however often it is tried: ``seconds`` and its bytes' time.

    The clock is one that nobody sets.
    """

    def __init__(self, seconds: float, nbytes: int = 0) -> None:
        self.seconds = seconds + nbytes / MIN_RATE
        self._end = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds that are left; at least 0."""
        return max(0.0, self._end - time.monotonic())


class Retries:
    """The failures of one transfer: counts, waits, and says when it is enough.

    Args:
        what: what is fetched, for people, without secrets.
        file: the file's name, for errors.
        deadline: the transfer's.
    """

    def __init__(self, what: str, file: str | None, deadline: Deadline) -> None:
        self.what = what
        self.file = file
        self.deadline = deadline
        self._failures = 0

    def progressed(self) -> None:
        """Bytes arrived: what failed before is forgiven."""
        self._failures = 0

    def failed(self, error: Transient, offset: int | None = None) -> None:
        """Wait until the next attempt.

        Raises:
            DownloadError: E_TIMEOUT, the deadline has passed or would; E_OFFLINE, the server is
                not reached; E_DOWNLOAD, it fails again and again.
        """
        self._failures += 1
        left = self.deadline.left()
        if error.retry_after is not None:
            wait = error.retry_after
        else:
            wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (self._failures - 1))
            wait *= random.uniform(0.5, 1.0)
        if self._failures >= (MAX_UNREACHED if error.unreached else MAX_ATTEMPTS):
            code = "E_OFFLINE" if error.unreached else "E_DOWNLOAD"
            raise self._given_up(f"failed {self._failures} times: {error}", code, error, offset)
        if wait >= left:
            seconds = f"{self.deadline.seconds:.1f} s"
            asked = "" if error.retry_after is None else f"; it asks to wait {wait:.0f} s"
            raise self._given_up(
                f"was not done within {seconds}: {error}{asked}", "E_TIMEOUT", error, offset
            )
        logger.warning(
            "%s: attempt %d failed: %s; again in %.1f s", self.what, self._failures, error, wait
        )
        time.sleep(wait)

    def _given_up(
        self, problem: str, code: str, error: Transient, offset: int | None
    ) -> DownloadError:
        hints = {
            "E_OFFLINE": "see that the address is right and the network is there",
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
