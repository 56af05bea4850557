"""The pickle of a ``.metadata``, walked for names, numbers and boxes: nothing is called.

It is written by ``pickle.dump`` of protocol 4 or 5, so a few opcodes come to those of
``torch.save``. Memory is linear in the pickle: every item of a list and of a dict was an opcode
of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadkit.file_checks import show
from loadkit.torch_archive.stack import MAX_IMPORT, MAX_STACK, StackMachine
from loadkit.torch_archive.values import Global, Mapping, Opaque, kind_of
from loadkit_dcp.names import CLASSES, ENUMS, PATHS, check_name

__all__ = ["STRIDED", "Instance", "Items", "MetadataMachine", "Table"]

STRIDED = Opaque("the strided layout")


class Instance:
    """An object of one of the metadata's classes. ``state``: a ``Table``, a tuple, or None."""

    __slots__ = ("at", "kind", "state")

    def __init__(self, kind: str, at: int) -> None:
        self.kind = kind
        self.at = at
        self.state: Any = None

    def get(self, name: str) -> Any:
        """An attribute; None where it has none of this name."""
        state = self.state
        return (state.items or {}).get(name) if type(state) is Table else None


class Items(list[Any]):
    """A list."""

    __slots__ = ()


class Table(Mapping):
    """A dict. ``pairs``: the entries whose keys are objects, in order."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Instance, Any]] = []


class MetadataMachine(StackMachine):
    """One ``.metadata``."""

    protocols = (2, 3, 4, 5)
    wanted = "a checkpoint's metadata"

    def _steps(self) -> dict[int, Callable[[], None]]:
        return {
            **super()._steps(),
            0x5D: self._list, 0x8C: self._text1, 0x93: self._stack_global, 0x94: self._memoize,
            0x95: self._frame,
        }  # fmt: skip

    def _check_name(self, found: Global) -> None:
        check_name(found, self.file)

    # -- protocol 4 ------------------------------------------------------------------------------

    def _frame(self) -> None:
        length = int.from_bytes(self._take(self.at, 8), "little")
        if length > len(self.data) - self.at:
            self._short(length)

    def _memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _text1(self) -> None:
        at = self.at + 1
        raw = self._take(at, self.data[self.at])
        try:
            self.stack.append(raw.decode())
        except UnicodeDecodeError:
            self._fail("a string is not UTF-8", -len(raw))

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            self._fail(f"a name is imported from {kind_of(module)}", -1)
        if max(len(name), len(module)) > MAX_IMPORT:
            self._fail("an import has a name that is too long", -1)
        self._named(module, name)

    def _named(self, module: str, name: str) -> None:
        key = f"{module}\n{name}".encode("utf-8", "surrogatepass")
        found = self._globals.get(key)
        if found is None:
            found = Global(module, name, self.base + self.at - 1)
            self._check_name(found)
            self._globals[key] = found
        self.stack.append(found)

    # -- lists and dicts -------------------------------------------------------------------------

    def _list(self) -> None:
        self._check_stack()
        self.stack.append(Items())

    def _dict(self) -> None:
        self._check_stack()
        self.stack.append(Table())

    def _check_stack(self) -> None:
        if len(self.stack) > MAX_STACK:
            self._fail(f"more than {MAX_STACK} values are on the stack", -1)

    def _append_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not Items:
            self._fail(f"something is appended to {_kind(target)}", -1)
        target.extend(items)

    def _set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not Table or len(pairs) % 2:
            self._fail(f"items are set in {_kind(target)}", -1)
        items = target.items
        if items is None:
            items = target.items = {}
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) is Instance:
                target.pairs.append((key, value))
            elif type(key) is not str:
                target.odd = target.odd or (_kind(key), self.base + self.at - 1)
            elif key in items:
                self._fail(
                    f"key {show(key)} is in one dict twice", -1, "E_STRUCTURE",
                    "it is not known which counts: save it again",
                )  # fmt: skip
            else:
                items[key] = value

    # -- objects ---------------------------------------------------------------------------------

    def _object(self) -> None:
        arguments, made = self.stack.pop(), self.stack.pop()
        if type(made) is not Global or (made.module, made.name) not in CLASSES or arguments != ():
            self._fail(f"an object is made of {_kind(made)}", -1)
        self._check_stack()
        self.stack.append(Instance(made.name, self.base + self.at - 1))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not Instance or target.state is not None:
            self._fail(f"attributes are set on {_kind(target)}", -1)
        if type(state) is not Table and type(state) is not tuple:
            self._fail(f"attributes are set from {_kind(state)}", -1)
        target.state = state

    def _reduce(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if type(called) is not Global or not isinstance(arguments, tuple):
            self._fail(f"{_kind(called)} is called", -1)
        pair, count = (called.module, called.name), len(arguments)
        made: Any
        if pair == ("torch", "Size") and count == 1 and type(arguments[0]) is tuple:
            made = arguments[0]
        elif pair in ENUMS and count == 1:
            made = Opaque("a memory format")
        elif pair == ("torch.serialization", "_get_layout") and count == 1:
            made = STRIDED if arguments[0] == "torch.strided" else Opaque("another layout")
        elif pair in PATHS:
            made = Opaque("a path")
        elif pair == ("collections", "OrderedDict") and not count:
            made = Table()
        else:
            self._fail(f"{show(called)} is called with {count} arguments", -1)
        self.stack.append(made)


def _kind(value: object) -> str:
    """What a value is, for people."""
    if isinstance(value, Instance):
        return f"an object of {value.kind}"
    return "a list" if isinstance(value, Items) else kind_of(value)
