"""``quantization="gguf"``: weights stay in the file's blocks, at every tp, and give its numbers.

A weight is decoded to what a load that decodes would store, bit for bit, so outputs differ only by
the order of sums: shards of different types are multiplied one by one, and long weights in parts.
Measured on SmolLM2 in float32: 0 to 6e-6 of logits up to 30; 1e-4 is allowed.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_shards
from helpers.cli import spawn
from helpers.gguf_blocks import joined_ranks, matrices, quantised
from helpers.gguf_files import LLAMA_KEYS, Tensor, f32, llama_tensors, write_gguf
from helpers.ranks import parallel_of
from loadkit import tables
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import ModelError, OptionError, PlanError, UsageError
from loadkit.generate import greedy
from loadkit_gguf.names import TableMapper
from loadkit_gguf.packed_parameter import GGUFParameter
from loadkit_gguf.packed_rows import decode_rows
from loadkit_gguf.quantization import GGUFConfig, GGUFLinearMethod
from loadkit_models.llama import LlamaForCausalLM

QUIET = LoadConfig(use_tqdm_on_load=False)
DECODE = LoadConfig(use_tqdm_on_load=False, gguf_misaligned="decode")
BOUND = 1e-4


def load(path: Path, parallel: ParallelConfig | None = None, **options: Any) -> loadkit.LoadResult:
    options = {"dtype": "float32", "load_config": QUIET, "quantization": "gguf", **options}
    return loadkit.load(str(path), parallel=parallel or ParallelConfig(), **options)


def decoded(path: Path, **options: Any) -> Any:
    return load(path, quantization=None, **options).model


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        hidden = model(torch.tensor(ids), torch.arange(len(ids)))
        logits: torch.Tensor = model.compute_logits(hidden)
    return logits


def packed_of(model: Any) -> dict[str, GGUFParameter]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, GGUFParameter)}


def numbers_of(param: GGUFParameter, dtype: torch.dtype) -> torch.Tensor:
    """The parameter as a load that decodes has it: [rows, K], padding zeroed."""
    parts = [decode_rows(kind, rows, dtype) for kind, rows in param.runs()]
    padding = torch.zeros(param.padding, parts[0].shape[1], dtype=dtype)
    return torch.cat([*parts, padding])


def check_joined(path: Path, size: int, **options: Any) -> list[loadkit.LoadResult]:
    """Every rank's blocks, side by side, are the file's bytes. Layers that are decoded are left."""
    ranks = [load(path, parallel, **options) for parallel in parallel_of(size)]
    file = matrices(path)
    models: list[Any] = [rank.model for rank in ranks]
    kv_heads = models[0].model.layers[0].self_attn.qkv_proj.total_num_kv_heads
    found = joined_ranks(models, kv_heads)
    assert found
    for name, matrix in found.items():
        assert matrix.kind == file[name].kind, name
        assert torch.equal(matrix.rows, file[name].rows), name
    for rank in ranks:
        assert rank.plan.bytes_to_read == rank.report.bytes_read == rank.report.bytes_needed
        assert {row.exact for row in rank.plan.rows} == {"exact"}
    return ranks


# -- SmolLM2 ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(smollm2: Path) -> loadkit.LoadResult:
    return load(smollm2)


@pytest.fixture(scope="module")
def oracle(root: Path) -> dict[str, Any]:
    text = (root / "tests/data/smollm2-135m-dequant-f32.llamacpp.json").read_text()
    prompts: dict[str, Any] = json.loads(text)["prompts"]
    return prompts


@pytest.mark.parametrize("size", [1, 3])
def test_smollm2s_ranks_join_to_the_files_blocks(size: int, smollm2: Path) -> None:
    (first, *_) = check_joined(smollm2, size)
    kinds = {piece.kind for param in packed_of(first.model).values() for piece in param.pieces}
    assert kinds == {"Q4_1", "Q8_0"}
    assert len(packed_of(first.model)) == 30 * 4 + 1


def test_smollm2_is_read_once_and_mostly_mapped(packed: loadkit.LoadResult) -> None:
    report = packed.report
    assert report.bytes_read == report.parameter_bytes == 96_576_768  # every tensor's bytes
    q_and_k_and_v = 30 * 960 * (576 // 32 * 20)  # no neighbours in the file, rows out of order
    assert report.aliased_bytes == report.bytes_read - q_and_k_and_v
    assert q_and_k_and_v <= packed.plan.predicted_peak_bytes < q_and_k_and_v + (1 << 20)
    assert report.peak["host_anonymous_bytes"] < q_and_k_and_v + (32 << 20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2s_blocks_hold_the_decoded_models_numbers(dtype: str, smollm2: Path) -> None:
    plain = dict(decoded(smollm2, dtype=dtype).named_parameters())
    for name, param in load(smollm2, dtype=dtype).model.named_parameters():
        if isinstance(param, GGUFParameter):
            assert torch.equal(numbers_of(param, getattr(torch, dtype)), plain[name]), name
        else:
            assert torch.equal(param, plain[name]), name


def test_smollm2s_logits_are_those_of_the_decoded_model(
    packed: loadkit.LoadResult, smollm2: Path, oracle: dict[str, Any]
) -> None:
    ids = oracle["p1"]["prompt_ids"]
    mine, theirs = logits_of(packed.model, ids), logits_of(decoded(smollm2), ids)
    assert (mine - theirs).abs().max() <= BOUND
    top = oracle["p1"]["top10_ids"]
    assert (mine[-1, top] - torch.tensor(oracle["p1"]["top10_logits"])).abs().max() <= 1e-3


def test_smollm2_says_the_oracles_ids(packed: loadkit.LoadResult, oracle: dict[str, Any]) -> None:
    prompt = oracle["p1"]
    new = greedy(packed.model, prompt["prompt_ids"], max_new_tokens=12)
    assert new == prompt["greedy24_ids"][:12]


@pytest.mark.slow
def test_smollm2_says_them_on_three_real_ranks(smollm2: Path, oracle: dict[str, Any]) -> None:
    line = ["generate", smollm2, "--prompt", oracle["p1"]["text"], "--max-new-tokens", 3]
    options = ["--dtype", "float32", "--quantization", "gguf", "--tp", 3, "--json"]
    ran = spawn(*line, *options, timeout=240)
    assert ran.code == 0, ran.err
    assert ran.json()["output_ids"] == oracle["p1"]["greedy24_ids"][:3]


def test_TP_two_ranks_cannot_share_smollm2s_heads(smollm2: Path) -> None:
    two = ParallelConfig(tp_size=2, tp_rank=0)
    (problem,) = loadkit.plan(str(smollm2), parallel=two, quantization="gguf").problems
    assert problem.code == "TP_INDIVISIBLE" and "1, 3" in str(problem.hint)


def test_a_packed_model_is_not_saved(packed: loadkit.LoadResult, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        loadkit.save(packed.model, tmp_path / "out")
    assert caught.value.code == "QUANTIZED" and not (tmp_path / "out").exists()


# -- larger real files -----------------------------------------------------------------------------


@pytest.mark.large
@pytest.mark.parametrize("size", [2, 4])
def test_gemma3s_ranks_join_to_the_files_blocks(size: int, gemma3: Path) -> None:
    first, *_ = check_joined(gemma3, size)
    plain = decoded(gemma3, parallel=ParallelConfig(tp_size=size, tp_rank=0))
    plain = dict(plain.named_parameters())
    packed = packed_of(first.model)
    assert len(packed) == 18 * 4 + 1
    for name, param in packed.items():
        assert torch.equal(numbers_of(param, torch.float32), plain[name]), name


@pytest.mark.large
def test_qwen25s_ranks_join_to_the_files_blocks(qwen25: Path) -> None:
    """19 blocks of 256 columns are no two halves: those layers are decoded, and only if asked."""
    first, *_ = check_joined(qwen25, 2, load_config=DECODE)
    assert len(packed_of(first.model)) == 24 * 3 + 2  # all but down_proj
    plain = decoded(qwen25, parallel=ParallelConfig(tp_size=2, tp_rank=0))
    plain = dict(plain.named_parameters())
    for name, param in first.model.named_parameters():
        mine = param
        if isinstance(param, GGUFParameter):
            mine = numbers_of(param, torch.float32)
        assert torch.equal(mine, plain[name]), name


@pytest.mark.large
def test_qwen25s_blocks_cannot_be_halved(qwen25: Path) -> None:
    two = ParallelConfig(tp_size=2, tp_rank=1)
    problems = loadkit.plan(str(qwen25), parallel=two, quantization="gguf").problems
    assert {problem.code for problem in problems} == {"GGUF_MISALIGNED"}
    assert [p.tensor for p in problems] == [f"blk.{i}.ffn_down.weight" for i in range(24)]
    assert all(p.message.endswith("legal: tp 1") for p in problems)  # 19 ranks do not fit the heads


@pytest.mark.large
@pytest.mark.parametrize("name", ["gemma3", "qwen25"])
def test_a_larger_models_logits_are_those_of_the_decoded_one(
    name: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    ids = [2, 1000, 77, 4242]
    mine, theirs = logits_of(load(path).model, ids), logits_of(decoded(path), ids)
    assert (mine - theirs).abs().max() <= BOUND


# -- made-up files ---------------------------------------------------------------------------------

SIZES = {"embedding_length": 64, "feed_forward_length": 128, "attention.head_count": 8}
SIZES |= {"attention.head_count_kv": 4, "block_count": 2}
KEYS = [LLAMA_KEYS[0], *((f"llama.{key}", value) for key, value in SIZES.items())]

MIXED = {"attn_q": "Q4_1", "attn_k": "Q8_0", "attn_v": "F16", "ffn_gate": "Q5_0", "ffn_up": "Q5_1"}


def mixed(name: str) -> str:
    """A type for each part: none of a fused parameter's are the same."""
    return next((kind for part, kind in MIXED.items() if part in name), "Q8_0")


def all_q8(name: str) -> str:
    return "Q8_0"


def toy(path: Path, kind_of: Callable[[str], str | None] = mixed, **options: Any) -> Path:
    sizes = {"hidden": 64, "heads": 8, "kv": 4, "ffn": 128, **options}
    return write_gguf(path / "m.gguf", quantised(llama_tensors(**sizes), kind_of), KEYS)


IDS = [1, 5, 39, 0, 2, 17]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("head", [False, True], ids=["tied", "untied"])
def test_types_may_be_mixed_inside_a_fused_parameter(size: int, head: bool, tmp_path: Path) -> None:
    path = toy(tmp_path, head=head, vocab=41)
    first, *_ = check_joined(path, size)
    fused = packed_of(first.model)["model.layers.1.self_attn.qkv_proj.weight"]
    assert [piece.kind for piece in fused.pieces] == ["Q4_1", "Q8_0", "F16"]
    if size == 1:
        theirs = logits_of(decoded(path), IDS)
        assert (logits_of(first.model, IDS) - theirs).abs().max() <= BOUND
        half = load(path, dtype="bfloat16").model
        assert torch.equal(logits_of(half, IDS), logits_of(decoded(path, dtype="bfloat16"), IDS))


@pytest.mark.parametrize("size", [4, 8])
def test_ranks_that_hold_the_same_key_head_hold_the_same_blocks(size: int, tmp_path: Path) -> None:
    check_joined(toy(tmp_path), size, load_config=DECODE)


def test_a_part_that_begins_inside_a_block_is_a_problem_for_each_tensor(tmp_path: Path) -> None:
    four = ParallelConfig(tp_size=4, tp_rank=3)
    path = toy(tmp_path, all_q8)
    plan = loadkit.plan(str(path), parallel=four, quantization="gguf")
    assert [(p.code, p.tensor) for p in plan.problems] == [
        ("GGUF_MISALIGNED", f"blk.{i}.attn_output.weight") for i in range(2)
    ]
    problem = plan.problems[0]
    assert problem.parameter == "model.layers.0.self_attn.o_proj.weight"
    assert problem.file == "m.gguf"
    assert "64 columns in Q8_0 blocks of 32: tp 4" in problem.message
    assert problem.message.endswith("legal: tp 1, 2")
    assert "tp 1, 2 fits every tensor" in str(problem.hint)
    assert "gguf_misaligned='decode'" in str(problem.hint)
    with pytest.raises(PlanError, match="GGUF_MISALIGNED"):
        load(path, four)


def test_such_a_layer_is_decoded_where_that_is_asked_for(tmp_path: Path) -> None:
    path = toy(tmp_path, all_q8)
    four = ParallelConfig(tp_size=4, tp_rank=3)
    first, plain = load(path, four, load_config=DECODE).model, decoded(path, parallel=four)
    own = {n for n, p in first.named_parameters() if n.endswith("proj.weight")} - {
        *packed_of(first)
    }
    assert own == {f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2)}
    for name in own:
        assert torch.equal(first.get_parameter(name), plain.get_parameter(name))


def test_a_rank_of_padding_alone_holds_no_bytes(tmp_path: Path) -> None:
    path = toy(tmp_path, head=True, vocab=41)
    ranks = [load(path, parallel).model for parallel in parallel_of(2)]
    heads: list[Any] = [rank.lm_head for rank in ranks]
    assert [head.weight.numel() for head in heads] == [41 * 64 // 32 * 34, 0]
    assert [head.weight.padding for head in heads] == [23, 64]
    hidden = torch.ones(3, 64)
    assert torch.equal(heads[1](hidden), torch.zeros(3, 64))
    assert torch.equal(heads[0](hidden)[:, 41:], torch.zeros(3, 23))
    table: Any = ranks[1].model.embed_tokens
    assert torch.equal(
        table.quant_method.embedding(table, torch.tensor([0, 63])), torch.zeros(2, 64)
    )


def test_an_embedding_decodes_the_rows_that_are_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toy(tmp_path, vocab=41)
    table: Any = load(path).model.model.embed_tokens
    plain: Any = decoded(path).model.embed_tokens
    seen: list[int] = []

    def watched(kind: str, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        seen.append(len(rows))
        return decode_rows(kind, rows, dtype)

    monkeypatch.setattr("loadkit_gguf.quantization.decode_rows", watched)
    ids = torch.tensor([[3, 40], [3, 41]], dtype=torch.int32)  # 41 is padding
    assert torch.equal(table(ids), plain(ids.long()))
    assert seen == [4]
    with pytest.raises(IndexError):
        table(torch.tensor([64]))


def test_a_long_weight_is_decoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(toy(tmp_path)).model
    whole = logits_of(model, IDS)
    monkeypatch.setattr("loadkit_gguf.quantization.STEP", 64 * 7)
    assert (logits_of(model, IDS) - whole).abs().max() <= BOUND


@pytest.mark.parametrize("kind", ["F16", "BF16", None])
def test_a_file_without_blocks_is_loaded_as_always(kind: str | None, tmp_path: Path) -> None:
    path = toy(tmp_path, lambda name: kind)
    model = load(path).model
    assert not packed_of(model)
    assert torch.equal(logits_of(model, IDS), logits_of(decoded(path), IDS))


def test_parts_that_are_one_tensor_in_the_file(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = []
    for tensor in llama_tensors(hidden=64, heads=8, kv=4, ffn=128):
        if "attn_q" in str(tensor.name):
            values = torch.randn(128, 64, generator=generator)
            name = str(tensor.name).replace("attn_q", "attn_qkv")
            tensors.append(f32(name, 128, 64, values=values))
        elif "attn_k" not in str(tensor.name) and "attn_v" not in str(tensor.name):
            tensors.append(tensor)
    path = write_gguf(tmp_path / "m.gguf", quantised(tensors, all_q8), KEYS)
    plain = dict(decoded(path).named_parameters())
    for size in (1, 2):
        ranks = [load(path, parallel).model for parallel in parallel_of(size)]
        params = [packed_of(r)["model.layers.0.self_attn.qkv_proj.weight"] for r in ranks]
        sizes = [64 // size, 32 // size, 32 // size]
        parts = [numbers_of(param, torch.float32).split(sizes) for param in params]
        whole = torch.cat([each[i] for i in range(3) for each in parts])
        assert torch.equal(whole, plain["model.layers.0.self_attn.qkv_proj.weight"])
    one = load(path)
    packed_bytes = sum(param.nbytes for param in packed_of(one.model).values())
    assert one.report.aliased_bytes == one.report.bytes_read > packed_bytes


def test_sizes_that_do_not_fit_are_told_in_elements(tmp_path: Path) -> None:
    tensors = list(llama_tensors(hidden=64, heads=8, kv=4, ffn=128))
    bad = next(t for t in tensors if t.name == "blk.1.ffn_up.weight")
    tensors[tensors.index(bad)] = f32("blk.1.ffn_up.weight", 96, 64)
    path = write_gguf(tmp_path / "m.gguf", quantised(tensors, all_q8), KEYS)
    (problem,) = loadkit.plan(str(path), quantization="gguf").problems
    assert (problem.code, problem.tensor) == ("SHAPE_MISMATCH", "blk.1.ffn_up.weight")
    assert "[96, 64]" in problem.message


def test_a_second_head_is_compared_block_by_block(tmp_path: Path) -> None:
    tensors = llama_tensors(hidden=64, heads=8, kv=4, ffn=128)
    tied = {"hf_overrides": {"tie_word_embeddings": True}}

    def with_head(head: Tensor, kind_of: Callable[[str], str]) -> Path:
        made = [*tensors, head._replace(name="output.weight")]
        return write_gguf(tmp_path / "m.gguf", quantised(made, kind_of), KEYS)

    same = load(with_head(tensors[0], all_q8), **tied)
    assert [row.exact for row in same.plan.rows if row.kind == "tied"] == ["exact"]
    other = f32("output.weight", 40, 64)
    with pytest.raises(ModelError, match="differs"):
        load(with_head(other, all_q8), **tied)
    path = with_head(tensors[0], lambda name: "Q5_0" if name == "output.weight" else "Q8_0")
    (problem,) = loadkit.plan(str(path), quantization="gguf", **tied).problems
    assert problem.tensor == "output.weight"
    assert "Q8_0 blocks of 'token_embd.weight'" in problem.message and "Q5_0" in problem.message


# -- other people's models -------------------------------------------------------------------------


def change_numbers(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    return tensor * 2


def turn_columns(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    return tensor.flip(1)


def fewer_rows(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    return torch.cat([tensor[:1], tensor[:-1]])


@pytest.mark.parametrize("change", [change_numbers, turn_columns, fewer_rows])
def test_what_a_mapper_does_more_to_than_move_rows_is_decoded(
    change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loadkit_gguf.architectures import GGUF_ARCHITECTURES

    known: Any = GGUF_ARCHITECTURES["llama"].mapper
    own = TableMapper(known.names, known.skipped, {"mlp.down_proj.weight": change})
    monkeypatch.setattr(LlamaForCausalLM, "gguf_mapper", own, raising=False)
    path = toy(tmp_path, all_q8)
    model, plain = load(path).model, decoded(path)
    assert len(packed_of(model)) == 2 * 3 + 1
    for name, param in model.named_parameters():
        if not isinstance(param, GGUFParameter):
            assert torch.equal(param, plain.get_parameter(name)), name


def test_a_packed_model_can_be_copied_and_pickled(tmp_path: Path) -> None:
    model = load(toy(tmp_path)).model
    expected = logits_of(model, IDS)
    assert torch.equal(logits_of(copy.deepcopy(model), IDS), expected)
    param = packed_of(model)["model.layers.0.self_attn.qkv_proj.weight"]
    again = pickle.loads(pickle.dumps(copy.deepcopy(param).data))
    assert torch.equal(again, param)


def test_real_bytes_are_taken_by_the_layers_weight_loader(tmp_path: Path) -> None:
    model = load(toy(tmp_path)).model
    layer: Any = model.model.layers[0].mlp.gate_up_proj
    before = layer.weight.rows_of(1).clone()
    layer.weight_loader(layer.weight, torch.zeros_like(before), 1)
    assert not layer.weight.rows_of(1).any() and layer.weight.rows_of(0).any()
    layer.weight_loader(layer.weight, before, 1)
    with pytest.raises(ModelError, match="takes"):
        layer.weight_loader(layer.weight, before[:-1], 1)
    with pytest.raises(ModelError, match="float32, from elsewhere"):
        layer.weight_loader(layer.weight, torch.zeros(128, 64), 1)
    assert torch.equal(layer.weight.rows_of(1), before)


# -- the method ------------------------------------------------------------------------------------


def test_the_method_is_found_by_name() -> None:
    assert tables.quantization.lookup("gguf") is GGUFConfig
    assert GGUFConfig.get_name() == "gguf"


def test_another_format_has_no_blocks_to_keep(tmp_path: Path) -> None:
    write_cfg(tmp_path)
    write_shards(tmp_path, llama_sd())
    with pytest.raises(OptionError, match=r"give the \.gguf file|this checkpoint is none"):
        loadkit.load(str(tmp_path), quantization="gguf", load_config=QUIET)


def test_a_dtype_that_blocks_do_not_decode_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="float64"):
        load(toy(tmp_path), dtype="float64")


def test_layers_made_by_hand_ask_the_same_config(tmp_path: Path) -> None:
    model: Any = load(toy(tmp_path)).model
    assert isinstance(model.model.layers[0].mlp.down_proj.quant_method, GGUFLinearMethod)
    assert model.lm_head.quant_method is model.model.embed_tokens.quant_method
