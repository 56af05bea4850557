"""A vocabulary out of a GGUF's metadata, checked before anything is built from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NoReturn

from loadkit.errors import FormatError
from loadkit.text import printable
from loadkit.tokenization.special_tokens import end_of_turn, stop_ids

__all__ = [
    "MAX_MERGES",
    "MAX_SPECIAL_LENGTH",
    "MAX_TOKENS",
    "MAX_TOKEN_LENGTH",
    "Kind",
    "Metadata",
    "Vocabulary",
]

MAX_TOKENS = 1_000_000
MAX_MERGES = 2_000_000
MAX_TOKEN_LENGTH = 4096  # characters; the longest seen in a published vocabulary is 512
MAX_SPECIAL_LENGTH = 512  # characters of a special token
MAX_TEXT_BYTES = 64 << 20  # of all tokens together

_NO_ID = 0xFFFFFFFF  # what some writers put where there is no such token
_IDS = ("bos", "eos", "eot", "eom", "unknown")


class Kind(IntEnum):
    """What ``tokenizer.ggml.token_type`` says of a token."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SPECIAL_KINDS = frozenset(map(int, (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)))


class Metadata:
    """The ``tokenizer.*`` values of a file, typed on the way out.

    Args:
        values: the file's metadata. Arrays may be lists, tuples or numpy arrays.
        file: its name, for errors.
    """

    def __init__(self, values: Mapping[str, Any], file: str | None = None) -> None:
        self._values = values
        self.file = file

    def fail(self, message: str, key: str | None = None, **detail: Any) -> NoReturn:
        """Raise FormatError with E_TOKENIZER."""
        where = f"{printable(self.file, ascii_only=False)}: " if self.file else ""
        raise FormatError(
            where + message, code="E_TOKENIZER", file=self.file, detail={"key": key, **detail}
        )

    def _scalar(self, key: str, kinds: type | tuple[type, ...], word: str) -> Any:
        value = self._values.get(key)
        if value is not None and not isinstance(value, str) and hasattr(value, "item"):
            value = value.item() if getattr(value, "ndim", 0) == 0 else value
        if value is not None and not isinstance(value, kinds):
            self.fail(f"{key} is {_kind(value)}, and must be {word}", key)
        return value

    def text(self, key: str) -> str | None:
        """A string, or None where the key is absent."""
        value: str | None = self._scalar(key, str, "a string")
        if value is not None:
            self._check_utf8(value, key)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value: bool | None = self._scalar(key, bool, "a boolean")
        return default if value is None else value

    def array(self, key: str, kind: type, most: int, length: int | None = None) -> list[Any] | None:
        """An array's elements, all of one kind, or None where the key is absent.

        Args:
            key: its key.
            kind: str, int or float (where integers will do too).
            most: the longest accepted; checked before anything is copied.
            length: the length it must have.
        """
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
            self.fail(f"{key} is {_kind(value)}, and must be an array", key)
        if len(value) > most:
            self.fail(f"{key} has {len(value)} elements, more than the {most} allowed", key)
        if length is not None and len(value) != length:
            message = f"{key} has {len(value)} elements, and the vocabulary has {length} tokens"
            self.fail(message, key, expected=length, actual=len(value))
        elements = value.tolist() if hasattr(value, "tolist") else list(value)
        allowed = {float, int} if kind is float else {kind}
        other = set(map(type, elements)) - allowed
        if other:
            names = ", ".join(sorted(found.__name__ for found in other))
            self.fail(f"{key} holds {names}, and must hold {kind.__name__} alone", key)
        return elements

    def token_id(self, name: str, size: int) -> int | None:
        """The id that ``tokenizer.ggml.<name>_token_id`` names, or None where there is none."""
        key = f"tokenizer.ggml.{name}_token_id"
        value: int | None = self._scalar(key, int, "an integer")
        if value is None or value == _NO_ID:
            return None
        if isinstance(value, bool) or not 0 <= value < size:
            self.fail(f"{key} is {printable(value, 40)}, and there are {size} tokens", key)
        return value

    def strings(self, key: str, most: int) -> list[str]:
        """An array of strings that must be there, each of them sound UTF-8 of bounded length."""
        found = self.array(key, str, most)
        if found is None:
            self.fail(f"{key} is not in the file", key)
        size = sum(map(len, found))
        if size > MAX_TEXT_BYTES:
            self.fail(f"{key} holds {size} characters, more than {MAX_TEXT_BYTES}", key)
        self._check_utf8("".join(found), key)
        return found

    def _check_utf8(self, text: str, key: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"{key} holds half a surrogate pair", key)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens, and what is special about them. Ids are positions in ``tokens``.

    Attributes:
        tokens: their texts, all different; an empty one is renamed ``[EMPTY_<id>]``.
        kinds: a ``Kind`` each, as plain integers.
        ids: text to id.
        special: the tokens found in a text before anything else: text to id.
        unk_id: stands for what has no token, or None.
    """

    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]
    special: dict[str, int]
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    unk_id: int | None
    stop_ids: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def read(cls, metadata: Metadata, *, defaults: Mapping[str, int]) -> Vocabulary:
        """The vocabulary of a file.

        Args:
            metadata: its metadata.
            defaults: ids of special tokens that the file need not name (they follow from the
                kind of tokenizer); ignored where such a token is a plain one, or not there.

        Raises:
            FormatError: E_TOKENIZER, it breaks a rule.
        """
        tokens = metadata.strings("tokenizer.ggml.tokens", MAX_TOKENS)
        if not tokens:
            metadata.fail("the vocabulary is empty", "tokenizer.ggml.tokens")
        if "" in tokens:
            tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
        ids = {text: i for i, text in enumerate(tokens)}
        if len(ids) != len(tokens):
            first, second, text = _first_twice(tokens)
            message = f"token {printable(text)!r} has two ids, {first} and {second}"
            metadata.fail(message, "tokenizer.ggml.tokens", ids=[first, second])
        longest = max(map(len, tokens))
        if longest > MAX_TOKEN_LENGTH:
            message = f"a token of {longest} characters, more than the {MAX_TOKEN_LENGTH} allowed"
            metadata.fail(message, "tokenizer.ggml.tokens")
        known = {name: metadata.token_id(name, len(tokens)) for name in _IDS}
        types = _types(metadata, len(tokens))
        for name, default in defaults.items():
            fits = default < len(tokens) and (types is None or types[default] in _SPECIAL_KINDS)
            if known[name] is None and fits:
                known[name] = default
        kinds = _kinds(len(tokens), known) if types is None else types
        special = _special(metadata, tokens, kinds)
        controls = {text: i for text, i in special.items() if kinds[i] != Kind.UNKNOWN}
        eot = known["eot"] if known["eot"] is not None else end_of_turn(controls)
        stops = stop_ids(controls, (known["eos"], eot, known["eom"]))
        return cls(
            tokens=tokens, kinds=kinds, ids=ids, special=special, bos_id=known["bos"],
            eos_id=known["eos"], eot_id=eot, unk_id=known["unknown"], stop_ids=stops,
        )  # fmt: skip

    def scores(self, metadata: Metadata) -> list[float]:
        """A finite score for each token.

        Raises:
            FormatError: E_TOKENIZER.
        """
        key = "tokenizer.ggml.scores"
        found = metadata.array(key, float, MAX_TOKENS, len(self.tokens))
        if found is None:
            metadata.fail(f"{key} is not in the file", key)
        if not all(map(math.isfinite, found)):
            metadata.fail(f"{key} holds NaN or an infinity", key)
        return found


def _types(metadata: Metadata, size: int) -> list[int] | None:
    """The kind the file gives each token; None in an old file, which gives none."""
    key = "tokenizer.ggml.token_type"
    found = metadata.array(key, int, MAX_TOKENS, size)
    strange = set(found or ()) - set(Kind)
    if strange:
        metadata.fail(f"{key} holds {printable(min(strange), 40)}, which is no token type", key)
    return found


def _kinds(size: int, known: Mapping[str, int | None]) -> list[int]:
    """The kinds where the file gives none: only what is named can be special."""
    kinds = [int(Kind.NORMAL)] * size
    for name, token_id in known.items():
        if token_id is not None:
            kinds[token_id] = int(Kind.UNKNOWN if name == "unknown" else Kind.CONTROL)
    return kinds


def _special(metadata: Metadata, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    special = {tokens[i]: i for i, kind in enumerate(kinds) if kind in _SPECIAL_KINDS}
    longest = max(map(len, special), default=0)
    if longest > MAX_SPECIAL_LENGTH:
        message = f"a special token of {longest} characters, more than {MAX_SPECIAL_LENGTH}"
        metadata.fail(message, "tokenizer.ggml.tokens")
    return special


def _first_twice(tokens: Sequence[str]) -> tuple[int, int, str]:
    """Both ids and the text of the first token that is there twice."""
    seen: dict[str, int] = {}
    for i, text in enumerate(tokens):
        if text in seen:
            return seen[text], i, text
        seen[text] = i
    raise ValueError("no token is there twice")


def _kind(value: object) -> str:
    """A value's type, in a word."""
    return "an array" if isinstance(value, list | tuple) else type(value).__name__
