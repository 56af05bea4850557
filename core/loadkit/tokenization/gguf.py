"""A tokenizer from the vocabulary inside a GGUF file: no hub, no tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from loadkit.text import printable
from loadkit.tokenization.base import Tokenizer, well_formed
from loadkit.tokenization.byte_bpe import ByteBpe, pretokenizer
from loadkit.tokenization.score_bpe import ScoreBpe
from loadkit.tokenization.special_tokens import SpecialTokens
from loadkit.tokenization.unigram import Unigram
from loadkit.tokenization.vocabulary import Kind, Metadata, Vocabulary

__all__ = ["GgufTokenizer", "from_gguf"]

# tokenizer.ggml.model -> ids that such a file need not name
_DEFAULT_IDS = {
    "gpt2": {},
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2},
}
_UNSEEN = {int(Kind.CONTROL), int(Kind.UNKNOWN)}


def from_gguf(metadata: Mapping[str, Any], *, file: str | None = None) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Args:
        metadata: its key-value pairs: ``tokenizer.ggml.*`` and ``tokenizer.chat_template``.
            Arrays may be lists, tuples or numpy arrays.
        file: the file's name, for errors.

    Raises:
        FormatError: ``E_TOKENIZER``, a key is missing, of a wrong type, or breaks a rule.
        NotInstalledError: ``tokenizers`` is needed for this vocabulary and not installed.

    Source: the keys under "Tokenizer" in the GGUF specification; the ids are those of llama.cpp.
    """
    return GgufTokenizer(Metadata(metadata, file))


class _Model(Protocol):
    """What the three kinds of vocabulary have in common.

    ``ids`` are those of a piece of text without special tokens; ``first`` says that it begins the
    text or follows a special token. ``prefixed``: such a piece is given a leading space.
    """

    prefixed: bool

    def ids(self, text: str, *, first: bool) -> list[int]: ...

    def piece(self, token: str, kind: int) -> bytes: ...


class GgufTokenizer(Tokenizer):
    """Special tokens are found first; the model of the vocabulary has what lies between them."""

    def __init__(self, metadata: Metadata) -> None:
        key = "tokenizer.ggml.model"
        kind = metadata.text(key)
        if kind is None:
            metadata.fail(f"{key} is not in the file: it holds no tokenizer", key)
        if kind not in _DEFAULT_IDS:
            known = ", ".join(sorted(_DEFAULT_IDS))
            message = f"{key} is {printable(kind, 80)!r}; loadkit has {known}"
            metadata.fail(message, key, name=kind[:200])
        self._vocabulary = vocabulary = Vocabulary.read(metadata, defaults=_DEFAULT_IDS[kind])
        add_bos, add_eos = kind == "llama", kind == "t5"
        self._model: _Model
        if kind == "gpt2":
            words = pretokenizer(metadata)
            add_bos = words.add_bos
            self._model = ByteBpe(vocabulary, metadata, words)
        elif kind == "llama":
            self._model = ScoreBpe(vocabulary, metadata)
        else:
            self._model = Unigram(vocabulary, metadata)
        self._special = SpecialTokens(vocabulary.special)
        self.bos_id, self.eos_id, self.eot_id = (
            vocabulary.bos_id, vocabulary.eos_id, vocabulary.eot_id,
        )  # fmt: skip
        self.stop_ids = vocabulary.stop_ids
        self.chat_template = metadata.text("tokenizer.chat_template")
        self._begin = _added("bos", add_bos, self.bos_id, metadata)
        self._end = _added("eos", add_eos, self.eos_id, metadata)

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary.tokens)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        well_formed(text)
        ids = list(self._begin) if add_special else []
        first = True
        for part in self._special.split(text):
            if isinstance(part, int):
                ids.append(part)
                first = True
            else:
                ids += self._model.ids(part, first=first)
                first = False
        if add_special:
            ids += self._end
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        tokens, kinds = self._vocabulary.tokens, self._vocabulary.kinds
        pieces: list[bytes] = []
        for i in ids:
            if not 0 <= i < len(tokens):
                pieces.append("\ufffd".encode())
            elif not (skip_special and kinds[i] in _UNSEEN):
                pieces.append(self._model.piece(tokens[i], kinds[i]))
        text = b"".join(pieces).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._model.prefixed else text

    def token(self, token_id: int) -> str | None:
        tokens = self._vocabulary.tokens
        return tokens[token_id] if 0 <= token_id < len(tokens) else None


def _added(name: str, default: bool, token_id: int | None, metadata: Metadata) -> list[int]:
    """The ids added at one end of a text."""
    key = f"tokenizer.ggml.add_{name}_token"
    if not metadata.flag(key, default):
        return []
    if token_id is None:
        metadata.fail(f"{key} asks for a token that the vocabulary does not name", key)
    return [token_id]
