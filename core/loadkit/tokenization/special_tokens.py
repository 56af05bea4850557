"""Special tokens: found in a text before anything else, and told apart by what they end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

__all__ = ["END_OF_TURN", "STOP_TEXTS", "SpecialTokens", "end_of_turn", "stop_ids"]

# Tokens that end a turn, the surest first. A vocabulary names none of them as such: formats have
# a key for the end of a text, few for the end of a turn.
END_OF_TURN: tuple[str, ...] = (
    *("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<turn|>", "[EOT]"),
    *("<EOT>", "<|endofturn|>", "<end_of_utterance>", "<|END_OF_TURN_TOKEN|>"),
)
STOP_TEXTS: tuple[str, ...] = (
    *END_OF_TURN,
    *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|eom_id|>"),
    *("<|return|>", "<|call|>", "[EOS]"),
)


class SpecialTokens:
    """The tokens a text is cut at, before any model sees it: leftmost first, longest first.

    Args:
        ids: text to id.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {text: token_id for text, token_id in ids.items() if text}
        lengths: dict[str, set[int]] = {}  # the first two characters -> lengths of such tokens
        for text in self._ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {head: sorted(of, reverse=True) for head, of in lengths.items()}
        self._firsts = frozenset(head[0] for head in lengths)

    def split(self, text: str) -> Iterator[str | int]:
        """The text in order: pieces without special tokens, and the ids of those between them."""
        begin = at = 0
        firsts = self._firsts
        end = len(text)
        while at < end:
            found = self._at(text, at) if text[at] in firsts else 0
            if not found:
                at += 1
                continue
            if begin < at:
                yield text[begin:at]
            yield self._ids[text[at : at + found]]
            begin = at = at + found
        if begin < end:
            yield text[begin:]

    def _at(self, text: str, at: int) -> int:
        """The length of the longest special token that begins there, or 0."""
        head = text[at : at + 2]
        for length in self._lengths.get(head, ()):
            if text[at : at + length] in self._ids:
                return length
        return 1 if text[at] in self._ids else 0


def end_of_turn(ids: Mapping[str, int]) -> int | None:
    """The id of the surest token that ends a turn, among the special tokens ``ids``."""
    return next((ids[text] for text in END_OF_TURN if text in ids), None)


def stop_ids(ids: Mapping[str, int], named: Iterable[int | None]) -> frozenset[int]:
    """The ids after which generation is over.

    Args:
        ids: the special tokens.
        named: ids that the checkpoint itself says end a text, a turn or a message.
    """
    found = {ids[text] for text in STOP_TEXTS if text in ids}
    if "<|return|>" in ids and "<|end|>" in ids:  # there, it ends a message and the turn goes on
        found.discard(ids["<|end|>"])
    return frozenset(found | {token_id for token_id in named if token_id is not None})
