"""``tokenizer.*`` keys for a file to write: those of the GGUF file a model came from, or made from
the tokenizer.json beside its weights.

Source: the keys under "Tokenizer" in the GGUF specification; token types as llama.cpp has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from loadkit.config import LoadConfig
from loadkit.json_safe import parse_json
from loadkit.sources.base import File, Source
from loadkit.tokenization.pretokenizers import PRETOKENIZERS
from loadkit_gguf.header import read_gguf_header
from loadkit_gguf.splits import find_first_file

__all__ = ["tokenizer_keys"]

_MAX_JSON = 128 << 20
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_keys(source: Source, load_config: LoadConfig) -> tuple[dict[str, Any], str | None]:
    """The keys, and why there are none.

    Raises:
        LoadkitError: a file that is there cannot be read, or breaks a rule of its format.
    """
    if load_config.load_format == "gguf":
        first, _ = find_first_file(source, load_config)
        metadata = read_gguf_header(source.open(first)).metadata
        found = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        return found, None if found else f"{first} holds none"
    names = {info.name for info in source.list()}
    if "tokenizer.json" not in names:
        return {}, "the source has no tokenizer.json"
    values = _json(source.open("tokenizer.json"))
    config = _json(source.open("tokenizer_config.json")) if "tokenizer_config.json" in names else {}
    template = None
    if "chat_template.jinja" in names:
        file = source.open("chat_template.jinja")
        template = bytes(file.read(0, min(file.size, _MAX_JSON))).decode("utf-8", "replace")
    return _from_json(values, config, template)


def _json(file: File) -> dict[str, Any]:
    data = file.read(0, min(file.size, _MAX_JSON + 1))
    found = parse_json(data, file=file.name, max_bytes=_MAX_JSON, allow_nan=True)
    return found if isinstance(found, dict) else {}


def _from_json(
    values: Mapping[str, Any], config: Mapping[str, Any], template: str | None
) -> tuple[dict[str, Any], str | None]:
    """Byte-level BPE, which is what Llama 3's, Qwen's and SmolLM's families use."""
    model = values.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = model.get("type") if isinstance(model, dict) else None
        return {}, f"its tokenizer.json is {kind!s} and not byte-level BPE"
    pre = _pretokenizer(values)
    if pre is None:
        return {}, "its tokenizer.json cuts words in a way that has no name in GGUF"
    tokens, kinds = _tokens(model, values.get("added_tokens") or [])
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]
        ],
    }
    ids = {token: number for number, token in enumerate(tokens)}
    for name, short in _NAMES.items():
        text = config.get(name)
        text = text.get("content") if isinstance(text, dict) else text
        if isinstance(text, str) and text in ids:
            keys[f"tokenizer.ggml.{short}_token_id"] = ids[text]
    for name in ("bos", "eos"):
        flag = config.get(f"add_{name}_token")
        if isinstance(flag, bool):
            keys[f"tokenizer.ggml.add_{name}_token"] = flag
    own = config.get("chat_template")
    template = template or (own if isinstance(own, str) else None)
    if template:
        keys["tokenizer.chat_template"] = template
    return keys, None


def _tokens(model: Mapping[str, Any], added: list[Any]) -> tuple[list[str], list[int]]:
    """Every token by its number, and its kind; numbers that nothing has are unused."""
    vocabulary: dict[str, int] = dict(model["vocab"])
    special = {each["content"]: bool(each.get("special")) for each in added}
    vocabulary |= {each["content"]: int(each["id"]) for each in added}
    size = max(vocabulary.values(), default=-1) + 1
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [_UNUSED] * size
    for token, number in vocabulary.items():
        tokens[number] = token
        kinds[number] = _NORMAL
        if token in special:
            kinds[number] = _CONTROL if special[token] else _USER
    return tokens, kinds


def _pretokenizer(values: Mapping[str, Any]) -> str | None:
    """GGUF's name of how a tokenizer.json cuts a text into words, or None."""
    node = values.get("pre_tokenizer") or {}
    steps = node.get("pretokenizers", [node]) if isinstance(node, dict) else []
    patterns: list[str] = []
    for step in steps:
        kind = step.get("type")
        if kind == "Split":
            pattern = step.get("pattern", {})
            patterns.append(str(pattern.get("Regex") or pattern.get("String")))
        elif kind == "Digits":
            patterns.append(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")
        elif kind == "ByteLevel":
            if step.get("use_regex", True):
                patterns.append(PRETOKENIZERS["gpt-2"].patterns[0])
        else:
            return None
    model: Any = values.get("model") or {}
    ignores = bool(model.get("ignore_merges"))
    for name, known in PRETOKENIZERS.items():
        if _plain(known.patterns) == _plain(patterns) and known.ignore_merges == ignores:
            return name
    return None


def _plain(patterns: Any) -> list[str]:
    """Expressions without what differs in spelling alone."""
    return [pattern.replace("(?:", "(").replace("(?i:", "(") for pattern in patterns]
