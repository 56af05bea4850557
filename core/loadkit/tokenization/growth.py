"""How much longer a tokenizer.json's pipeline could make a text: refused where it is too much.

Its steps come from the checkpoint. A chain of twenty replacements ``a -> aa`` is a small file and
turns one character into a megabyte.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

__all__ = ["MAX_GROWTH", "charsmap_growth", "pipeline_growth"]

MAX_GROWTH = 1024  # times; NFKC alone may make a text 18 times longer

_NESTED = ("normalizers", "pretokenizers", "processors", "decoders")


def pipeline_growth(*parts: Any) -> int:
    """The most that the parts (normaliser, pre-tokenizer, ...) together make of one byte."""
    growth = 1
    for part in parts:
        if part is not None:
            for step in _steps(json.loads(part.__getstate__())):
                growth *= max(1, _step_growth(step))
    return growth


def charsmap_growth(table: bytes) -> int:
    """The longest text that a SentencePiece table of characters puts for one, in bytes.

    The table is the size of a trie (4 bytes, little-endian), the trie, then the texts, each with
    a zero byte after it.
    """
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max((len(text) for text in texts.split(b"\0")), default=0)


def _steps(part: Any) -> list[dict[str, Any]]:
    """A pipeline's steps, nested ones too."""
    found: list[dict[str, Any]] = []
    waiting = [part]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            found.append(step)
            for key in _NESTED:
                waiting += step.get(key) or []
    return found


def _step_growth(step: dict[str, Any]) -> int:
    kind = step.get("type")
    if kind == "Replace":
        fixed = step["pattern"].get("String")
        size = len(step["content"].encode())
        return -(-size // len(fixed.encode())) if fixed else 1 + size
    if kind == "ByteLevel":
        return 2  # a byte becomes a character of up to two bytes
    if kind == "Precompiled":
        try:
            return charsmap_growth(base64.b64decode(step["precompiled_charsmap"]))
        except (binascii.Error, ValueError):
            return 1  # the library refuses it
    if kind == "TemplateProcessing":
        return max(_copies(step["single"]), _copies(step["pair"]))
    return 1


def _copies(template: list[dict[str, Any]]) -> int:
    """How often the text itself occurs in a template of special tokens around it."""
    return sum("Sequence" in piece for piece in template)
