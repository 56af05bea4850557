"""The rotary embedding family, and ``get_rope`` that picks a member by what config.json says.

Both spellings of config.json are read: ``rope_theta`` beside ``rope_scaling`` (whose kind is
``rope_type`` or the older ``type``), and one dict ``rope_parameters`` that holds everything, flat
or per layer type (``{"full_attention": {...}, "sliding_attention": {...}}``).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from loadkit.config import HFConfig
from loadkit.errors import ConfigFileError
from loadkit_layers.rotary_embedding.embedding import (
    DynamicNTKScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
from loadkit_layers.rotary_embedding.frequencies import number

__all__ = [
    "DynamicNTKScalingRotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "get_rope",
    "rope_from_config",
    "rope_parameters_of",
]

_CLASSES: dict[str, type[RotaryEmbedding]] = {
    cls.rope_type: cls
    for cls in (
        RotaryEmbedding,
        LinearScalingRotaryEmbedding,
        DynamicNTKScalingRotaryEmbedding,
        YaRNScalingRotaryEmbedding,
        Llama3RotaryEmbedding,
    )
}


def get_rope(
    head_size: int,
    *,
    rotary_dim: int | None = None,
    max_position: int,
    base: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_parameters: Mapping[str, Any] | None = None,
    is_neox_style: bool = True,
    dtype: torch.dtype | None = None,
) -> RotaryEmbedding:
    """The rotary embedding that these settings describe.

    Args:
        head_size: channels of a head.
        rotary_dim: how many of them turn; None is ``partial_rotary_factor`` of the head, else all.
        max_position: tokens the model was trained for (``max_position_embeddings``).
        base: used where the settings have no ``rope_theta``.
        rope_scaling: the older dict; ``rope_parameters``: the newer one. At most one of them.
        is_neox_style: halves are paired (True) or neighbours are (False).
        dtype: dtype to rotate in; None is the query's.

    Raises:
        ConfigFileError: E_CONFIG, an unknown kind, or numbers that make no sense.
    """
    settings = _plain(rope_parameters) or _plain(rope_scaling)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    cls = _CLASSES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        near = difflib.get_close_matches(str(kind), _CLASSES, n=1)
        raise ConfigFileError(
            f"config.json asks for rope type {kind!r}; there are {', '.join(sorted(_CLASSES))}",
            hint=f"did you mean {near[0]!r}?" if near else None,
            detail={"rope_type": kind, "known": sorted(_CLASSES)},
        )
    if rotary_dim is None:
        rotary_dim = int(head_size * number(settings, "partial_rotary_factor", 1.0))
    theta = number(settings, "rope_theta", base)
    return cls(head_size, rotary_dim, max_position, theta, is_neox_style, dtype, settings=settings)


def rope_from_config(
    config: Any,
    *,
    head_size: int,
    layer_type: str | None = None,
    is_neox_style: bool = True,
    dtype: torch.dtype | None = None,
) -> RotaryEmbedding:
    """``get_rope`` for a model's config (attributes as config.json names them)."""
    return get_rope(
        head_size,
        max_position=getattr(config, "max_position_embeddings", None) or 2048,
        rope_parameters=rope_parameters_of(config, layer_type),
        is_neox_style=is_neox_style,
        dtype=dtype,
    )


def rope_parameters_of(config: Any, layer_type: str | None = None) -> dict[str, Any]:
    """One flat dict of rope settings from either spelling in config.json.

    ``rope_theta``, ``partial_rotary_factor`` and ``original_max_position_embeddings`` may also
    stand beside the dict, at the top of the config; the dict wins, but for the last of the three.
    """
    settings = _plain(getattr(config, "rope_parameters", None))
    settings = settings or _plain(getattr(config, "rope_scaling", None))
    if layer_type is not None and layer_type in settings:
        settings = _plain(settings[layer_type])
    for key in ("rope_theta", "partial_rotary_factor"):
        value = getattr(config, key, None)
        if value is not None and settings.get(key) is None:
            settings[key] = value
    original = getattr(config, "original_max_position_embeddings", None)
    if original is not None:
        settings["original_max_position_embeddings"] = original
    return settings


def _plain(settings: object) -> dict[str, Any]:
    """A settings object (dict, attributes, or None) as a new dict.

    Raises:
        ConfigFileError: E_CONFIG, it is neither.
    """
    if settings is None:
        return {}
    if isinstance(settings, Mapping):
        return dict(settings)
    if isinstance(settings, HFConfig):
        return settings.to_dict()
    raise ConfigFileError(f"rope settings are {type(settings).__name__}, not an object")
