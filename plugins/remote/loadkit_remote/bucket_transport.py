"""Ranges of objects in a bucket, by obstore: it signs, lists and finds credentials.

Its own retries are off: attempts, deadlines and resumed ranges are the same for all transports.
Its errors may hold signed addresses, so only their kind and their status are told.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from obstore import exceptions, get, head
from obstore import list as list_objects

from loadkit.errors import DownloadError, OptionError
from loadkit.file_checks import show
from loadkit.network.answers import Absent, Answer, Denied, Pin, Transient, Transport, changed
from loadkit.text import printable

if TYPE_CHECKING:
    from obstore import GetOptions
    from typing_extensions import Buffer

    from loadkit.network.patience import Deadline

__all__ = ["BucketTransport"]

PIECE = 64 << 10  # bytes that are waited for at a time
PAGE = 1000  # objects of one page of a listing
_STATUS = re.compile(r"status(?: code)?:? (\d{3})|HTTP status \S* ?\((\d{3})", re.IGNORECASE)
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_EXPIRED = ("ExpiredToken", "RequestTimeTooSkewed", "InvalidToken", "TokenRefreshRequired")


class BucketTransport(Transport):
    """The objects below a prefix.

    Args:
        make: makes the store; called again where its credentials are refused.
        prefix: keys begin with it: empty, or ending with "/".
        address: the bucket's address for people.

    Raises:
        OptionError: the environment's settings make no store.
    """

    def __init__(self, make: Callable[[], Any], prefix: str, address: str) -> None:
        self._make = make
        self.prefix = prefix
        self._address = address
        self._store = self._made()
        self._lock = threading.Lock()

    def shown(self, name: str) -> str:
        return f"{self._address}/{self.prefix}{name}"

    def address(self, name: str) -> str:
        return self.shown(name)

    def look(self, name: str) -> Pin:
        """What an object is; raises as ``get``."""
        with _told(name, 0):
            return _pin(head(self._store, self.prefix + name))

    def listing(self) -> Iterator[tuple[str, Pin]]:
        """Every object below the prefix with its name after it; raises as ``get``."""
        with _told("", 0):
            for page in list_objects(self._store, prefix=self.prefix, chunk_size=PAGE):
                for meta in page:
                    key = str(meta["path"])
                    if key.startswith(self.prefix):
                        yield key[len(self.prefix) :], _pin(meta)

    def get(self, name: str, start: int, end: int, pin: Pin | None, deadline: Deadline) -> Answer:
        if pin is None:
            pin = self.look(name)
            end = min(end, pin.size)
        if start >= end:
            return _ObjectAnswer(name, pin, start, start, iter(()), deadline)
        options: GetOptions = {"range": (start, end)}
        if pin.strong:
            options["if_match"] = pin.strong
        with _told(name, start):
            result = get(self._store, self.prefix + name, options=options)
            found = _pin(result.meta)
            if found != pin:
                raise changed(name, start, "its size, ETag or time of modification is another one")
            if tuple(result.range) != (start, end):
                raise DownloadError(
                    f"bytes {result.range} of {show(name)} came for bytes {start} to {end}",
                    file=name,
                    offset=start,
                )
            encoding = result.attributes.get("Content-Encoding", "identity")
            if encoding not in ("identity", "", "aws-chunked"):
                problem = f"{show(name)} is stored with Content-Encoding {show(encoding)}"
                hint = "store its plain bytes"
                raise DownloadError(problem, file=name, offset=start, hint=hint)
            pieces = result.stream(min_chunk_size=PIECE)
        return _ObjectAnswer(name, pin, start, end, iter(pieces), deadline)

    def refresh(self) -> bool:
        """A new store looks for its credentials again."""
        with self._lock:
            self._store = self._made()
        return True

    def _made(self) -> Any:
        try:
            return self._make()
        except (exceptions.BaseError, OSError, ValueError) as error:
            reason = str(error).partition("\n")[0].partition("?")[0]
            raise OptionError(
                f"{self._address} cannot be opened: {printable(reason)}",
                hint="see the environment variables of its cloud: account, key, endpoint",
            ) from None

    def close(self) -> None:
        """Connections end with the store."""


class _ObjectAnswer(Answer):
    def __init__(
        self,
        name: str,
        pin: Pin,
        start: int,
        end: int,
        pieces: Iterator[Buffer],
        deadline: Deadline,
    ) -> None:
        super().__init__(pin, start, end)
        self._name = name
        self._pieces = pieces
        self._deadline = deadline

    def pieces(self) -> Iterator[Buffer]:
        left = self.end - self.start
        while left:
            if not self._deadline.left():
                raise Transient("the bytes come too slowly")
            with _told(self._name, self.end - left):
                piece = next(self._pieces, None)
            if piece is None:
                raise Transient(f"the answer ended {left} bytes early")
            left -= memoryview(piece).nbytes
            if left < 0:
                problem = f"more bytes of {show(self._name)} came than were asked for"
                raise DownloadError(problem, file=self._name, offset=self.end)
            yield piece

    def close(self) -> None:
        self._pieces = iter(())


class _told:  # noqa: N801 - used like a function
    """Errors of the library inside, as ours, without the addresses they may hold."""

    def __init__(self, name: str, offset: int) -> None:
        self._name = name
        self._offset = offset

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (exceptions.BaseError, OSError)):
            raise _ours(error, self._name, self._offset) from None


def _ours(error: BaseException, name: str, offset: int) -> Exception:
    """The error that an error of the library stands for."""
    text = str(error)
    code = _CODE.search(text)
    said = _STATUS.search(text)
    status = int(next(filter(None, said.groups()))) if said else None
    what = f"the server answered {code[1] if code else status or type(error).__name__}"
    if isinstance(error, FileNotFoundError):
        return Absent(name)
    if isinstance(error, (exceptions.PreconditionError, exceptions.NotModifiedError)):
        return changed(name, offset, "the server has another content now")
    expired = code is not None and code[1] in _EXPIRED
    denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)
    if isinstance(error, denied):
        return Denied(what)
    if expired or status in (401, 403):
        return Denied(what)
    if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
        asked = f"the request for {show(name)}" if name else "the listing"
        return DownloadError(
            f"{asked} failed: {what}",
            file=name or None,
            offset=offset if name else None,
            detail={"status": status},
            hint="see that the name of the bucket is right, and the endpoint that is asked"
            if not name
            else None,
        )
    unreached = "connect" in text.lower() and status is None
    return Transient(
        what if status else "the connection failed", unreached=unreached, status=status
    )


def _pin(meta: Any) -> Pin:
    etag = meta.get("e_tag")
    if etag is not None:  # a listing may have it without its quotes
        weak = str(etag).startswith("W/")
        etag = ("W/" if weak else "") + '"' + str(etag).removeprefix("W/").strip('"') + '"'
    when = None if etag else str(meta.get("last_modified"))
    return Pin(int(meta["size"]), etag, when)
