"""BERT equals transformers, however it is named on disk and over however many ranks."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import loadkit
from helpers.families import Case, Tensors, build, fused, load, positions_of, run
from helpers.four_ranks import FourRanks
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import CheckpointError, ConfigFileError, ModelError, UsageError
from loadkit_models.sentence_transformers import PoolingSettings, read_pooling

transformers = pytest.importorskip(
    "transformers", reason="the oracle of these tests, in the development requirements"
)

BERT = "loadkit_models.bert:BertModel"
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 77,
    "max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decoder": {"is_decoder": True},
    "relu": {"hidden_act": "relu", "layer_norm_eps": 1e-5, "type_vocab_size": 1},
}
BORDERS = [0, 7, 8, 20]
# float32 against float32: sums in another order
TOLERANCE: dict[str, Any] = {"rtol": 0, "atol": 1e-4}


def oracle(name: str = "plain", kind: str = "BertModel") -> Any:
    """transformers' model of a variant, every parameter random."""
    config = transformers.BertConfig(**{**SIZES, **VARIANTS[name]})
    model = getattr(transformers, kind)(config).eval()
    made = torch.Generator().manual_seed(len(name))
    for key, param in model.named_parameters():
        centre = 1.0 if key.endswith("LayerNorm.weight") else 0.0
        param.data.copy_(centre + 0.2 * torch.randn(param.shape, generator=made))
    return model


def make_case(name: str, *, fuse: bool) -> Case:
    model = oracle(name)
    ids = torch.randint(0, 77, (20,), generator=torch.Generator().manual_seed(3))
    hidden, summaries = [], []
    for start, end in pairwise(BORDERS):
        with torch.inference_mode():
            out = model(ids[None, start:end])
        hidden.append(out.last_hidden_state[0])
        summaries.append(out.pooler_output)
    weights = dict(model.state_dict())
    return Case(
        model=BERT,
        config=model.config.to_dict(),
        weights=fused(weights) if fuse else weights,
        ids=ids,
        borders=BORDERS,
        hidden=torch.cat(hidden),
        extra={"pooler_output": torch.cat(summaries)},
    )


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    made = {name: make_case(name, fuse=False) for name in VARIANTS}
    return made | {f"{name}_fused": make_case(name, fuse=True) for name in VARIANTS}


@pytest.fixture(scope="module")
def ranks(
    cases: dict[str, Case], four_ranks: FourRanks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Tensors]]:
    return four_ranks.run(cases, tmp_path_factory.mktemp("ranks"))


NAMES = [f"{name}{form}" for name in VARIANTS for form in ("", "_fused")]


def check(got: Tensors, case: Case) -> None:
    torch.testing.assert_close(got["hidden"], case.hidden, **TOLERANCE)
    torch.testing.assert_close(got["pooler_output"], case.extra["pooler_output"], **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_equals_transformers(name: str, cases: dict[str, Case]) -> None:
    case = cases[name]
    model = build(case.model, case.config)
    load(model, case.weights)
    check(run(model, case.ids, case.borders, 0, logits=False), case)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_real_ranks_equal_transformers(
    name: str, tp: int, cases: dict[str, Case], ranks: dict[str, list[Tensors]]
) -> None:
    for got in ranks[f"{name}/tp{tp}"]:
        check(got, cases[name])


def test_token_types_equal_transformers() -> None:
    theirs = oracle()
    ours = build(BERT, theirs.config.to_dict())
    load(ours, dict(theirs.state_dict()))
    ids, types = torch.arange(9), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    with torch.inference_mode():
        expected = theirs(ids[None], token_type_ids=types[None]).last_hidden_state[0]
        got = ours(ids, torch.arange(9), token_type_ids=types)
    torch.testing.assert_close(got, expected, **TOLERANCE)


def renamed(weights: Tensors, prefix: str, legacy: bool) -> Tensors:
    def rename(name: str) -> str:
        if legacy:
            name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            name = name.replace("LayerNorm.bias", "LayerNorm.beta")
        return prefix + name

    return {rename(name): tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("legacy", [False, True], ids=["weight-bias", "NM-03-gamma-beta"])
@pytest.mark.parametrize("prefix", ["", "bert."], ids=["plain", "prefixed"])
def test_names_of_all_times_load(prefix: str, legacy: bool, cases: dict[str, Case]) -> None:
    case = cases["plain"]
    model = build(BERT, case.config)
    loaded = load(model, renamed(case.weights, prefix, legacy))
    assert loaded == set(dict(model.named_parameters()))
    check(run(model, case.ids, case.borders, 0, logits=False), case)


def test_a_pretraining_checkpoint_loads_without_its_heads() -> None:
    theirs = oracle(kind="BertForPreTraining")
    weights = dict(theirs.state_dict())
    weights["bert.embeddings.position_ids"] = torch.arange(32)[None]
    ours = build(BERT, theirs.config.to_dict())
    loaded = load(ours, weights)
    assert not any(name.startswith("cls") for name in loaded)
    ids = torch.arange(9)
    with torch.inference_mode():
        expected = theirs.bert(ids[None]).last_hidden_state[0]
        torch.testing.assert_close(ours(ids, torch.arange(9)), expected, **TOLERANCE)


def test_a_checkpoint_without_the_pooler_loads_and_has_none() -> None:
    weights = {k: v for k, v in oracle().state_dict().items() if not k.startswith("pooler.")}
    model = build(BERT, oracle().config.to_dict())
    load(model, weights)
    assert model.pooler is None
    with pytest.raises(UsageError, match="no pooler weights"):
        model.pooler_output(torch.zeros(3, 24))


def test_weights_in_several_calls_keep_the_pooler(cases: dict[str, Case]) -> None:
    weights = list(cases["plain"].weights.items())
    model = build(BERT, cases["plain"].config)
    for at in range(0, len(weights), 7):
        model.load_weights(iter(weights[at : at + 7]))
    assert model.pooler is not None
    model.load_weights((name, tensor) for name, tensor in weights if "pooler" not in name)
    assert model.pooler is not None
    assert not any(param.isnan().any() for param in model.parameters())


def test_half_a_pooler_is_not_enough() -> None:
    weights = dict(oracle().state_dict())
    del weights["pooler.dense.bias"]
    model = build(BERT, oracle().config.to_dict())
    loaded = model.load_weights(iter(weights.items()))
    assert set(dict(model.named_parameters())) - loaded == {"pooler.dense.bias"}


def joined(models: list[torch.nn.Module], words: int) -> Tensors:
    """The checkpoint that the ranks hold together: fused parts apart, padding rows left out."""
    found: Tensors = {}
    for name, _ in models[0].named_parameters():
        parts = [dict(model.named_parameters())[name].data for model in models]
        if "qkv_proj" in name:
            cut = [part.chunk(3) for part in parts]
            for index, one in enumerate(("query", "key", "value")):
                found[name.replace("qkv_proj", one)] = torch.cat([pieces[index] for pieces in cut])
        elif "word_embeddings" in name:
            found[name] = torch.cat(parts)[:words]
        elif "intermediate" in name:
            found[name] = torch.cat(parts)
        elif name.endswith("output.dense.weight"):
            found[name] = torch.cat(parts, dim=1)
        else:
            found[name] = parts[0]
            assert all(torch.equal(part, parts[0]) for part in parts)
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_ranks_shards_put_together_are_the_checkpoint(tp: int, cases: dict[str, Case]) -> None:
    case = cases["plain"]
    models = [build(BERT, case.config, ParallelConfig(tp_size=tp, tp_rank=r)) for r in range(tp)]
    for model in models:
        load(model, case.weights)
    found = joined(models, 77)
    assert found.keys() == case.weights.keys()
    for name, value in case.weights.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_ranks_of_the_real_minilm_put_together_are_its_file(tp: int, minilm: Path) -> None:
    results = [
        loadkit.load(minilm, parallel=ParallelConfig(tp_size=tp, tp_rank=rank))
        for rank in range(tp)
    ]
    found = joined([result.model for result in results], 30522)
    file = load_file(minilm / "model.safetensors")
    assert file.keys() - found.keys() == {"embeddings.position_ids"}
    assert all(result.report.skipped.keys() == {"embeddings.position_ids"} for result in results)
    for name, value in found.items():
        assert torch.equal(value, file[name]), name
    assert all(result.report.bytes_read == result.plan.bytes_to_read for result in results)


def test_what_cannot_be_is_refused() -> None:
    config = oracle().config.to_dict()
    with pytest.raises(ModelError, match="tp sizes that fit: 1, 2, 4") as caught:
        build(BERT, config, ParallelConfig(tp_size=3))
    assert caught.value.code == "TP_INDIVISIBLE"
    with pytest.raises(ConfigFileError, match="'relative_key'"):
        build(BERT, {**config, "position_embedding_type": "relative_key"})


# -- pooling -------------------------------------------------------------------------------------


def write_modules(folder: Path, pooling: Any, *kinds: str) -> Path:
    """A sentence-transformers folder with these module types after the transformer."""
    modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, kind in enumerate(kinds, 1):
        path = f"{index}_{kind}"
        modules.append({"idx": index, "path": path, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


@pytest.mark.parametrize(
    ("pooling", "kinds", "expected"),
    [
        ({"pooling_mode_mean_tokens": True}, ["Pooling"], PoolingSettings("mean", False)),
        (
            {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True},
            ["Pooling", "Normalize"],
            PoolingSettings("cls", True),
        ),
        ({"pooling_mode": "last"}, ["Pooling"], PoolingSettings("last", False)),
        (
            {"pooling_mode_max_tokens": True},
            ["Pooling", "Dense"],
            PoolingSettings("mean", False, ("pooling modes pooling_mode_max_tokens", "Dense")),
        ),
    ],
)
def test_the_folder_says_how_to_pool(
    tmp_path: Path, pooling: Any, kinds: list[str], expected: PoolingSettings
) -> None:
    folder = write_modules(tmp_path, pooling, *kinds)
    assert read_pooling(str(folder), LoadConfig()) == expected


def test_a_folder_that_does_not_say_pools_by_the_plain_mean(tmp_path: Path) -> None:
    assert read_pooling(str(tmp_path), LoadConfig()) == PoolingSettings("mean", False)
    assert read_pooling(str(tmp_path / "absent"), LoadConfig()) == PoolingSettings("mean", False)


@pytest.mark.parametrize(
    "text", ["{", '{"a": 1}', "[1]", '[{"type": "x.Pooling", "path": "../.."}]']
)
def test_a_modules_file_that_lies_is_a_typed_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError):
        read_pooling(str(tmp_path), LoadConfig())


def test_pool_follows_the_folder(tmp_path: Path, cases: dict[str, Case]) -> None:
    case = cases["plain"]
    folder = write_modules(tmp_path, {"pooling_mode_mean_tokens": True}, "Pooling", "Normalize")
    model = build(BERT, case.config, source=str(folder))
    means = torch.stack([case.hidden[a:b].mean(0) for a, b in pairwise(BORDERS)])
    expected = means / means.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(model.pool(case.hidden, BORDERS), expected)


def test_a_pooling_step_that_is_not_here_is_refused_when_it_is_asked_for(
    tmp_path: Path, cases: dict[str, Case]
) -> None:
    folder = write_modules(tmp_path, {"pooling_mode_mean_tokens": True}, "Pooling", "Dense")
    model = build(BERT, cases["plain"].config, source=str(folder))
    with pytest.raises(UsageError, match="no pooling step here for: Dense"):
        model.pool(cases["plain"].hidden, BORDERS)


def test_the_real_minilm_gives_the_oracles_similarities(minilm: Path, root: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="in the development requirements")
    oracle_file = json.loads((root / "tests/data/all-minilm-l6-v2.json").read_text())
    model = loadkit.load_model(minilm)
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    lines = [tokenizer.encode(text).ids for text in oracle_file["sentences"]]
    borders = [0]
    for line in lines:
        borders.append(borders[-1] + len(line))
    with torch.inference_mode():
        ids = torch.tensor([token for line in lines for token in line])
        hidden = model(ids, positions_of(borders), cu_seqlens=borders)
        vectors = model.pool(hidden, borders)
    cosine = vectors @ vectors.T
    torch.testing.assert_close(cosine, torch.tensor(oracle_file["cosine"]), rtol=0, atol=1e-5)
