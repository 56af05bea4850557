"""Norms equal transformers' bit for bit, in float32 and bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from helpers.ranks import randn
from loadkit_layers import GemmaRMSNorm, LayerNorm, RMSNorm

D = 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("ours", "theirs"), [(RMSNorm, LlamaRMSNorm), (GemmaRMSNorm, Gemma3RMSNorm)]
)
def test_an_rms_norm_equals_transformers(ours: Any, theirs: Any, dtype: torch.dtype) -> None:
    x, residual, weight = (randn(3, 5, D, seed=s, dtype=dtype) for s in range(3))
    norm, reference = ours(D, 1e-5, dtype=dtype), theirs(D, 1e-5).to(dtype)
    assert torch.equal(norm(x), reference(x))  # a new norm is the identity on the scale
    norm.weight.copy_(weight[0, 0])
    reference.weight.data.copy_(weight[0, 0])
    assert torch.equal(norm(x), reference(x))
    y, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, reference(x + residual))
    assert y.dtype == dtype


def test_an_rms_norm_without_a_weight_has_no_parameter() -> None:
    norm = RMSNorm(D, has_weight=False)
    assert not list(norm.parameters())
    assert torch.equal(norm(randn(2, D)), RMSNorm(D)(randn(2, D)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_norm_equals_torchs(dtype: torch.dtype, bias: bool) -> None:
    norm = LayerNorm(D, 1e-12, bias=bias, dtype=dtype)
    reference = torch.nn.LayerNorm(D, 1e-12, bias=bias, dtype=dtype)
    reference.weight.data.copy_(randn(D))
    if bias:
        reference.bias.data.copy_(randn(D, seed=1))
    norm.load_state_dict(reference.state_dict())
    x = randn(4, D, dtype=dtype)
    assert torch.equal(norm(x), reference(x))


def test_norms_take_no_part_in_training() -> None:
    for norm in (RMSNorm(D), GemmaRMSNorm(D), LayerNorm(D)):
        assert not any(param.requires_grad for param in norm.parameters())
