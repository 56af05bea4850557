"""What every decoder family is held to; a test file subclasses it for each of its families.

Each variant is a tiny random model of transformers. Ours has to compute the same from the same
weights, fused on disk or not, on one rank and on real ranks, at once and token by token; and what
the ranks hold, put together, has to be the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import loadkit
from helpers.checkpoints import write_shards
from helpers.families import (
    DECODED,
    Case,
    Tensors,
    build,
    decode,
    fused,
    load,
    positions_of,
    run,
)
from helpers.four_ranks import FourRanks
from loadkit.config import ParallelConfig
from loadkit_layers import FusedMoE

__all__ = [
    "BORDERS",
    "SIZES",
    "TOLERANCE",
    "DecoderFamilyTests",
    "checkpoint_of",
    "same",
    "stack_experts",
]

VOCAB = 99  # no multiple of anything, so that every tp pads
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
BORDERS = [0, 11, 12, 19]
# float32 against float32: sums in another order
TOLERANCE: dict[str, Any] = {"rtol": 0, "atol": 1e-4}
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal within ``TOLERANCE``."""
    torch.testing.assert_close(got, expected, **TOLERANCE)


def checkpoint_of(models: list[Any]) -> Tensors:
    """What all ranks of a model hold, put together under the checkpoint's names.

    Checks that ranks agree on what each holds whole, and that padding is zero.
    """
    ranks = [dict(model.named_parameters()) for model in models]
    found: Tensors = {}
    for name in ranks[0]:
        parts = [rank[name].data for rank in ranks]
        layer = models[0].get_submodule(name.rpartition(".")[0])
        whole = name.split(".")[-2]
        if isinstance(layer, FusedMoE):
            found |= experts_of(models, name)
        elif whole in PARTS:
            cut = [part.split(layer.output_partition_sizes) for part in parts]
            for index, part_name in enumerate(PARTS[whole]):
                step = layer.num_kv_head_replicas if part_name in ("k_proj", "v_proj") else 1
                pieces = [pieces[index] for pieces in cut[::step]]
                found[name.replace(whole, part_name)] = torch.cat(pieces)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = torch.cat(parts, dim=1)
        elif whole in ("embed_tokens", "lm_head"):
            rows = torch.cat(parts)
            assert not rows[layer.num_embeddings :].any(), f"{name}: padding is not zero"
            found[name] = rows[: layer.num_embeddings]
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name}: ranks differ"
            found[name] = parts[0]
    return found


def experts_of(models: list[Any], name: str) -> Tensors:
    """What all ranks hold of a parameter of experts, under the checkpoint's names.

    Checks that redundant experts are alike.
    """
    prefix, _, leaf = name.rpartition(".")
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for model in models:
        layer, param = model.get_submodule(prefix), model.get_parameter(name)
        for slot, expert in enumerate(layer.ranks.placement.experts_of(layer.ranks.ep_rank)):
            gate, up, down = layer.disk_names
            halves = zip((gate, up), param.data[slot].chunk(2), strict=True)
            parts = halves if leaf.startswith("w13") else [(down, param.data[slot])]
            for part_name, part in parts:
                of_ranks = pieces.setdefault(f"{prefix}.{expert}.{part_name}.weight", {})
                known = of_ranks.setdefault(layer.ranks.tp_rank, part)
                assert torch.equal(known, part), f"{name}: expert {expert} differs"
    dim = 0 if leaf.startswith("w13") else 1
    return {
        key: torch.cat([value for _, value in sorted(of_ranks.items())], dim=dim)
        for key, of_ranks in pieces.items()
    }


def stack_experts(weights: Tensors) -> Tensors:
    """The same weights with each layer's experts in two tensors, as transformers 5 has them."""
    out = dict(weights)
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        for first in [n for n in weights if n.endswith(f".experts.0.{gate}.weight")]:
            prefix = first.removesuffix(f".0.{gate}.weight")
            count = sum(n.startswith(f"{prefix}.") for n in weights) // 3
            parts = {
                part: torch.stack([out.pop(f"{prefix}.{e}.{part}.weight") for e in range(count)])
                for part in (gate, up, down)
            }
            out[f"{prefix}.gate_up_proj"] = torch.cat([parts[gate], parts[up]], dim=1)
            out[f"{prefix}.down_proj"] = parts[down]
    return out


class OnRanks:
    """What four ranks make of the cases; those of slow tests are run once one is asked for."""

    def __init__(
        self,
        ranks: FourRanks,
        cases: dict[str, Case],
        slow: set[str],
        folders: pytest.TempPathFactory,
    ) -> None:
        self._ranks, self._folders = ranks, folders
        self._waiting = [
            {name: case for name, case in cases.items() if (name in slow) is late}
            for late in (False, True)
        ]
        self._found: dict[str, list[Tensors]] = {}

    def of(self, case: str, layout: str) -> list[Tensors]:
        """Each rank's outputs."""
        for batch in [batch for batch in self._waiting if case in batch]:
            self._waiting.remove(batch)
            self._found |= self._ranks.run(batch, self._folders.mktemp("ranks"))
        return self._found[f"{case}/{layout}"]


class DecoderFamilyTests:
    """Subclass it as ``Test...``.

    Attributes:
        model: our class, ``"module:Class"``.
        oracle: transformers' classes, of the config and of the model.
        sizes: what every variant's config has.
        variants: name to what its config has beside them.
        norm_centre: about what stored norm weights are.
        joined: the variants whose ranks are put together.
        forms: ways the same weights are stored.
        layouts: more ways to lay the ``joined`` ones over four ranks, as ``Case.layouts``.
    """

    model: ClassVar[str]
    oracle: ClassVar[tuple[str, str]]
    sizes: ClassVar[dict[str, Any]] = SIZES
    variants: ClassVar[dict[str, dict[str, Any]]]
    norm_centre: ClassVar[float] = 1.0
    joined: ClassVar[tuple[str, ...]]
    forms: ClassVar[dict[str, Callable[[Tensors], Tensors]]] = {"unfused": dict, "fused": fused}
    layouts: ClassVar[dict[str, dict[str, Any]]] = {}

    @classmethod
    def reference(cls, variant: str) -> Any:
        """transformers' model of a variant, every parameter random."""
        transformers = pytest.importorskip("transformers", reason="the oracle of these tests")
        config_class, model_class = cls.oracle
        config = getattr(transformers, config_class)(**{**cls.sizes, **cls.variants[variant]})
        model = getattr(transformers, model_class)(config).eval()
        made = torch.Generator().manual_seed(len(variant))
        for key, param in model.named_parameters():
            centre = cls.norm_centre if "norm" in key else 0.0
            param.data.copy_(centre + 0.2 * torch.randn(param.shape, generator=made))
        return model

    @staticmethod
    def stored(reference: Any) -> Tensors:
        """The tensors that its checkpoint has."""
        weights = dict(reference.state_dict())
        if reference.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        return weights

    @classmethod
    def case(cls, variant: str) -> Case:
        """A variant with what transformers makes of three texts, each alone."""
        reference = cls.reference(variant)
        ids = torch.randint(0, VOCAB, (BORDERS[-1],), generator=torch.Generator().manual_seed(3))
        hidden, logits = [], []
        for start, end in pairwise(BORDERS):
            with torch.inference_mode():
                out = reference(
                    ids[None, start:end],
                    position_ids=positions_of([0, end - start])[None],
                    output_hidden_states=True,
                )
            hidden.append(out.hidden_states[-1][0])
            logits.append(out.logits[0])
        config = reference.config.to_dict()
        return Case(
            model=cls.model,
            config=config,
            weights=cls.stored(reference),
            ids=ids,
            borders=BORDERS,
            hidden=torch.cat(hidden),
            logits=torch.cat(logits),
            decode=not config.get("use_bidirectional_attention"),
            layouts=cls.layouts,
        )

    @staticmethod
    def model_names(weights: Tensors) -> Tensors:
        """A checkpoint's tensors under the model's names, fused ones apart."""
        return weights

    @pytest.fixture(scope="class")
    @classmethod
    def cases(cls) -> dict[str, Case]:
        made = {}
        for variant in cls.variants:
            case = cls.case(variant)
            for form, stored_as in cls.forms.items():
                weights = stored_as(case.weights)
                laid_out = form == "unfused" and variant in cls.joined
                layouts = cls.layouts if laid_out else {}
                changed = {"weights": weights, "layouts": layouts}
                made[f"{variant}-{form}"] = Case(**{**vars(case), **changed})
        return made

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(
        cls,
        cases: dict[str, Case],
        four_ranks: FourRanks,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> OnRanks:
        return OnRanks(four_ranks, cases, cls.slow_on_ranks(), tmp_path_factory)

    @classmethod
    def slow_on_ranks(cls) -> set[str]:
        """Cases that add a crossing alone: another form of a variant that is not ``joined``."""
        others = list(cls.forms)[1:]
        return {f"{v}-{form}" for v in cls.variants for form in others if v not in cls.joined}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        causal = [v for v, c in self.variants.items() if not c.get("use_bidirectional_attention")]
        if "ranked_name" in metafunc.fixturenames:
            slow = self.slow_on_ranks()
            names = [f"{v}-{form}" for v in self.variants for form in self.forms]
            metafunc.parametrize(
                "ranked_name",
                [pytest.param(n, marks=[pytest.mark.slow] if n in slow else []) for n in names],
            )
        for argument, variants, forms in (
            ("case_name", self.variants, self.forms),
            ("joined_name", self.joined, self.forms),
            ("causal_name", causal, ("unfused",)),
        ):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, [f"{v}-{form}" for v in variants for form in forms])

    def test_one_rank_equals_transformers(self, case_name: str, cases: dict[str, Case]) -> None:
        case = cases[case_name]
        model = build(case.model, case.config)
        load(model, case.weights)
        got = run(model, case.ids, case.borders, case.first_position, logits=True)
        same(got["hidden"], case.hidden)
        assert case.logits is not None
        same(got["logits"], case.logits)

    @pytest.mark.parametrize("tp", [2, 4])
    def test_real_ranks_equal_transformers(
        self, ranked_name: str, tp: int, cases: dict[str, Case], ranks: OnRanks
    ) -> None:
        case = cases[ranked_name]
        for got in ranks.of(ranked_name, f"tp{tp}"):
            same(got["hidden"], case.hidden)
            assert case.logits is not None
            same(got["logits"], case.logits)
            if case.decode:
                same(got["decoded"], case.hidden[:DECODED])

    def test_other_layouts_of_real_ranks_equal_transformers(
        self, cases: dict[str, Case], ranks: OnRanks
    ) -> None:
        for case_name, case in cases.items():
            for layout in case.layouts:
                for got in ranks.of(case_name, layout):
                    same(got["hidden"], case.hidden)
                    assert case.logits is not None
                    same(got["logits"], case.logits)

    @pytest.mark.parametrize("prompt", [1, 7])
    def test_token_by_token_with_caches_equals_all_at_once(
        self, causal_name: str, prompt: int, cases: dict[str, Case]
    ) -> None:
        case = cases[causal_name]
        ids = case.ids[: case.borders[1]]  # longer than every variant's window
        model = build(case.model, case.config)
        load(model, case.weights)
        with torch.inference_mode():
            at_once = model(ids, torch.arange(len(ids)))
        same(decode(model, ids, prompt), at_once)
        with torch.inference_mode():  # and the caches are gone
            assert torch.equal(model(ids, torch.arange(len(ids))), at_once)

    @pytest.mark.parametrize("tp", [1, 2, 4])
    def test_the_ranks_shards_put_together_are_the_checkpoint(
        self, joined_name: str, tp: int, cases: dict[str, Case], tmp_path: Path
    ) -> None:
        case = cases[joined_name]
        architecture = self.model.rpartition(":")[2]
        config = {**case.config, "architectures": [architecture]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        write_shards(tmp_path, case.weights, 2)
        models = []
        for rank in range(tp):
            parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
            result = loadkit.load(tmp_path, parallel=parallel, dtype="float32")
            assert type(result.model).__name__ == architecture
            models.append(result.model)
        variant = joined_name.rpartition("-")[0]
        expected = self.model_names(cases[f"{variant}-unfused"].weights)
        found = checkpoint_of(models)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
