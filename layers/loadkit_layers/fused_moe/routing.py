"""Which experts a token goes to, and with what weight. T tokens, E experts, G groups, k chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from loadkit.errors import ConfigFileError

__all__ = ["Router"]

_SCORING = ("softmax", "sigmoid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How experts are chosen from the scores of a layer's gate.

    Attributes:
        num_experts: E.
        top_k: experts per token.
        scoring: "softmax" over all experts, or "sigmoid" of each.
        renormalize: the chosen weights sum to one, before ``scale``.
        groups: experts lie in so many groups of neighbours; 1: no groups.
        top_groups: of so many groups experts are chosen, the best ones. A group is as good as its
            best expert; where choices are corrected by a bias, as its two best together.
        scale: what the weights are multiplied by in the end.

    Raises:
        ConfigFileError: the numbers do not go together.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        E, G = self.num_experts, self.groups
        if self.scoring not in _SCORING:
            raise ConfigFileError(
                f"experts are scored by {self.scoring!r}; accepted: {' and '.join(_SCORING)}"
            )
        counts: dict[str, Any] = {"groups": G, "top_groups": self.top_groups, "top_k": self.top_k}
        for name, value in counts.items():
            if value < 1:
                raise ConfigFileError(f"{name} of {E} experts is {value}, less than 1")
        if E % G or self.top_groups > G:
            raise ConfigFileError(
                f"{self.top_groups} of {G} groups of {E} experts: groups are of one size, and no "
                "more are chosen than there are"
            )
        if self.top_k > E // G * self.top_groups:
            raise ConfigFileError(
                f"{self.top_k} experts per token of {E // G * self.top_groups} to choose from"
            )

    def route(
        self, logits: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose for every token.

        Args:
            logits: [T, E], the gate's output.
            bias: [E], added to the scores for choosing, not to the weights.

        Returns:
            Weights [T, k] in float32, experts [T, k] in int64.
        """
        if self.scoring == "softmax":
            scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        else:
            scores = logits.float().sigmoid()
        choice = scores if bias is None else scores + bias.float()
        if self.groups > 1:
            choice = self._in_best_groups(choice, 1 if bias is None else 2)
        experts = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.scale if self.scale != 1.0 else weights, experts

    def _in_best_groups(self, choice: torch.Tensor, judged_by: int) -> torch.Tensor:
        """The scores [T, E], minus infinity outside of each token's best groups."""
        grouped = choice.unflatten(-1, (self.groups, -1))
        judged_by = min(judged_by, grouped.shape[-1])
        best = grouped.topk(judged_by, dim=-1).values.sum(dim=-1).topk(self.top_groups, dim=-1)
        left_out = torch.ones(*grouped.shape[:-1], dtype=torch.bool, device=choice.device)
        left_out.scatter_(-1, best.indices, False)
        kept: torch.Tensor = grouped.masked_fill(left_out[..., None], float("-inf"))
        return kept.flatten(-2)
