"""What is accepted of a web server's answers: its ETags, its ranges, plain bytes.

A server is not trusted: nothing it says is a path, and every number is held against what was asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from loadkit.file_checks import show
from loadkit.network.answers import Pin, changed, wrong

__all__ = ["check_same", "conditions", "content_range", "pin_of", "unencoded"]

_ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]{1,510}"')
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


def conditions(start: int, end: int, pin: Pin | None) -> dict[str, str]:
    """The headers that ask for a range, and for nothing of another content."""
    headers = {"Range": f"bytes={start}-{end - 1}"}
    if pin is not None and pin.strong:
        headers |= {"If-Match": pin.strong, "If-Range": pin.strong}
    elif pin is not None and pin.modified and pin.etag is None:
        headers |= {"If-Unmodified-Since": pin.modified, "If-Range": pin.modified}
    return headers


def pin_of(name: str, headers: Mapping[str, str], size: int) -> Pin:
    """What an answer says its file is.

    Raises:
        DownloadError: the ETag is none.
    """
    etag = headers.get("ETag")
    if etag is not None and not _ETAG.fullmatch(etag):
        raise wrong(name, f"an ETag that is none: {show(etag[:60])}, {len(etag)} characters")
    modified = headers.get("Last-Modified")
    if modified is not None and (len(modified) > 64 or not modified.isprintable()):
        modified = None
    return Pin(size, etag, modified)


def content_range(name: str, headers: Mapping[str, str], start: int, end: int) -> tuple[int, int]:
    """The end of the range that a 206 holds, and the whole file's size.

    Raises:
        DownloadError: it is not the range that was asked for.
    """
    found = _RANGE.fullmatch(headers.get("Content-Range", ""))
    if found is None:
        said = show(headers.get("Content-Range", "")[:60])
        raise wrong(name, f"Content-Range {said} for bytes {start} to {end}", start)
    first, last, size = map(int, found.groups())
    if first != start or last + 1 != min(end, size):
        problem = f"bytes {first} to {last + 1} of {size} for bytes {start} to {end}"
        raise wrong(name, problem, start)
    length = headers.get("Content-Length")
    if length is not None and length != str(last + 1 - first):
        raise wrong(name, f"Content-Length {show(length[:30])} for {last + 1 - first} bytes", start)
    return last + 1, size


def check_same(name: str, pin: Pin, found: Pin, offset: int) -> None:
    """Hold an answer against what is known of the file.

    Raises:
        DownloadError: it is another content.
    """
    if found.size != pin.size:
        raise changed(name, offset, f"it has {found.size} bytes and had {pin.size}")
    if pin.etag not in (None, found.etag):
        raise changed(name, offset, "its ETag is another one")
    if pin.etag is None and pin.modified not in (None, found.modified):
        raise changed(name, offset, "its time of modification is another one")


def unencoded(name: str, headers: Mapping[str, str]) -> None:
    """Refuse compressed bodies: their bytes are not the file's, and may be endless.

    Raises:
        DownloadError: the body is encoded although that was ruled out.
    """
    encoding = headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise wrong(name, f"Content-Encoding {show(encoding[:30])}, which was not asked for")
