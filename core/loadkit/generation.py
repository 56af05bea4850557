"""Generation from a checkpoint: load it, over one rank or several, and let it speak."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loadkit.build import build
from loadkit.errors import CheckpointError, DistributedError
from loadkit.generate import greedy
from loadkit.hf_config import HFConfig, parse_config
from loadkit.launch import Patience, run_ranks
from loadkit.load_config import LoadConfig
from loadkit.loader import load, run_line
from loadkit.parallel_config import ParallelConfig
from loadkit.parallel_groups import make_groups
from loadkit.rank_worker import Rank

if TYPE_CHECKING:
    from loadkit.resolve import Job
    from loadkit.tokenization import Tokenizer

__all__ = ["continue_prompt", "speak", "stop_ids"]

_GENERATION_CONFIG = "generation_config.json"


def continue_prompt(
    job: Job,
    prompt_ids: Sequence[int],
    world: Sequence[ParallelConfig],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    options: Mapping[str, Any] | None = None,
    patience: Patience | None = None,
    on_token: Callable[[int], None] | None = None,
) -> list[int]:
    """The greedy continuation of a prompt by a checkpoint's model.

    Args:
        job: the resolved checkpoint; it is closed at the end.
        prompt_ids: at least one.
        world: every rank's place. One rank runs in this process, several in one process each.
        max_new_tokens: when to stop at the latest.
        eos_ids: tokens that end the text.
        options: what ``job`` was resolved with, ``parallel`` excepted; several ranks load by it.
        patience: how long several ranks are waited for.
        on_token: called with each new token as it comes.

    Raises:
        LoadkitError: whatever stands against the load; over several ranks the rank is named.
    """
    if len(world) == 1:
        model = run_line(job).model

        def on_step(token: int, _: object) -> None:
            if on_token is not None:
                on_token(token)

        return greedy(
            model, prompt_ids, max_new_tokens=max_new_tokens, eos_ids=eos_ids, on_step=on_step
        )
    build(job)  # what no rank could build is told before any is started
    job.close()
    arguments = {
        "source": job.source_name,
        "options": dict(options or {}),
        "prompt_ids": list(prompt_ids),
        "max_new_tokens": max_new_tokens,
        "eos_ids": frozenset(eos_ids),
    }

    def on_message(_: int, token: int) -> None:
        if on_token is not None:
            on_token(token)

    answers: list[list[int]] = run_ranks(
        f"{__name__}:speak",
        arguments,
        world,
        device=job.device,
        patience=patience,
        on_message=on_message,
    )
    for number, answer in enumerate(answers):
        if answer != answers[0]:
            raise DistributedError(
                f"rank {number} chose other tokens than rank 0",
                detail={"rank 0": answers[0], f"rank {number}": answer},
            )
    return answers[0]


def speak(
    rank: Rank,
    *,
    source: str,
    options: Mapping[str, Any],
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> list[int]:
    """One rank's part: load its share and generate.

    The first rank of the last pipeline stage, which chooses them, says each token as it comes.
    """
    load_config = options.get("load_config") or LoadConfig()
    if not load_config.num_threads:
        load_config = replace(load_config, num_threads=rank.threads)
    options = {**options, "load_config": load_config, "device": rank.device}
    model = load(source, parallel=rank.parallel, process_group=rank.process_group, **options).model
    make_groups(rank.parallel)

    def on_step(token: int, _: object) -> None:
        if rank.parallel.tp_rank == rank.parallel.dp_rank == 0:
            rank.say(token)

    return greedy(
        model,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        eos_ids=eos_ids,
        on_step=on_step,
        parallel=rank.parallel,
    )


def stop_ids(job: Job, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every token that ends a text, as tokenizer, config and generation_config.json say."""
    hf_config = job.config.model_config.hf_config
    said: list[Any] = [hf_config.get("eos_token_id")]
    said.append(job.config.model_config.hf_text_config.get("eos_token_id"))
    if _GENERATION_CONFIG in {info.name for info in job.source.list()}:
        said.append(_generation_config(job).get("eos_token_id"))
    found = set(tokenizer.stop_ids) if tokenizer is not None else set()
    for value in said:
        each = value if isinstance(value, list | tuple) else [value]
        found |= {item for item in each if isinstance(item, int) and not isinstance(item, bool)}
    return frozenset(found)


def _generation_config(job: Job) -> HFConfig:
    file = job.source.open(_GENERATION_CONFIG)
    if file.size > 1 << 20:
        raise CheckpointError(f"{_GENERATION_CONFIG} has {file.size} bytes", file=file.name)
    return HFConfig.from_dict(parse_config(file.read(0, file.size), file=_GENERATION_CONFIG))
