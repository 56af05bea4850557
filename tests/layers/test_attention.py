"""Attention equals a plain softmax over the tokens that each query may see."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import loadkit_layers.attention as module
from loadkit.errors import ModelError, UsageError
from loadkit_layers.attention import Attention
from loadkit_layers.kv_cache import KVCache

HEADS, KV_HEADS, HEAD, V_HEAD = 6, 2, 8, 4


def inputs(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    widths = (HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * V_HEAD)
    query, key, value = (torch.randn(tokens, width, generator=made) for width in widths)
    return query, key, value


def attention(**options: Any) -> Attention:
    return Attention(HEADS, HEAD, 0.3, KV_HEADS, v_head_size=V_HEAD, **options)


def plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
) -> torch.Tensor:
    """The definition, one query and one head at a time, in float64."""
    tokens = len(query)
    q = query.double().view(tokens, HEADS, HEAD)
    k, v = key.double().view(tokens, KV_HEADS, HEAD), value.double().view(tokens, KV_HEADS, V_HEAD)
    out = torch.empty(tokens, HEADS, V_HEAD, dtype=torch.float64)
    for i in range(tokens):
        seen = [
            j
            for j in range(tokens)
            if (not causal or j <= i)
            and (
                sliding_window is None
                or (i - j < sliding_window if causal else abs(i - j) <= sliding_window)
            )
        ]
        for h in range(HEADS):
            group = h * KV_HEADS // HEADS
            scores = k[seen, group] @ q[i, h] * 0.3
            if logits_soft_cap is not None:
                scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
            out[i, h] = scores.softmax(0) @ v[seen, group]
    return out.view(tokens, HEADS * V_HEAD).float()


KINDS = [
    pytest.param({}, id="causal"),
    pytest.param({"causal": False}, id="bidirectional"),
    pytest.param({"sliding_window": 3}, id="window"),
    pytest.param({"sliding_window": 1}, id="window-of-one"),
    pytest.param({"sliding_window": 3, "causal": False}, id="window-both-ways"),
    pytest.param({"sliding_window": 999}, id="window-larger-than-the-text"),
    pytest.param({"logits_soft_cap": 0.7}, id="capped"),
    pytest.param({"logits_soft_cap": 0.7, "causal": False}, id="capped-bidirectional"),
    pytest.param({"logits_soft_cap": 0.7, "sliding_window": 4}, id="capped-window"),
]


@pytest.mark.parametrize("block", [1024, 4, 1], ids=lambda size: f"block{size}")
@pytest.mark.parametrize("options", KINDS)
def test_each_query_sees_what_it_may(
    options: dict[str, Any], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    query, key, value = inputs(13)
    out = attention(**options)(query, key, value)
    torch.testing.assert_close(out, plain(query, key, value, **options), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", KINDS)
def test_sequences_side_by_side_do_not_see_each_other(options: dict[str, Any]) -> None:
    query, key, value = inputs(17)
    borders = [0, 5, 5, 6, 17]
    out = attention(**options)(query, key, value, cu_seqlens=torch.tensor(borders))
    for start, end in pairwise(borders):
        part = (x[start:end] for x in (query, key, value))
        torch.testing.assert_close(out[start:end], plain(*part, **options), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [kind for kind in KINDS if "causal" not in str(kind.values)])
def test_a_cache_gives_what_the_whole_text_gives(options: dict[str, Any]) -> None:
    query, key, value = inputs(150)
    layer = attention(**options)
    whole = layer(query, key, value)
    layer.kv_cache = KVCache()
    pieces = [0, 70, 71, 72, 140, 149, 150]  # a prompt, single tokens, chunks; the cache grows
    parts = [layer(query[a:b], key[a:b], value[a:b]) for a, b in pairwise(pieces)]
    assert len(layer.kv_cache) == 150
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6)
    layer.kv_cache.clear()
    again = layer(query[:9], key[:9], value[:9])
    torch.testing.assert_close(again, whole[:9], rtol=0, atol=1e-6)


def test_a_mask_never_has_all_tokens_by_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    original = Attention._mask

    def spy(self: Attention, *given: Any) -> torch.Tensor | None:
        mask = original(self, *given)
        shapes.append(() if mask is None else tuple(mask.shape))
        return mask

    monkeypatch.setattr(Attention, "_mask", spy)
    attention(sliding_window=100)(*inputs(2500))
    assert shapes == [(1024, 1024), (1024, 1123), (452, 551)]


def test_no_token_is_no_fault_and_bfloat16_stays() -> None:
    assert attention()(*inputs(0)).shape == (0, HEADS * V_HEAD)
    assert attention(sliding_window=2)(*inputs(0)).shape == (0, HEADS * V_HEAD)
    out = attention(logits_soft_cap=5.0)(*(x.bfloat16() for x in inputs(5)))
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "borders",
    [[0, 4], [1, 5], [0, 3, 2, 5], [], [0]],
    ids=["short", "late", "falls", "none", "one"],
)
def test_borders_that_do_not_fit_are_refused(borders: list[int]) -> None:
    with pytest.raises(UsageError, match="does not describe 5 tokens"):
        attention()(*inputs(5), cu_seqlens=borders)


def test_one_cache_takes_one_sequence() -> None:
    layer = attention()
    layer.kv_cache = KVCache()
    with pytest.raises(UsageError, match="holds one sequence, the call has 2"):
        layer(*inputs(5), cu_seqlens=[0, 2, 5])


def test_head_counts_and_windows_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ModelError, match="5 query heads"):
        Attention(5, 8, 1.0, 2, prefix="layers.0.self_attn.attn")
    with pytest.raises(ModelError, match="window of 0"):
        Attention(4, 8, 1.0, sliding_window=0)


def test_it_has_no_parameters_and_the_hook_after_loading() -> None:
    layer = attention()
    layer.process_weights_after_loading(torch.float32)
    assert layer.state_dict() == {}
