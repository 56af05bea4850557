"""A look at a weight file's first bytes before any parser sees it, the same for every format.

What is not weights at all (a Git LFS pointer, an error page, nothing) and what is another format
under the wrong name is told apart here, so that no parser answers with a riddle and none is
swapped for a less safe one because of what a file holds.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from loadkit.errors import FormatError
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["HEAD_BYTES", "Content", "check_content", "show", "show_path", "sniff"]

Content = Literal["safetensors", "gguf", "torch"]

HEAD_BYTES = 1024
SHORTEST: dict[Content, int] = {"safetensors": 10, "gguf": 24, "torch": 4}  # bytes
# What a file is called by its first bytes, and how it is told to the user.
_NAMES = {
    "safetensors": "a safetensors file",
    "gguf": "a GGUF file",
    "zip": "a zip archive (a PyTorch .pt/.bin checkpoint is one)",
    "pickle": "a Python pickle (an old PyTorch .pt/.bin checkpoint is one)",
    "hdf5": "an HDF5 file (Keras and TensorFlow use them)",
    "gzip": "a gzip archive",
}
_ACCEPTED: dict[Content, frozenset[str]] = {
    "safetensors": frozenset({"safetensors"}),
    "gguf": frozenset({"gguf"}),
    "torch": frozenset({"zip", "pickle"}),
}
_MAGIC = (
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
    (b"GGUF", "gguf"),
    (b"\x89HDF\r\n\x1a\n", "hdf5"),
    (b"\x1f\x8b\x08", "gzip"),
)
_LFS = b"version https://git-lfs"
_HTML = re.compile(rb"\s*<(?:!doctype|html|head|body|\?xml|!--)", re.IGNORECASE)
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e]{16}")


def show(name: object) -> str:
    """A name from a file in quotes, on one line, that cannot steer a terminal or look alike."""
    return f"'{printable(name)}'"


def show_path(path: object) -> str:
    """A path that the user gave, the same way; letters of every language stay readable."""
    return f"'{printable(path, ascii_only=False)}'"


def sniff(head: bytes, size: int) -> str | None:
    """What a file's first bytes say it is: ``lfs html text zip pickle gguf hdf5 gzip safetensors``.

    Args:
        head: the first ``HEAD_BYTES`` bytes, or all of a shorter file.
        size: the whole file's size in bytes.

    Returns:
        The kind, or None where the bytes are nothing known.
    """
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= size - 8:
        return "safetensors"
    if head.startswith(_LFS):
        return "lfs"
    if _HTML.match(head):
        return "html"
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    if head[:1] == b"\x80" and head[1:2] in b"\x01\x02\x03\x04\x05":
        return "pickle"
    return "text" if _TEXT.match(head) else None


def check_content(file: File, expected: Content, *, short_code: str = "E_HEADER") -> None:
    """Refuse a file whose first bytes are not weights, or weights of another format.

    A file whose bytes say nothing passes: its own parser tells what is wrong.

    Args:
        file: an open file.
        expected: what its name (or the load format) says it is.
        short_code: the code for a file too short to be one.

    Raises:
        FormatError: E_FORMAT, or ``short_code`` for a file too short to hold anything.
        ReadFailure: it could not be read.
    """
    head = file.read(0, min(file.size, HEAD_BYTES))
    kind = sniff(head, file.size)
    if kind in _ACCEPTED[expected]:
        return
    name = show(file.name)
    if kind == "lfs":
        found = re.search(rb"^size (\d{1,20})$", head, re.MULTILINE)
        size = int(found[1]) if found else None
        raise _wrong(
            file,
            f"{name} is a Git LFS pointer, not the file itself"
            + ("" if size is None else f" (real size {size})"),
            "run `git lfs pull` in the checkpoint's folder, or download it again",
            {"kind": kind, "real_size": size},
        )
    if kind == "html":
        raise _wrong(
            file,
            f"{name} looks like an HTML page, not weights",
            "a download saved an error or login page; download the file again",
            {"kind": kind},
        )
    if file.size < SHORTEST[expected]:
        empty = "is empty" if file.size == 0 else f"is {file.size} bytes long"
        raise _wrong(
            file,
            f"{name} {empty}; the shortest {expected} file has {SHORTEST[expected]} bytes",
            "the download is incomplete; fetch the file again",
            {"kind": "short", "expected": SHORTEST[expected], "actual": file.size},
            short_code,
        )
    if kind == "text":
        start = show(head[:40].decode("ascii", "replace"))
        raise _wrong(
            file,
            f"{name} is text, not weights; it starts with {start}",
            "a download saved a message instead of the file; download it again",
            {"kind": kind},
        )
    if kind is not None:
        raise _wrong(
            file,
            f"{name} was taken for {expected}, but its content is {_NAMES[kind]}",
            "name the file after what it holds; loadkit never switches parsers by content",
            {"kind": kind, "expected": expected},
        )


def _wrong(
    file: File, message: str, hint: str, detail: dict[str, object], code: str = "E_FORMAT"
) -> FormatError:
    return FormatError(message, code=code, file=file.name, offset=0, detail=detail, hint=hint)
