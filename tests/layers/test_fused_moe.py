"""``FusedMoE``: names on disk, every way its experts lie over ranks, and what it computes.

E experts, D width, I inner width, T tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from helpers.ranks import only_views_and_writes, randn, unchanged_by
from loadkit import ExpertPlacement
from loadkit.config import ParallelConfig
from loadkit.errors import ModelError, OptionError, UsageError, WeightLoadError
from loadkit.quantization import FusedMoEMethodBase
from loadkit.sharded_name import ShardedName
from loadkit_layers import FusedMoE, Router, UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from loadkit_layers.fused_moe.names import ExpertShard, find_place

E, D, INNER, T, TOP = 8, 12, 16, 7, 3
ROUTER = Router(num_experts=E, top_k=TOP)
Tensors = dict[str, torch.Tensor]


def make(parallel: ParallelConfig | None = None, **options: Any) -> FusedMoE:
    layer = FusedMoE(
        ROUTER, D, INNER, parallel=parallel or ParallelConfig(), prefix="mlp.experts", **options
    )
    for param in layer.parameters():
        param.data.fill_(float("nan"))
    return layer


def per_expert() -> Tensors:
    """One tensor for each expert's gate, up and down."""
    found: Tensors = {}
    for e in range(E):
        found[f"{e}.gate_proj.weight"] = randn(INNER, D, seed=3 * e)
        found[f"{e}.up_proj.weight"] = randn(INNER, D, seed=3 * e + 1)
        found[f"{e}.down_proj.weight"] = randn(D, INNER, seed=3 * e + 2)
    return found


def each(name: str) -> list[torch.Tensor]:
    """A projection of every expert."""
    return [per_expert()[f"{e}.{name}.weight"] for e in range(E)]


def both() -> list[torch.Tensor]:
    """Gate and up of every expert, one below the other."""
    return [torch.cat(pair) for pair in zip(each("gate_proj"), each("up_proj"), strict=True)]


def renamed(names: dict[str, str]) -> Tensors:
    return {
        f"{e}.{names[part]}.{leaf}": value
        for (e, part, leaf), value in ((n.split("."), v) for n, v in per_expert().items())
    }


STORED: dict[str, Any] = {
    "one_by_one": per_expert,
    "mixtral_s_names": lambda: renamed({"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
    "gate_and_up_fused": lambda: {
        **{f"{e}.gate_up_proj.weight": value for e, value in enumerate(both())},
        **{f"{e}.down_proj.weight": value for e, value in enumerate(each("down_proj"))},
    },
    "all_in_two": lambda: {
        "gate_up_proj": torch.stack(both()),
        "down_proj": torch.stack(each("down_proj")),
    },
    "all_in_three": lambda: {
        f"{name}_proj": torch.stack(each(f"{name}_proj")) for name in ("gate", "up", "down")
    },
    "as_it_is_in_memory": lambda: {
        "w13_weight": torch.stack(both()),
        "w2_weight": torch.stack(each("down_proj")),
    },
}
PLACEMENTS: dict[str, ExpertPlacement | None] = {
    "none_given": None,
    "linear": ExpertPlacement.linear(E, 4),
    "round_robin": ExpertPlacement.round_robin(E, 4),
    "redundant": ExpertPlacement.linear(E, 4, redundant=4),
    "any": ExpertPlacement((5, 0, 0, 2, 4, 6, 1, 3, 7, 5), 4),
}
LAYOUTS = {
    "tp2": ({"tp_size": 2}, None),
    "tp4": ({"tp_size": 4}, None),
    "tp4_ep2": ({"tp_size": 4, "ep_size": 2}, None),
    **{f"ep4_{name}": ({"tp_size": 4, "ep_size": 4}, p) for name, p in PLACEMENTS.items()},
    "dp_beside_ep": ({"dp_size": 2, "tp_size": 2, "ep_size": 2}, None),
    "ep_over_dp": ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, None),
    "cut_over_dp": ({"dp_size": 4, "tp_size": 1, "ep_size": 2}, None),
}


def ranks_of(layout: str, **options: Any) -> list[FusedMoE]:
    """Every rank's layer, filled."""
    sizes, placement = LAYOUTS[layout]
    world = sizes.get("dp_size", 1) * sizes["tp_size"]
    layers = []
    for rank in range(world):
        parallel = ParallelConfig.for_rank(rank, **sizes, expert_placement=placement)
        layers.append(make(parallel, **options))
        layers[-1].load_weights(iter(per_expert().items()))
    return layers


def expected() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack(both()), torch.stack(each("down_proj"))


@pytest.mark.parametrize("stored", STORED)
def test_however_it_is_stored_the_parameters_are_the_same(stored: str) -> None:
    layer = make()
    w13, w2 = expected()
    loaded = layer.load_weights(iter(STORED[stored]().items()))
    assert loaded == {"w13_weight", "w2_weight"}
    assert torch.equal(layer.w13_weight, w13) and torch.equal(layer.w2_weight, w2)


def test_names_that_a_mapper_made_say_which_part_they_are() -> None:
    layer = make()
    w13, w2 = expected()
    parts = {"gate_proj": 0, "up_proj": 1}
    tensors = []
    for name, value in per_expert().items():
        expert, part, _ = name.split(".")
        stacked = ShardedName(f"{expert}.gate_up_proj.weight", parts.get(part))
        tensors.append((stacked if part in parts else name, value))
    layer.load_weights(iter(tensors))
    assert torch.equal(layer.w13_weight, w13) and torch.equal(layer.w2_weight, w2)


@pytest.mark.parametrize("stored", ["one_by_one", "gate_and_up_fused", "all_in_two"])
def test_projections_stored_transposed_are_turned(stored: str) -> None:
    layer = make(disk_layout="input_output")
    w13, w2 = expected()
    turned = {n: v.transpose(-1, -2).contiguous() for n, v in STORED[stored]().items()}
    layer.load_weights(iter(turned.items()))
    assert torch.equal(layer.w13_weight, w13) and torch.equal(layer.w2_weight, w2)
    part = layer.checkpoint_part("w13_weight", ExpertShard("w3", 5))
    assert part is not None and torch.equal(part, per_expert()["5.up_proj.weight"].t())


@pytest.mark.parametrize("stored", ["one_by_one", "all_in_two"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_holds_its_part_of_its_experts(layout: str, stored: str) -> None:
    w13, w2 = expected()
    for layer in ranks_of(layout):
        layer.w13_weight.data.fill_(float("nan"))
        layer.w2_weight.data.fill_(float("nan"))
        layer.load_weights(iter(STORED[stored]().items()))
        own = layer.ranks.placement.experts_of(layer.parallel.ep_rank)
        assert layer.w13_weight.shape[0] == layer.w2_weight.shape[0] == len(own)
        size = INNER // layer.tp_size
        cut = slice(layer.tp_rank * size, (layer.tp_rank + 1) * size)
        for slot, expert in enumerate(own):
            gate, up = w13[expert].chunk(2)
            assert torch.equal(layer.w13_weight[slot], torch.cat([gate[cut], up[cut]]))
            assert torch.equal(layer.w2_weight[slot], w2[expert][:, cut])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_all_ranks_are_every_expert_as_often_as_it_is_placed(layout: str) -> None:
    layers = ranks_of(layout)
    replicas = 1 if not layers[0].ranks.one_replica else layers[0].parallel.dp_size
    held = torch.zeros(E, INNER, dtype=torch.int64)
    for layer in layers:
        size = INNER // layer.tp_size
        for expert in layer.ranks.placement.experts_of(layer.ranks.ep_rank):
            held[expert, layer.tp_rank * size : (layer.tp_rank + 1) * size] += 1
    table = layers[0].ranks.placement.physical_to_logical
    copies = torch.tensor([table.count(expert) for expert in range(E)]) * replicas
    assert torch.equal(held, copies[:, None].expand(E, INNER))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_is_skipped_exactly_where_nothing_of_it_is_held(layout: str) -> None:
    for layer in ranks_of(layout):
        own = layer.ranks.placement.experts_of(layer.ranks.ep_rank)
        for name in per_expert():
            expert = int(name.partition(".")[0])
            reason = layer.skip_weight(name)
            assert (reason is None) == (expert in own)
            if reason is not None:
                others = layer.ranks.placement.ranks()[expert]
                assert reason.startswith(f"expert {expert} lives on ep rank")
                assert all(str(rank) in reason for rank in others)
        assert layer.skip_weight("gate_up_proj") is None
        assert layer.skip_weight("99.up_proj.weight") is None  # an error, and no other rank's


def test_names_of_parameters_are_in_the_layout_of_parameters() -> None:
    layer = make(disk_layout="input_output")
    w13, w2 = expected()
    layer.load_weights(iter(STORED["as_it_is_in_memory"]().items()))
    assert torch.equal(layer.w13_weight, w13) and torch.equal(layer.w2_weight, w2)


def test_loaders_take_views_and_copy() -> None:
    parallel = ParallelConfig.for_rank(1, tp_size=4, ep_size=2)
    layer = make(parallel)
    for stored in ("one_by_one", "all_in_two"):
        tensors = STORED[stored]()
        with only_views_and_writes():
            layer.load_weights(iter(tensors.items()))


def test_a_weight_loader_is_called_as_in_vllm() -> None:
    layer = make(ParallelConfig.for_rank(1, tp_size=2, ep_size=2))
    tensors = per_expert()
    loader = layer.w13_weight.weight_loader
    for expert, there in ((2, False), (6, True)):
        for shard, part in (("w1", "gate_proj"), ("w3", "up_proj")):
            name = f"{expert}.{part}.weight"
            found = loader(
                layer.w13_weight, tensors[name], name, shard_id=shard, expert_id=expert,
                return_success=True,
            )  # fmt: skip
            assert found is there
    assert torch.equal(layer.w13_weight[2], both()[6])
    assert layer.w13_weight[0].isnan().all()
    with pytest.raises(WeightLoadError, match="no expert 8"):
        loader(layer.w13_weight, tensors["0.up_proj.weight"], "", "w3", 8)
    with pytest.raises(WeightLoadError, match="no shard 'w2'"):
        loader(layer.w13_weight, tensors["0.up_proj.weight"], "", "w2", 6)


@pytest.mark.parametrize(
    ("name", "shard", "place"),
    [
        ("5.gate_proj.weight", None, ("w13_weight", "w1", 5)),
        ("0.w2.weight_scale_inv", None, ("w2_weight_scale_inv", "w2", 0)),
        ("12.gate_up_proj.weight", 1, ("w13_weight", "w3", 12)),
        ("12.gate_up_proj.weight", None, ("w13_weight", None, 12)),
        ("gate_up_proj", None, ("w13_weight", None, None)),
        ("down_proj.weight", None, ("w2_weight", "w2", None)),
        ("gate_up_proj_scale_inv", None, ("w13_weight_scale_inv", None, None)),
        ("down_proj_bias", None, ("w2_bias", "w2", None)),
        ("w13_weight_scale", None, ("w13_weight_scale", None, None)),
        ("5.w3.qweight.packed", None, ("w13_qweight_packed", "w3", 5)),
        ("05.w3.weight", None, None),
        ("+5.w3.weight", None, None),
        ("\u0665.w3.weight", None, None),
        ("5", None, None),
        ("5.gate_proj.weight", 0, None),
        ("gate_up_proj", 2, None),
        ("shared.w1.weight", None, None),
        ("", None, None),
    ],
)
def test_names_on_disk(name: str, shard: Any, place: Any) -> None:
    found = find_place(name, shard)
    assert found == (None if place is None else (place[0], ExpertShard(*place[1:])))


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("3.gate_proj.weight", (INNER + 1, D), "takes"),
        ("3.down_proj.weight", (D, INNER - 1), "takes"),
        ("3.gate_up_proj.weight", (INNER, D), "fused"),
        ("gate_up_proj", (E - 1, 2 * INNER, D), f"{E - 1} experts"),
        ("gate_up_proj", (E, 2 * INNER, D + 1), "takes"),
        ("down_proj", (D, INNER), "no experts"),
        ("8.gate_proj.weight", (INNER, D), "expert 8; the config has 8 experts, 0 to 7"),
        ("3.weird_proj.weight", (INNER, D), "no place"),
        ("3.gate_proj.bias", (INNER,), "no place"),
    ],
)
def test_what_does_not_fit_is_named_and_writes_nothing(
    name: str, shape: tuple[int, ...], said: str
) -> None:
    layer = make()
    for param in layer.parameters():
        param.data.zero_()
    with unchanged_by(layer.w13_weight), unchanged_by(layer.w2_weight):
        with pytest.raises(WeightLoadError, match=said) as caught:
            layer.load_weights(iter({name: torch.ones(shape)}.items()))
        assert caught.value.tensor == name


def test_places_that_cannot_be_are_refused() -> None:
    with pytest.raises(ModelError, match=r"tp 3") as caught:
        make(ParallelConfig(tp_size=3))
    assert caught.value.code == "TP_INDIVISIBLE"
    assert caught.value.detail["legal"] == [1, 2, 4, 8, 16]
    with pytest.raises(OptionError, match="has ep_rank 1"):
        make(ParallelConfig(tp_size=2, tp_rank=1, ep_size=2))
    other = ExpertPlacement.linear(E + 1, 1)
    with pytest.raises(ModelError, match="of 9") as caught:
        make(ParallelConfig(expert_placement=other))
    assert caught.value.code == "EXPERT_PLACEMENT"
    with pytest.raises(ModelError, match="8 experts for 16"):
        make(ParallelConfig(tp_size=16, ep_size=16))


# -- what it computes ----------------------------------------------------------------------------


def by_hand(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    w13, w2 = expected()
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for factor, e in zip(weights[t], experts[t].tolist(), strict=True):
            gate, up = (w13[e] @ x[t]).chunk(2)
            out[t] += factor * (w2[e] @ (F.silu(gate) * up))
    return out


INPUTS = (randn(T, D, seed=50), randn(T, E, seed=51))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)  # float32, another order of sums


def test_one_rank_equals_token_by_token() -> None:
    layer = make()
    layer.load_weights(iter(per_expert().items()))
    close(layer(*INPUTS), by_hand(INPUTS[0], *ROUTER.route(INPUTS[1])))
    assert layer(INPUTS[0][:0], INPUTS[1][:0]).shape == (0, D)


@pytest.mark.parametrize("layout", [n for n in LAYOUTS if "dp" not in n])
def test_the_sum_over_the_ranks_equals_one_rank(layout: str) -> None:
    want = by_hand(INPUTS[0], *ROUTER.route(INPUTS[1]))
    parts = [layer(*INPUTS) for layer in ranks_of(layout, reduce_results=False)]
    close(torch.stack(parts).sum(0), want)


def test_tokens_take_turns_with_redundant_experts() -> None:
    layers = ranks_of("ep4_redundant", reduce_results=False)
    logits = torch.full((4, E), -9.0)
    logits[:, :TOP] = 9.0  # every token to experts 0, 1 and 2, which are there twice
    used = [(layer._slots_of(layer.router.route(logits)[1]) >= 0).sum(-1) for layer in layers]
    assert torch.equal(torch.stack(used).sum(0), torch.full((4,), TOP))
    busy = torch.stack(used).bool()
    assert not torch.equal(busy[:, 0], busy[:, 1])  # neighbours go to different copies
    assert torch.equal(busy[:, 0], busy[:, 2])


def test_ranks_of_several_replicas_load_and_do_not_compute() -> None:
    layer = ranks_of("ep_over_dp")[3]
    with pytest.raises(UsageError, match="data-parallel"):
        layer(*INPUTS)


class Doubling(UnquantizedFusedMoEMethod):
    def apply(self, layer: Any, x: Any, weights: Any, slots: Any) -> torch.Tensor:
        return 2 * super().apply(layer, x, weights, slots)


class Config:
    def __init__(self, method: Any) -> None:
        self.method = method

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        assert prefix == "mlp.experts"
        return self.method


def test_a_quantisation_brings_its_own_method() -> None:
    plain, doubled = make(), make(quant_config=Config(Doubling()))
    assert isinstance(doubled.quant_method, FusedMoEMethodBase)
    for layer in (plain, doubled):
        layer.load_weights(iter(per_expert().items()))
    assert torch.equal(doubled(*INPUTS), 2 * plain(*INPUTS))
    assert isinstance(make(quant_config=Config(None)).quant_method, UnquantizedFusedMoEMethod)
    with pytest.raises(ModelError, match="no method for experts"):
        make(quant_config=Config(UnquantizedLinearMethod()))
