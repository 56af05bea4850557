"""A pickle machine that imports nothing: it walks a pickle for names and numbers.

It knows the opcodes of protocol 2 (and 3's bytes) that ``torch.save`` writes, and refuses every
other. Objects are plain values: nothing is called, nothing of a size that the file merely claims is
made. Time is linear in the pickle; so is memory: lists keep nothing, tuples hold at most one more
level of tuples, marks and unmemoised objects are limited. What is made of a name is a subclass's
business.

Source: the comments of CPython's ``pickletools``.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from loadkit.file_checks import show
from loadkit.torch_archive.errors import refused
from loadkit.torch_archive.values import LIST, OTHER, Global, Mapping, Nested, kind_of

__all__ = ["MAX_PICKLE_BYTES", "MoreNeededError", "StackMachine"]

MAX_PICKLE_BYTES = 100_000_000
MAX_DEEP = 64  # marks that are open at once
MAX_STACK = 20_000  # values on the stack when an object is made
MAX_IMPORT = 512  # bytes of a module's or a class's name

_INT32 = struct.Struct("<i").unpack_from
_UINT32 = struct.Struct("<I").unpack_from
_UINT16 = struct.Struct("<H").unpack_from
_HINT = "it is no checkpoint of torch.save, or it is damaged"


class MoreNeededError(Exception):
    """The pickle goes on behind the bytes that were given."""


class StackMachine(ABC):
    """One pickle.

    Attributes:
        protocols: the versions that are taken.
        wanted: whose pickle it should be, for errors.

    Args:
        data: its bytes, and whatever follows them.
        file: the file's name, for errors.
        base: the offset in the file of ``data``.
        complete: whether ``data`` goes on to where the pickle has to be over.
    """

    protocols: ClassVar[tuple[int, ...]] = (2, 3)
    wanted: ClassVar[str] = "a state dict's"

    def __init__(self, data: bytes, file: str, base: int = 0, *, complete: bool = True) -> None:
        self.data, self.file, self.base, self.complete = data, file, base, complete
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.kept: list[Any] | None = None  # what is appended to lists, where that counts
        self._globals: dict[bytes, Global] = {}

    def run(self, start: int = 0) -> Any:
        """The value of the pickle that begins at ``data[start]``; ``at`` is behind its STOP.

        Raises:
            FormatError: E_PICKLE, E_STRUCTURE, E_UNSUPPORTED or E_LAYOUT, at the opcode's offset.
            MoreNeededError: ``data`` ends first, and is not complete.
        """
        self.at, self.stack, self.marks, self.memo = start, [], [], {}
        data, table = self.data, [None] * 256
        for code, step in self._steps().items():
            table[code] = step  # type: ignore[call-overload]
        try:
            while True:
                code = data[self.at]
                self.at += 1
                if code == 0x2E:
                    break
                table[code]()  # type: ignore[misc]
        except IndexError:
            if self.at < len(data):
                self._fail("an opcode asks for a value that is not there", -1)
            self._ended(start)
        except struct.error:  # a number is cut off
            self._ended(start)
        except TypeError:
            if table[code] is not None:
                raise
            self._fail(f"opcode 0x{code:02x} is none of {self.wanted}", -1)
        if len(self.stack) != 1 or self.marks:
            self._fail(f"STOP with {len(self.stack)} values on the stack", -1)
        return self.stack[0]

    def run_list(self, start: int = 0) -> list[Any]:
        """The items of the pickle of a list of plain values that begins at ``data[start]``.

        Raises:
            FormatError, MoreNeededError: as ``run``; E_PICKLE also where it is no list.
        """
        self.kept = []
        if self.run(start) is not LIST:
            self._fail("there is no list here", -1)
        found, self.kept = self.kept, None
        return found

    def _ended(self, start: int) -> NoReturn:
        """Raise: the bytes are over."""
        if not self.complete:
            raise MoreNeededError
        self.at = len(self.data)
        self._fail(f"the pickle that begins at byte {self.base + start} has no STOP", 0)

    def _fail(self, problem: str, back: int, code: str = "E_PICKLE", hint: str = _HINT) -> NoReturn:
        raise refused(code, self.file, problem, hint, offset=self.base + self.at + back)

    def _steps(self) -> dict[int, Callable[[], None]]:
        push = self._pusher
        return {
            0x80: self._proto, 0x28: self._mark, 0x30: self._pop, 0x31: self._pop_mark,
            0x29: push(()), 0x4E: push(None), 0x88: push(True), 0x89: push(False),
            0x5D: push(LIST), 0x7D: self._dict,
            0x4B: self._int1, 0x4D: self._int2, 0x4A: self._int4, 0x8A: self._long,
            0x47: self._float, 0x58: self._text, 0x55: self._short_text, 0x54: self._text,
            0x42: self._bytes, 0x43: self._short_bytes,
            0x68: self._get1, 0x6A: self._get4, 0x71: self._put1, 0x72: self._put4,
            0x74: self._tuple, 0x85: self._tuple1, 0x86: self._tuple2, 0x87: self._tuple3,
            0x63: self._global, 0x52: self._reduce, 0x51: self._persistent, 0x81: self._object,
            0x73: self._set, 0x75: self._set_all, 0x61: self._append, 0x65: self._append_all,
            0x62: self._build,
        }  # fmt: skip

    # -- constants ---------------------------------------------------------------------------------

    def _pusher(self, value: Any) -> Callable[[], None]:
        def push() -> None:
            self.stack.append(value)

        return push

    def _proto(self) -> None:
        if self.data[self.at] not in self.protocols:
            self._fail(
                f"the pickle is of protocol {self.data[self.at]}; torch.save writes 2",
                -1,
                hint="save it again with torch.save's own pickle_protocol",
            )
        self.at += 1

    def _int1(self) -> None:
        self.stack.append(self.data[self.at])
        self.at += 1

    def _int2(self) -> None:
        self.stack.append(_UINT16(self.data, self.at)[0])
        self.at += 2

    def _int4(self) -> None:
        self.stack.append(_INT32(self.data, self.at)[0])
        self.at += 4

    def _long(self) -> None:
        length = self.data[self.at]
        raw = self._take(self.at + 1, length)
        self.stack.append(int.from_bytes(raw, "little", signed=True))

    def _float(self) -> None:
        self.stack.append(struct.unpack(">d", self._take(self.at, 8))[0])

    def _text(self) -> None:
        at = self.at + 4
        end = at + _UINT32(self.data, self.at)[0]
        raw = self.data[at:end]
        if end > len(self.data):
            self._short(end - at)
        self.at = end
        try:
            self.stack.append(raw.decode())
        except UnicodeDecodeError:
            self._fail("a string is not UTF-8", at - end)

    def _short_text(self) -> None:
        raw = self._take(self.at + 1, self.data[self.at])
        try:
            self.stack.append(raw.decode())
        except UnicodeDecodeError:
            self._fail("a string is not UTF-8", -len(raw))

    def _bytes(self) -> None:
        self._take(self.at + 4, _UINT32(self.data, self.at)[0])
        self.stack.append(OTHER)

    def _short_bytes(self) -> None:
        self._take(self.at + 1, self.data[self.at])
        self.stack.append(OTHER)

    def _take(self, at: int, length: int) -> bytes:
        if at + length > len(self.data):
            self._short(length)
        self.at = at + length
        return self.data[at : self.at]

    def _short(self, length: int) -> NoReturn:
        """Raise: something is said to be longer than what is left."""
        if not self.complete and length <= MAX_PICKLE_BYTES:
            raise MoreNeededError
        self._fail(f"{length} bytes are said to follow, and {len(self.data) - self.at} do", -1)

    # -- the memo and the stack --------------------------------------------------------------------

    def _get1(self) -> None:
        try:
            self.stack.append(self.memo[self.data[self.at]])
        except KeyError:
            self._fail(f"memo {self.data[self.at]} was never put", -1)
        self.at += 1

    def _get4(self) -> None:
        index = _UINT32(self.data, self.at)[0]
        try:
            self.stack.append(self.memo[index])
        except KeyError:
            self._fail(f"memo {index} was never put", -1)
        self.at += 4

    def _put1(self) -> None:
        self.memo[self.data[self.at]] = self.stack[-1]
        self.at += 1

    def _put4(self) -> None:
        self.memo[_UINT32(self.data, self.at)[0]] = self.stack[-1]
        self.at += 4

    def _pop(self) -> None:
        self.stack.pop()

    def _mark(self) -> None:
        if len(self.marks) >= MAX_DEEP:
            self._fail(f"more than {MAX_DEEP} objects are open inside one another", -1)
        self.marks.append(self.stack)
        self.stack = []

    def _since_mark(self) -> list[Any]:
        if not self.marks:
            self._fail("an opcode wants a mark, and there is none", -1)
        found, self.stack = self.stack, self.marks.pop()
        return found

    def _pop_mark(self) -> None:
        self._since_mark()

    # -- tuples, lists, dicts ----------------------------------------------------------------------

    def _made(self, items: tuple[Any, ...]) -> None:
        if len(self.stack) > MAX_STACK:
            self._fail(f"more than {MAX_STACK} values are on the stack", -1)
        for item in items:
            if isinstance(item, tuple):
                self._nest(items)
                return
        self.stack.append(items)

    def _nest(self, items: tuple[Any, ...]) -> None:
        if any(type(item) is Nested for item in items):
            self._fail("a tuple is in a tuple in a tuple: no tensor is made so", -1)
        self.stack.append(Nested(items))

    def _tuple(self) -> None:
        self._made(tuple(self._since_mark()))

    def _tuple1(self) -> None:
        self._made((self.stack.pop(),))

    def _tuple2(self) -> None:
        second = self.stack.pop()
        self._made((self.stack.pop(), second))

    def _tuple3(self) -> None:
        third, second = self.stack.pop(), self.stack.pop()
        self._made((self.stack.pop(), second, third))

    def _dict(self) -> None:
        if len(self.stack) > MAX_STACK:
            self._fail(f"more than {MAX_STACK} values are on the stack", -1)
        self.stack.append(Mapping())

    def _append(self) -> None:
        self._append_items([self.stack.pop()])

    def _append_all(self) -> None:
        self._append_items(self._since_mark())

    def _append_items(self, items: list[Any]) -> None:
        if self.stack[-1] is not LIST:
            self._fail(f"something is appended to {kind_of(self.stack[-1])}", -1)
        if self.kept is not None:
            self.kept += items

    def _set(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _set_all(self) -> None:
        self._set_items(self._since_mark())

    def _set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not Mapping or len(pairs) % 2:
            self._fail(f"items are set in {kind_of(target)}", -1)
        items = target.items
        if items is None:
            items = target.items = {}
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) is not str:
                target.odd = target.odd or (kind_of(key), self.base + self.at - 1)
                continue
            if key in items:
                self._fail(
                    f"key {show(key)} is in one dict twice", -1, "E_STRUCTURE",
                    "it is not known which counts: save it again",
                )  # fmt: skip
            items[key] = value

    def _build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is not Mapping or type(state) is not Mapping:
            self._fail(f"attributes are set on {kind_of(self.stack[-1])}", -1)

    # -- names and what is made of them ------------------------------------------------------------

    def _global(self) -> None:
        at, data = self.at, self.data
        middle = data.find(b"\n", at, at + MAX_IMPORT)
        end = data.find(b"\n", middle + 1, middle + 1 + MAX_IMPORT) if middle >= 0 else -1
        if end < 0:
            if not self.complete and len(data) - at < 2 * MAX_IMPORT:
                raise MoreNeededError
            self._fail("an import has no name, or one too long", -1)
        raw = data[at:end]
        self.at = end + 1
        found = self._globals.get(raw)
        if found is None:
            module, _, name = raw.decode("ascii", "backslashreplace").partition("\n")
            found = Global(module, name, self.base + at - 1)
            self._check_name(found)
            self._globals[raw] = found
        self.stack.append(found)

    @abstractmethod
    def _check_name(self, found: Global) -> None:
        """Let a name pass, or raise FormatError: E_PICKLE, E_STRUCTURE or E_UNSUPPORTED."""

    @abstractmethod
    def _reduce(self) -> None:
        """A name is called with a tuple of arguments."""

    def _object(self) -> None:
        """An object is made of a class."""
        self._fail("an object is made of a class", -1)

    def _persistent(self) -> None:
        """What a pickle refers to by an id."""
        self._fail("a persistent id is none of a storage", -1)
