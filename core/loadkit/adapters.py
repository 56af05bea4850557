"""A folder that holds an adapter and no model: what is said of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadkit.detect import kind_of, matching_formats
from loadkit.errors import LoadkitError, NoWeightsError
from loadkit.file_checks import show
from loadkit.hf_config import MAX_CONFIG_BYTES, parse_config

if TYPE_CHECKING:
    from loadkit.sources.base import Source

__all__ = ["adapter_error"]

CONFIG = "adapter_config.json"


def adapter_error(source: Source) -> NoWeightsError | None:
    """The error for a source whose only weights are an adapter's; None for any other source.

    It names the base model, where the adapter's config does.
    """
    names = [info.name for info in source.list()]
    adapters = [name for name in names if kind_of(name) == "adapter"]
    if not adapters or matching_formats(names):
        return None
    base = _base_model(source) if CONFIG in names else None
    of = "" if base is None else f" for {show(base)}"
    return NoWeightsError(
        f"this is a PEFT adapter{of}, not a model: {', '.join(map(show, adapters[:3]))} changes "
        "the weights of a base model, which are not here",
        file=adapters[0],
        detail={"adapters": adapters, "base_model_name_or_path": base},
        hint="give the base model, or the folder of a model that the adapter was merged into",
    )


def _base_model(source: Source) -> str | None:
    """What the adapter's config says that it was trained on."""
    try:
        file = source.open(CONFIG)
        config = parse_config(file.read(0, min(file.size, MAX_CONFIG_BYTES + 1)), file=CONFIG)
    except LoadkitError:
        return None  # the adapter is what is told, whatever is wrong with its config
    found = config.get("base_model_name_or_path")
    return found if isinstance(found, str) and found else None
