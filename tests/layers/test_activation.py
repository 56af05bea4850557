"""Activations equal transformers' bit for bit in float32."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from helpers.ranks import randn
from loadkit.errors import ConfigFileError
from loadkit_layers import GeluAndMul, SiluAndMul, get_act_and_mul_fn, get_act_fn

NAMES = ["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh"]


@pytest.mark.parametrize("name", NAMES)
def test_an_activation_equals_transformers(name: str) -> None:
    x = randn(7, 33) * 4
    assert torch.equal(get_act_fn(name)(x), ACT2FN[name](x))
    assert torch.equal(get_act_fn(name.upper())(x), ACT2FN[name](x))


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "silu", "swish"])
def test_a_gated_activation_is_the_activation_of_the_first_half_times_the_second(name: str) -> None:
    x = randn(7, 32)
    assert torch.equal(get_act_and_mul_fn(name)(x), ACT2FN[name](x[:, :16]) * x[:, 16:])


def test_the_gated_classes() -> None:
    x = randn(3, 8)
    assert torch.equal(SiluAndMul()(x), get_act_and_mul_fn("silu")(x))
    assert torch.equal(GeluAndMul("tanh")(x), get_act_and_mul_fn("gelu_pytorch_tanh")(x))
    with pytest.raises(ConfigFileError, match="quick"):
        GeluAndMul("quick")


def test_an_unknown_activation_lists_the_known_ones() -> None:
    with pytest.raises(ConfigFileError, match="gelu_new"):
        get_act_fn("geluu")
    with pytest.raises(ConfigFileError, match="silu"):
        get_act_and_mul_fn("relu")
