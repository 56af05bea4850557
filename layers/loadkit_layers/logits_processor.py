"""Hidden states to logits over the whole vocabulary.

# T tokens, D model width, V vocabulary, P padded vocabulary, R tp size
"""

from __future__ import annotations

import torch
from torch import nn

from loadkit_layers.communication import all_gather
from loadkit_layers.vocab_parallel_embedding import ParallelLMHead

__all__ = ["LogitsProcessor"]


class LogitsProcessor(nn.Module):
    """Applies the head, joins the ranks' parts and cuts the padding off.

    Args:
        vocab_size: V, added tokens included.
        org_vocab_size: how many logits to give, where added tokens are not wanted; None: V.
        scale: what logits are multiplied by, after the cap.
        soft_cap: c of ``c * tanh(logit / c)``; None is no cap.
    """

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.org_vocab_size = vocab_size if org_vocab_size is None else org_vocab_size
        self.scale = scale
        self.soft_cap = soft_cap

    def forward(self, lm_head: ParallelLMHead, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [T, D]`` to logits ``[T, V]``, the same on every tp rank."""
        part: torch.Tensor = lm_head(hidden)
        logits = all_gather(part, lm_head.parallel)[..., : self.org_vocab_size]
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits if self.scale == 1.0 else logits * self.scale

    def extra_repr(self) -> str:
        return f"vocab={self.org_vocab_size}, scale={self.scale:g}, soft_cap={self.soft_cap}"
