"""Logits are the head's rows times the hidden state, without the padding."""

from __future__ import annotations

import pytest
import torch

from loadkit.config import ParallelConfig
from loadkit_layers.logits_processor import LogitsProcessor
from loadkit_layers.vocab_parallel_embedding import ParallelLMHead


@pytest.fixture
def head() -> ParallelLMHead:
    made = ParallelLMHead(70, 8, parallel=ParallelConfig())
    rows = torch.randn(70, 8, generator=torch.Generator().manual_seed(0))
    made.weight_loader(made.weight, rows)  # type: ignore[arg-type]
    return made


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def plain(head: ParallelLMHead, hidden: torch.Tensor) -> torch.Tensor:
    assert isinstance(head.weight, torch.Tensor)
    return hidden @ head.weight[:70].T


def test_padding_rows_give_no_logits(head: ParallelLMHead, hidden: torch.Tensor) -> None:
    logits = LogitsProcessor(70)(head, hidden)
    assert logits.shape == (3, 70)
    torch.testing.assert_close(logits, plain(head, hidden))


def test_added_tokens_may_be_cut_off(head: ParallelLMHead, hidden: torch.Tensor) -> None:
    logits = LogitsProcessor(70, 64)(head, hidden)
    torch.testing.assert_close(logits, plain(head, hidden)[:, :64])


def test_the_cap_comes_before_the_scale(head: ParallelLMHead, hidden: torch.Tensor) -> None:
    logits = LogitsProcessor(70, scale=0.5, soft_cap=2.0)(head, hidden)
    torch.testing.assert_close(logits, 0.5 * 2.0 * torch.tanh(plain(head, hidden) / 2.0))
