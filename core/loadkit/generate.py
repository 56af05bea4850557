"""Greedy generation: what a loaded model says next, with a plain cache for each attention.

# T tokens in a call, D model width, V vocabulary

The core knows no layers. A module that keeps keys and values has an attribute ``kv_cache`` (None
while nobody generates) and a method ``new_kv_cache()`` that makes what is bound to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from loadkit.errors import ModelError, UsageError
from loadkit.interfaces import is_text_generation_model
from loadkit.parallel_config import ParallelConfig
from loadkit.stage_links import StageLinks

__all__ = ["OnStep", "generate", "greedy"]

# Gets each new token and the logits ``[V]`` it was chosen from.
OnStep = Callable[[int, torch.Tensor], None]


def greedy(
    model: nn.Module,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    on_step: OnStep | None = None,
    parallel: ParallelConfig | None = None,
) -> list[int]:
    """The tokens that follow the prompt, the likeliest one each time.

    The prompt is one call, every further token another. Caches are bound for this call only.

    Args:
        model: has ``forward(input_ids [T], positions [T]) -> [T, D]`` and ``compute_logits``. At
            tp or pp > 1 every rank calls this with the same arguments, and gets the same tokens.
        prompt_ids: at least one.
        max_new_tokens: when to stop at the latest; 0 computes nothing.
        eos_ids: tokens that end the text; the one that did is part of the answer.
        on_step: called with each new token and its logits ``[V]``, before the next is computed; of
            several pipeline stages, on the last one only.
        parallel: this rank's place, where the model is one of several pipeline stages.

    Returns:
        The new tokens, without the prompt.

    Raises:
        UsageError: no prompt, or an id that the model has no embedding for.
        ModelError: the model generates no text, or its logits are not numbers (``E_LOGITS``).
        DistributedError: ``parallel`` has stages and is not this process's place.
    """
    new: list[int] = []
    _check(model, prompt_ids, max_new_tokens)
    with torch.inference_mode(), _caches(model):
        device = next(model.parameters()).device
        links = StageLinks(model, parallel or ParallelConfig(), device)
        unread, position = list(prompt_ids), 0
        while len(new) < max_new_tokens:
            logits = _step(model, links, unread, position, device)
            token = links.share(None if logits is None else _best(logits, len(new)))
            position += len(unread)
            unread = [token]
            new.append(token)
            if on_step is not None and logits is not None:
                on_step(token, logits)
            if token in eos_ids:
                break
    return new


generate = greedy  # the package's name for it


def _step(
    model: Any, links: StageLinks, ids: list[int], position: int, device: torch.device
) -> torch.Tensor | None:
    """The logits ``[V]`` after ``ids [T]``, the first of which is at ``position``.

    None on a pipeline stage that is not the last.
    """
    positions = torch.arange(position, position + len(ids), device=device)
    before = links.receive(len(ids))
    given = {} if before is None else {"intermediate_tensors": before}
    hidden = model(torch.tensor(ids, device=device), positions, **given)
    if not links.is_last:
        links.send(hidden, len(ids))
        return None
    if not isinstance(hidden, torch.Tensor):
        raise ModelError(
            f"{type(model).__name__} gives no hidden states: it is one of several pipeline stages",
            hint="give its place: parallel=ParallelConfig(pp_size=..., pp_rank=...)",
        )
    logits: torch.Tensor = model.compute_logits(hidden[-1:])
    return logits[-1]


def _best(logits: torch.Tensor, step: int) -> int:
    """The likeliest token. A NaN counts as the largest, so it is met here."""
    token = int(logits.argmax())
    if not torch.isfinite(logits[token]):
        raise ModelError(
            f"the logits of new token {step} are no finite numbers: {logits[token].item()} for "
            f"token {token}",
            code="E_LOGITS",
            detail={"step": step, "token": token, "not_finite": int((~logits.isfinite()).sum())},
            hint="try dtype='float32'; if it stays so, the weights hold such numbers",
        )
    return token


@contextmanager
def _caches(model: nn.Module) -> Iterator[None]:
    """A new cache in every module that keeps one; what was bound before is bound again after."""
    bound: list[tuple[Any, Any]] = []
    try:
        for name, module in model.named_modules():
            layer: Any = module
            if not hasattr(layer, "kv_cache"):
                continue
            make = getattr(layer, "new_kv_cache", None)
            if make is None or getattr(layer, "causal", True) is False:
                why = "sees later tokens" if make is not None else "has no new_kv_cache()"
                raise ModelError(f"{name} ({type(layer).__name__}) cannot generate: it {why}")
            bound.append((layer, layer.kv_cache))
            layer.kv_cache = make()
        if not bound:
            raise ModelError(
                f"{type(model).__name__} cannot generate: no module of it keeps a kv cache",
                hint="an attention needs an attribute kv_cache and a method new_kv_cache()",
            )
        yield
    finally:
        for layer, before in bound:
            layer.kv_cache = before


def _check(model: nn.Module, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    """Refuse what cannot be generated from, before anything is computed."""
    if not is_text_generation_model(model):
        raise ModelError(f"{type(model).__name__} generates no text: it has no compute_logits")
    if max_new_tokens < 0:
        raise UsageError(f"max_new_tokens is {max_new_tokens}")
    if not prompt_ids:
        raise UsageError("the prompt has no tokens", hint="give at least one")
    # Over several ranks an unknown id would be a vector of zeros, and no error.
    rows = max((_rows(module) for module in model.modules()), default=0)
    for place, token in enumerate(prompt_ids):
        if token < 0 or (rows and token >= rows):
            raise UsageError(
                f"prompt token {place} is {token}; the model has embeddings for 0..{rows - 1}",
                detail={"place": place, "token": token, "vocab_size": rows},
            )


def _rows(module: nn.Module) -> int:
    """How many ids an embedding knows; 0 for any other module."""
    rows = getattr(module, "num_embeddings", 0)
    return rows if isinstance(rows, int) else 0
