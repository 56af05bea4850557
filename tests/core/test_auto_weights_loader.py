"""The walk from names to parameters: who is asked, what is left out, and what the errors say."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from helpers.checkpoints import llama_sd
from helpers.counting import calls_of
from loadkit.auto_weights_loader import AutoWeightsLoader
from loadkit.errors import ReadError, WeightLoadError
from loadkit.mapper import ShardedName, WeightsMapper
from loadkit.tracing import set_sink

STACKED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}


class Fused(nn.Module):
    """Some matrices in one parameter, one under another, with an imperative weight loader."""

    def __init__(self, rows: dict[object, int], width: int) -> None:
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(torch.zeros(sum(rows.values()), width), requires_grad=False)
        self.weight.weight_loader = self.weight_loader

    def weight_loader(self, param, loaded_weight, shard_id=None) -> None:
        start = 0
        for key, size in self.rows.items():
            if key == shard_id:
                assert loaded_weight.shape == (size, param.shape[1])
                param.data.narrow(0, start, size).copy_(loaded_weight)
                return
            start += size
        raise KeyError(shard_id)


def linear(rows: int, width: int) -> nn.Linear:
    return nn.Linear(width, rows, bias=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = Fused({"q": 16, "k": 8, "v": 8}, 16)
        self.o_proj = linear(16, 16)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = Fused({0: 32, 1: 32}, 16)
        self.down_proj = linear(16, 32)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16), requires_grad=False)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), MLP()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(40, 16)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = Norm()


class Llama(nn.Module):
    def __init__(self, body: type[nn.Module] = Body) -> None:
        super().__init__()
        self.model = body()
        self.lm_head = linear(40, 16)


class PackedLlama(Llama):
    packed_modules_mapping = PACKED


class AutoBody(Body):
    def load_weights(self, weights):
        return AutoWeightsLoader(self).load_weights(weights)


class ImperativeBody(Body):
    """The field's loop: a table of parts, a dict of parameters, loaders that take a shard id."""

    calls = 0

    def load_weights(self, weights):
        type(self).calls += 1
        params, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            for part, (fused, shard) in STACKED.items():
                if f".{part}." in name:
                    target = name.replace(f".{part}.", f".{fused}.")
                    params[target].weight_loader(params[target], weight, shard)
                    break
            else:
                target = name
                params[target].data.copy_(weight)
            loaded.add(target)
        return loaded


def check(model: nn.Module, sd: dict[str, torch.Tensor]) -> None:
    """Every parameter holds exactly what the checkpoint says."""
    for name, value in model.named_parameters():
        parts = [name.replace(f, p) for f, ps in PACKED.items() if f in name for p in ps] or [name]
        assert torch.equal(value, torch.cat([sd[part] for part in parts])), name


def shuffled(sd: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    items = list(sd.items())
    random.Random(0).shuffle(items)
    return items


@contextmanager
def recording() -> Iterator[list[tuple[str, dict]]]:
    told: list[tuple[str, dict]] = []
    before = set_sink(lambda kind, **what: told.append((kind, what)))
    try:
        yield told
    finally:
        set_sink(before)


# -- placing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [list, iter], ids=["collection", "stream"])
@pytest.mark.parametrize(
    ("model", "mapper"),
    [
        pytest.param(Llama, WeightsMapper(orig_to_new_stacked=STACKED), id="stacked"),
        pytest.param(PackedLlama, None, id="packed"),
        pytest.param(lambda: PackedLlama(AutoBody), None, id="packed-through-a-nested-loader"),
        pytest.param(
            lambda: Llama(AutoBody), WeightsMapper(orig_to_new_stacked=STACKED), id="nested-stacked"
        ),
        pytest.param(lambda: PackedLlama(ImperativeBody), None, id="imperative-child"),
    ],
)
def test_every_way_of_saying_what_is_fused_places_the_same(model, mapper, make) -> None:
    sd, made = llama_sd(), model()
    loaded = AutoWeightsLoader(made).load_weights(make(shuffled(sd)), mapper=mapper)
    check(made, sd)
    assert loaded == {name for name, _ in made.named_parameters()}


def test_a_child_is_asked_once_whatever_the_order() -> None:
    ImperativeBody.calls = 0
    AutoWeightsLoader(Llama(ImperativeBody)).load_weights(shuffled(llama_sd()))
    assert ImperativeBody.calls == 1


def test_a_stream_of_tensors_in_memory_is_not_held_back() -> None:
    model, given, most = PackedLlama(), 0, 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal given, most
        for name, tensor in llama_sd().items():
            given += 1
            most = max(most, given - landed)
            yield name, tensor

    landed = 0
    for module in model.modules():
        for param in module.parameters(recurse=False):
            inner = getattr(param, "weight_loader", lambda p, w: p.data.copy_(w))

            def counting(p, w, *shard, inner=inner) -> None:
                nonlocal landed
                inner(p, w, *shard)
                landed += 1

            param.weight_loader = counting
    AutoWeightsLoader(model).load_weights(stream())
    assert landed == given == 21
    assert most <= 2


def test_the_shard_id_travels_through_nested_loaders_and_renames() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = Llama(AutoBody)

    class Inner(Llama):
        def load_weights(self, weights):
            mapper = WeightsMapper(orig_to_new_prefix={"body": "model"})
            return AutoWeightsLoader(self).load_weights(weights, mapper=mapper)

    outer, sd = Outer(), llama_sd()
    outer.language_model = Inner(AutoBody)
    weights = {f"lm.{name.replace('model.', 'body.')}": value for name, value in sd.items()}
    mapper = WeightsMapper(orig_to_new_prefix={"lm": "language_model"}, orig_to_new_stacked=STACKED)
    loaded = AutoWeightsLoader(outer).load_weights(weights.items(), mapper=mapper)
    check(outer.language_model, sd)
    assert loaded == {name for name, _ in outer.named_parameters()}


def test_a_module_that_keeps_its_parts_separate_is_left_so() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = linear(16, 16)
            self.qkv_proj = Fused({"q": 16}, 16)

    class Both(nn.Module):
        packed_modules_mapping = PACKED

        def __init__(self) -> None:
            super().__init__()
            self.vision, self.text = Tower(), Attention()

    model, q = Both(), torch.randn(16, 16)
    loaded = AutoWeightsLoader(model).load_weights(
        {"vision.q_proj.weight": q, "text.q_proj.weight": q}.items()
    )
    assert loaded == {"vision.q_proj.weight", "text.qkv_proj.weight"}
    assert torch.equal(model.vision.q_proj.weight, q)


def test_tensors_already_fused_on_disk_come_without_a_shard() -> None:
    seen = []
    model = Attention()
    model.qkv_proj.weight.weight_loader = lambda p, w, *shard: seen.append(shard)
    AutoWeightsLoader(model).load_weights({"qkv_proj.weight": torch.ones(32, 16)}.items())
    assert seen == [()]


def test_buffers_are_loaded_persistent_or_not() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("scale", torch.zeros(2), persistent=False)

    model = Counts()
    given = {
        "norm.running_mean": torch.tensor([1.0, 2, 3]),
        "norm.num_batches_tracked": torch.tensor(9),
        "scale": torch.tensor([4.0, 5]),
    }
    assert AutoWeightsLoader(model).load_weights(given.items()) == set(given)
    assert model.norm.num_batches_tracked.item() == 9
    assert model.scale.tolist() == [4, 5]


def test_no_weights_are_no_error() -> None:
    assert AutoWeightsLoader(Llama()).load_weights([]) == set()
    assert AutoWeightsLoader(Llama()).load_weights(iter([])) == set()


# -- leaving out ---------------------------------------------------------------------------------


def test_skips_are_whole_components_and_reported() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Norm() for _ in range(11)])

    model = Two()
    with recording() as told:
        loaded = AutoWeightsLoader(
            model, skip_prefixes=["layers.1."], skip_substrs=["2.weight"]
        ).load_weights((f"layers.{i}.weight", torch.ones(16)) for i in range(11))
    assert loaded == {f"layers.{i}.weight" for i in range(11) if i not in (1, 2)}
    assert [(kind, what["name"]) for kind, what in told] == [
        ("SKIPPED", "layers.1.weight"),
        ("SKIPPED", "layers.2.weight"),
    ]


def test_NM_05_harmless_extras_are_left_out_by_rule_with_a_reason() -> None:
    sd = llama_sd()
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.layers.1.attn.masked_bias": torch.tensor(-1e4),
        "model.layers.1.attn.bias": torch.ones(1, 1, 4, 4),
        "model.embeddings.position_ids": torch.arange(4),
        "model.norm.num_batches_tracked": torch.tensor(1),
    }
    model = PackedLlama()
    with recording() as told:
        AutoWeightsLoader(model).load_weights((sd | harmless).items())
    check(model, sd)
    assert {what["name"] for _, what in told} == set(harmless)
    assert all(kind == "SKIPPED" and what["message"] for kind, what in told)


def test_NM_05_a_mask_rule_does_not_excuse_a_bias() -> None:
    with pytest.raises(WeightLoadError, match=r"attn\.bias"):
        AutoWeightsLoader(Llama()).load_weights({"model.attn.bias": torch.ones(16)}.items())


def test_a_computed_table_is_not_overwritten_by_a_stored_one() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary_emb = nn.Module()
            self.rotary_emb.register_buffer("inv_freq", torch.ones(2), persistent=False)

    model = Rotary()
    given = {"rotary_emb.inv_freq": torch.zeros(2)}
    assert AutoWeightsLoader(model).load_weights(given.items()) == set()
    assert model.rotary_emb.inv_freq.tolist() == [1, 1]


def test_NM_05_a_class_lists_its_own_ignored_weights() -> None:
    class Text(PackedLlama):
        ignored_weights = ("vision_tower.", "layers.*.mtp")

    sd = llama_sd()
    extra = {"vision_tower.patch.w": torch.ones(2), "model.layers.61.mtp.w": torch.ones(2)}
    model = Text()
    AutoWeightsLoader(model).load_weights((sd | extra).items())
    check(model, sd)
    with pytest.raises(WeightLoadError, match="vision_tower_2"):
        AutoWeightsLoader(model).load_weights({"vision_tower_2.w": torch.ones(2)}.items())


def test_unexpected_names_can_be_ignored_by_prefix_and_suffix() -> None:
    loader = AutoWeightsLoader(
        Llama(), ignore_unexpected_prefixes=["mtp"], ignore_unexpected_suffixes=["_scale"]
    )
    extra = {"mtp.0.w": torch.ones(1), "model.norm.k_scale": torch.ones(1)}
    with recording() as told:
        assert loader.load_weights(extra.items()) == set()
    assert [kind for kind, _ in told] == ["SKIPPED", "SKIPPED"]
    with pytest.raises(WeightLoadError, match=r"mtpx\.w"):
        loader.load_weights({"mtpx.w": torch.ones(1)}.items())


def test_a_layer_of_another_stage_swallows_its_names_with_a_report() -> None:
    class Missing(nn.Module):
        is_missing_layer = True

        def load_weights(self, weights):
            raise AssertionError("not ours")

    model, sd = PackedLlama(), llama_sd()
    model.model.layers[1] = Missing()
    with recording() as told:
        AutoWeightsLoader(model).load_weights(sd.items())
    assert {what["name"] for _, what in told} == {n for n in sd if ".layers.1." in n}
    assert "pipeline stage" in told[0][1]["message"]


# -- errors --------------------------------------------------------------------------------------


def test_NM_05_a_typo_names_the_nearest_parameter_with_joined_paths() -> None:
    sd = llama_sd()
    sd["model.layers.0.mlp.gate_projj.weight"] = sd.pop("model.layers.0.mlp.gate_proj.weight")
    with pytest.raises(WeightLoadError) as caught:
        AutoWeightsLoader(PackedLlama()).load_weights(sd.items())
    error = caught.value
    assert error.code == "UNEXPECTED_TENSOR"
    assert error.tensor == "model.layers.0.mlp.gate_projj.weight"
    assert "'model.layers.0.mlp' has no 'gate_projj'" in str(error)
    assert error.detail["nearest"][0] == "model.layers.0.mlp.gate_proj.weight"
    assert set(error.detail["available"]) == {
        "down_proj", "gate_up_proj", "gate_proj", "up_proj"
    }  # fmt: skip


@pytest.mark.parametrize("body", [Body, AutoBody], ids=["walk", "nested"])
def test_NM_05_paths_are_joined_through_nested_loaders(body) -> None:
    weights = {"model.layers.0.self_attn.indexer.weights_proj": torch.ones(1)}
    with pytest.raises(WeightLoadError) as caught:
        AutoWeightsLoader(Llama(body)).load_weights(weights.items())
    assert "'model.layers.0.self_attn' has no 'indexer'" in str(caught.value)
    assert caught.value.parameter == "model.layers.0.self_attn.indexer.weights_proj"


def test_NM_02_all_misfits_of_a_wrong_prefix_are_one_error_with_the_prefix() -> None:
    sd = {name.removeprefix("model."): value for name, value in llama_sd(head=False).items()}
    mapper = WeightsMapper(orig_to_new_stacked=STACKED)
    with pytest.raises(WeightLoadError) as caught:
        AutoWeightsLoader(Llama()).load_weights(sd.items(), mapper=mapper)
    assert "all 20 names match if 'model.' is added" in str(caught.value)
    assert "layers 0-1: 2 x mlp.gate_proj.weight" in str(caught.value)
    assert caught.value.detail["count"] == 20
    assert len(caught.value.detail["unexpected"]) == 20


def test_NM_02_a_stream_stops_at_the_first() -> None:
    weights = itertools.chain([("nope.w", torch.ones(1))], iter(int, 1))
    with pytest.raises(WeightLoadError, match=r"nope\.w"):
        AutoWeightsLoader(Llama()).load_weights(weights)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model", "'model' is a module, not a parameter"),
        ("model.layers", "'model.layers' is a module"),
        ("lm_head.weight.x", "'lm_head.weight' is a parameter and has no members"),
        ("lm_head.bias", "made without 'bias'"),
        ("", "has no ''"),
        ("model..w", "has no ''"),
        (".", "has no ''"),
    ],
)
def test_names_that_end_in_the_wrong_place_say_so(name: str, says: str) -> None:
    with pytest.raises(WeightLoadError) as caught:
        AutoWeightsLoader(Llama()).load_weights({name: torch.ones(1)}.items())
    assert says in str(caught.value)
    assert caught.value.code == "UNEXPECTED_TENSOR"


def test_under_a_recorder_the_walk_goes_on_past_every_misfit() -> None:
    sd = llama_sd()
    sd["model.layers.1.mlp.up_proj.weight"] = torch.zeros(31, 16)
    sd["model.norm.weight"] = torch.zeros(17)
    sd["model.layers.7.w"] = torch.zeros(1)
    with recording() as told:
        loaded = AutoWeightsLoader(PackedLlama()).load_weights(shuffled(sd))
    assert sorted((kind, what["name"]) for kind, what in told) == [
        ("SHAPE", "model.layers.1.mlp.up_proj.weight"),
        ("SHAPE", "model.norm.weight"),
        ("UNEXPECTED", "model.layers.7.w"),
    ]
    assert "model.norm.weight" not in loaded
    assert "lm_head.weight" in loaded


def test_UX_01_a_failing_loader_is_wrapped_once_with_everything() -> None:
    model = PackedLlama()
    model.model.layers[1].mlp.gate_up_proj.weight.tp_rank = 1
    model.model.layers[1].mlp.gate_up_proj.weight.tp_size = 4
    sd = {"model.layers.1.mlp.up_proj.weight": torch.zeros(31, 16, dtype=torch.bfloat16)}
    with pytest.raises(WeightLoadError) as caught:
        AutoWeightsLoader(model).load_weights(sd.items())
    error = caught.value
    assert isinstance(error.__cause__, AssertionError)
    assert error.tensor == "model.layers.1.mlp.up_proj.weight"
    assert error.parameter == "model.layers.1.mlp.gate_up_proj.weight"
    assert error.detail == {
        "tensor": "model.layers.1.mlp.up_proj.weight",
        "parameter": "model.layers.1.mlp.gate_up_proj.weight",
        "shard_id": 1,
        "checkpoint_shape": [31, 16],
        "checkpoint_dtype": "bfloat16",
        "parameter_shape": [64, 16],
        "parameter_dtype": "float32",
        "tp_rank": 1,
        "tp_size": 4,
    }
    for part in ("up_proj", "shard 1", "[31, 16] bfloat16", "[64, 16] float32", "tp rank 1 of 4"):
        assert part in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert isinstance(again.__cause__, AssertionError)


def test_UX_01_a_typed_error_keeps_its_class_and_gets_its_empty_fields_filled() -> None:
    def fails(param, weight) -> None:
        raise ReadError("the disk is gone", errno=5, file="a.safetensors")

    model = Llama(AutoBody)
    model.model.norm.weight.weight_loader = fails
    with pytest.raises(ReadError) as caught:
        AutoWeightsLoader(model).load_weights({"model.norm.weight": torch.ones(16)}.items())
    error = caught.value
    assert (error.tensor, error.parameter) == ("model.norm.weight", "model.norm.weight")
    assert (error.file, error.errno, str(error)) == ("a.safetensors", 5, "the disk is gone")


def test_UX_01_a_shape_error_says_tensor_parameter_and_both_shapes_once() -> None:
    with pytest.raises(WeightLoadError) as caught:
        AutoWeightsLoader(Llama(AutoBody)).load_weights(
            {"model.norm.weight": torch.ones(15)}.items()
        )
    assert str(caught.value).count("model.norm.weight") == 2, "tensor -> parameter, once"
    assert "[15]" in str(caught.value)
    assert "[16]" in str(caught.value)


def test_UX_01_the_ranks_of_the_model_are_told_where_the_parameter_has_none() -> None:
    from loadkit.config import ParallelConfig

    model = Llama()
    model.parallel_config = ParallelConfig(tp_size=2, tp_rank=1, pp_size=3, pp_rank=2)
    with pytest.raises(WeightLoadError) as caught:
        AutoWeightsLoader(model).load_weights({"lm_head.weight": torch.ones(1)}.items())
    assert caught.value.detail["pp_rank"] == 2
    assert caught.value.detail["ep_size"] == 1


def test_no_memory_is_not_a_misfit() -> None:
    def fails(param, weight) -> None:
        raise MemoryError

    model = Llama()
    model.lm_head.weight.weight_loader = fails
    with recording() as told, pytest.raises(MemoryError):
        AutoWeightsLoader(model).load_weights({"lm_head.weight": torch.ones(40, 16)}.items())
    assert told == []


def test_a_name_from_a_file_cannot_steer_a_terminal() -> None:
    with pytest.raises(WeightLoadError) as caught:
        AutoWeightsLoader(Llama()).load_weights({"a\x1b[2J\u202e.w": torch.ones(1)}.items())
    assert str(caught.value).isprintable()


# -- cost ----------------------------------------------------------------------------------------


def test_the_walk_is_linear_in_the_names() -> None:
    class Experts(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Norm() for _ in range(count)])

    def calls(count: int) -> int:
        weights = {f"experts.{i}.weight": torch.zeros(16) for i in range(count)}
        model = Experts(count)
        for param in model.parameters():
            param.weight_loader = lambda p, w: None
        return calls_of(lambda: AutoWeightsLoader(model).load_weights(weights.items()))

    assert calls(1600) < 16.2 * calls(100)


def test_a_name_knows_its_way() -> None:
    seen: list[ShardedName] = []

    class Spy(nn.Module):
        def load_weights(self, weights):
            seen.extend(name for name, _ in weights)
            return set()

    model = Llama()
    model.model.layers[0] = Spy()
    mapper = WeightsMapper(orig_to_new_prefix={"h": "model.layers"})
    AutoWeightsLoader(model).load_weights({"h.0.x.w": torch.ones(1)}.items(), mapper=mapper)
    [name] = seen
    assert (name, name.path, name.checkpoint_name) == ("x.w", "model.layers.0.x.w", "h.0.x.w")
