"""GGUF files loaded through the whole line: every number right, only a rank's own bytes read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import loadkit
from helpers.cli import spawn
from helpers.gguf_files import LLAMA_KEYS, Tensor, f32, llama_tensors, lone_llama, write_gguf
from helpers.gguf_reference import reference, shard
from helpers.ranks import parallel_of
from loadkit.auto_weights_loader import AutoWeightsLoader
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import ConfigFileError, LoadkitError, ModelError, PlanError
from loadkit.mapper import WeightsMapper
from loadkit.model_registry import ModelRegistry
from loadkit.sources.local import LocalSource
from loadkit_gguf.loader import GGUFModelLoader
from loadkit_gguf.names import GGUFMapper, TableMapper
from loadkit_models.llama import LlamaForCausalLM

QUIET = LoadConfig(use_tqdm_on_load=False)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def load(path: Path, parallel: ParallelConfig | None = None, **options: Any) -> loadkit.LoadResult:
    options = {"dtype": "float32", "load_config": QUIET, **options}
    return loadkit.load(str(path), parallel=parallel or ParallelConfig(), **options)


def check_ranks(path: Path, size: int) -> list[loadkit.LoadResult]:
    """Load every rank; each parameter is what gguf-py and plain slicing give, bit for bit."""
    weights = reference(path)
    results = []
    for parallel in parallel_of(size):
        result = load(path, parallel)
        config = config_of(path)
        for name, parameter in result.model.named_parameters():
            expected = shard(weights, name, config, parallel.tp_rank, size)
            assert torch.equal(bits(parameter), bits(expected)), (name, parallel.tp_rank)
        results.append(result)
    return results


def config_of(path: Path) -> Any:
    with LocalSource(path, QUIET) as source:
        return GGUFModelLoader.read_model_config(source, QUIET).hf_config


# -- real files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_smollm2_has_the_numbers_of_gguf_py(size: int, smollm2: Path) -> None:
    results = check_ranks(smollm2, size)
    whole = results[0].report.bytes_needed if size == 1 else None
    for result in results:
        assert result.plan.ok and result.plan.bytes_to_read == result.report.bytes_read
        assert {row.exact for row in result.plan.rows} == {"exact"}
    if size == 1:
        assert whole == 96_576_768  # every tensor's bytes
    else:  # the norms are everybody's, everything else is cut in three
        norms = 61 * 576 * 4
        assert [r.report.bytes_needed for r in results] == [(96_576_768 - norms) // 3 + norms] * 3


def test_smollm2_is_bfloat16_unless_told_otherwise(smollm2: Path) -> None:
    model = loadkit.load_model(str(smollm2), load_config=QUIET)
    plain = load(smollm2).model.state_dict()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(bits(parameter), bits(plain[name].to(torch.bfloat16)))


def test_a_tp_that_does_not_divide_the_heads_names_the_legal_ones(smollm2: Path) -> None:
    plan = loadkit.plan(str(smollm2), parallel=ParallelConfig(tp_size=2, tp_rank=0))
    (problem,) = plan.problems
    assert problem.code == "TP_INDIVISIBLE"


@pytest.mark.large
@pytest.mark.parametrize("size", [1, 2, 4])
def test_gemma3_has_the_numbers_of_gguf_py(size: int, gemma3: Path) -> None:
    check_ranks(gemma3, size)


@pytest.mark.large
@pytest.mark.parametrize("size", [1, 2])
def test_qwen25_has_the_numbers_of_gguf_py(size: int, qwen25: Path) -> None:
    check_ranks(qwen25, size)


# -- made-up files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("head", [False, True], ids=["tied", "untied"])
def test_GG_06_a_lone_llama_loads_at_every_tp(size: int, head: bool, tmp_path: Path) -> None:
    check_ranks(lone_llama(tmp_path / "m.gguf", head=head, vocab=41), size)


def test_GG_06_known_extras_are_skipped_by_name_with_a_reason(tmp_path: Path) -> None:
    tensors = [*llama_tensors(), f32("rope_freqs.weight", 2, values=[1.0, 1.0])]
    result = load(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_KEYS))
    (row,) = [row for row in result.plan.rows if row.kind == "skipped"]
    assert row.tensor == "rope_freqs.weight" and "rope factors" in str(row.reason)


def test_an_unknown_tensor_is_a_problem_under_its_own_name(tmp_path: Path) -> None:
    tensors = [*llama_tensors(), f32("blk.0.mystery.weight", 16)]
    plan = loadkit.plan(str(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_KEYS)))
    (problem,) = plan.problems
    assert (problem.code, problem.tensor) == ("UNEXPECTED_TENSOR", "blk.0.mystery.weight")


def test_a_missing_tensor_is_a_problem(tmp_path: Path) -> None:
    tensors = [t for t in llama_tensors() if t.name != "blk.1.ffn_up.weight"]
    plan = loadkit.plan(str(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_KEYS)))
    assert [problem.parameter for problem in plan.problems] == [
        "model.layers.1.mlp.gate_up_proj.weight"
    ]


@pytest.mark.parametrize("rows", [42, 32])
def test_CFG_05_an_embedding_of_another_size_than_the_vocabulary_is_named(
    rows: int, tmp_path: Path
) -> None:
    keys = [*LLAMA_KEYS, ("llama.vocab_size", 40)]
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(vocab=rows), keys)
    plan = loadkit.plan(str(path))
    (problem,) = plan.problems
    assert problem.tensor == "token_embd.weight" and str(rows) in problem.message
    assert "40" in problem.message and "vocab_size" in f"{problem.message} {problem.hint}"
    with pytest.raises(PlanError):
        load(path)


def test_TP_08_ranks_differ_and_together_are_the_whole(tmp_path: Path) -> None:
    path = lone_llama(tmp_path / "m.gguf")
    whole = load(path).model.state_dict()
    ranks = [load(path, parallel).model.state_dict() for parallel in parallel_of(2)]
    name = "model.layers.0.mlp.gate_up_proj.weight"
    first, second = ranks[0][name], ranks[1][name]
    assert not torch.equal(first, second)
    gate, up = (torch.cat(pair) for pair in zip(first.chunk(2), second.chunk(2), strict=True))
    assert torch.equal(torch.cat([gate, up]), whole[name])
    down = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(torch.cat([rank[down] for rank in ranks], dim=1), whole[down])


PLAIN = {1: torch.float16, 30: torch.bfloat16, 28: torch.float64}


@pytest.mark.parametrize("kind", PLAIN)
def test_GG_03_plain_types_are_tensors_of_their_dtype(kind: int, tmp_path: Path) -> None:
    dtype, tensors, expected = PLAIN[kind], [], {}
    for tensor in llama_tensors():
        values = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).to(dtype)
        expected[str(tensor.name)] = values.float()
        tensors.append(tensor._replace(kind=kind, data=bytes(bits(values).tolist())))
    path = write_gguf(tmp_path / "m.gguf", tensors, LLAMA_KEYS)
    found = load(path).model.state_dict()
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(found[name].reshape(-1), expected["blk.1.ffn_down.weight"])


def test_a_type_that_only_kernels_use_is_refused_by_name(tmp_path: Path) -> None:
    tensors = [Tensor("token_embd.weight", [32, 2], 9, b"\0" * 72)]
    keys = [item for item in LLAMA_KEYS if item[0] != "llama.embedding_length"]
    path = write_gguf(tmp_path / "m.gguf", tensors, [*keys, ("llama.embedding_length", 32)])
    with pytest.raises(LoadkitError) as caught:
        load(path)
    assert "Q8_1" in str(caught.value) and "token_embd.weight" in str(caught.value)


def test_a_slice_inside_a_block_is_decoded_exactly(tmp_path: Path) -> None:
    """64 columns over two ranks are one block of 32 each; over four they are half a block."""
    generator = torch.Generator().manual_seed(1)
    tensors = []
    for tensor in llama_tensors(hidden=64, heads=8, kv=4, ffn=64):
        if len(tensor.dims) == 2:
            size = tensor.dims[0] * tensor.dims[1] // 32
            blocks = torch.randint(0, 256, (size, 34), dtype=torch.uint8, generator=generator)
            blocks[:, 1] = 0x38  # scales near one half
            tensor = tensor._replace(kind=8, data=bytes(blocks.view(-1).tolist()))
        tensors.append(tensor)
    sizes = {"embedding_length": 64, "feed_forward_length": 64, "attention.head_count": 8}
    sizes |= {"attention.head_count_kv": 4, "block_count": 2}
    keys = [LLAMA_KEYS[0], *((f"llama.{key}", value) for key, value in sizes.items())]
    path = write_gguf(tmp_path / "m.gguf", tensors, keys)
    for size in (1, 2, 4):
        check_ranks(path, size)


def test_a_split_file_loads_as_the_whole_one(tmp_path: Path) -> None:
    whole = load(lone_llama(tmp_path / "whole.gguf")).model.state_dict()
    folder = tmp_path / "parts"
    folder.mkdir()
    tensors = llama_tensors()
    for number in range(3):
        keys = [*(LLAMA_KEYS if number == 0 else []), ("split.no", number), ("split.count", 3)]
        write_gguf(folder / f"toy-{number + 1:05d}-of-00003.gguf", tensors[number::3], keys)
    for source in (folder, folder / "toy-00002-of-00003.gguf"):
        result = load(source)
        found = result.model.state_dict()
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        assert len({row.file for row in result.plan.rows if row.file}) == 3


# -- other people's models -------------------------------------------------------------------------


class Swapped:
    """A third party's mapper: plain functions, no base class; one weight is stored transposed."""

    def map_name(self, name: str) -> str | None:
        return {"first.w": "linear.weight", "norm.w": "norm"}.get(name)

    def transform(self, hf_name: str, tensor: torch.Tensor, hf_config: Any) -> torch.Tensor:
        return tensor.t() * 2 if hf_name == "linear.weight" else tensor


class Outside(nn.Module):
    """A model class from outside, with a ``gguf_mapper`` of its own."""

    gguf_mapper: ClassVar[GGUFMapper] = Swapped()

    def __init__(self, *, config: Any, prefix: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, bias=False)
        self.norm = nn.Parameter(torch.zeros(4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    ModelRegistry.register_model("OutsideGGUFModel", Outside)
    keys = [("general.architecture", "outside")]
    keys += [(key.replace("llama", "outside"), value) for key, value in LLAMA_KEYS[1:]]
    tensors = [
        f32("first.w", 4, 3),
        f32("norm.w", 4),
        f32("token_embd.weight", 1, 1),
    ]
    return write_gguf(tmp_path / "m.gguf", tensors, keys)


def test_a_model_from_outside_brings_its_own_mapper(outside: Path) -> None:
    result = load(outside, architecture="OutsideGGUFModel")
    expected = torch.arange(12.0).view(4, 3).t() * 2
    assert torch.equal(result.model.linear.weight, expected)
    (row,) = [row for row in result.plan.rows if row.kind == "skipped"]
    assert row.tensor == "token_embd.weight" and "gguf_mapper" in str(row.reason)


def test_a_mapper_that_fails_names_its_tensor(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, hf_name: str, tensor: torch.Tensor, hf_config: Any) -> torch.Tensor:
        if hf_name == "norm":
            raise ValueError("no such norm")
        return tensor.t() if hf_name == "linear.weight" else tensor

    monkeypatch.setattr(Swapped, "transform", broken)
    plan = loadkit.plan(str(outside), dtype="float32", architecture="OutsideGGUFModel")
    (problem,) = [p for p in plan.problems if p.code != "MISSING"]
    assert problem.tensor == "norm.w" and "no such norm" in problem.message


def test_a_class_attribute_goes_before_the_architectures_mapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = WeightsMapper(orig_to_new_prefix={"token_embd.": "model.embed_tokens."})
    own = TableMapper(names, {"blk": "not wanted", "attn_q": "nor this"})
    monkeypatch.setattr(LlamaForCausalLM, "gguf_mapper", own, raising=False)
    plan = loadkit.plan(str(lone_llama(tmp_path / "m.gguf")), dtype="float32")
    assert {row.tensor for row in plan.rows if row.reason == "nor this"} == {
        "blk.0.attn_q.weight",
        "blk.1.attn_q.weight",
    }
    monkeypatch.setattr(LlamaForCausalLM, "gguf_mapper", object(), raising=False)
    plan = loadkit.plan(str(lone_llama(tmp_path / "m.gguf")), dtype="float32")
    assert any("gguf_mapper has no map_name" in problem.message for problem in plan.problems)


def test_no_mapper_at_all_says_what_to_do(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Outside, "gguf_mapper")
    plan = loadkit.plan(str(outside), dtype="float32", architecture="OutsideGGUFModel")
    assert any("no gguf_mapper" in problem.message for problem in plan.problems)


def test_q_and_k_are_unpermuted_only_where_they_fit() -> None:
    from loadkit.errors import WeightLoadError
    from loadkit_gguf.names import unpermute_keys, unpermute_queries

    class Config:
        num_attention_heads = 2
        num_key_value_heads = 1

    rows = torch.arange(8.0).unsqueeze(1)
    assert unpermute_queries("q", rows, Config).view(-1).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert unpermute_keys("k", rows, Config).view(-1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    with pytest.raises(WeightLoadError, match="2 heads"):
        unpermute_queries("q", torch.zeros(6, 1), Config)


# -- around it -------------------------------------------------------------------------------------


def test_the_tokenizer_is_the_files_own(smollm2: Path, root: Path) -> None:
    oracle = json.loads((root / "tests/data/smollm2-135m-dequant-f32.llamacpp.json").read_text())
    with LocalSource(smollm2, QUIET) as source:
        tokenizer = GGUFModelLoader.read_tokenizer(source)
    assert tokenizer.vocab_size == oracle["n_vocab"]
    for prompt in oracle["prompts"].values():
        assert tokenizer.encode(prompt["text"]) == prompt["prompt_ids"]


def test_inspect_lists_tensors_by_their_types(tmp_path: Path) -> None:
    path = lone_llama(tmp_path / "m.gguf")
    document = spawn("inspect", path, "--json").json()
    assert document["formats"] == ["gguf"] and len(document["tensors"]) == len(llama_tensors())
    first = document["tensors"][0]
    assert (first["name"], first["dtype"], first["shape"]) == ("token_embd.weight", "F32", [40, 16])
    assert document["metadata"]["m.gguf"]["llama.block_count"] == 2


def test_a_config_error_reaches_the_caller_before_any_weight(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA_KEYS[:2])
    with pytest.raises(ConfigFileError):
        load(path)
    with pytest.raises(ModelError):
        load(lone_llama(tmp_path / "n.gguf"), ParallelConfig(tp_size=3, tp_rank=0))
