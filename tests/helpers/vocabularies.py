"""Small vocabularies in the shape of a GGUF's metadata."""

from __future__ import annotations

from typing import Any

from loadkit.tokenization.byte_bpe import byte_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_bpe(**changes: Any) -> dict[str, Any]:
    """A byte-level BPE vocabulary: all bytes, a few merges, two control tokens, one of a user's.

    ``changes`` go into the metadata; a key is given without ``tokenizer.ggml.``; None removes it.
    """
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "a a", "aa a", "Ċ Ċ", "Ġ Ġ"]
    tokens = [*sorted(byte_alphabet(), key=byte_alphabet().__getitem__)]
    tokens += [merge.replace(" ", "") for merge in merges]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    kinds = [NORMAL] * len(tokens) + [CONTROL] * 3 + [USER_DEFINED]
    tokens += special
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": kinds,
        "merges": merges,
        "bos_token_id": tokens.index("<|im_start|>"),
        "eos_token_id": tokens.index("<|endoftext|>"),
    }
    return _metadata(values, changes)


def score_bpe(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: bytes, scored pieces, one token of a user's."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    pieces = ["▁", "h", "e", "l", "o", "a", "b", "he", "ll", "hell", "hello", "▁hello", "aa", "aaa"]
    pieces += ["aba", "ab", "ba", "▁▁"]
    tokens += [*pieces, "<mark>", "\n\n"]
    kinds += [*[NORMAL] * len(pieces), USER_DEFINED, USER_DEFINED]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [-1000.0, -1000.0]
    values = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores}
    return _metadata(values, changes)


def unigram(**changes: Any) -> dict[str, Any]:
    """A unigram vocabulary; tokens are likelier the longer they are."""
    tokens = ["<pad>", "</s>", "<unk>", "▁", "h", "e", "l", "o", "he", "llo", "▁hello", "▁he"]
    kinds = [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * (len(tokens) - 3)]
    scores = [0.0, 0.0, 0.0, -4.0, -4.0, -4.0, -4.0, -4.0, -5.0, -5.0, -6.0, -6.0]
    values = {"model": "t5", "tokens": tokens, "token_type": kinds, "scores": scores}
    return _metadata(values, changes)


def _metadata(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    named = {f"tokenizer.ggml.{key}": value for key, value in {**values, **changes}.items()}
    if "tokenizer.ggml.chat_template" in named:
        named["tokenizer.chat_template"] = named.pop("tokenizer.ggml.chat_template")
    return {key: value for key, value in named.items() if value is not None}
