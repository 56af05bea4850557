"""Pooling gives one vector per sequence."""

from __future__ import annotations

import pytest
import torch

from loadkit.errors import UsageError
from loadkit_layers.pooler import Pooler, PoolingType

BORDERS = [0, 4, 5, 11]


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(11, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("borders", [BORDERS, torch.tensor(BORDERS)], ids=["list", "tensor"])
def test_each_kind_takes_its_tokens(hidden: torch.Tensor, borders: torch.Tensor) -> None:
    assert torch.equal(Pooler("cls")(hidden, borders), hidden[[0, 4, 5]])
    assert torch.equal(Pooler(PoolingType.LAST)(hidden, borders), hidden[[3, 4, 10]])
    means = torch.stack([hidden[:4].mean(0), hidden[4], hidden[5:].mean(0)])
    torch.testing.assert_close(Pooler("MEAN")(hidden, borders), means, rtol=0, atol=1e-7)


def test_normalised_vectors_have_length_one(hidden: torch.Tensor) -> None:
    pooled = Pooler("mean", normalize=True)(hidden, BORDERS)
    torch.testing.assert_close(pooled.norm(dim=-1), torch.ones(3))
    plain = Pooler("mean")(hidden, BORDERS)
    torch.testing.assert_close(pooled, plain / plain.norm(dim=-1, keepdim=True))


def test_without_borders_there_is_one_sequence(hidden: torch.Tensor) -> None:
    assert torch.equal(Pooler("last")(hidden), hidden[-1:])


def test_a_bfloat16_mean_is_taken_in_float32() -> None:
    hidden = torch.cat([torch.full((1, 2), 256.0), torch.ones(255, 2)]).bfloat16()
    assert Pooler("mean")(hidden).tolist() == [[2.0, 2.0]]  # 511 / 256, rounded once
    assert Pooler("mean")(hidden).dtype == torch.bfloat16


def test_a_sequence_without_tokens_is_refused(hidden: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="sequence 1 of 3 has no token"):
        Pooler("mean")(hidden, [0, 4, 4, 11])


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no pooling type 'max'; there are cls, last, mean"):
        Pooler("max")
