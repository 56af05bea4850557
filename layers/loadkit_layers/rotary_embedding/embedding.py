"""Rotary position embedding: pairs of a head's channels turn by an angle that grows with position.

# T tokens, H heads, D head size, R rotated width (R <= D, even)

Nothing is tabulated: a module holds ``inv_freq`` (float32 ``[R/2]``, some hundred bytes) and
computes cosines and sines of the positions it is given. So ``max_position`` costs no memory, a
position beyond it is no fault, and planning a model with 131,072 positions is cheap as a toy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from loadkit.errors import ConfigFileError
from loadkit_layers.custom_op import CustomOp
from loadkit_layers.rotary_embedding.frequencies import ROPE_TYPES, dynamic_inv_freq, number

__all__ = [
    "DynamicNTKScalingRotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
]


@CustomOp.register("rotary_embedding")
class RotaryEmbedding(CustomOp):
    """Turns queries and keys by their positions.

    Args:
        head_size: D, channels of a head.
        rotary_dim: R, how many of them turn (the first R); the rest pass through.
        max_position: tokens the model was trained for; some scalings depend on it.
        base: the longest wave is about ``2 pi base`` positions.
        is_neox_style: True pairs channel i with ``i + R/2``, False pairs ``2i`` with ``2i + 1``.
        dtype: dtype to rotate in; None is the query's. Angles are always float32.
        settings: the scaling's own numbers, as config.json names them.

    Raises:
        ConfigFileError: E_CONFIG, a width, number or setting that the scaling cannot use.
    """

    rope_type: ClassVar[str] = "default"
    inv_freq: torch.Tensor

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: float,
        is_neox_style: bool = True,
        dtype: torch.dtype | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not 0 < rotary_dim <= head_size or rotary_dim % 2:
            raise ConfigFileError(
                f"rotary width {rotary_dim} of a head of {head_size}: "
                f"it must be even and in 2..{head_size}"
            )
        self.head_size = head_size
        self.rotary_dim = rotary_dim
        self.max_position = max_position
        self.base = number({"rope_theta": base}, "rope_theta", minimum=1e-6)
        self.is_neox_style = is_neox_style
        self.dtype = dtype
        self.settings = {**(settings or {}), "rope_type": self.rope_type}
        inv_freq, self.attention_factor = self._frequencies()
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _frequencies(self) -> tuple[torch.Tensor, float]:
        compute = ROPE_TYPES[self.rope_type]
        return compute(self.rotary_dim, self.base, self.max_position, self.settings)

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> RotaryEmbedding:
        """Follow the model to its device, but never to a dtype: half-precision angles are wrong."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.inv_freq.dtype != torch.float32:
            self.inv_freq = self._frequencies()[0].to(self.inv_freq.device)
        return self

    def frequencies_for(self, positions: torch.Tensor) -> torch.Tensor:
        """``inv_freq`` for these positions, on their device: float32 ``[R/2]``."""
        return self.inv_freq.to(positions.device)

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of each position's angles: float32 ``[T, R/2]`` each."""
        angles = positions.unsqueeze(-1).to(torch.float32) * self.frequencies_for(positions)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate ``query [T, H*D]`` and ``key [T, K*D]`` (optional) by ``positions [T]``."""
        cos, sin = self.cos_sin(positions)
        rotated = self._rotate(query, cos, sin)
        return rotated, None if key is None else self._rotate(key, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``x [T, H*D]`` turned by ``cos, sin [T, R/2]``; gives the dtype of ``x``."""
        dtype = self.dtype or x.dtype
        cos, sin = cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)
        heads = x.unflatten(-1, (-1, self.head_size))
        turning, kept = heads.split([self.rotary_dim, self.head_size - self.rotary_dim], dim=-1)
        turning = turning.to(dtype)
        if self.is_neox_style:
            first, second = turning.chunk(2, dim=-1)
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        else:
            first, second = turning[..., 0::2], turning[..., 1::2]
            pairs = (first * cos - second * sin, second * cos + first * sin)
            turned = torch.stack(pairs, dim=-1).flatten(-2)
        turned = turned.to(x.dtype)
        return (torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned).flatten(-2)

    def extra_repr(self) -> str:
        return (
            f"type={self.rope_type}, head_size={self.head_size}, rotary_dim={self.rotary_dim}, "
            f"base={self.base:g}, max_position={self.max_position}, neox={self.is_neox_style}"
        )


class LinearScalingRotaryEmbedding(RotaryEmbedding):
    """Positions divided by ``factor``."""

    rope_type = "linear"


class DynamicNTKScalingRotaryEmbedding(RotaryEmbedding):
    """Plain up to ``max_position`` tokens; the base grows with sequences longer than that.

    The length is that of the longest position in the call, so one call turns all its tokens alike
    and the answer does not depend on earlier calls.
    """

    rope_type = "dynamic"

    def frequencies_for(self, positions: torch.Tensor) -> torch.Tensor:
        plain = super().frequencies_for(positions)
        if positions.numel() == 0:
            return plain
        length = positions.max() + 1
        factor = number(self.settings, "factor")
        longer = dynamic_inv_freq(self.rotary_dim, self.base, self.max_position, factor, length)
        return torch.where(length > self.max_position, longer, plain)


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    """Fast pairs kept, slow pairs stretched, and a temperature (``mscale``)."""

    rope_type = "yarn"


class Llama3RotaryEmbedding(RotaryEmbedding):
    """Llama 3.1's blend of kept and stretched waves."""

    rope_type = "llama3"
