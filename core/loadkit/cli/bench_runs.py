"""What ``loadkit bench`` measures, as functions for fresh processes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

from loadkit.bench.measure import Figures
from loadkit.cli.options import ModelRequest

__all__ = ["forward", "load"]

PROMPT = 8  # tokens of the first forward


def load(request: Mapping[str, Any]) -> Callable[[], Any]:
    """A load of what the command line asks for; its imports are done before."""
    return _loading(request, lambda result: result.model)


def forward(request: Mapping[str, Any]) -> Callable[[], Any]:
    """A load and the model's first forward, of a prompt of a few tokens.

    Gives the report's figures; the numbers that the model answers must be finite.
    """
    return _loading(request, _first_forward)


def _loading(request: Mapping[str, Any], then: Callable[[Any], Any]) -> Callable[[], Any]:
    from loadkit import loader

    asked = ModelRequest(**{**request, "settings": tuple(request["settings"])})
    keywords = asked.keywords(progress=False)
    parallel = asked.ranks()[0]
    # A plan imports what a load imports: the architecture, the format, the reader.
    loader.plan(asked.source, parallel=parallel, **keywords).raise_if_bad()
    gc.collect()

    def go() -> Any:
        return then(loader.load(asked.source, parallel=parallel, **keywords))

    return go


def _first_forward(result: Any) -> Figures:
    import torch

    from loadkit.errors import ModelError

    model = result.model
    device = next(model.parameters()).device
    ids = torch.arange(PROMPT, device=device) % 4
    with torch.inference_mode():
        hidden = model(ids, torch.arange(PROMPT, device=device))
        answer = model.compute_logits(hidden[-1:]) if hasattr(model, "compute_logits") else hidden
        finite = bool(torch.isfinite(answer.float()).all())  # waits for a device
    if not finite:
        raise ModelError("the first forward gave numbers that are not finite", code="E_LOGITS")
    return {"bytes_read": result.report.bytes_read}
