"""BPE by scores (``tokenizer.ggml.model`` = ``llama``): SentencePiece's own algorithm.

Of all neighbours whose joined text is a token, the two with the best score are joined, the
leftmost first where scores are equal, until none are left; what is no token then is spelled in
bytes. There are no merges in such a file. To make some (every split of every token) for a BPE
library takes seconds for 262,144 tokens, and cannot say that two splits of one token are equally
good, which changes the ids of repeated characters; a dictionary takes a tenth of a second, and the
ids are exact.
"""

from __future__ import annotations

import re
from heapq import heapify, heappop, heappush

from loadkit.text import printable
from loadkit.tokenization.vocabulary import Kind, Metadata, Vocabulary

__all__ = ["ScoreBpe"]

SPACE = "\u2581"  # how a vocabulary spells a space
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_JOINABLE = {int(Kind.NORMAL), int(Kind.USER_DEFINED), int(Kind.UNUSED), int(Kind.UNDEFINED)}


class ScoreBpe:
    """Pieces of text to ids.

    Args:
        vocabulary: the tokens.
        metadata: where the scores are, and whether a text is given a leading space.

    Raises:
        FormatError: E_TOKENIZER, no scores, or neither bytes nor an unknown token.
    """

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata) -> None:
        self.prefixed = metadata.flag("tokenizer.ggml.add_space_prefix", True)
        self._ids = vocabulary.ids
        self._unknown = vocabulary.unk_id
        kinds = vocabulary.kinds
        scores = vocabulary.scores(metadata)
        # token -> cost, the least first; what only stands for bytes or control is never joined
        self._costs = {
            text: -score
            for text, score, kind in zip(vocabulary.tokens, scores, kinds, strict=True)
            if kind in _JOINABLE
        }
        self._bytes: dict[int, int] = {}
        for token_id, kind in enumerate(kinds):
            if kind == Kind.BYTE:
                self._bytes[_byte(vocabulary.tokens[token_id], metadata)] = token_id
        if len(self._bytes) < 256 and self._unknown is None:
            metadata.fail(
                f"there are {len(self._bytes)} byte tokens of 256 and no unknown token, so some "
                "texts have no ids",
                "tokenizer.ggml.token_type",
            )

    def ids(self, text: str, *, first: bool) -> list[int]:
        """The ids of a piece without special tokens; ``first``: it may get the leading space."""
        if self.prefixed and first:
            text = " " + text
        text = text.replace(" ", SPACE)
        ends = self._join(text)
        found: list[int] = []
        begin = 0
        while begin < len(text):
            piece = text[begin : ends[begin]]
            begin = ends[begin]
            if piece in self._costs:
                found.append(self._ids[piece])
            else:
                found += self._spell(piece)
        return found

    def _join(self, text: str) -> list[int]:
        """``ends[i]``: where the symbol that begins at character i ends, 0 if none begins there."""
        costs = self._costs
        size = len(text)
        ends = list(range(1, size + 1))
        before = list(range(-1, size))  # where the symbol before the one at i begins
        heap = [
            (costs[text[i : i + 2]], i, i + 1, i + 2)
            for i in range(size - 1)
            if text[i : i + 2] in costs
        ]
        heapify(heap)
        while heap:
            _, left, middle, right = heappop(heap)
            if ends[left] != middle or ends[middle] != right:
                continue  # one of the two was joined meanwhile
            ends[left] = right
            ends[middle] = 0
            before[right] = left
            if left:
                start = before[left]
                joined = text[start:right]
                if joined in costs:
                    heappush(heap, (costs[joined], start, left, right))
            if right < size:
                end = ends[right]
                joined = text[left:end]
                if joined in costs:
                    heappush(heap, (costs[joined], left, right, end))
        return ends

    def _spell(self, char: str) -> list[int]:
        """A character that is no token, in bytes, or as the unknown token."""
        data = char.encode()
        if all(byte in self._bytes for byte in data):
            return [self._bytes[byte] for byte in data]
        return [] if self._unknown is None else [self._unknown]

    def piece(self, token: str, kind: int) -> bytes:
        """The bytes a token stands for."""
        if kind == Kind.BYTE:
            return bytes([int(token[3:5], 16)])
        if kind in (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN):
            return token.encode()
        return token.replace(SPACE, " ").encode()


def _byte(token: str, metadata: Metadata) -> int:
    """The byte that a byte token is."""
    found = _BYTE.fullmatch(token)
    if found is None:
        message = f"byte token {printable(token, 40)!r} is not spelled <0x00> to <0xFF>"
        metadata.fail(message, "tokenizer.ggml.tokens")
    return int(found[1], 16)
