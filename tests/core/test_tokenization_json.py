"""Tokenizers from tokenizer.json, and what stands beside it in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadkit.errors import FormatError, NotInstalledError, OptionError
from loadkit.load_config import LoadConfig
from loadkit.sources.local import LocalSource
from loadkit.tokenization import Tokenizer, from_source, from_tokenizer_json
from loadkit.tokenization import tokenizer_json as module

WORDS = {"<s>": 0, "</s>": 1, "<unk>": 2, "hello": 3, "world": 4, "<|im_end|>": 5}


def described(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json of whole words that puts <s> before a text."""
    special = [
        {"id": i, "content": word, "special": True} for word, i in WORDS.items() if "<" in word
    ]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    template = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    return {
        "version": "1.0",
        "truncation": {
            "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": 1 << 30}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>",
        },
        "added_tokens": [{**token, **flags} for token in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing", "single": template, "pair": template,
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "<unk>"},
        **changes,
    }  # fmt: skip


def made(config: Any = None, template: str | None = None, **changes: Any) -> Tokenizer:
    return from_tokenizer_json(
        json.dumps(described(**changes)).encode(),
        config=None if config is None else json.dumps(config).encode(),
        chat_template=template,
    )


def test_a_text_is_neither_padded_nor_cut() -> None:
    tokenizer = made()
    assert tokenizer.encode("hello world hello") == [0, 3, 4, 3]
    assert tokenizer.encode("hello world hello", add_special=False) == [3, 4, 3]
    assert tokenizer.vocab_size == 6


def test_decoding_skips_special_tokens_and_shows_ids_without_one() -> None:
    tokenizer = made()
    assert tokenizer.decode([0, 3, 4]) == "hello world"
    assert tokenizer.decode([0, 3], skip_special=False) == "<s> hello"
    assert tokenizer.decode([3, 99, 4, -1]) == "hello\ufffdworld\ufffd"
    assert [tokenizer.token(i) for i in (3, 6, -1, 1 << 40)] == ["hello", None, None, None]


def test_the_config_names_special_tokens_and_the_template() -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "x"}
    tokenizer = made(config)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eot_id) == (0, 1, 5)
    assert tokenizer.stop_ids == {1, 5}
    assert tokenizer.chat_template == "x"
    assert made(config, "y").chat_template == "y"
    assert made({"eos_token": None}).eos_id is None
    assert made().stop_ids == {5}


def test_of_several_templates_the_default_is_taken() -> None:
    rows = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    assert made({"chat_template": rows}).chat_template == "b"
    assert made({"chat_template": rows[:1]}).chat_template is None


def replaced(content: str, times: int, pattern: dict[str, str]) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [step] * times}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DOUBLED = replaced("aa", 40, {"String": "a"})
COPY = {"Sequence": {"id": "A", "type_id": 0}}
COPIES = {"type": "TemplateProcessing", "single": [COPY] * 5000, "pair": [COPY]}


def split(pattern: str) -> dict[str, Any]:
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


HOSTILE: dict[str, tuple[str, Any, str]] = {
    "replace": ("normalizer", DOUBLED, "longer"),
    "regex": ("normalizer", replaced("a", 40, {"Regex": "x*"}), "longer"),
    "nothing": ("normalizer", replaced("aaaa", 6, {"String": ""}), "longer"),
    "bytes": ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTES] * 40}, "longer"),
    "decoder": ("decoder", {"type": "Sequence", "decoders": DOUBLED["normalizers"]}, "longer"),
    "copies": ("post_processor", {**COPIES, "special_tokens": {}}, "longer"),
    "unknown-model": ("model", {"type": "Nothing"}, "refused"),
    "no-model": ("model", None, "refused"),
    "charsmap": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "//8="}, "refused"),
    "bad-regex": ("pre_tokenizer", split("("), "refused"),
}


@pytest.mark.parametrize(("key", "value", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_tokenizer_json_that_is_wrong_or_hostile_is_refused(
    key: str, value: Any, message: str
) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        made(**{key: value})
    assert (caught.value.code, caught.value.file) == ("E_TOKENIZER", "tokenizer.json")


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[1, 2]", b"\xff\xfe", b"{" * 100_000, b'{"a":' * 100_000, b"\x00" * 100],
    ids=["empty", "object", "list", "no-utf8", "braces", "deep", "zeros"],
)
def test_what_is_no_tokenizer_json_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"tokenizer\.json was refused") as caught:
        from_tokenizer_json(data)
    assert caught.value.code == "E_TOKENIZER"


def test_a_regex_without_end_is_a_typed_error() -> None:
    tokenizer = made(pre_tokenizer=split("(a+)+$"))
    with pytest.raises(FormatError, match="could not be cut") as caught:
        tokenizer.encode("a" * 60 + "b")
    assert caught.value.code == "E_TOKENIZER"


def test_sizes_are_looked_at_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENIZER_JSON", 100)
    with pytest.raises(FormatError, match="more than the 100 allowed") as caught:
        made()
    assert caught.value.code == "E_LIMIT"
    monkeypatch.undo()
    monkeypatch.setattr(module, "MAX_TOKENIZER_CONFIG", 10)
    with pytest.raises(FormatError, match=r"tokenizer_config\.json.*more than the 10 allowed"):
        made({"bos_token": "<s>"})
    monkeypatch.undo()
    monkeypatch.setattr(module, "MAX_TOKENS", 5)
    with pytest.raises(FormatError, match="6 tokens, more than the 5 allowed"):
        made()


@pytest.mark.parametrize(
    ("config", "code", "message"),
    [
        (b"[]", "E_TOKENIZER", "must hold an object"),
        (b"{", "E_JSON", "not JSON"),
        (b'{"a": 1, "a": 2}', "E_DUPLICATE", "twice"),
        (b'{"bos_token": "<none>"}', "E_TOKENIZER", "'<none>' is not in the vocabulary"),
        (b'{"eos_token": 5}', "E_TOKENIZER", "'5' is not in the vocabulary"),
        (b'{"eos_token": {"content": {}}}', "E_TOKENIZER", "is not in the vocabulary"),
        (b'{"chat_template": 5}', "E_TOKENIZER", "chat_template is no text"),
    ],
)
def test_a_config_that_is_wrong_is_refused(config: bytes, code: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        from_tokenizer_json(json.dumps(described()).encode(), config=config)
    assert (caught.value.code, caught.value.file) == (code, "tokenizer_config.json")


def test_a_text_without_utf8_is_the_callers_error() -> None:
    with pytest.raises(OptionError, match="half a surrogate"):
        made().encode("\udc80")


def test_a_folder_gives_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(described()))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("é")
    with LocalSource(tmp_path, LoadConfig()) as source:
        tokenizer = from_source(source)
    assert tokenizer.encode("hello") == [0, 3]
    assert (tokenizer.eos_id, tokenizer.chat_template) == (1, "é")


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with LocalSource(tmp_path, LoadConfig()) as source:
        with pytest.raises(FormatError, match=r"has no tokenizer\.json") as caught:
            from_source(source)
    assert caught.value.code == "E_TOKENIZER"


def test_a_template_file_without_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(described()))
    (tmp_path / "chat_template.jinja").write_bytes(b"a\xff")
    with LocalSource(tmp_path, LoadConfig()) as source:
        with pytest.raises(FormatError, match="not UTF-8 at byte 1") as caught:
            from_source(source)
    assert (caught.value.code, caught.value.offset) == ("E_UTF8", 1)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadkit.tokenization.libraries.find_spec", lambda name: None)
    with pytest.raises(NotInstalledError, match=r"pip install \"loadkit\[generate\]\""):
        made()


def test_minilms_ids_are_those_of_the_oracle(minilm: Path, root: Path) -> None:
    oracle = json.loads((root / "tests/data/all-minilm-l6-v2.json").read_text())
    with LocalSource(minilm, LoadConfig()) as source:
        tokenizer = from_source(source)
    for sentence, padded, mask in zip(
        oracle["sentences"], oracle["input_ids"], oracle["attention_mask"], strict=True
    ):
        assert tokenizer.encode(sentence) == padded[: sum(mask)]
        assert tokenizer.decode(padded) == sentence.lower()
    assert tokenizer.vocab_size == 30522
