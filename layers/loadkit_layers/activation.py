"""Activations, plain and gated. T tokens, F feed-forward width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from loadkit.errors import ConfigFileError
from loadkit_layers.custom_op import CustomOp

__all__ = ["Activation", "GeluAndMul", "SiluAndMul", "get_act_and_mul_fn", "get_act_fn"]


@CustomOp.register("silu_and_mul")
class SiluAndMul(CustomOp):
    """silu(gate) * up of [..., 2 F] = gate | up, giving [..., F]."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


@CustomOp.register("gelu_and_mul")
class GeluAndMul(CustomOp):
    """gelu(gate) * up of [..., 2 F] = gate | up, giving [..., F].

    Args:
        approximate: "none" or "tanh".
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ConfigFileError(f"gelu approximation {approximate!r} is neither none nor tanh")
        self.approximate = approximate

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate=self.approximate) * up

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


def _gelu_new(x: torch.Tensor) -> torch.Tensor:
    """The tanh form as GPT-2 wrote it out."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The tanh form as torch computes it."""
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid form of CLIP."""
    return x * torch.sigmoid(1.702 * x)


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_new,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


class Activation(torch.nn.Module):
    """An activation of config.json by its name; elementwise, any shape."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._function = _FUNCTIONS[_known(name, _FUNCTIONS)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)

    def extra_repr(self) -> str:
        return self.name


def get_act_fn(name: str) -> Activation:
    """The activation that config.json calls ``name`` (``hidden_act``); case does not matter.

    Raises:
        ConfigFileError: an unknown name; lists the known ones.
    """
    return Activation(name)


_GATED: dict[str, Callable[[], CustomOp]] = {
    "gelu": GeluAndMul,
    "gelu_pytorch_tanh": lambda: GeluAndMul("tanh"),
    "silu": SiluAndMul,
    "swish": SiluAndMul,
}


def get_act_and_mul_fn(name: str) -> CustomOp:
    """The gated form of an activation, for a fused gate and up projection.

    Raises:
        ConfigFileError: an activation without a gated form; lists those with one.
    """
    return _GATED[_known(name, _GATED)]()


def _known(name: str, table: Mapping[str, Callable[..., object]]) -> str:
    """The table's key for a name from config.json."""
    key = name.lower()
    if key not in table:
        raise ConfigFileError(
            f"activation {name!r} is not known here; known: {', '.join(sorted(table))}"
        )
    return key
