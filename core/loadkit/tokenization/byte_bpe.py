"""Byte-level BPE (``tokenizer.ggml.model`` = ``gpt2``), by the library ``tokenizers``."""

from __future__ import annotations

import logging
from typing import Any

from loadkit.text import nearest, printable
from loadkit.tokenization.libraries import need, refused
from loadkit.tokenization.pretokenizers import PRETOKENIZERS, PreTokenizer
from loadkit.tokenization.vocabulary import MAX_MERGES, Kind, Metadata, Vocabulary

__all__ = ["ByteBpe", "byte_alphabet", "pretokenizer"]

logger = logging.getLogger("loadkit")


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a vocabulary, to the byte.

    Bytes that print in Latin-1 stand for themselves; the others are counted up from U+0100.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printing))
    alphabet = {chr(byte): byte for byte in printing}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_alphabet()
# Bytes that occur in UTF-8.
_UTF8_BYTES = {*range(0x80), *range(0x80, 0xC0), *range(0xC2, 0xF5)}


def pretokenizer(metadata: Metadata) -> PreTokenizer:
    """How the file says a text is cut into words; ``default`` where it says nothing.

    Raises:
        FormatError: E_TOKENIZER, a kind that is not known.
    """
    key = "tokenizer.ggml.pre"
    name = metadata.text(key) or "default"
    if name not in PRETOKENIZERS:
        near = ", ".join(nearest(name, PRETOKENIZERS)) or ", ".join(sorted(PRETOKENIZERS))
        message = f"{key} is {printable(name, 80)!r}, which is not known (nearest: {near})"
        metadata.fail(message, key, name=name[:200])
    return PRETOKENIZERS[name]


class ByteBpe:
    """Pieces of text to ids.

    Args:
        vocabulary: the tokens.
        metadata: where the merges are.
        words: how a text is cut into words.

    Raises:
        FormatError: E_TOKENIZER, the merges do not fit the vocabulary.
        NotInstalledError: ``tokenizers`` is not installed.
    """

    prefixed = False  # a piece is not given a leading space

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata, words: PreTokenizer) -> None:
        library = need("tokenizers", "a byte-level BPE vocabulary")
        merges = _merges(vocabulary, metadata)
        self._file = metadata.file
        with refused("the vocabulary was refused", file=self._file):
            model = library.models.BPE(
                vocab=vocabulary.ids, merges=merges, ignore_merges=words.ignore_merges
            )
            self._tokenizer: Any = library.Tokenizer(model)
            steps = [
                library.pre_tokenizers.Split(library.Regex(pattern), "isolated")
                for pattern in words.patterns
            ]
            steps.append(library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
            self._tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(steps)
        without = {byte for char, byte in _ALPHABET.items() if char not in vocabulary.ids}
        self._without = bytes(sorted(without & _UTF8_BYTES))

    def ids(self, text: str, *, first: bool) -> list[int]:
        """The ids of a piece without special tokens.

        A byte for which the vocabulary has no token is left out, as the models were trained, and
        a warning says so.
        """
        if self._without:
            data = text.encode()
            left = len(data.translate(None, self._without))
            if left != len(data):
                logger.warning(
                    "%d bytes of the text have no token in this vocabulary and are left out",
                    len(data) - left,
                )
        with refused("the text could not be cut into words", file=self._file):
            found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def piece(self, token: str, kind: int) -> bytes:
        """The bytes a token stands for."""
        if kind in (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN):
            return token.encode()
        try:
            return bytes([_ALPHABET[char] for char in token])
        except KeyError:  # not spelled in the alphabet of bytes: padding, mostly
            return token.encode()


def _merges(vocabulary: Vocabulary, metadata: Metadata) -> list[tuple[str, str]]:
    """The merges, best first; each of the three tokens of each is in the vocabulary."""
    key = "tokenizer.ggml.merges"
    lines = metadata.strings(key, MAX_MERGES)
    if len(set(lines)) != len(lines):
        metadata.fail(f"{key} holds a merge twice", key)
    ids = vocabulary.ids
    merges: list[tuple[str, str]] = []
    for i, line in enumerate(lines):
        at = line.find(" ", 1)  # a merge may begin with a space that belongs to its first token
        left, right = line[:at], line[at + 1 :]
        if at < 0 or not right:
            metadata.fail(f"merge {i} ({printable(line, 80)!r}) names no two tokens", key, merge=i)
        if left not in ids or right not in ids or left + right not in ids:
            lost = next(text for text in (left, right, left + right) if text not in ids)
            message = f"merge {i} names {printable(lost, 80)!r}, which is no token"
            metadata.fail(message, key, merge=i)
        merges.append((left, right))
    return merges
