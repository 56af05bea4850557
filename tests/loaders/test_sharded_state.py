"""``sharded_state``: what ranks hold comes back bit for bit, at their topology and at others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_llama, write_shards
from helpers.saving import read, same
from helpers.sharded import QUIET, ranks_of, same_state, save_ranks
from helpers.tiny_families import FAMILIES, write_family
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import OptionError, ShardedError
from loadkit.expert_placement import ExpertPlacement
from loadkit.manifest import MANIFEST, parse_manifest

MIXTURES = {"qwen3_moe", "mixtral"}


def load(folder: Path, parallel: ParallelConfig | None = None, **options: Any) -> Any:
    options = {"load_config": QUIET, **options}
    return loadkit.load(folder, parallel=parallel or ParallelConfig(), **options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, shards=2)
    return folder


class Written:
    """A folder of checkpoints, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __truediv__(self, family: str) -> Path:
        folder = self._folder / family
        return folder if folder.exists() else write_family(folder, family)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("families"))


def topologies(family: str) -> list[dict[str, int]]:
    """Every kind of topology that a family has."""
    found = [{"tp_size": 1}, {"tp_size": 2}, {"tp_size": 4}]
    if family != "bert":
        found += [{"pp_size": 2}, {"tp_size": 2, "pp_size": 2}]
    if family in MIXTURES:
        found += [{"tp_size": 4, "ep_size": 4}, {"tp_size": 2, "dp_size": 2, "ep_size": 4}]
    return found


# -- round trips -------------------------------------------------------------------------------


def _quick(family: str, tp: int) -> bool:
    return tp == 2 or family in ("llama", "mixtral")


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        pytest.param(family, tp, marks=() if _quick(family, tp) else pytest.mark.slow)
        for family in FAMILIES
        for tp in (1, 2, 4)
    ],
)
def test_every_family_comes_back_bit_for_bit(
    family: str, tp: int, families: Written, tmp_path: Path
) -> None:
    ranks = ranks_of(tp_size=tp)
    models = save_ranks(families / family, tmp_path, ranks)
    for parallel, model in zip(ranks, models, strict=True):
        found = load(tmp_path, parallel)
        same_state(found.model, model)
        assert found.plan.load_format == "sharded_state"
        assert found.report.aliased_bytes == found.report.bytes_read == found.report.bytes_needed
        assert {row.exact for row in found.plan.rows} == {"exact"}


@pytest.mark.parametrize(
    ("family", "saved", "asked"),
    [
        ("llama", {"tp_size": 4}, {"tp_size": 1}),
        ("llama", {"tp_size": 1}, {"tp_size": 4}),
        ("llama_tied", {"tp_size": 4}, {"tp_size": 2}),
        ("llama", {"tp_size": 2}, {"tp_size": 8}),
        ("bert", {"tp_size": 4}, {"tp_size": 2}),
        ("gemma3", {"tp_size": 2, "pp_size": 2}, {"tp_size": 1}),
        ("qwen3", {"pp_size": 2}, {"tp_size": 2}),
        ("qwen3_moe", {"tp_size": 4, "ep_size": 4}, {"tp_size": 2}),
        ("mixtral", {"tp_size": 2}, {"tp_size": 2, "dp_size": 2, "ep_size": 4}),
    ],
)
def test_another_topology_is_cut_anew(
    family: str, saved: Any, asked: Any, families: Written, tmp_path: Path
) -> None:
    source = families / family
    save_ranks(source, tmp_path, ranks_of(**saved))
    for parallel in ranks_of(**asked):
        found, expected = load(tmp_path, parallel), load(source, parallel)
        same_state(found.model, expected.model)
        assert found.plan.bytes_to_read == found.report.bytes_read
        assert found.report.bytes_needed == expected.report.bytes_needed
        assert {row.exact for row in found.plan.rows} == {"exact"}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_topology_is_cut_from_every_other(
    family: str, families: Written, tmp_path: Path
) -> None:
    source = families / family
    kinds = topologies(family)
    models = [
        save_ranks(source, tmp_path / str(at), ranks_of(**kind)) for at, kind in enumerate(kinds)
    ]
    for at in range(len(kinds)):
        for kind, expected in zip(kinds, models, strict=True):
            for parallel, model in zip(ranks_of(**kind), expected, strict=True):
                same_state(load(tmp_path / str(at), parallel).model, model)


def test_six_heads_saved_at_two_ranks_are_cut_for_three(tmp_path: Path) -> None:
    source = write_family(
        tmp_path / "six",
        "llama",
        hidden_size=48,
        intermediate_size=96,
        num_attention_heads=6,
        num_key_value_heads=6,
    )
    save_ranks(source, tmp_path / "two", ranks_of(tp_size=2))
    for parallel in ranks_of(tp_size=3):
        same_state(load(tmp_path / "two", parallel).model, load(source, parallel).model)


def test_experts_placed_otherwise_are_cut_anew(families: Written, tmp_path: Path) -> None:
    source = families / "qwen3_moe"
    save_ranks(source, tmp_path, ranks_of(tp_size=2, ep_size=2))
    placed = ExpertPlacement.round_robin(8, 2, redundant=2)
    for parallel in ranks_of(tp_size=2, ep_size=2, expert_placement=placed):
        same_state(load(tmp_path, parallel).model, load(source, parallel).model)


def test_redundant_experts_come_back_and_are_read_once_elsewhere(
    families: Written, tmp_path: Path
) -> None:
    source = families / "mixtral"
    placed = ExpertPlacement.linear(8, 2, redundant=4)
    ranks = ranks_of(tp_size=2, ep_size=2, expert_placement=placed)
    models = save_ranks(source, tmp_path, ranks)
    for parallel, model in zip(ranks, models, strict=True):
        same_state(load(tmp_path, parallel).model, model)
    same_state(load(tmp_path).model, load(source).model)


def test_data_parallel_ranks_share_files(llama: Path, tmp_path: Path) -> None:
    for parallel in ranks_of(tp_size=2, dp_size=2):
        model = load(llama, parallel).model
        report = loadkit.save(model, tmp_path, save_format="sharded_state")
        assert report.files == (() if parallel.dp_rank else report.files)
    assert report.missing_ranks == ()
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    for parallel in ranks_of(tp_size=2, dp_size=2):
        same_state(load(tmp_path, parallel).model, load(llama, parallel).model)


# -- what is written ---------------------------------------------------------------------------


def test_the_manifest_says_what_the_files_are(llama: Path, tmp_path: Path) -> None:
    import hashlib

    save_ranks(llama, tmp_path, ranks_of(tp_size=2), saving={"max_shard_bytes": 6000})
    manifest = parse_manifest((tmp_path / MANIFEST).read_bytes())
    assert (manifest.layout, str(manifest.topology)) == ("runtime", "tp 2")
    assert (manifest.dtype, manifest.architecture) == ("float32", "LlamaForCausalLM")
    assert manifest.source == str(llama) and manifest.quantization is None
    assert len(manifest.files) > 2
    assert {p.name for p in tmp_path.glob("*.safetensors")} == set(manifest.files)
    for name, entry in manifest.files.items():
        data = (tmp_path / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry.size, entry.sha256)
        for key, tensor in load_file(tmp_path / name).items():
            known = entry.tensors[key]
            found = data[known.offset : known.offset + known.nbytes]
            assert found == tensor.contiguous().view(torch.uint8).numpy().tobytes()
            assert hashlib.sha256(found).hexdigest() == known.sha256
    assert manifest.tensors.keys() == llama_sd().keys()


def test_parts_are_bounded_and_larger_parameters_cut_into_rows(llama: Path, tmp_path: Path) -> None:
    models = save_ranks(llama, tmp_path, ranks_of(tp_size=1), saving={"max_shard_bytes": 1000})
    manifest = parse_manifest((tmp_path / MANIFEST).read_bytes())
    for entry in manifest.files.values():
        assert sum(tensor.nbytes for tensor in entry.tensors.values()) <= 1000
    assert any(t.rows is not None for e in manifest.files.values() for t in e.tensors.values())
    same_state(load(tmp_path).model, models[0])
    for parallel in ranks_of(tp_size=2):
        same_state(load(tmp_path, parallel).model, load(llama, parallel).model)


def test_a_tied_weight_is_written_once(families: Written, tmp_path: Path) -> None:
    (model,) = save_ranks(families / "llama_tied", tmp_path, ranks_of(tp_size=1))
    found = read(tmp_path)
    assert len({"lm_head.weight", "model.embed_tokens.weight"} & found.keys()) == 1
    loaded = load(tmp_path).model
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    same_state(loaded, model)


def test_config_and_tokenizer_files_come_along(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_cfg(source_of(source), rope_theta=5000.0)
    write_shards(source, llama_sd())
    (source / "tokenizer.json").write_text("{}")
    model = load(source, hf_overrides={"max_position_embeddings": 77}, dtype="bfloat16").model
    report = loadkit.save(model, tmp_path / "out", save_format="sharded_state")
    assert report.copied == ("tokenizer.json",)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["max_position_embeddings"], config["torch_dtype"]) == (77, "bfloat16")
    same_state(load(tmp_path / "out").model, model)


def source_of(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_saving_replaces_a_folder_of_any_layout(llama: Path, tmp_path: Path) -> None:
    loadkit.save(load(llama).model, tmp_path, max_shard_bytes=5000)
    (tmp_path / "mine.txt").write_text("keep")
    save_ranks(llama, tmp_path, ranks_of(tp_size=2))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        *(f"model-rank-{rank}-part-0.safetensors" for rank in range(2)),
        *("config.json", "mine.txt", MANIFEST),
    }
    save_ranks(llama, tmp_path, ranks_of(tp_size=1))
    assert not (tmp_path / "model-rank-1-part-0.safetensors").exists()
    loadkit.save(load(llama).model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "mine.txt", "model.safetensors",
    }  # fmt: skip
    same(read(tmp_path), llama_sd())


def test_a_model_is_saved_over_the_files_that_it_is_views_of(llama: Path, tmp_path: Path) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=1))
    model = load(tmp_path).model
    loadkit.save(model, tmp_path, save_format="sharded_state")
    same_state(load(tmp_path).model, model)
    same_state(load(llama).model, model)


def test_rank_files_become_a_checkpoint_again(families: Written, tmp_path: Path) -> None:
    for family in ("llama", "gemma3", "bert", "mixtral"):
        source, folder = families / family, tmp_path / family
        save_ranks(source, folder, ranks_of(tp_size=1))
        loadkit.save(load(folder).model, folder / "by-key")
        same(read(folder / "by-key"), read(source))
        save_ranks(source, folder / "two", ranks_of(tp_size=2))
        loadkit.save(load(folder / "two").model, folder / "joined")
        same(read(folder / "joined"), read(source))


def test_rank_files_are_saved_for_another_topology(llama: Path, tmp_path: Path) -> None:
    save_ranks(llama, tmp_path / "two", ranks_of(tp_size=2))
    save_ranks(tmp_path / "two", tmp_path / "four", ranks_of(tp_size=4))
    save_ranks(tmp_path / "four", tmp_path / "four again", ranks_of(tp_size=4))
    for parallel in ranks_of(tp_size=4):
        same_state(load(tmp_path / "four", parallel).model, load(llama, parallel).model)
    same_state(load(tmp_path / "four again").model, load(llama).model)


def test_another_dtype_is_cast(llama: Path, tmp_path: Path) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=1), dtype="bfloat16")
    found = load(tmp_path, dtype="float32")
    assert found.report.casts == [{"from": "bfloat16", "to": "float32", "tensors": 15}]
    half = load(llama, dtype="bfloat16").model
    for name, param in found.model.named_parameters():
        assert torch.equal(param, half.get_parameter(name).float())


def test_iter_weights_and_load_into_see_the_checkpoints_tensors(
    llama: Path, tmp_path: Path
) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=2))
    same(dict(loadkit.iter_weights(tmp_path)), llama_sd())
    model = load(llama).model
    expected = {name: param.clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.data.zero_()
    loadkit.load_into(model, tmp_path)
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[name])


def test_load_into_takes_a_ranks_files_by_key(llama: Path, tmp_path: Path) -> None:
    ranks = ranks_of(tp_size=2)
    models = save_ranks(llama, tmp_path, ranks)
    for parallel, model in zip(ranks, models, strict=True):
        other = load(llama, parallel).model
        for param in other.parameters():
            param.data = torch.zeros_like(param)
        loadkit.load_into(other, tmp_path, parallel=parallel)
        same_state(other, model)


@pytest.mark.parametrize("reader", ["pread", "mmap"])
@pytest.mark.parametrize("tp", [1, 2])
def test_readers_and_owned_memory(reader: str, tp: int, llama: Path, tmp_path: Path) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=2))
    config = LoadConfig(reader=reader, alias="never", use_tqdm_on_load=False)
    for parallel in ranks_of(tp_size=tp):
        found = load(tmp_path, parallel, load_config=config)
        assert found.report.aliased_bytes == 0
        same_state(found.model, load(llama, parallel).model)


@pytest.mark.parametrize("tp", [2, 1], ids=["by key", "cut anew"])
@pytest.mark.parametrize("strategy", ["lazy", "eager", "prefetch"])
def test_the_strategies_of_safetensors_are_followed(
    strategy: str, tp: int, llama: Path, tmp_path: Path
) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=2))
    parallel = ParallelConfig(tp_size=tp)
    config = LoadConfig(use_tqdm_on_load=False, safetensors_load_strategy=strategy)
    result = load(tmp_path, parallel, load_config=config)
    same_state(result.model, load(llama, parallel).model)
    report = result.report
    assert f"safetensors_load_strategy is '{strategy}'" in report.reader_why
    assert (report.aliased_bytes > 0) == (strategy != "eager")
    assert result.plan.bytes_to_read == report.bytes_read


def test_the_streamer_has_no_strategies(llama: Path, tmp_path: Path) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=2))
    config = LoadConfig(load_format="runai_streamer_sharded", safetensors_load_strategy="eager")
    with pytest.raises(OptionError, match="safetensors_load_strategy='eager'"):
        load(tmp_path, ParallelConfig(tp_size=2), load_config=config)


def test_the_streamers_name_is_the_same_format(llama: Path, tmp_path: Path) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=1))
    found = load(tmp_path, load_format="runai_streamer_sharded")
    same_state(found.model, load(llama).model)


def test_auto_says_why(llama: Path, tmp_path: Path) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=2))
    plan = loadkit.plan(tmp_path, parallel=ParallelConfig(tp_size=2))
    assert plan.load_format == "sharded_state" and "model-rank-0" in plan.load_format_why


# -- files that other programs wrote -----------------------------------------------------------


def without_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


@pytest.mark.parametrize("tp", [1, 2])
def test_rank_files_without_a_manifest_load_at_their_own_topology(
    tp: int, families: Written, tmp_path: Path
) -> None:
    ranks = ranks_of(tp_size=tp)
    models = save_ranks(
        families / "llama_tied", tmp_path, ranks, saving={"max_shard_bytes": 30_000}
    )
    without_manifest(tmp_path)
    assert len(list(tmp_path.glob("model-rank-0-part-*"))) > 1
    for parallel, model in zip(ranks, models, strict=True):
        found = load(tmp_path, parallel)
        same_state(found.model, model)
        assert found.report.aliased_bytes == found.report.bytes_read


def test_a_state_dict_with_both_names_of_a_tie_loads(families: Written, tmp_path: Path) -> None:
    model = load(families / "llama_tied").model
    every = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "lm_head.weight" in every and "model.embed_tokens.weight" in every
    save_file(every, tmp_path / "model-rank-0-part-0.safetensors")
    (tmp_path / "config.json").write_text((families / "llama_tied" / "config.json").read_text())
    found = load(tmp_path)
    same_state(found.model, model)
    assert "another name" in str(found.report.skipped)


def test_a_pattern_of_ones_own(llama: Path, tmp_path: Path) -> None:
    own = {"pattern": "r{rank:03d}.{part}.safetensors"}
    models = save_ranks(
        llama, tmp_path, ranks_of(tp_size=2), saving={"model_loader_extra_config": own}
    )
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == [
        "r000.0.safetensors", "r001.0.safetensors",
    ]  # fmt: skip
    for named in ({}, own):
        config = LoadConfig(
            load_format="sharded_state", model_loader_extra_config=named, use_tqdm_on_load=False
        )
        for parallel, model in zip(ranks_of(tp_size=2), models, strict=True):
            same_state(load(tmp_path, parallel, load_config=config).model, model)
        if not named:
            without_manifest(tmp_path)  # now the pattern has to be named


def test_CFG_06_an_option_that_the_format_has_not_is_refused(llama: Path, tmp_path: Path) -> None:
    for extra, said in (({"patern": "x"}, "pattern"), ({"pattern": 7}, "string")):
        config = LoadConfig(load_format="sharded_state", model_loader_extra_config=extra)
        with pytest.raises(OptionError, match=said):
            load(tmp_path, load_config=config)
    with pytest.raises(OptionError, match="save_id"):
        loadkit.save(
            load(llama).model,
            tmp_path / "out",
            save_format="sharded_state",
            model_loader_extra_config={"save_idd": "x"},
        )
    with pytest.raises(OptionError, match="letters"):
        loadkit.save(
            load(llama).model,
            tmp_path / "out",
            save_format="sharded_state",
            model_loader_extra_config={"save_id": "../x"},
        )
    assert not (tmp_path / "out").exists()


def test_the_wrong_number_of_ranks_is_named(llama: Path, tmp_path: Path) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=2))
    without_manifest(tmp_path)
    with pytest.raises(ShardedError, match=r"of tp 2, and tp 4 was asked for") as caught:
        load(tmp_path, ParallelConfig(tp_size=4))
    assert caught.value.code == "E_SHARDED"
