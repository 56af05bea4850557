"""The angle per position of each rotated pair, for every kind of rotary scaling.

# D rotated width of a head (even), so D/2 pairs

Each function takes ``(dim, base, max_position, settings)`` and gives ``(inv_freq, factor)``:
float32 ``[D/2]`` radians per position on the CPU, and what cosines and sines are multiplied by.
The float32 arithmetic follows the order of operations that checkpoints were trained and tested
with, so that far positions (thousands of radians) agree as well.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from loadkit.errors import ConfigFileError
from loadkit.text import printable

__all__ = ["ROPE_TYPES", "dynamic_inv_freq", "number", "plain_inv_freq"]

Settings = Mapping[str, Any]
Frequencies = tuple[torch.Tensor, float]


def number(
    settings: Settings, key: str, default: float | None = None, *, minimum: float | None = None
) -> float:
    """A finite number of the rope settings.

    Raises:
        ConfigFileError: E_CONFIG, the key is missing (no default), no number, or below ``minimum``.
    """
    value = settings.get(key)
    if value is None:
        if default is not None:
            return default
        kind = settings.get("rope_type", "default")
        raise ConfigFileError(
            f"rope type {kind!r} needs {key!r} in rope_parameters (or rope_scaling)",
            detail={"rope_type": kind, "missing": key},
        )
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not abs(value) <= sys.float_info.max:
        raise ConfigFileError(f"rope {key} is {printable(repr(value), 120)}, not a finite number")
    if minimum is not None and value < minimum:
        raise ConfigFileError(f"rope {key} is {value}, less than {minimum:g}")
    found: float = value
    return found


def plain_inv_freq(dim: int, base: float | torch.Tensor) -> torch.Tensor:
    """``base ** -(2i / D)`` for pair i: float32 ``[D/2]``, on the device of ``base``."""
    device = base.device if isinstance(base, torch.Tensor) else torch.device("cpu")
    steps = torch.arange(0, dim, 2, dtype=torch.int64, device=device).to(torch.float32)
    inverse: torch.Tensor = 1.0 / (base ** (steps / dim))
    return inverse


def dynamic_inv_freq(
    dim: int, base: float, max_position: int, factor: float, length: torch.Tensor
) -> torch.Tensor:
    """NTK frequencies for sequences of ``length`` tokens (a 0-d tensor, > ``max_position``)."""
    stretch = (factor * length.to(torch.float32) / max_position) - (factor - 1)
    return plain_inv_freq(dim, base * stretch ** (dim / (dim - 2)))


def _default(dim: int, base: float, max_position: int, settings: Settings) -> Frequencies:
    return plain_inv_freq(dim, base), 1.0


def _linear(dim: int, base: float, max_position: int, settings: Settings) -> Frequencies:
    return plain_inv_freq(dim, base) / _factor(settings), 1.0


def _dynamic(dim: int, base: float, max_position: int, settings: Settings) -> Frequencies:
    """Up to ``max_position`` the plain ones; ``dynamic_inv_freq`` serves longer sequences."""
    _factor(settings)
    if dim <= 2:
        raise ConfigFileError(f"rope type 'dynamic' needs a rotary width above 2, not {dim}")
    return plain_inv_freq(dim, base), 1.0


def _yarn(dim: int, base: float, max_position: int, settings: Settings) -> Frequencies:
    """Source: YaRN, arXiv 2309.00071, sections 3.2 to 3.4."""
    original = number(settings, "original_max_position_embeddings", max_position, minimum=1)
    factor = number(settings, "factor", max_position / original, minimum=1e-6)
    fast, slow = number(settings, "beta_fast", 32) or 32, number(settings, "beta_slow", 1) or 1

    def pair_that_turns(times: float) -> float:
        """The pair index that makes ``times`` full turns over the original length."""
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_that_turns(fast), pair_that_turns(slow)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(0, dim, 2, device="cpu").to(torch.float32)
    period = base ** (steps / dim)
    index = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - torch.clamp((index - low) / (high - low), 0, 1)
    inv_freq = (1.0 / (factor * period)) * (1 - kept) + (1.0 / period) * kept
    return inv_freq, _yarn_magnitude(settings, factor)


def _yarn_magnitude(settings: Settings, factor: float) -> float:
    """What the attention logits' temperature adds to cosines and sines."""
    if settings.get("attention_factor") is not None:
        return number(settings, "attention_factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    upper, lower = number(settings, "mscale", 0), number(settings, "mscale_all_dim", 0)
    return mscale(upper) / mscale(lower) if upper and lower else mscale(1.0)


def _llama3(dim: int, base: float, max_position: int, settings: Settings) -> Frequencies:
    """Long waves are stretched by ``factor``, short ones kept, those between are blended."""
    factor = _factor(settings)
    low, high = number(settings, "low_freq_factor"), number(settings, "high_freq_factor")
    original = number(settings, "original_max_position_embeddings", max_position, minimum=1)
    if not 0 < low < high:
        raise ConfigFileError(
            f"rope type 'llama3' needs 0 < low_freq_factor < high_freq_factor, not {low} and {high}"
        )
    inv_freq = plain_inv_freq(dim, base)
    wave = 2 * math.pi / inv_freq
    scaled = torch.where(wave > original / low, inv_freq / factor, inv_freq)
    blend = (original / wave - low) / (high - low)
    blended = (1 - blend) * scaled / factor + blend * scaled
    between = ~(wave < original / high) & ~(wave > original / low)
    return torch.where(between, blended, scaled), 1.0


def _factor(settings: Settings) -> float:
    """``factor``; values below 1 are legal (shorter context), zero and less are not."""
    return number(settings, "factor", minimum=1e-6)


ROPE_TYPES: dict[str, Callable[[int, float, int, Settings], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}
