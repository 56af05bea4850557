"""Layers over pipeline stages: every layer on one stage, and none below a missing one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loadkit.config import ParallelConfig
from loadkit.errors import ModelError
from loadkit_layers import (
    IntermediateTensors,
    PPMissingLayer,
    get_pp_indices,
    is_pp_missing_parameter,
    make_layers,
)

CASES = [(layers, stages) for layers in range(1, 14) for stages in range(1, layers + 1)]


@pytest.mark.parametrize(("layers", "stages"), CASES)
def test_stages_are_even_up_to_one_layer_and_the_last_has_no_more_than_others(
    layers: int, stages: int
) -> None:
    spans = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
    sizes = [end - start for start, end in spans]
    assert [i for start, end in spans for i in range(start, end)] == list(range(layers))
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)
    if max(sizes) > min(sizes) and sizes[0] == max(sizes):  # only where all between are larger
        assert sizes[:-1] == [max(sizes)] * (stages - 1)


def test_TP_05_three_layers_over_two_stages_are_two_and_one() -> None:
    assert [get_pp_indices(3, stage, 2) for stage in range(2)] == [(0, 2), (2, 3)]


@pytest.mark.parametrize("layers", [1, 3])
def test_more_stages_than_layers_name_the_legal_sizes(layers: int) -> None:
    with pytest.raises(ModelError) as caught:
        get_pp_indices(layers, 0, layers + 1)
    assert caught.value.code == "PP_INDIVISIBLE"
    assert caught.value.detail["legal"] == list(range(1, layers + 1))


def made(stage: int, stages: int = 3, layers: int = 5) -> tuple[int, int, nn.ModuleList, list[str]]:
    asked: list[str] = []

    def layer(*, prefix: str) -> nn.Module:
        asked.append(prefix)
        return nn.Linear(2, 2)

    parallel = ParallelConfig(pp_size=stages, pp_rank=stage)
    return *make_layers(layers, layer, "model.layers", parallel), asked


def test_a_stage_makes_its_own_layers_under_the_numbers_of_the_whole_model() -> None:
    start, end, layers, asked = made(1)
    assert (start, end, len(layers)) == (2, 4, 5)
    assert asked == ["model.layers.2", "model.layers.3"]
    kinds = [type(layer) is PPMissingLayer for layer in layers]
    assert kinds == [True, True, False, False, True]
    assert [name for name, _ in layers.named_parameters()] == [
        "2.weight", "2.bias", "3.weight", "3.bias",
    ]  # fmt: skip


def test_a_missing_layer_says_which_stage_has_it() -> None:
    _, _, layers, _ = made(1)
    said = [layer.skip_weight("self_attn.q_proj.weight") for layer in (layers[0], layers[4])]
    assert said == ["layer of pipeline stage 0", "layer of pipeline stage 2"]


def test_what_goes_into_a_missing_layer_comes_out() -> None:
    x = torch.ones(2)
    assert PPMissingLayer()(x, 3) is x
    assert PPMissingLayer()(hidden=x) is x


def test_loops_of_their_own_can_ask_for_a_name() -> None:
    model = nn.Module()
    model.layers = made(1)[2]
    asked = ["layers.0.weight", "layers.2.weight", "layers.4.mlp.up.weight", "layers.9.weight", "x"]
    assert [is_pp_missing_parameter(name, model) for name in asked] == [
        True, False, True, False, False,
    ]  # fmt: skip


def test_intermediate_tensors_are_found_by_name() -> None:
    x = torch.ones(2)
    between = IntermediateTensors({"hidden_states": x, "residual": x})
    assert between["residual"] is x
    assert [name for name, _ in between.items()] == ["hidden_states", "residual"]
    assert len(between) == 2
