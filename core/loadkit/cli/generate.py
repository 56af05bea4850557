"""``loadkit generate``: a model's greedy continuation of a prompt."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from loadkit.cli.options import ModelRequest, model_options
from loadkit.cli.output import Output
from loadkit.errors import LoadkitError, OptionError
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.resolve import Job
    from loadkit.tokenization import Tokenizer

__all__ = ["command"]

log = logging.getLogger("loadkit")

_MAX_PROMPT_IDS = 1 << 20


@click.command("generate")
@model_options
@click.option("--prompt", metavar="TEXT", help="What the text begins with.")
@click.option("--prompt-ids", metavar="I,I,...", help="Token ids in place of a text.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=0),
    default=64,
    metavar="N",
    show_default=True,
    help="When to stop at the latest.",
)
@click.option("--chat", is_flag=True, help="The prompt is a user's turn, by the chat template.")
@click.option("--ignore-eos", is_flag=True, help="Go on after a token that ends the text.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.5),
    metavar="S",
    help="Seconds after which a silent rank, or one that others wait for, is given up "
    "(60, and 600).",
)
@click.pass_obj
def command(
    out: Output,
    request: ModelRequest,
    prompt: str | None,
    prompt_ids: str | None,
    max_new_tokens: int,
    chat: bool,
    ignore_eos: bool,
    timeout: float | None,
) -> int:
    """Load SOURCE and write what its model says after a prompt, the likeliest token each time.

    With --tp and --pp, one process per rank is started on this machine; --ep uses the same ones.
    """  # fmt: skip
    if request.rank is not None:
        raise OptionError("generate needs every rank: --rank cannot be given")
    if (prompt is None) == (prompt_ids is None):
        raise OptionError("give a prompt: one of --prompt and --prompt-ids")
    if chat and prompt is None:
        raise OptionError("--chat needs --prompt")
    given = None if prompt_ids is None else _read_ids(prompt_ids)
    world = request.ranks()

    from loadkit.generation import continue_prompt, stop_ids
    from loadkit.launch import Patience
    from loadkit.resolve import resolve

    alone = len(world) == 1
    options = request.keywords(progress=alone and sys.stderr.isatty() and not out.as_json)
    patience = Patience()
    if timeout is not None:
        patience = replace(patience, silence=timeout, collective=timeout)
    job = resolve(request.source, parallel=world[0], **options)
    try:
        tokenizer = _tokenizer(job, needed=prompt is not None)
        ids = given if given is not None else _encode(tokenizer, prompt or "", chat)
        text = _Continuation(tokenizer, ids)
        answer = continue_prompt(
            job,
            ids,
            world,
            max_new_tokens=max_new_tokens,
            eos_ids=frozenset() if ignore_eos else stop_ids(job, tokenizer),
            options=options,
            patience=patience,
            on_token=None if out.as_json else text.write,
        )
    finally:
        job.close()
    if out.as_json:
        found = {"prompt_ids": ids, "output_ids": answer, "text": text.of(answer)}
        out.emit({"ok": True, **found})
    else:
        text.end()
    return 0


class _Continuation:
    """New tokens as text, written as they come; without a tokenizer, as numbers.

    A token's text depends on those before it, and may be half a character. So everything is
    decoded each time, and what is new and whole is written.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = list(prompt_ids)
        self._prompt = "" if tokenizer is None else tokenizer.decode(prompt_ids)
        self._ids: list[int] = []
        self._written = ""

    def of(self, ids: Sequence[int]) -> str | None:
        """The text that ``ids`` add to the prompt; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        whole = self._tokenizer.decode([*self._prompt_ids, *ids])
        if whole.startswith(self._prompt):
            return whole[len(self._prompt) :]
        return self._tokenizer.decode(ids)  # the prompt ended within a character

    def write(self, token: int) -> None:
        """Write what one more token adds."""
        self._ids.append(token)
        text = self.of(self._ids)
        if text is None:
            self._put(f" {token}" if len(self._ids) > 1 else f"{token}")
        elif not text.endswith("\ufffd"):
            self._add(text)

    def end(self) -> None:
        """Write what is left, and end the line."""
        self._add(self.of(self._ids) or "")
        self._put("\n")

    def _add(self, text: str) -> None:
        if text.startswith(self._written):
            self._put(_harmless(text[len(self._written) :]))
            self._written = text

    def _put(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _tokenizer(job: Job, *, needed: bool) -> Tokenizer | None:
    """The checkpoint's tokenizer; None where it has none and ids are enough."""
    from loadkit.tokenization.of_checkpoint import tokenizer_for

    try:
        return tokenizer_for(job.source, job.loader)
    except LoadkitError as error:
        if needed:
            raise
        log.warning("the answer is told by its ids: %s", error)
        return None


def _encode(tokenizer: Tokenizer | None, prompt: str, chat: bool) -> list[int]:
    """The prompt's ids; as a user's turn of a chat where that is asked for."""
    if tokenizer is None:
        return []
    if not chat:
        return tokenizer.encode(prompt)
    turn = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tokenizer.encode(turn, add_special=False)


def _read_ids(text: str) -> list[int]:
    """The numbers of ``1,2,3``.

    Raises:
        OptionError: anything else, or too many.
    """
    parts = text.split(",")
    if len(parts) > _MAX_PROMPT_IDS:
        raise OptionError(f"--prompt-ids has {len(parts)} ids; at most {_MAX_PROMPT_IDS}")
    for part in parts:
        if not (part.strip().isascii() and part.strip().isdecimal() and len(part) < 20):
            raise OptionError(
                f"--prompt-ids takes token ids, and was given '{printable(part, 40)}'",
                hint="write them like 1,2,3",
            )
    return [int(part) for part in parts]


def _harmless(text: str) -> str:
    """What a model says is data: lines and tabs stay, what steers a terminal is escaped."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )
