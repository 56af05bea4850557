"""Rules over names: what matches, which one wins, and that nothing else matters."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.counting import calls_of
from loadkit.errors import ModelError, WeightLoadError
from loadkit.mapper import MappedName, ShardedName, WeightsMapper
from loadkit.tracing import set_sink

ONE = torch.ones(1)
LLAMA = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def mapped(mapper: WeightsMapper, name: str) -> str:
    """The new name, for mappers without shards."""
    found = mapper.map_name(name)
    assert found is not None
    assert found.shard_id is None
    return found.name


# -- what matches --------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["model", "model."])
def test_a_prefix_matches_whole_components_only(pattern: str) -> None:
    mapper = WeightsMapper(orig_to_new_prefix={pattern: "body"})
    assert mapped(mapper, "model.w") == "body.w"
    assert mapped(mapper, "model_x.w") == "model_x.w"
    assert mapped(mapper, "a.model.w") == "a.model.w"


def test_a_prefix_with_a_dot_needs_something_after_it() -> None:
    assert mapped(WeightsMapper(orig_to_new_prefix={"score.": "s."}), "score") == "score"
    assert mapped(WeightsMapper(orig_to_new_prefix={"score": "s"}), "score") == "s"


def test_a_prefix_can_be_added_and_removed() -> None:
    assert mapped(WeightsMapper(orig_to_new_prefix={"": "model."}), "norm.w") == "model.norm.w"
    assert mapped(WeightsMapper(orig_to_new_prefix={"model.": ""}), "model.norm.w") == "norm.w"


def test_a_substr_is_a_run_of_whole_components_anywhere() -> None:
    mapper = WeightsMapper(orig_to_new_substr={".attn.c_attn.": ".self_attn.qkv_proj."})
    assert mapped(mapper, "h.0.attn.c_attn.w") == "h.0.self_attn.qkv_proj.w"
    assert mapped(mapper, "h.0.attn.c_attn_x.w") == "h.0.attn.c_attn_x.w"
    assert mapped(mapper, "attn.c_attn.w") == "attn.c_attn.w", "the first dot asks for more"


def test_every_substr_rule_applies_once_in_one_pass() -> None:
    mapper = WeightsMapper(orig_to_new_substr={"encoder.layer": "layers", "attn": "self_attn"})
    assert mapped(mapper, "encoder.layer.0.attn.w") == "layers.0.self_attn.w"
    assert mapped(mapper, "attn.0.attn.w") == "self_attn.0.attn.w", "the leftmost place"


def test_overlapping_substr_rules_let_the_longest_win() -> None:
    mapper = WeightsMapper(orig_to_new_substr={"a.b": "x", "b.c.d": "y"})
    assert mapped(mapper, "a.b.c.d") == "a.y"
    assert mapped(WeightsMapper(orig_to_new_substr={"a.b": "x", "b.c": "y"}), "a.b.c") == "x.c"


def test_a_suffix_is_whole_trailing_components() -> None:
    mapper = WeightsMapper(orig_to_new_suffix={"kv_scale": "attn.k_scale"})
    assert mapped(mapper, "l.0.kv_scale") == "l.0.attn.k_scale"
    assert mapped(mapper, "l.0.my_kv_scale") == "l.0.my_kv_scale"


def test_NM_03_legacy_gamma_and_beta() -> None:
    mapper = WeightsMapper(orig_to_new_suffix={".gamma": ".weight", ".beta": ".bias"})
    assert mapped(mapper, "bert.encoder.LayerNorm.gamma") == "bert.encoder.LayerNorm.weight"
    assert mapped(mapper, "bert.encoder.LayerNorm.beta") == "bert.encoder.LayerNorm.bias"
    assert mapped(mapper, "gamma") == "gamma"


def test_a_rename_is_the_whole_name_and_settles_it() -> None:
    mapper = WeightsMapper(
        orig_to_new_rename={"wte": "embed.weight"}, orig_to_new_prefix={"": "model."}
    )
    assert mapped(mapper, "wte") == "embed.weight"
    assert mapped(mapper, "h.wte") == "model.h.wte"


def test_a_regex_may_cut_a_component_and_use_groups() -> None:
    mapper = WeightsMapper(orig_to_new_regex={r"^h(\d+)_": r"layers.\1."})
    assert mapped(mapper, "h12_attn.w") == "layers.12.attn.w"
    given = WeightsMapper(orig_to_new_regex={re.compile("LAYER", re.IGNORECASE): "layers"})
    assert mapped(given, "layer.0.w") == "layers.0.w"


def test_kinds_run_in_the_documented_order() -> None:
    mapper = WeightsMapper(
        orig_to_new_regex={"^a": "b"},
        orig_to_new_substr={"b": "c"},
        orig_to_new_prefix={"c": "d"},
        orig_to_new_suffix={"d.w": "e.w"},
        orig_to_new_stacked={"e": ("f", 3)},
    )
    assert mapper.map_name("a.w") == ("f.w", 3)
    kinds = [step.kind for step in mapper.explain("a.w").steps]
    assert kinds == ["regex", "substr", "prefix", "suffix", "stacked"]


# -- stacked -------------------------------------------------------------------------------------


def test_stacked_gives_the_fused_name_and_the_shard() -> None:
    mapper = WeightsMapper(orig_to_new_stacked=LLAMA)
    at = "model.layers.0."
    assert mapper.map_name(at + "self_attn.k_proj.weight") == (
        at + "self_attn.qkv_proj.weight",
        "k",
    )
    assert mapper.map_name(at + "mlp.up_proj.bias") == (at + "mlp.gate_up_proj.bias", 1)
    assert mapper.map_name(at + "mlp.gate_proj_x.w") == (at + "mlp.gate_proj_x.w", None)
    assert mapper.map_name(at + "self_attn.qkv_proj.w") == (at + "self_attn.qkv_proj.w", None)


def test_stacked_with_dots_as_the_field_writes_it() -> None:
    mapper = WeightsMapper(orig_to_new_stacked={".mlp.gate_proj": (".mlp.gate_up_proj", (0, 1))})
    assert mapper.map_name("l.mlp.gate_proj.weight") == ("l.mlp.gate_up_proj.weight", (0, 1))
    assert mapper.map_name("mlp.gate_proj.weight") == ("mlp.gate_proj.weight", None)


def test_the_shard_travels_with_the_name() -> None:
    [(name, _)] = WeightsMapper(orig_to_new_stacked=LLAMA).apply([("a.q_proj.w", ONE)])
    assert isinstance(name, ShardedName)
    assert (name, name.shard_id, name.checkpoint_name) == ("a.qkv_proj.w", "q", "a.q_proj.w")
    [(again, _)] = WeightsMapper(orig_to_new_prefix={"a": "b"}).apply([(name, ONE)])
    assert (again, again.shard_id, again.checkpoint_name) == ("b.qkv_proj.w", "q", "a.q_proj.w")


# -- which rule wins -----------------------------------------------------------------------------


def test_NM_03_the_longest_prefix_wins_whatever_the_order() -> None:
    rules = {"": "model.", "model.": "model.", "model.model.": "model.", "model.score": "score"}
    for order in (list(rules.items()), list(rules.items())[::-1]):
        mapper = WeightsMapper(orig_to_new_prefix=dict(order))
        assert mapped(mapper, "layers.0.w") == "model.layers.0.w"
        assert mapped(mapper, "model.layers.0.w") == "model.layers.0.w"
        assert mapped(mapper, "model.model.layers.0.w") == "model.layers.0.w"
        assert mapped(mapper, "model.score.w") == "score.w"


def test_NM_03_a_rule_never_fires_on_its_own_output() -> None:
    swap = WeightsMapper(orig_to_new_substr={"a": "b", "b": "a"})
    assert mapped(swap, "x.a.y") == "x.b.y"
    assert mapped(WeightsMapper(orig_to_new_prefix={"m": "m.m"}), "m.w") == "m.m.w"
    assert mapped(WeightsMapper(orig_to_new_stacked={}), "q_proj.w") == "q_proj.w"
    again = WeightsMapper(orig_to_new_stacked={"p": ("p.p", 0)})
    assert again.map_name("p.w") == ("p.p.w", 0)


@pytest.mark.parametrize("kind", ["prefix", "suffix", "substr"])
def test_NM_03_the_same_components_with_other_targets_are_an_error(kind: str) -> None:
    patterns = {"prefix": ("m", "m."), "suffix": ("m", ".m"), "substr": (".m.", "m")}[kind]
    with pytest.raises(ModelError, match="differ") as caught:
        WeightsMapper(**{f"orig_to_new_{kind}": {patterns[0]: "a", patterns[1]: "b"}})
    assert caught.value.code == "MAPPER_CONFLICT"
    WeightsMapper(**{f"orig_to_new_{kind}": {patterns[0]: "a", patterns[1]: "a"}})


def test_NM_03_two_regexes_that_tie_and_differ_are_an_error_naming_both() -> None:
    mapper = WeightsMapper(orig_to_new_regex={r"layer.0": "a", r"layer\.\d": "b", "x": "y"})
    with pytest.raises(ModelError, match=r"layer\.0.*layer") as caught:
        mapper.map_name("layer.0.w")
    assert caught.value.code == "MAPPER_CONFLICT"
    longest = WeightsMapper(orig_to_new_regex={"layer": "a", r"layer\.\d": "b"})
    assert mapped(longest, "layer.0.w") == "b.w"


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param({"orig_to_new_prefix": {".model": "a"}}, id="prefix-after-nothing"),
        pytest.param({"orig_to_new_suffix": {"w.": "a"}}, id="suffix-before-nothing"),
        pytest.param({"orig_to_new_substr": {"": "a"}}, id="empty"),
        pytest.param({"orig_to_new_substr": {"a..b": "a"}}, id="empty-component"),
        pytest.param({"orig_to_new_substr": {".": "a"}}, id="only-a-dot"),
        pytest.param({"orig_to_new_prefix": {"a": 3}}, id="not-a-name"),
        pytest.param({"orig_to_new_regex": {"(": "a"}}, id="not-a-regex"),
        pytest.param({"orig_to_new_stacked": {"q": "qkv"}}, id="no-shard"),
        pytest.param({"orig_to_new_stacked": {"q": ("qkv", [1])}}, id="unhashable-shard"),
    ],
)
def test_a_rule_that_is_none_is_refused_when_the_mapper_is_made(rules: dict[str, dict]) -> None:
    with pytest.raises(ModelError) as caught:
        WeightsMapper(**rules)
    assert caught.value.code == "MAPPER_PATTERN"


def test_a_replacement_for_a_group_that_is_not_there_says_so() -> None:
    with pytest.raises(ModelError, match="cannot expand"):
        WeightsMapper(orig_to_new_regex={"a": r"\2"}).map_name("a.w")


def test_a_mapper_that_leaves_nothing_of_a_name_says_so() -> None:
    with pytest.raises(ModelError, match="leaves nothing"):
        WeightsMapper(orig_to_new_prefix={"a": ""}).map_name("a")


# -- dropping, colliding -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prefix", "suffix", "substr", "rename", "regex", "stacked"])
def test_a_target_of_None_drops_and_says_why(kind: str) -> None:
    mapper = WeightsMapper(**{f"orig_to_new_{kind}": {"mtp": None}})
    assert mapper.map_name("mtp") is None
    told: list[tuple[str, dict[str, object]]] = []
    before = set_sink(lambda kind, **what: told.append((kind, what)))
    try:
        assert [name for name, _ in mapper.apply([("mtp", ONE), ("a", ONE)])] == ["a"]
    finally:
        set_sink(before)
    assert told[0][0] == "SKIPPED"
    assert told[0][1]["name"] == "mtp"
    assert kind in str(told[0][1]["message"])


def test_NM_03_two_names_for_one_place_are_an_error_naming_both() -> None:
    mapper = WeightsMapper(orig_to_new_prefix={"model.": ""})
    with pytest.raises(WeightLoadError, match=r"'model\.norm\.w' and 'norm\.w'") as caught:
        list(mapper.apply([("model.norm.w", ONE), ("norm.w", ONE)]))
    assert caught.value.code == "NAME_COLLISION"
    assert caught.value.detail == {"names": ["model.norm.w", "norm.w"]}


def test_two_parts_of_one_fused_parameter_do_not_collide() -> None:
    mapper = WeightsMapper(orig_to_new_stacked=LLAMA)
    names = [name for name, _ in mapper.apply([("a.q_proj.w", ONE), ("a.k_proj.w", ONE)])]
    assert names == ["a.qkv_proj.w", "a.qkv_proj.w"]
    with pytest.raises(WeightLoadError, match="shard 'q'"):
        list(mapper.apply([("a.q_proj.w", ONE), ("a.q_proj.w", ONE)]))


# -- explain, merge, reverse ---------------------------------------------------------------------


def test_NM_03_explain_shows_which_rules_fired() -> None:
    mapper = WeightsMapper(orig_to_new_prefix={"transformer.": "model."}, orig_to_new_stacked=LLAMA)
    explained = mapper.explain("transformer.h.0.q_proj.w")
    assert [step.pattern for step in explained.steps] == ["transformer.", "q_proj"]
    assert explained.result == MappedName("model.h.0.qkv_proj.w", "q")
    assert "shard 'q'" in str(explained)
    assert "no rule" in str(mapper.explain("norm.w"))


def test_mappers_merge_and_a_conflict_is_an_error() -> None:
    a = WeightsMapper(orig_to_new_prefix={"a.": "x."})
    b = WeightsMapper(orig_to_new_prefix={"b.": "y."}, orig_to_new_stacked=LLAMA)
    both = a | b
    assert both == b | a
    assert mapped(both, "a.w") == "x.w"
    assert mapped(both, "b.w") == "y.w"
    assert both.map_name("a.q_proj.w") == ("x.qkv_proj.w", "q")
    with pytest.raises(ModelError):
        a | WeightsMapper(orig_to_new_prefix={"a.": "z."})
    with pytest.raises(ModelError):
        a | WeightsMapper(orig_to_new_prefix={"a": "z."})


def test_reverse_finds_the_checkpoint_name_where_it_is_unique() -> None:
    mapper = WeightsMapper(
        orig_to_new_prefix={"transformer.": "model."},
        orig_to_new_substr={"h": "layers", "attn": "self_attn"},
        orig_to_new_suffix={".gamma": ".weight", ".weight": ".weight"},
        orig_to_new_rename={"wte": "model.embed.w"},
        orig_to_new_stacked=LLAMA,
    )
    back = mapper.reverse()
    for name in ("transformer.h.0.attn.q_proj.w", "transformer.h.0.mlp.up_proj.w", "wte"):
        assert back.map_name(*mapper.map_name(name)) == name  # type: ignore[misc]
    assert back.map_name("other.weight") == "other.weight", "an identity rule says: this spelling"
    assert back.map_name("model.norm.bias") == "transformer.norm.bias"
    known = mapper.reverse(known=["model.norm.bias", "other.gamma"])
    assert known.map_name("model.norm.bias") == "model.norm.bias"
    assert known.map_name("other.weight") == "other.gamma"
    assert back.shards("model.layers.0.self_attn.qkv_proj.w") == ["q", "k", "v"]
    two = WeightsMapper(orig_to_new_prefix={"a": "c", "b": "c"})
    assert two.reverse().map_name("c.w") is None


def test_reverse_gives_None_where_nothing_leads_there() -> None:
    back = WeightsMapper(orig_to_new_prefix={"": "model."}).reverse()
    assert back.map_name("head.w") is None
    assert back.map_name("model.w") == "w"


# -- NM-02: every spelling -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix",
    ["", "model.", "backbone.", "transformer.", "model.model.", "model.language_model."],
)
def test_NM_02_optional_prefixes_are_one_declaration(prefix: str) -> None:
    spellings = ("", "model.", "backbone.", "transformer.", "model.model.", "model.language_model.")
    mapper = WeightsMapper(orig_to_new_prefix=dict.fromkeys(spellings, "model."))
    assert mapped(mapper, prefix + "layers.0.w") == "model.layers.0.w"


# -- properties ----------------------------------------------------------------------------------

words = st.sampled_from(["a", "b", "c", "ab", "0", "1"])
runs = st.lists(words, min_size=1, max_size=3).map(".".join)
names = st.lists(words, min_size=1, max_size=6).map(".".join)
rule_sets = st.dictionaries(runs, st.none() | runs, max_size=6)


@given(rule_sets, rule_sets, rule_sets, names, st.randoms())
def test_the_order_of_rules_does_not_matter(prefix, suffix, substr, name, rng) -> None:
    def shuffled(rules: dict[str, str | None]) -> dict[str, str | None]:
        items = list(rules.items())
        rng.shuffle(items)
        return dict(items)

    one = WeightsMapper(prefix, suffix, substr)
    two = WeightsMapper(shuffled(prefix), shuffled(suffix), shuffled(substr))
    assert one.map_name(name) == two.map_name(name)
    assert one.explain(name) == two.explain(name)


@given(rule_sets, names)
def test_a_prefix_kind_fires_once_and_as_its_longest_rule(rules, name) -> None:
    explained = WeightsMapper(orig_to_new_prefix=rules).explain(name)
    fitting = [p for p in rules if name == p or name.startswith(p + ".")]
    assert len(explained.steps) == bool(fitting)
    if fitting:
        best = max(fitting, key=len)
        target = rules[best]
        assert explained.result == (None if target is None else (target + name[len(best) :], None))


@given(rule_sets, names)
def test_every_substr_rule_fires_at_most_once(rules, name) -> None:
    patterns = [s.pattern for s in WeightsMapper(orig_to_new_substr=rules).explain(name).steps]
    assert len(patterns) == len(set(patterns))
    present = [p for p in rules if f".{p}." in f".{name}."]
    assert bool(patterns) == bool(present)


@given(st.lists(names, unique=True, max_size=8), rule_sets, st.randoms())
def test_the_order_of_tensors_does_not_matter(given_names, rules, rng) -> None:
    mapper = WeightsMapper(orig_to_new_substr=rules)

    def outcome(order: list[str]) -> object:
        try:
            return sorted((n.checkpoint_name, n) for n, _ in mapper.apply((n, ONE) for n in order))
        except WeightLoadError as error:
            return error.code

    shuffled = list(given_names)
    rng.shuffle(shuffled)
    assert outcome(given_names) == outcome(shuffled)


@given(rule_sets, rule_sets, names)
def test_what_reverse_returns_leads_forward_again(prefix, substr, name) -> None:
    mapper = WeightsMapper(prefix, orig_to_new_substr=substr, orig_to_new_stacked={"q": ("a", 1)})
    back = mapper.reverse().map_name(name)
    assert back is None or mapper.map_name(back) == (name, None)


def test_the_cost_of_a_name_does_not_grow_with_the_number_of_rules() -> None:
    def calls(rules: int) -> int:
        mapper = WeightsMapper(
            {f"p{i}.": f"q{i}." for i in range(rules)},
            orig_to_new_substr={f"s{i}.t": f"u{i}" for i in range(rules)},
            orig_to_new_stacked={f"w{i}": (f"x{i}", i) for i in range(rules)},
        )
        assert mapper.map_name("p1.layers.7.s1.t.w1.weight") == ("q1.layers.7.u1.x1.weight", 1)
        return calls_of(lambda: mapper.map_name("p1.layers.7.s1.t.w1.weight"))

    assert calls(2000) == calls(10)
