"""Scaled dot-product attention over this rank's heads, one or several sequences at a time.

# T tokens in the call, S tokens a query may see, H heads, K kv heads (H a multiple of K)
# D head size, Dv value head size, W sliding window; H and K are counts of this rank
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from loadkit.errors import ModelError, UsageError
from loadkit_layers.kv_cache import KVCache
from loadkit_layers.sequences import CuSeqlens, sequence_spans

__all__ = ["Attention"]

_BLOCK = 1024  # queries per mask, so that a mask never has T x T elements


class Attention(nn.Module):
    """Softmax attention without parameters; projections are the model's.

    A sliding window is counted as transformers does: causal attention sees the last W tokens, the
    query's own included; bidirectional attention sees W tokens to either side.

    Args:
        num_heads: H, query heads on this rank.
        head_size: D.
        scale: what scores are multiplied by, often ``D ** -0.5``.
        num_kv_heads: K on this rank; None is H.
        v_head_size: Dv; None is D.
        sliding_window: W; None is no window.
        causal: a query sees no later token; False for encoders.
        logits_soft_cap: c of ``c * tanh(score / c)``; None is no cap.
        prefix: the module's dotted name, for messages.

    Raises:
        ModelError: H is no multiple of K, or the window is not positive.
    """

    layout_version = 0  # post-processing changes no weight

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        *,
        v_head_size: int | None = None,
        sliding_window: int | None = None,
        causal: bool = True,
        logits_soft_cap: float | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size
        self.v_head_size = head_size if v_head_size is None else v_head_size
        self.scale = scale
        self.sliding_window = sliding_window
        self.causal = causal
        self.logits_soft_cap = logits_soft_cap
        self.prefix = prefix
        self.kv_cache: KVCache | None = None
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ModelError(
                f"attention {prefix!r} has {num_heads} query heads on this rank, "
                f"which is no multiple of its {self.num_kv_heads} kv heads"
            )
        if sliding_window is not None and sliding_window < 1:
            raise ModelError(f"attention {prefix!r} has a sliding window of {sliding_window}")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cu_seqlens: CuSeqlens = None,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            query: ``[T, H*D]``.
            key: ``[T, K*D]``.
            value: ``[T, K*Dv]``.
            cu_seqlens: ``[B + 1]`` borders of several sequences; None is one. With a ``kv_cache``
                bound there is one sequence, whose earlier tokens the cache holds.

        Returns:
            ``[T, H*Dv]``, in the query's dtype.

        Raises:
            UsageError: the borders do not fit, or several sequences meet one cache.
        """
        total = query.shape[0]
        queries = query.view(total, self.num_heads, self.head_size)
        keys = key.view(total, self.num_kv_heads, self.head_size)
        values = value.view(total, self.num_kv_heads, self.v_head_size)
        spans = sequence_spans(cu_seqlens, total)
        if self.kv_cache is not None:
            if len(spans) > 1:
                raise UsageError(f"a kv cache holds one sequence, the call has {len(spans)}")
            out = self._attend(queries, *self.kv_cache.append(keys, values))
        elif len(spans) == 1:
            out = self._attend(queries, keys, values)
        else:
            out = torch.cat([self._attend(queries[a:b], keys[a:b], values[a:b]) for a, b in spans])
        return out.reshape(total, self.num_heads * self.v_head_size)

    def new_kv_cache(self) -> KVCache:
        """An empty cache that fits this layer, for whoever generates to bind to ``kv_cache``."""
        return KVCache()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called once the weights are there. Nothing to do: scales are part of the config."""

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """One sequence: ``queries [T, H, D]`` are its last T tokens, ``keys``, ``values`` its S."""
        T, S = queries.shape[0], keys.shape[0]
        window = self.sliding_window
        if self.logits_soft_cap is None and (window is None or window >= S):
            if not self.causal:
                return self._scores(queries, keys, values)
            if T == S:
                return self._scores(queries, keys, values, causal=True)
        blocks = []
        for start in range(S - T, S, _BLOCK):
            rows = range(start, min(start + _BLOCK, S))
            columns = self._visible(rows, S)
            mask = self._mask(rows, columns, queries.device)
            some = slice(rows.start - (S - T), rows.stop - (S - T))
            seen = slice(columns.start, columns.stop)
            blocks.append(self._scores(queries[some], keys[seen], values[seen], mask=mask))
        return (
            torch.cat(blocks) if blocks else values.new_empty(0, self.num_heads, self.v_head_size)
        )

    def _visible(self, rows: range, S: int) -> range:
        """The tokens that any query of ``rows`` sees."""
        first, last = 0, rows.stop if self.causal else S
        if self.sliding_window is not None:
            first = max(0, rows.start - self.sliding_window + (1 if self.causal else 0))
            last = min(last, rows.stop + self.sliding_window)
        return range(first, last)

    def _mask(self, rows: range, columns: range, device: torch.device) -> torch.Tensor | None:
        """True where a query of ``rows`` sees a token of ``columns``; None where it sees all."""
        if len(rows) == 1:
            return None
        row = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
        ahead = torch.arange(columns.start, columns.stop, device=device) - row
        if self.causal:
            seen = ahead <= 0
            return seen if self.sliding_window is None else seen & (ahead > -self.sliding_window)
        return None if self.sliding_window is None else ahead.abs() <= self.sliding_window

    def _scores(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        """Attention of ``[T, H, D]`` over ``[S, K, D]`` and ``[S, K, Dv]``: ``[T, H, Dv]``."""
        # The fused kernels want [batch, heads, tokens, channels].
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (queries, keys, values))
        if self.logits_soft_cap is None:
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=causal,
                scale=self.scale,
                enable_gqa=self.num_kv_heads != self.num_heads,
            )
        else:
            out = self._capped(q, k, v, mask, self.logits_soft_cap)
        return out.squeeze(0).transpose(0, 1)

    def _capped(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        cap: float,
    ) -> torch.Tensor:
        """Attention with capped scores, which no fused kernel offers."""
        groups = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.tanh((q @ k.transpose(-1, -2)) * self.scale / cap) * cap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights: torch.Tensor = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        return weights @ v

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_size={self.head_size}, "
            f"window={self.sliding_window}, causal={self.causal}"
        )
