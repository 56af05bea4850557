"""A tokenizer from tokenizer.json, by the library ``tokenizers``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from loadkit.errors import FormatError
from loadkit.file_checks import show
from loadkit.json_safe import parse_json
from loadkit.sources.base import File, Source
from loadkit.text import printable
from loadkit.tokenization.base import Tokenizer, well_formed
from loadkit.tokenization.growth import MAX_GROWTH, pipeline_growth
from loadkit.tokenization.libraries import need, refused
from loadkit.tokenization.special_tokens import end_of_turn, stop_ids
from loadkit.tokenization.vocabulary import MAX_TOKENS

__all__ = ["JsonTokenizer", "from_source", "from_tokenizer_json"]

MAX_TOKENIZER_JSON = 128 << 20  # bytes; the largest published are about 35 MB
MAX_TOKENIZER_CONFIG = 8 << 20  # bytes

_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


def from_tokenizer_json(
    data: bytes | File,
    *,
    config: bytes | File | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """The tokenizer that a tokenizer.json describes.

    Padding and truncation that the file asks for are switched off: ids are those of the text.

    Args:
        data: tokenizer.json.
        config: tokenizer_config.json, for bos, eos and the chat template.
        chat_template: the text of chat_template.jinja; it goes before the one in ``config``.

    Raises:
        FormatError: ``E_LIMIT`` too large; ``E_TOKENIZER`` the library refuses it, or its
            steps could blow up a text; ``E_JSON`` and its like for ``config``.
        NotInstalledError: ``tokenizers`` is not installed.
    """
    file = _name(data, _TOKENIZER)
    library = need("tokenizers", "tokenizer.json")
    content = _bytes(data, _TOKENIZER, MAX_TOKENIZER_JSON)
    with refused(f"{printable(file, ascii_only=False)} was refused", file=file):
        made = library.Tokenizer.from_buffer(content)
        size = made.get_vocab_size()
        made.no_padding()
        made.no_truncation()
        parts = (made.normalizer, made.pre_tokenizer, made.post_processor, made.decoder)
        growth = pipeline_growth(*parts)
    if size > MAX_TOKENS:
        raise _bad(f"{size} tokens, more than the {MAX_TOKENS} allowed", file)
    if growth > MAX_GROWTH:
        raise _bad(f"its steps could make a text {growth} times longer", file)
    if config is None:
        return JsonTokenizer(made, {}, chat_template, file)
    content = _bytes(config, _CONFIG, MAX_TOKENIZER_CONFIG)
    where = _name(config, _CONFIG)
    values = parse_json(content, file=where, max_bytes=MAX_TOKENIZER_CONFIG, allow_nan=True)
    if not isinstance(values, dict):
        raise _bad(f"holds {type(values).__name__}, and must hold an object", where)
    return JsonTokenizer(made, values, chat_template or _template(values, where), file)


def _is_other(name: str) -> bool:
    """Whether a file is a tokenizer of a kind that is not read: sentencepiece's, Mistral's."""
    return name in ("tekken.json", "vocab.json") or name.startswith("tokenizer.model")


def from_source(source: Source) -> Tokenizer:
    """The tokenizer of a checkpoint's folder: tokenizer.json and what stands beside it.

    Raises:
        FormatError: as ``from_tokenizer_json``; ``E_TOKENIZER`` there is no tokenizer.json.
        NotInstalledError: ``tokenizers`` is not installed.
    """
    names = {info.name for info in source.list()}
    if _TOKENIZER not in names:
        others = sorted(name for name in names if _is_other(name))
        told = f"; {show(others[0])} is there, which is not read" if others else ""
        raise FormatError(
            f"the checkpoint has no tokenizer.json{told}",
            code="E_TOKENIZER",
            detail={"found": others},
            hint="put the tokenizer.json of the same model beside the weights (Hugging Face's "
            "layout of it has one), or give token ids in place of a text",
        )
    template = None
    if _TEMPLATE in names:
        content = _bytes(source.open(_TEMPLATE), _TEMPLATE, MAX_TOKENIZER_CONFIG)
        try:
            template = content.decode()
        except UnicodeDecodeError as problem:
            message = f"{_TEMPLATE}: not UTF-8 at byte {problem.start}"
            raise FormatError(
                message, code="E_UTF8", file=_TEMPLATE, offset=problem.start
            ) from None
    config = source.open(_CONFIG) if _CONFIG in names else None
    return from_tokenizer_json(source.open(_TOKENIZER), config=config, chat_template=template)


class JsonTokenizer(Tokenizer):
    """A tokenizer of the library, and what tokenizer_config.json adds.

    Args:
        made: the library's tokenizer.
        config: tokenizer_config.json's values.
        chat_template: the template, or None.
        file: tokenizer.json's name, for errors.
    """

    def __init__(
        self, made: Any, config: Mapping[str, Any], chat_template: str | None, file: str
    ) -> None:
        self._made = made
        self._file = file
        self.chat_template = chat_template
        special = {
            token.content: token_id
            for token_id, token in made.get_added_tokens_decoder().items()
            if token.special
        }
        self.bos_id = self._named(config, "bos_token")
        self.eos_id = self._named(config, "eos_token")
        self.eot_id = end_of_turn(special)
        self.stop_ids = stop_ids(special, (self.eos_id, self.eot_id))

    def _named(self, config: Mapping[str, Any], key: str) -> int | None:
        """The id of a token that the config spells; None where it spells none."""
        text = config.get(key)
        if isinstance(text, dict):
            text = text.get("content")
        if text is None:
            return None
        found: int | None = self._made.token_to_id(text) if isinstance(text, str) else None
        if found is None:
            raise _bad(f"{key} {printable(text, 80)!r} is not in the vocabulary", _CONFIG)
        return found

    @property
    def vocab_size(self) -> int:
        size: int = self._made.get_vocab_size()
        return size

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        well_formed(text)
        with refused("the text could not be cut into tokens", file=self._file):
            ids: list[int] = self._made.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        known = list(ids)
        if any(self.token(i) is None for i in known):
            return self._decode_around_holes(known, skip_special)
        with refused("the ids could not be decoded", file=self._file):
            text: str = self._made.decode(known, skip_special_tokens=skip_special)
        return text

    def _decode_around_holes(self, ids: list[int], skip_special: bool) -> str:
        """The library leaves out what has no token; here it shows."""
        parts: list[str] = []
        run: list[int] = []
        for i in ids:
            if self.token(i) is not None:
                run.append(i)
                continue
            parts += [self.decode(run, skip_special), "\ufffd"]
            run = []
        return "".join([*parts, self.decode(run, skip_special)])

    def token(self, token_id: int) -> str | None:
        if not 0 <= token_id < 1 << 32:
            return None
        found: str | None = self._made.id_to_token(token_id)
        return found


def _bytes(data: bytes | File, name: str, most: int) -> bytes:
    """The content, not read at all where it is too large."""
    size = data.size if isinstance(data, File) else len(data)
    if size > most:
        file = _name(data, name)
        message = f"{printable(file, ascii_only=False)}: {size} bytes, more than the {most} allowed"
        raise FormatError(message, code="E_LIMIT", file=file)
    return data.read(0, size) if isinstance(data, File) else data


def _name(data: bytes | File, name: str) -> str:
    return data.name if isinstance(data, File) else name


def _bad(message: str, file: str) -> FormatError:
    where = printable(file, ascii_only=False)
    return FormatError(f"{where}: {message}", code="E_TOKENIZER", file=file)


def _template(config: Mapping[str, Any], file: str) -> str | None:
    """The config's chat template; of several named ones, the default."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {row.get("name"): row.get("template") for row in found if isinstance(row, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise _bad("chat_template is no text", file)
    return found
