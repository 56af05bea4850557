"""SentencePiece unigram (``tokenizer.ggml.model`` = ``t5``), by the library ``tokenizers``."""

from __future__ import annotations

from typing import Any

from loadkit.tokenization.growth import MAX_GROWTH, charsmap_growth
from loadkit.tokenization.libraries import need, refused
from loadkit.tokenization.score_bpe import SPACE
from loadkit.tokenization.vocabulary import Kind, Metadata, Vocabulary

__all__ = ["Unigram"]

MAX_CHARSMAP = 16 << 20  # bytes


class Unigram:
    """Pieces of text to ids: the likeliest of all ways to cut a piece into tokens.

    Args:
        vocabulary: the tokens.
        metadata: where the scores and the rules of normalisation are.

    Raises:
        FormatError: E_TOKENIZER, no scores, no unknown token, or a broken table of characters.
        NotInstalledError: ``tokenizers`` is not installed.
    """

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata) -> None:
        library = need("tokenizers", "a unigram vocabulary")
        self._file = metadata.file
        self.prefixed = metadata.flag("tokenizer.ggml.add_space_prefix", True)
        if vocabulary.unk_id is None:
            metadata.fail("a unigram vocabulary needs an unknown token")
        scored = list(zip(vocabulary.tokens, vocabulary.scores(metadata), strict=True))
        spelled = sum(kind == Kind.BYTE for kind in vocabulary.kinds) == 256
        with refused("the vocabulary was refused", file=self._file):
            model = library.models.Unigram(scored, vocabulary.unk_id, spelled)
            self._tokenizer: Any = library.Tokenizer(model)
            self._tokenizer.normalizer = _normalizer(library, metadata, self.prefixed)

    def ids(self, text: str, *, first: bool) -> list[int]:
        """The ids of a piece without special tokens."""
        with refused("the text could not be cut into tokens", file=self._file):
            found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def piece(self, token: str, kind: int) -> bytes:
        """The bytes a token stands for."""
        if kind == Kind.BYTE:
            return bytes([int(token[3:5], 16)])
        return token.replace(SPACE, " ").encode()


def _normalizer(library: Any, metadata: Metadata, prefixed: bool) -> Any:
    """SentencePiece's steps in its order: characters, spaces, the one in front, their spelling."""
    steps = []
    table = _charsmap(metadata)
    if table:
        steps.append(library.normalizers.Precompiled(table))
    if metadata.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        steps.append(library.normalizers.Strip())
        steps.append(library.normalizers.Replace(library.Regex(" {2,}"), " "))
    if prefixed:
        steps.append(library.normalizers.Prepend(" "))
    steps.append(library.normalizers.Replace(" ", SPACE))
    return library.normalizers.Sequence(steps)


def _charsmap(metadata: Metadata) -> bytes:
    key = "tokenizer.ggml.precompiled_charsmap"
    found = metadata.array(key, int, MAX_CHARSMAP) or []
    if any(not -128 <= byte < 256 for byte in found):
        metadata.fail(f"{key} must hold bytes", key)
    table = bytes(byte & 0xFF for byte in found)
    growth = charsmap_growth(table)
    if growth > MAX_GROWTH:
        metadata.fail(f"{key} could make a text {growth} times longer", key)
    return table
