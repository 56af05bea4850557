"""What a tokenizer is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loadkit.errors import OptionError
from loadkit.tokenization.chat_template import render_chat_template

__all__ = ["Tokenizer", "well_formed"]


class Tokenizer(ABC):
    """Text to ids and back, with what the checkpoint says about special tokens.

    Attributes:
        bos_id: the id that begins a text, or None.
        eos_id: the id that ends a text, or None.
        eot_id: the id that ends a turn of a chat, or None.
        stop_ids: every id after which generation is over (eos, eot and their like).
        chat_template: the checkpoint's template, unrendered and untrusted, or None.
    """

    bos_id: int | None = None
    eos_id: int | None = None
    eot_id: int | None = None
    stop_ids: frozenset[int] = frozenset()
    chat_template: str | None = None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """How many ids there are; a model's embedding may have more rows than that."""

    @abstractmethod
    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of ``text``. Special tokens spelled out in it become their ids.

        Args:
            text: any text.
            add_special: add bos and eos where the checkpoint asks for them.

        Raises:
            OptionError: the text holds half a surrogate pair, so it has no UTF-8.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ``ids``; bytes that are no UTF-8, and ids without a token, become U+FFFD.

        Args:
            ids: token ids.
            skip_special: leave out control tokens.
        """

    @abstractmethod
    def token(self, token_id: int) -> str | None:
        """The token's text as the vocabulary spells it, or None where there is no such id."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat. Encode it with ``add_special=False``: templates spell out bos.

        The template is code from the checkpoint. It runs in a sandbox in a process of its own,
        with limits of memory, time and output, and only when this is called.

        Args:
            messages: ``{"role": ..., "content": ...}`` and what else the template reads.
            add_generation_prompt: end with the words that make the model answer.
            template: use this one instead of the checkpoint's.
            variables: more values for the template (``tools``, ``documents``, ...).

        Raises:
            OptionError: there is no template, or it refuses these messages.
            FormatError: ``E_TEMPLATE`` it fails; ``E_LIMIT`` it goes over a limit.
            NotInstalledError: jinja2 is not installed.
        """
        source = template if template is not None else self.chat_template
        if source is None:
            raise OptionError(
                "this checkpoint has no chat template",
                hint="give the prompt as plain text, or a template of your own",
            )
        context: dict[str, Any] = {"messages": list(messages)}
        context["add_generation_prompt"] = add_generation_prompt
        for name, token_id in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            if token_id is not None:
                context[name] = self.token(token_id)
        return render_chat_template(source, {**context, **(variables or {})})


def well_formed(text: str) -> bytes:
    """The UTF-8 of ``text``.

    Raises:
        OptionError: it holds half a surrogate pair.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as problem:
        raise OptionError(
            f"the text holds half a surrogate pair at character {problem.start}",
            hint="was it read with the right encoding?",
        ) from None
