"""Vocabularies that are wrong or hostile: one typed error each, soon and without much memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.vocabularies import byte_bpe, score_bpe, unigram
from loadkit.errors import FormatError
from loadkit.tokenization import Tokenizer, from_gguf
from loadkit.tokenization.vocabulary import MAX_MERGES, MAX_TOKEN_LENGTH, MAX_TOKENS

Change = Callable[[dict[str, Any]], object]


class Huge(Sequence[Any]):
    """An array that says it is long, and must not be read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("an element was read")


def put(key: str, value: Any) -> Change:
    return lambda metadata: metadata.update({f"tokenizer.ggml.{key}": value})


def at(key: str, index: int, value: Any) -> Change:
    return lambda metadata: metadata[f"tokenizer.ggml.{key}"].__setitem__(index, value)


def drop(key: str) -> Change:
    return lambda metadata: metadata.pop(f"tokenizer.ggml.{key}")


def more(key: str, *values: Any) -> Change:
    return lambda metadata: metadata[f"tokenizer.ggml.{key}"].extend(values)


ANY = [
    pytest.param(drop("model"), "holds no tokenizer", id="no-model"),
    pytest.param(put("model", "rwkv"), "'rwkv'; loadkit has gpt2, llama, t5", id="unknown-model"),
    pytest.param(put("model", "\x1b[2J"), r"\\x1b\[2J", id="model-name-steers-terminals"),
    pytest.param(put("model", 5), "must be a string", id="model-is-a-number"),
    pytest.param(drop("tokens"), "tokens is not in the file", id="no-tokens"),
    pytest.param(put("tokens", []), "is empty", id="no-token"),
    pytest.param(put("tokens", "abc"), "must be an array", id="tokens-are-a-string"),
    pytest.param(put("tokens", 7), "must be an array", id="tokens-are-a-number"),
    pytest.param(put("tokens", Huge(10_000_000)), f"{MAX_TOKENS} allowed", id="10-million-tokens"),
    pytest.param(put("tokens", Huge(1 << 62)), f"{MAX_TOKENS} allowed", id="2^62-tokens"),
    pytest.param(at("tokens", 5, 5), "holds int", id="a-token-is-a-number"),
    pytest.param(at("tokens", 5, b"a"), "holds bytes", id="a-token-is-bytes"),
    pytest.param(at("tokens", 5, "\udc80"), "half a surrogate", id="a-token-has-no-utf8"),
    pytest.param(at("tokens", 5, "x" * (MAX_TOKEN_LENGTH + 1)), "characters", id="a-long-token"),
    pytest.param(at("tokens", -1, "e"), "'e' has two ids", id="a-token-twice"),
    pytest.param(put("tokens", ["x" * 4096] * 20_000), "more than", id="80-MB-of-tokens"),
    pytest.param(more("tokens", "one-more"), "elements, and the vocabulary has", id="lengths"),
    pytest.param(put("token_type", Huge(10_000_000)), "allowed", id="10-million-types"),
    pytest.param(at("token_type", 5, 7), "7, which is no token type", id="type-7"),
    pytest.param(at("token_type", 5, -(1 << 70)), "which is no token type", id="type-negative"),
    pytest.param(at("token_type", 5, 1.5), "holds float", id="type-is-a-float"),
    pytest.param(at("token_type", 5, True), "holds bool", id="type-is-a-boolean"),
    pytest.param(put("bos_token_id", 1 << 20), "and there are", id="bos-out-of-range"),
    pytest.param(put("eos_token_id", -1), "and there are", id="eos-negative"),
    pytest.param(put("eos_token_id", "2"), "must be an integer", id="eos-is-a-string"),
    pytest.param(put("eos_token_id", True), "and there are", id="eos-is-a-boolean"),
    pytest.param(put("add_bos_token", 1), "must be a boolean", id="add-bos-is-a-number"),
    pytest.param(put("unknown_token_id", [0]), "must be an integer", id="unknown-is-an-array"),
]
BYTES = [
    *ANY,
    pytest.param(drop("merges"), "merges is not in the file", id="no-merges"),
    pytest.param(put("merges", Huge(MAX_MERGES + 1)), "allowed", id="too-many-merges"),
    pytest.param(more("merges", "q q"), "'qq', which is no token", id="merge-makes-no-token"),
    pytest.param(more("merges", "zz h"), "'zz', which is no token", id="merge-of-no-token"),
    pytest.param(more("merges", "hello"), "names no two tokens", id="merge-of-one"),
    pytest.param(more("merges", ""), "names no two tokens", id="merge-of-none"),
    pytest.param(more("merges", "h "), "names no two tokens", id="merge-with-nothing"),
    pytest.param(more("merges", "h e"), "a merge twice", id="merge-twice"),
    pytest.param(more("merges", 3), "holds int", id="merge-is-a-number"),
    pytest.param(put("pre", "qwen"), r"nearest: qwen", id="unknown-pre"),
    pytest.param(put("pre", "\u202e"), r"\\u202e", id="pre-turns-text-around"),
]
SCORES = [
    *ANY,
    pytest.param(drop("scores"), "scores is not in the file", id="no-scores"),
    pytest.param(more("scores", 0.0), "elements, and the vocabulary has", id="scores-too-long"),
    pytest.param(at("scores", 5, float("nan")), "NaN", id="score-nan"),
    pytest.param(at("scores", 5, float("-inf")), "infinity", id="score-infinite"),
    pytest.param(at("scores", 5, "1"), "holds str", id="score-is-a-string"),
    pytest.param(at("tokens", 5, "<0xZZ>"), "is not spelled <0x00>", id="byte-token-misspelled"),
    pytest.param(
        put("tokens", ["a", "b"]), "elements, and the vocabulary has 2", id="scores-for-two-tokens"
    ),
]
UNIGRAM = [
    *ANY,
    pytest.param(drop("scores"), "scores is not in the file", id="no-scores"),
    pytest.param(at("scores", 5, float("nan")), "NaN", id="score-nan"),
    pytest.param(put("precompiled_charsmap", [1, 2, 999]), "must hold bytes", id="charsmap-999"),
    pytest.param(put("precompiled_charsmap", [255] * 40), "refused", id="charsmap-broken"),
    pytest.param(
        put("precompiled_charsmap", [0, 0, 0, 0, *[65] * 2000, 0]), "longer", id="charsmap-grows"
    ),
]


def refuse(metadata: dict[str, Any], message: str) -> FormatError:
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(FormatError, match=message) as caught:
            from_gguf(metadata, file="model.gguf")
        seconds, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    error = caught.value
    assert (error.code, error.file) == ("E_TOKENIZER", "model.gguf")
    assert str(error).isprintable()
    assert len(str(error)) < 1000
    assert seconds < 2
    assert peak < 64 << 20
    return error


@pytest.mark.parametrize(("change", "message"), BYTES)
def test_a_bad_byte_level_vocabulary_is_refused(change: Change, message: str) -> None:
    metadata = byte_bpe()
    change(metadata)
    refuse(metadata, message)


@pytest.mark.parametrize(("change", "message"), SCORES)
def test_a_bad_scored_vocabulary_is_refused(change: Change, message: str) -> None:
    metadata = score_bpe()
    change(metadata)
    refuse(metadata, message)


@pytest.mark.parametrize(("change", "message"), UNIGRAM)
def test_a_bad_unigram_vocabulary_is_refused(change: Change, message: str) -> None:
    metadata = unigram()
    change(metadata)
    refuse(metadata, message)


def test_a_bos_that_is_asked_for_must_be_named() -> None:
    refuse(byte_bpe(add_bos_token=True, bos_token_id=None), "does not name")


def test_a_scored_vocabulary_must_spell_every_text() -> None:
    metadata = score_bpe(add_bos_token=False)
    for key in ("tokens", "token_type", "scores"):
        del metadata[f"tokenizer.ggml.{key}"][10:20]  # ten bytes
    assert from_gguf(metadata).encode("\n", add_special=False)[-1] == 0
    metadata["tokenizer.ggml.token_type"][0] = 1  # a plain token is not taken for the unknown one
    refuse(metadata, "246 byte tokens of 256 and no unknown token")


def test_a_chat_template_that_is_no_text_is_refused() -> None:
    refuse({**byte_bpe(), "tokenizer.chat_template": ["a"]}, "must be a string")


def test_long_special_tokens_are_refused() -> None:
    metadata = byte_bpe()
    metadata["tokenizer.ggml.tokens"][-1] = "x" * 513
    refuse(metadata, "a special token of 513 characters")


def test_many_special_tokens_of_many_lengths_are_found_in_bounded_time() -> None:
    special = ["<" + "x" * i + "y" for i in range(500)]
    metadata = byte_bpe(merges=[])
    metadata["tokenizer.ggml.tokens"] += special
    metadata["tokenizer.ggml.token_type"] += [3] * len(special)
    tokenizer = from_gguf(metadata)
    text = "<" + "x" * 600
    begin = time.process_time()
    tokenizer.encode(text * 50)
    assert time.process_time() - begin < 2


def test_a_text_of_one_character_repeated_is_not_quadratic() -> None:
    tokenizer = from_gguf(score_bpe())
    begin = time.process_time()
    assert len(tokenizer.encode("a" * 100_000)) > 30_000
    assert time.process_time() - begin < 5


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=5,
)
MAKERS: list[Callable[[], dict[str, Any]]] = [byte_bpe, score_bpe, unigram]


@given(st.sampled_from(MAKERS), st.data())
def test_any_change_gives_a_tokenizer_or_a_typed_error(
    make: Callable[[], dict[str, Any]], data: st.DataObject
) -> None:
    metadata = make()
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(metadata)))
        value = metadata[key]
        if isinstance(value, list) and value and data.draw(st.booleans()):
            value = list(value)
            place = data.draw(st.integers(0, len(value) - 1))
            if data.draw(st.booleans()):
                del value[place]
            else:
                value[place] = data.draw(json_values)
            metadata[key] = value
        else:
            metadata[key] = data.draw(json_values)
    try:
        tokenizer: Tokenizer = from_gguf(metadata)
        tokenizer.decode(tokenizer.encode("hello <mark> é\x00"))
    except FormatError as error:
        assert error.code == "E_TOKENIZER"
