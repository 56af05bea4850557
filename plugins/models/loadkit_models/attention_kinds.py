"""Which layers see everything and which only a window: ``layer_types`` and its older spellings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadkit.errors import ConfigFileError
from loadkit.text import printable
from loadkit_models.config_fields import count

__all__ = ["FULL", "SLIDING", "attention_kinds", "sliding_window"]

FULL, SLIDING = "full_attention", "sliding_attention"


def attention_kinds(hf_config: Any, layers: int, slides: Callable[[int], bool]) -> tuple[str, ...]:
    """``FULL`` or ``SLIDING`` for each layer: what ``layer_types`` says, else by a rule.

    Args:
        hf_config: the text model's config.
        layers: how many there are.
        slides: the family's rule, asked by index where the config has no ``layer_types``.

    Raises:
        ConfigFileError: E_CONFIG, ``layer_types`` is no list of these two, one per layer.
    """
    named = getattr(hf_config, "layer_types", None)
    if named is None:
        return tuple(SLIDING if slides(index) else FULL for index in range(layers))
    if not isinstance(named, list) or len(named) != layers:
        found = f"{len(named)} entries" if isinstance(named, list) else printable(repr(named), 80)
        raise ConfigFileError(
            f"config.json: layer_types is {found}, not one entry for each of {layers} layers"
        )
    for index, kind in enumerate(named):
        if kind not in (FULL, SLIDING):
            raise ConfigFileError(
                f"config.json: layer_types[{index}] is {printable(repr(kind), 80)}; "
                f"there are {FULL!r} and {SLIDING!r}"
            )
    return tuple(named)


def sliding_window(hf_config: Any) -> int | None:
    """``sliding_window`` in tokens; None where it is null or absent.

    Raises:
        ConfigFileError: E_CONFIG, it is no count.
    """
    if getattr(hf_config, "sliding_window", None) is None:
        return None
    return count(hf_config, "sliding_window")
