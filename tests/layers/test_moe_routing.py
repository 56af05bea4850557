"""Which experts a token goes to: softmax and sigmoid, groups, and the correction of choices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.ranks import randn
from loadkit.errors import ConfigFileError
from loadkit_layers import Router

E, T = 16, 50


def as_rows(weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """[T, E]: each token's weight of each expert, whatever order they were chosen in."""
    return torch.zeros(len(weights), E).scatter(1, experts, weights)


@pytest.mark.parametrize("renormalize", [False, True])
def test_softmax_takes_the_most_likely(renormalize: bool) -> None:
    logits = randn(T, E)
    weights, experts = Router(num_experts=E, top_k=3, renormalize=renormalize).route(logits)
    likely, chosen = logits.softmax(-1).topk(3)
    assert torch.equal(experts, chosen)
    if renormalize:
        likely = likely / likely.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, likely)
    assert weights.dtype == torch.float32 and experts.dtype == torch.int64


def test_half_precision_scores_are_softmaxed_in_float32() -> None:
    logits = randn(T, E, dtype=torch.bfloat16)
    weights, _ = Router(num_experts=E, top_k=2, renormalize=False).route(logits)
    assert torch.equal(weights, logits.float().softmax(-1).topk(2).values)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_sigmoid_with_groups_and_a_correction_equals_transformers(
    groups: tuple[int, int], renormalize: bool
) -> None:
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    sizes: Any = {
        "num_experts_per_tok": 4,
        "num_local_experts": E,
        "hidden_size": E,
        "routed_scaling_factor": 2.5,
        "n_group": groups[0],
        "topk_group": groups[1],
        "norm_topk_prob": renormalize,
    }
    theirs = deepseek.DeepseekV3TopkRouter(SimpleNamespace(**sizes))
    theirs.weight.data.copy_(torch.eye(E))
    bias = 0.2 * randn(E, seed=1)
    theirs.e_score_correction_bias.copy_(bias)
    logits = randn(T, E)
    _, weights, experts = theirs(logits)
    router = Router(
        num_experts=E,
        top_k=4,
        scoring="sigmoid",
        renormalize=renormalize,
        groups=groups[0],
        top_groups=groups[1],
        scale=2.5,
    )
    torch.testing.assert_close(
        as_rows(*router.route(logits, bias)), as_rows(weights.detach(), experts)
    )


def test_a_correction_changes_the_choice_and_not_the_weight() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    router = Router(num_experts=4, top_k=1, scoring="sigmoid", renormalize=False)
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    weights, experts = router.route(logits, bias)
    assert experts.tolist() == [[3]]
    assert torch.equal(weights, logits[:, 3:].sigmoid())


def test_without_a_correction_a_group_is_as_good_as_its_best() -> None:
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]])  # groups (3, -9) and (2, 2)
    router = Router(num_experts=4, top_k=2, groups=2)
    assert sorted(router.route(logits)[1][0].tolist()) == [0, 1]
    corrected = router.route(logits, torch.zeros(4))[1]
    assert sorted(corrected[0].tolist()) == [0, 1]
    balanced = Router(num_experts=4, top_k=2, groups=2, scoring="sigmoid")
    assert sorted(balanced.route(logits, torch.zeros(4))[1][0].tolist()) == [2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 0}, {"top_k": 17}, {"scoring": "tanh"}, {"groups": 3}, {"groups": 0},
        {"groups": 4, "top_groups": 5}, {"groups": 4, "top_groups": 1, "top_k": 5},
        {"top_groups": 0},
    ],
)  # fmt: skip
def test_numbers_that_do_not_go_together_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigFileError):
        Router(**{"num_experts": E, "top_k": 2, **wrong})
