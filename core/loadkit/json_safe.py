"""JSON from untrusted bytes: bounded, linear, no recursion on the input, typed errors.

The standard library's C scanner does the work; what it lets pass (duplicate keys, lone
surrogates, NaN, deep nesting, endless integers) is looked for here, by whole-buffer operations
that stay in C: a 100 MB header takes about 1.7 times the bare parse.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any, NoReturn

from loadkit.errors import CheckpointError, FormatError
from loadkit.text import printable

__all__ = ["MAX_DEPTH", "MAX_INT_DIGITS", "parse_json"]

MAX_DEPTH = 64
MAX_INT_DIGITS = 4300

_CHUNK = 1 << 20  # bytes scanned at a time
_BOM = b"\xef\xbb\xbf"
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_TO_ROUND = bytes.maketrans(b"[]{}", b"()()")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")


def parse_json(
    data: bytes,
    *,
    file: str,
    max_bytes: int,
    max_depth: int = MAX_DEPTH,
    base: int = 0,
    allow_nan: bool = False,
    error: type[CheckpointError] | None = None,
) -> Any:
    """The value that ``data`` spells.

    Args:
        data: the bytes, UTF-8 without a byte order mark.
        file: the file they come from, for errors.
        max_bytes: most bytes accepted.
        max_depth: most levels of nesting accepted.
        base: where ``data`` begins in ``file``, in bytes; added to the offsets of errors.
        allow_nan: return NaN and the infinities as floats instead of refusing them (a caller
            that checks types says more about them; some config.json files hold ``Infinity``).
        error: raise this class, with its own code, in place of ``FormatError``; the code below
            is then in ``detail["rule"]``.

    Raises:
        FormatError: ``E_LIMIT`` too many bytes; ``E_UTF8`` not UTF-8, with the byte offset;
            ``E_DUPLICATE`` a key twice in one object; ``E_JSON`` everything else.
    """

    def fail(code: str, message: str, offset: int | None = None, **detail: Any) -> NoReturn:
        at = None if offset is None else base + offset
        said = f"{printable(file, ascii_only=False)}: {message}"
        if error is None:
            raise FormatError(said, code=code, detail=detail or None, file=file, offset=at)
        raise error(said, detail={"rule": code, **detail}, file=file, offset=at)

    if len(data) > max_bytes:
        fail("E_LIMIT", f"{len(data)} bytes of JSON, more than the {max_bytes} allowed")
    if data.startswith(_BOM):
        fail("E_JSON", "begins with a byte order mark, which JSON must not", 0)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as problem:
        fail("E_UTF8", f"not UTF-8 at byte {base + problem.start}", problem.start)
    if _too_deep(data, max_depth):
        fail("E_JSON", f"nested more than {max_depth} levels deep")
    lone = _lone_surrogate(data)
    if lone is not None:
        fail("E_JSON", f"half of a surrogate pair at byte {base + lone}", lone)

    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            key = _first_twice(pairs)
            fail("E_DUPLICATE", f"key {printable(key)!r} is there twice", key=key[:1024])
        return made

    def as_constant(word: str) -> float:
        if allow_nan:
            return float(word)
        fail("E_JSON", f"{word} is no JSON value")

    def as_float(digits: str) -> float:
        number = float(digits)
        if math.isinf(number) and not allow_nan:
            fail("E_JSON", f"the number {printable(digits, 40)} is out of range")
        return number

    def as_int(digits: str) -> int:
        if len(digits) > MAX_INT_DIGITS:
            raise ValueError("too many digits")
        return int(digits)

    limit = sys.get_int_max_str_digits()  # 0: the process lifted it, so count ourselves
    try:
        return json.loads(
            text,
            object_pairs_hook=as_dict,
            parse_constant=as_constant,
            parse_float=as_float,
            parse_int=None if 0 < limit <= MAX_INT_DIGITS else as_int,
        )
    except json.JSONDecodeError as problem:
        offset = len(text[: problem.pos].encode())
        near = printable(text[max(0, problem.pos - 20) : problem.pos + 20], 80)
        message = f"not JSON at byte {base + offset}: {problem.msg}, near {near!r}"
        fail("E_JSON", message, offset)
    except RecursionError:
        fail("E_JSON", "nested too deeply for the stack that is left")
    except ValueError:
        fail("E_JSON", f"an integer of more than {MAX_INT_DIGITS} digits")


def _too_deep(data: bytes, max_depth: int) -> bool:
    """Whether brackets outside strings nest more than ``max_depth`` levels.

    Each pass takes away the innermost pairs, so a value of height h is gone after h passes.
    """
    if data.count(b"[") + data.count(b"{") <= max_depth:
        return False
    left = _brackets(data)
    for _ in range(max_depth):
        before = len(left)
        left = left.replace(b"()", b"")
        if len(left) == before:
            break
    return b"()" in left or left.count(b"(") > max_depth


def _brackets(data: bytes) -> bytes:
    """The brackets outside strings, as round ones."""
    if b"\\" in data:  # escaped quotes do not end a string; lengths do not matter here
        data = data.replace(rb"\\", b"").replace(rb"\"", b"")
    found: list[bytes] = []
    inside = 0
    for start in range(0, len(data), _CHUNK):
        pieces = data[start : start + _CHUNK].split(b'"')
        found.append(b"".join(pieces[inside::2]).translate(_TO_ROUND, _NOT_BRACKETS))
        inside ^= (len(pieces) - 1) & 1
    return b"".join(found)


def _lone_surrogate(data: bytes) -> int | None:
    """Offset of the first escaped surrogate that is not half of a pair, or None."""
    if not _SURROGATE.search(data):
        return None
    # Same lengths, so that offsets stay: an escaped backslash is no start of an escape.
    rest = _PAIR.sub(b"____________", data.replace(rb"\\", b"__"))
    found = _SURROGATE.search(rest)
    return found.start() if found else None


def _first_twice(pairs: list[tuple[str, Any]]) -> str:
    """The first key that occurs a second time."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return ""  # unreachable: called only when a key is there twice
