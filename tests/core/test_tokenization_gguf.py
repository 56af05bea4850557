"""Tokenizers from small vocabularies in the shape of a GGUF's metadata."""

from __future__ import annotations

import logging
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.vocabularies import byte_bpe, score_bpe, unigram
from loadkit.errors import NotInstalledError, OptionError
from loadkit.tokenization import Tokenizer, from_gguf
from loadkit.tokenization.special_tokens import SpecialTokens

BYTE_BPE, SCORE_BPE = from_gguf(byte_bpe()), from_gguf(score_bpe())


def spelled(tokenizer: Tokenizer, text: str, *, add_special: bool = False) -> list[str | None]:
    return [tokenizer.token(i) for i in tokenizer.encode(text, add_special=add_special)]


def test_importing_it_imports_no_library() -> None:
    names = "{'tokenizers', 'jinja2', 'torch', 'numpy'}"
    code = f"import sys, loadkit.tokenization\nprint({names} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_merges_join_the_best_first_and_never_across_words() -> None:
    assert spelled(BYTE_BPE, "hello hello  helo") == ["hello", "Ġhello", "Ġ", "Ġ", "he", "l", "o"]
    assert spelled(BYTE_BPE, "aaaaa") == ["aa", "aaa"]


def test_scores_join_the_best_first_and_the_leftmost_of_equals() -> None:
    assert spelled(SCORE_BPE, "hello hello") == ["▁hello", "▁hello"]
    plain = from_gguf(score_bpe(add_space_prefix=False))
    assert spelled(plain, "aaaaa") == ["aa", "aaa"]
    assert spelled(plain, "ababa") == ["aba", "ba"]


def test_the_likeliest_cut_wins_in_a_unigram_vocabulary() -> None:
    tokenizer = from_gguf(unigram())
    assert spelled(tokenizer, "hello helo") == ["▁hello", "▁he", "l", "o"]
    assert tokenizer.encode("hello", add_special=True)[-1] == tokenizer.eos_id == 1
    assert tokenizer.decode(tokenizer.encode("hello helo")) == "hello helo"


def test_a_unigram_text_is_normalised_as_the_file_says() -> None:
    tokenizer = from_gguf(unigram(remove_extra_whitespaces=True, add_eos_token=False))
    assert spelled(tokenizer, "  hello   hello ") == ["▁hello", "▁hello"]
    tokenizer = from_gguf(unigram(add_space_prefix=False, add_eos_token=False))
    assert spelled(tokenizer, "hello") == ["he", "llo"]


def test_what_is_no_token_is_spelled_in_bytes() -> None:
    plain = from_gguf(score_bpe(add_space_prefix=False))
    assert spelled(plain, "é🙂") == ["<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]


def test_what_is_no_token_is_the_unknown_one_where_there_are_no_bytes() -> None:
    metadata = score_bpe(add_space_prefix=False)
    drop = slice(3, 259)
    for key in ("tokens", "token_type", "scores"):
        del metadata[f"tokenizer.ggml.{key}"][drop]
    tokenizer = from_gguf(metadata)
    assert spelled(tokenizer, "aéa") == ["a", "<unk>", "a"]
    assert tokenizer.decode(tokenizer.encode("aéa", add_special=False)) == "aa"


def test_a_leading_space_is_added_at_the_start_and_after_a_special_token() -> None:
    assert spelled(SCORE_BPE, "hello<mark>hello") == ["▁hello", "<mark>", "▁hello"]
    plain = from_gguf(score_bpe(add_space_prefix=False))
    assert spelled(plain, "hello<mark>hello") == ["hello", "<mark>", "hello"]


def test_bos_and_eos_are_added_where_the_file_or_its_kind_says_so() -> None:
    assert spelled(SCORE_BPE, "a", add_special=True) == ["<s>", "▁", "a"]
    both = from_gguf(score_bpe(add_eos_token=True))
    assert spelled(both, "a", add_special=True) == ["<s>", "▁", "a", "</s>"]
    neither = from_gguf(score_bpe(add_bos_token=False))
    assert spelled(neither, "a", add_special=True) == ["▁", "a"]
    assert spelled(BYTE_BPE, "a", add_special=True) == ["a"]
    llama3 = from_gguf(byte_bpe(pre="llama-bpe"))
    assert spelled(llama3, "a", add_special=True) == ["<|im_start|>", "a"]
    assert BYTE_BPE.encode("") == []
    assert SCORE_BPE.encode("") == [1]


def test_special_tokens_in_a_text_are_found_first() -> None:
    text = "hello<think><|im_end|>hell<|im_en"
    assert spelled(BYTE_BPE, text)[:3] == ["hello", "<think>", "<|im_end|>"]
    assert BYTE_BPE.decode(BYTE_BPE.encode(text), skip_special=False) == text
    assert BYTE_BPE.decode(BYTE_BPE.encode(text)) == "hello<think>hell<|im_en"


def test_ids_that_matter_have_names() -> None:
    ids = {BYTE_BPE.token(i): i for i in range(BYTE_BPE.vocab_size)}
    assert BYTE_BPE.bos_id == ids["<|im_start|>"]
    assert BYTE_BPE.eos_id == ids["<|endoftext|>"]
    assert BYTE_BPE.eot_id == ids["<|im_end|>"]
    assert BYTE_BPE.stop_ids == {ids["<|endoftext|>"], ids["<|im_end|>"]}
    assert (SCORE_BPE.bos_id, SCORE_BPE.eos_id, SCORE_BPE.eot_id) == (1, 2, None)
    assert SCORE_BPE.stop_ids == {2}
    named = from_gguf(byte_bpe(eot_token_id=5, eom_token_id=6))
    assert named.eot_id == 5
    assert {5, 6} <= named.stop_ids


def test_a_plain_token_that_looks_like_a_stop_token_stops_nothing() -> None:
    metadata = score_bpe()
    metadata["tokenizer.ggml.tokens"][-1] = "<|im_end|>"
    metadata["tokenizer.ggml.token_type"][-1] = 1
    assert from_gguf(metadata).stop_ids == {2}


def test_an_old_file_without_token_types_has_the_tokens_it_names() -> None:
    tokenizer = from_gguf(byte_bpe(token_type=None))
    assert spelled(tokenizer, "<|im_start|>hello") == ["<|im_start|>", "hello"]
    assert len(spelled(tokenizer, "<think>")) > 1


def test_a_token_id_of_all_ones_is_none() -> None:
    assert from_gguf(byte_bpe(bos_token_id=0xFFFFFFFF)).bos_id is None


def test_empty_tokens_may_pad_a_vocabulary() -> None:
    metadata = byte_bpe()
    metadata["tokenizer.ggml.tokens"] += ["", ""]
    metadata["tokenizer.ggml.token_type"] += [5, 5]
    tokenizer = from_gguf(metadata)
    assert tokenizer.vocab_size == BYTE_BPE.vocab_size + 2
    assert tokenizer.encode("hello") == BYTE_BPE.encode("hello")


@pytest.mark.parametrize("make", [byte_bpe, score_bpe, unigram])
def test_arrays_may_be_tuples_and_numpy_arrays(make: Any) -> None:
    metadata = make()
    expected = from_gguf(metadata).encode("hello hello")
    metadata["tokenizer.ggml.tokens"] = tuple(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], "int32")
    if "tokenizer.ggml.scores" in metadata:
        metadata["tokenizer.ggml.scores"] = np.array(metadata["tokenizer.ggml.scores"], "float32")
    metadata["tokenizer.ggml.add_space_prefix"] = np.bool_(True)
    metadata["tokenizer.ggml.eos_token_id"] = np.uint32(1)
    assert from_gguf(metadata).encode("hello hello")[:2] == expected[:2]


def test_ids_without_a_token_show_as_a_replacement_character() -> None:
    ids = BYTE_BPE.encode("hello")
    assert BYTE_BPE.decode([*ids, BYTE_BPE.vocab_size, *ids, -1]) == "hello\ufffdhello\ufffd"
    assert BYTE_BPE.token(BYTE_BPE.vocab_size) is None


def test_half_a_character_decodes_to_a_replacement_character() -> None:
    ids = BYTE_BPE.encode("é")
    assert len(ids) == 2
    assert BYTE_BPE.decode(ids[:1]) == "\ufffd"


def test_bytes_without_a_token_are_left_out_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metadata = byte_bpe(merges=[])
    at = metadata["tokenizer.ggml.tokens"].index("Ă")  # the byte 0x02
    metadata["tokenizer.ggml.tokens"][at] = "[PAD]"
    tokenizer = from_gguf(metadata)
    with caplog.at_level(logging.WARNING, logger="loadkit"):
        assert tokenizer.decode(tokenizer.encode("a\x02b")) == "ab"
    assert "1 bytes of the text have no token" in caplog.text


@pytest.mark.parametrize("tokenizer", [BYTE_BPE, SCORE_BPE], ids=["byte", "score"])
def test_a_text_without_utf8_is_the_callers_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(OptionError, match="half a surrogate pair at character 1"):
        tokenizer.encode("a\ud800")


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadkit.tokenization.libraries.find_spec", lambda name: None)
    with pytest.raises(NotInstalledError, match=r"tokenizers.*pip install \"loadkit\[generate\]\""):
        from_gguf(byte_bpe())
    assert from_gguf(score_bpe()).encode("hello") == SCORE_BPE.encode("hello")


# -- properties ------------------------------------------------------------------------------------

texts = st.text(max_size=40) | st.text(
    st.sampled_from("hello ab\n▁<>|<|im_end|>é🙂\t"), max_size=40
)


@given(texts)
def test_bytes_come_back_as_they_went_in(text: str) -> None:
    assert BYTE_BPE.decode(BYTE_BPE.encode(text), skip_special=False) == text


@given(texts)
def test_scored_pieces_come_back_but_for_the_space_sign(text: str) -> None:
    plain = from_gguf(score_bpe(add_space_prefix=False, add_bos_token=False))
    ids = plain.encode(text)
    special = {text for text in ("<unk>", "<s>", "</s>", "<mark>", "\n\n") if text in text}
    assert plain.decode(ids, skip_special=False) == text.replace("▁", " ") or special


def joined_naively(text: str, scores: dict[str, float]) -> list[str]:
    """All neighbours looked at again after each join."""
    pieces = list(text)
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(pairwise(pieces))]
        known = [(score, at) for score, at in pairs if score is not None]
        if not known:
            return pieces
        at = -max(known)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@given(st.text(st.sampled_from("aabbhelo "), max_size=30))
def test_scored_pieces_are_those_of_the_plain_algorithm(text: str) -> None:
    metadata = score_bpe(add_space_prefix=False)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    # Scores that many tokens share, so that ties happen.
    scores = [float(len(token) % 3) for token in tokens]
    tokenizer = from_gguf({**metadata, "tokenizer.ggml.scores": scores})
    known = {t: s for t, s, k in zip(tokens, scores, kinds, strict=True) if k in (1, 4)}
    assert spelled(tokenizer, text) == joined_naively(text.replace(" ", "▁"), known)


@given(
    st.lists(st.text("ab<", min_size=1, max_size=4), unique=True, max_size=6),
    st.text("ab<", max_size=20),
)
def test_special_tokens_are_cut_out_leftmost_and_longest(special: list[str], text: str) -> None:
    ids = {token: i for i, token in enumerate(special)}
    parts = list(SpecialTokens(ids).split(text))
    assert "".join(part if isinstance(part, str) else special[part] for part in parts) == text
    at = 0
    for part in parts:
        size = len(part) if isinstance(part, str) else len(special[part])
        here = max((len(t) for t in special if text.startswith(t, at)), default=0)
        if isinstance(part, int):
            assert size == here
        else:
            assert all(not text.startswith(t, i) for t in special for i in range(at, at + size))
        at += size
