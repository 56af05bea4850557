"""What the constructors of all families need: names, options, and refusals that help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadkit.config import LoadkitConfig, ParallelConfig
from loadkit_layers.sharding import require_divisible

__all__ = ["check_tp", "join", "layer_options"]


def join(prefix: str, name: str) -> str:
    """The dotted name of ``name`` inside the module ``prefix``."""
    return f"{prefix}.{name}" if prefix else name


def layer_options(config: LoadkitConfig) -> dict[str, Any]:
    """What every layer with a weight matrix is given."""
    return {
        "parallel": config.parallel_config,
        "quant_config": config.quant_config,
        "params_dtype": config.model_config.dtype,
    }


def check_tp(
    parallel: ParallelConfig, *, heads: int, kv_heads: int, widths: Sequence[int], prefix: str = ""
) -> None:
    """Refuse a tp size that the whole model cannot be cut into.

    Layers refuse too, each by its own sizes; here the legal sizes are those of all of them.

    Args:
        parallel: this rank's place.
        heads: query heads; every rank takes as many.
        kv_heads: key/value heads; cut, or repeated where there are more ranks than heads.
        widths: other sizes that are cut (the width of the feed-forward part).
        prefix: the model's dotted name, for the error.

    Raises:
        ModelError: ``TP_INDIVISIBLE``; ``detail["legal"]`` lists the tp sizes that would do.
    """

    def fits(tp: int) -> bool:
        kv_fits = kv_heads % tp == 0 or tp % kv_heads == 0
        return heads % tp == 0 and kv_fits and all(width % tp == 0 for width in widths)

    require_divisible(
        prefix or "model",
        parallel.tp_size,
        [heads, kv_heads, *widths],
        unit="query heads, key/value heads and feed-forward width",
        legal=fits,
    )
