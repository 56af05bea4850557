"""The options of the Run:ai model streamer, under vLLM's names; two load formats take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadkit.errors import OptionError
from loadkit.options import OptionSpec

__all__ = ["STREAMER_OPTIONS", "STREAMER_READER_OPTIONS", "for_streamer"]

STREAMER_READER_OPTIONS: Mapping[str, OptionSpec] = {
    "concurrency": OptionSpec(
        "concurrency",
        int,
        None,
        "requests under way at once; the streamer's own default",
        low=1,
        high=4096,
    ),
    "memory_limit": OptionSpec(
        "memory_limit",
        int,
        None,
        "bytes of buffers beside the parameters; -1: as many as it likes, 0: the fewest",
        low=-1,
        high=1 << 40,
    ),
}
"""The keys of ``reader_options`` of the reader ``runai``."""

STREAMER_OPTIONS: Mapping[str, OptionSpec] = {
    **STREAMER_READER_OPTIONS,
    "distributed": OptionSpec(
        "distributed", bool, False, "ranks read for each other: LoadConfig.distribute does that"
    ),
}
"""The keys of ``model_loader_extra_config``, for a loader's ``options``."""


def for_streamer(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What the reader takes of a loader's checked ``model_loader_extra_config``.

    Raises:
        OptionError: ``distributed`` is set.
    """
    if extra.get("distributed"):
        raise OptionError(
            "model_loader_extra_config.distributed is true: the streamer would hand every rank "
            "whole tensors, and a rank's load reads only its own parts",
            detail={"options": ["distributed"]},
            hint="set LoadConfig.distribute='broadcast' and give a process_group: then ranks read "
            "each byte once and send it to those that need it",
        )
    return {name: extra[name] for name in STREAMER_READER_OPTIONS if name in extra}
