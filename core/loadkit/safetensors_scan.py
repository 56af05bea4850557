"""The JSON of a safetensors header, read by its own small grammar.

A header is one object of objects with three fields each, so nothing else is ever built: no
recursion, no dictionaries of what a hostile file would like to say, and the first byte that does
not belong ends the read. An entry as every saver writes it is one match of one expression; all
other spellings that JSON allows (escapes, other field order) go field by field.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple, NoReturn

from loadkit.errors import FormatError
from loadkit.file_checks import show

__all__ = ["ENTRY", "RawEntry", "Scanner"]

MAX_DIGITS = 20  # of an integer; 2**64 has 20
MAX_NESTING = 32  # of a value that should not be there, before it is called no JSON at all

_WS = r"[ \t\n\r]*+"
_INT = r"(?:0|[1-9][0-9]{0,14}+)"
ENTRY = re.compile(
    rf'"([^"\\\x00-\x1f\x7f-\x9f]{{1,1024}}+)"{_WS}:{_WS}\{{{_WS}'
    rf'"dtype"{_WS}:{_WS}"([A-Z0-9_]{{1,16}}+)"{_WS},{_WS}'
    rf'"shape"{_WS}:{_WS}\[{_WS}((?:{_INT}(?:{_WS},{_WS}{_INT}){{0,7}}+)?){_WS}\]{_WS},{_WS}'
    rf'"data_offsets"{_WS}:{_WS}\[{_WS}({_INT}){_WS},{_WS}({_INT}){_WS}\]{_WS}\}}{_WS}([,}}]){_WS}'
)
_SPACE = re.compile(_WS)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(\.[0-9]++)?([eE][+-]?[0-9]++)?")
_WORD = re.compile(r"true|false|null|NaN|-?Infinity")
_BRACKET = re.compile(r'[\[\]{}]|"(?:[^"\\]|\\.)*+"')
_SURROGATE = re.compile("[\ud800-\udfff]")
_scan_string = json.JSONDecoder().raw_decode  # of a string: the C scanner, no recursion


class RawEntry(NamedTuple):
    """One tensor as the header spells it; offsets in bytes of the data part."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Scanner:
    """Reads header text from a position on; positions are characters of ``text``."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file

    def fail(
        self,
        code: str,
        message: str,
        pos: int,
        *,
        tensor: str | None = None,
        hint: str | None = None,
    ) -> NoReturn:
        """Raise the typed error, with ``pos`` as a byte offset in the file."""
        offset = 8 + len(self.text[:pos].encode("utf-8"))
        raise FormatError(
            f"{message} (header of {show(self.file)}, byte {offset})",
            code=code,
            file=self.file,
            tensor=tensor,
            offset=offset,
            hint=hint,
        )

    def space(self, pos: int) -> int:
        """The position after white space."""
        match = _SPACE.match(self.text, pos)
        return match.end() if match else pos

    def expect(self, pos: int, chars: str) -> tuple[str, int]:
        """One of ``chars``, and the position after it and the white space that follows."""
        found = self.text[pos : pos + 1]
        if not found or found not in chars:
            self.broken(pos, " or ".join(repr(char) for char in chars))
        return found, self.space(pos + 1)

    def broken(self, pos: int, expected: str) -> NoReturn:
        """E_JSON: something else was expected here."""
        found = show(self.text[pos : pos + 20]) if pos < len(self.text) else "the header's end"
        self.fail("E_JSON", f"not a safetensors header: expected {expected}, found {found}", pos)

    def string(self, pos: int, what: str, code: str, tensor: str | None = None) -> tuple[str, int]:
        """A JSON string, and the position after it and white space."""
        if self.text[pos : pos + 1] != '"':
            self.wrong(pos, code, f"{what} must be a string", tensor)
        try:
            value, end = _scan_string(self.text, pos)
        except json.JSONDecodeError as error:
            self.fail("E_JSON", f"not a safetensors header: {error.msg}", error.pos)
        if not value.isascii() and _SURROGATE.search(value):
            self.fail("E_JSON", f"{what} holds half of a surrogate pair", pos)
        return value, self.space(end)

    def integer(self, pos: int, what: str, code: str, tensor: str) -> tuple[int, int]:
        """A whole number >= 0, and the position after it and white space."""
        match = _NUMBER.match(self.text, pos)
        if match is None:
            self.wrong(pos, code, f"{what} must be whole numbers", tensor)
        digits = match.group()
        if len(digits) > MAX_DIGITS + 1:
            self.fail("E_JSON", f"a number of {len(digits)} digits", pos, tensor=tensor)
        if match.group(1) or match.group(2) or digits.startswith("-"):
            self.fail(code, f"{what} must be whole numbers >= 0, not {digits}", pos, tensor=tensor)
        return int(digits), self.space(match.end())

    def integers(
        self, pos: int, what: str, code: str, tensor: str, most: int
    ) -> tuple[tuple[int, ...], int]:
        """A list of at most ``most`` whole numbers, and the position after it."""
        if self.text[pos : pos + 1] != "[":
            self.wrong(pos, code, f"{what} must be a list", tensor)
        values: list[int] = []
        pos = self.space(pos + 1)
        if self.text[pos : pos + 1] == "]":
            return (), self.space(pos + 1)
        while True:
            if len(values) == most:
                self.fail(code, f"{what} has more than {most} numbers", pos, tensor=tensor)
            value, pos = self.integer(pos, what, code, tensor)
            values.append(value)
            mark, pos = self.expect(pos, ",]")
            if mark == "]":
                return tuple(values), pos

    def entry(self, pos: int, name: str, max_dims: int) -> tuple[RawEntry, int]:
        """A tensor's object, its fields in any order, and the position after it."""
        if self.text[pos : pos + 1] != "{":
            self.wrong(pos, "E_FIELD", f"the entry of tensor {show(name)} must be an object", name)
        dtype: str | None = None
        shape: tuple[int, ...] | None = None
        span: tuple[int, ...] | None = None
        start, mark, pos = pos, ",", self.space(pos + 1)
        while mark == ",":
            at = pos
            key, pos = self.string(pos, "a field's name", "E_JSON", name)
            _, pos = self.expect(pos, ":")
            known = {"dtype": dtype, "shape": shape, "data_offsets": span}
            if known.get(key) is not None:
                self.fail("E_DUPLICATE", f"tensor {show(name)} has two {key}", at, tensor=name)
            what = f"{key} of tensor {show(name)}"
            if key == "dtype":
                dtype, pos = self.string(pos, what, "E_DTYPE", name)
            elif key == "shape":
                shape, pos = self.integers(pos, what, "E_SHAPE", name, max_dims)
            elif key == "data_offsets":
                span, pos = self.integers(pos, what, "E_LAYOUT", name, 2)
            else:
                self._check_nesting(pos)
                self.fail(
                    "E_FIELD",
                    f"tensor {show(name)} has an unknown field {show(key)}",
                    at,
                    tensor=name,
                )
            mark, pos = self.expect(pos, ",}")
        if dtype is None or shape is None or span is None:
            known = {"dtype": dtype, "shape": shape, "data_offsets": span}
            missing = ", ".join(key for key, value in known.items() if value is None)
            self.fail("E_FIELD", f"tensor {show(name)} has no {missing}", start, tensor=name)
        if len(span) != 2:
            self.fail(
                "E_LAYOUT",
                f"data_offsets of tensor {show(name)} must be two numbers, not {len(span)}",
                start,
                tensor=name,
            )
        return RawEntry(dtype, shape, span[0], span[1]), pos

    def metadata(self, pos: int, most: int) -> tuple[dict[str, str], int]:
        """The ``__metadata__`` object (strings to strings), and the position after it."""
        if self.text[pos : pos + 1] != "{":
            self.wrong(pos, "E_METADATA", "__metadata__ must be an object of strings", None)
        found: dict[str, str] = {}
        pos = self.space(pos + 1)
        if self.text[pos : pos + 1] == "}":
            return found, self.space(pos + 1)
        mark = ","
        while mark == ",":
            at = pos
            key, pos = self.string(pos, "a key of __metadata__", "E_JSON")
            if key in found:
                self.fail("E_DUPLICATE", f"__metadata__ has two {show(key)}", at)
            if len(found) == most:
                self.fail("E_METADATA", f"__metadata__ has more than {most} keys", at)
            _, pos = self.expect(pos, ":")
            found[key], pos = self.string(pos, f"__metadata__ {show(key)}", "E_METADATA")
            mark, pos = self.expect(pos, ",}")
        return found, pos

    def wrong(self, pos: int, code: str, message: str, tensor: str | None) -> NoReturn:
        """A value of the wrong kind: ``code`` if it is a JSON value at all, else E_JSON."""
        if self.text[pos : pos + 1] in ("[", "{"):
            self._check_nesting(pos)
        elif self.text[pos : pos + 1] != '"' and not (
            _NUMBER.match(self.text, pos) or _WORD.match(self.text, pos)
        ):
            self.broken(pos, "a value")
        self.fail(code, f"{message}, not {show(self.text[pos : pos + 20])}", pos, tensor=tensor)

    def _check_nesting(self, pos: int) -> None:
        """E_JSON for a list or object that nests too deep or never ends.

        Looks at its first 10,000 brackets and strings at most.
        """
        if self.text[pos : pos + 1] not in ("[", "{"):
            return
        depth = 0
        for count, match in enumerate(_BRACKET.finditer(self.text, pos)):
            mark = match.group()[0]
            depth += (mark in "[{") - (mark in "]}")
            if depth > MAX_NESTING:
                self.fail("E_JSON", f"values nested deeper than {MAX_NESTING}", match.start())
            if depth == 0 or count > 10_000:
                return
        self.broken(len(self.text), "']' or '}'")
