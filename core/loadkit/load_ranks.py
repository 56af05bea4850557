"""A load over several ranks of this machine, one process each, to tell what it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from loadkit.launch import Patience, run_ranks
from loadkit.load_config import LoadConfig
from loadkit.parallel_config import ParallelConfig
from loadkit.rank_worker import Rank

__all__ = ["load_on_ranks", "load_one"]


def load_on_ranks(
    source: str, world: Sequence[ParallelConfig], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Load every rank at once; what each took.

    Args:
        source: a folder, a file or a URI.
        world: every rank's place.
        options: keyword arguments of ``loadkit.load``, ``parallel`` excepted.

    Returns:
        One per rank: ``report`` and, of the plan, ``architecture``, ``model_class``,
        ``distribution`` and ``load_format``.

    Raises:
        LoadkitError: the one cause, its rank named.
    """
    load_config = options.get("load_config") or LoadConfig()
    device = str(options.get("device") or load_config.device or "cpu")
    found: list[dict[str, Any]] = run_ranks(
        f"{__name__}:load_one",
        {"source": source, "options": dict(options)},
        world,
        device=device,
        patience=Patience(silence=load_config.rank_timeout),
    )
    return found


def load_one(rank: Rank, *, source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """One rank's part."""
    from loadkit.loader import load

    load_config = options.get("load_config") or LoadConfig()
    if not load_config.num_threads:
        load_config = replace(load_config, num_threads=rank.threads)
    options = {**options, "load_config": load_config, "device": rank.device}
    result = load(source, parallel=rank.parallel, process_group=rank.process_group, **options)
    keys = ("architecture", "model_class", "distribution", "load_format")
    head = {key: getattr(result.plan, key) for key in keys}
    return head | {"report": result.report.to_dict()}
