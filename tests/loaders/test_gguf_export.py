"""Models written as GGUF: what loads again, what other programs read, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, quants
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType
from gguf.tensor_mapping import get_tensor_name_map

import loadkit
from helpers.alphabet import alphabet_gguf
from helpers.checkpoints import write_llama
from helpers.gguf_files import lone_llama
from helpers.gguf_metadata import read_metadata
from helpers.saving import contents
from helpers.tiny_families import FAMILIES, write_family
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import ModelError, NoWeightsError, OptionError, UsageError, WriteError
from loadkit_gguf.architectures import GGUF_ARCHITECTURES, MIXTRAL
from loadkit_gguf.encode import ENCODERS, encode_rows

QUIET = LoadConfig(use_tqdm_on_load=False)
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3,
    "qwen3moe": MODEL_ARCH.QWEN3MOE, "gemma3": MODEL_ARCH.GEMMA3, "bert": MODEL_ARCH.BERT,
}  # fmt: skip


def load(path: Path, tp: int = 1, rank: int = 0, **options: Any) -> torch.nn.Module:
    parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
    values = {"dtype": "float32", "load_config": QUIET, "parallel": parallel, **options}
    return loadkit.load_model(path, **values)


def export(model: torch.nn.Module, path: Path, kind: str | None = None, **options: Any) -> Any:
    extra = {} if kind is None else {"quantization": kind}
    return loadkit.save(model, path, save_format="gguf", model_loader_extra_config=extra, **options)


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in model.named_parameters()}


def same(found: torch.nn.Module, expected: torch.nn.Module, but: tuple[str, ...] = ()) -> None:
    have, wanted = parameters(found), parameters(expected)
    assert have.keys() == {name for name in wanted if name not in but}
    for name, tensor in have.items():
        assert torch.equal(tensor, wanted[name]), name


# -- every family ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gemma3", "bert"}))
def test_a_family_comes_back_bit_for_bit(family: str, tp: int, tmp_path: Path) -> None:
    write_family(tmp_path / "plain", family)
    export(load(tmp_path / "plain"), tmp_path / "model.gguf")
    for rank in range(tp):
        same(load(tmp_path / "model.gguf", tp, rank), load(tmp_path / "plain", tp, rank))


def test_gemmas_norms_come_back_as_far_as_one_more_than_them_says(tmp_path: Path) -> None:
    write_family(tmp_path / "plain", "gemma3")
    export(load(tmp_path / "plain"), tmp_path / "model.gguf")
    found, expected = (parameters(load(tmp_path / name)) for name in ("model.gguf", "plain"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if "norm" in name:
            assert torch.equal(found[name], (tensor + 1) - 1), name
        else:
            assert torch.equal(found[name], tensor), name


def test_berts_pooler_is_left_out_and_named(tmp_path: Path) -> None:
    write_family(tmp_path / "plain", "bert")
    model = load(tmp_path / "plain")
    report = export(model, tmp_path / "model.gguf")
    pooler = ("pooler.dense.weight", "pooler.dense.bias")
    assert {name for name in report.not_copied if name != "tokenizer"} == set(pooler)
    same(load(tmp_path / "model.gguf"), model, but=pooler)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_names_are_those_of_gguf_pys_tables(name: str, tmp_path: Path) -> None:
    family = {"qwen3moe": "qwen3_moe"}.get(name, name)
    write_family(tmp_path / "plain", family)
    report = export(load(tmp_path / "plain"), tmp_path / "model.gguf")
    theirs = get_tensor_name_map(ARCHITECTURES[name], 2)
    mapper: Any = GGUF_ARCHITECTURES[name].mapper
    stored = [tensor.name for tensor in GGUFReader(tmp_path / "model.gguf").tensors]
    assert len(stored) == report.tensors
    for tensor in stored:
        hf_name = mapper.map_name(tensor)
        assert mapper.gguf_name(hf_name) == tensor
        if "exps" not in tensor and "word_embeddings" not in hf_name:
            assert theirs.get_name(hf_name, try_suffixes=(".weight", ".bias")) == tensor
        assert tensor.rpartition(".")[0] in {key for _, key in theirs.mapping.values()}, (
            f"no architecture {name} of gguf-py has {tensor}"
        )


def test_mixtrals_names_are_those_of_gguf_pys_tables() -> None:
    theirs, mapper = get_tensor_name_map(MODEL_ARCH.LLAMA, 1), MIXTRAL.mapper
    known = {key for _, key in theirs.mapping.values()}
    for part in ("gate", "up", "down"):
        name = f"blk.0.ffn_{part}_exps.weight"
        assert name.removesuffix(".weight") in known
        assert str(mapper.map_name(name)).startswith("model.layers.0.block_sparse_moe.experts.w")
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    assert theirs.get_name(gate, (".weight",)) == "blk.0.ffn_gate_inp.weight"
    assert mapper.map_name("blk.0.ffn_gate_inp.weight") == gate


# -- types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENCODERS)
def test_blocks_are_those_of_gguf_py(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(64, 256, generator=generator)
    rows[0] = 0
    rows[1, :32] = 5.0
    rows[2, 3] = -1e4
    rows[3] *= 1e-6
    expected = quants.quantize(rows.numpy(), GGMLQuantizationType[kind])
    found = encode_rows(kind, rows).numpy()
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "bound"),
    [("F32", 0.0), ("F16", 2**-11), ("BF16", 2**-8), ("Q8_0", 5e-3), ("Q5_1", 0.04), ("Q5_0", 0.07),
     ("Q4_1", 0.07), ("Q4_0", 0.14)],
)  # fmt: skip
def test_a_type_keeps_numbers_within_its_steps(kind: str, bound: float, tmp_path: Path) -> None:
    write_llama(tmp_path / "plain", hidden=64, ffn=64, vocab=96)
    model = load(tmp_path / "plain")
    export(model, tmp_path / "model.gguf", kind)
    kinds = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "model.gguf").tensors}
    assert kinds["blk.1.ffn_down.weight"] == kind
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    ends = kind if kind in ("F32", "F16", "BF16") else "Q8_0"
    assert {kinds["token_embd.weight"], kinds["output.weight"]} == {ends}
    found, expected = parameters(load(tmp_path / "model.gguf")), parameters(model)
    for name, tensor in expected.items():
        gap = (found[name] - tensor).abs().max() / tensor.abs().max()
        assert gap <= bound, name
        assert gap > 0 or kind == "F32" or tensor.dim() == 1


def test_without_a_type_the_models_dtype_is_kept(tmp_path: Path) -> None:
    write_llama(tmp_path / "plain", dtype=torch.bfloat16)
    model = load(tmp_path / "plain", dtype="bfloat16")
    export(model, tmp_path / "out")
    kinds = {t.tensor_type.name for t in GGUFReader(tmp_path / "out/model.gguf").tensors}
    assert kinds == {"BF16", "F32"}
    same(load(tmp_path / "out", dtype="bfloat16"), model)


def test_rows_of_no_whole_blocks_stay_f16(tmp_path: Path) -> None:
    write_llama(tmp_path / "plain", hidden=16, ffn=64)
    export(load(tmp_path / "plain"), tmp_path / "model.gguf", "Q8_0")
    kinds = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "model.gguf").tensors}
    assert kinds["blk.0.ffn_up.weight"] == "F16" and kinds["blk.0.ffn_down.weight"] == "Q8_0"


@pytest.mark.parametrize("kind", ["Q4_K", "q8_0", "Q8"])
def test_CFG_06_a_type_that_is_not_written_names_those_that_are(kind: str, tmp_path: Path) -> None:
    model = load(lone_llama(tmp_path / "m.gguf"))
    with pytest.raises(OptionError, match="Q8_0") as caught:
        export(model, tmp_path / "model.gguf", kind)
    assert "Q4_0" in caught.value.detail["accepted"]
    with pytest.raises(OptionError, match="did you mean 'quantization'"):
        loadkit.save(
            model, tmp_path / "x", save_format="gguf",
            model_loader_extra_config={"quantisation": "F16"},
        )  # fmt: skip


# -- what comes along ------------------------------------------------------------------------------


def test_a_files_own_tokenizer_is_carried_over(tmp_path: Path) -> None:
    first = alphabet_gguf(tmp_path / "first.gguf")
    report = export(load(first), tmp_path / "second.gguf", "Q8_0")
    assert report.not_copied == {}
    before, after = (
        {k: v for k, v in read_metadata(path).items() if k.startswith("tokenizer.")}
        for path in (first, tmp_path / "second.gguf")
    )
    assert before == after and "tokenizer.ggml.tokens" in after
    same(load(tmp_path / "second.gguf"), load(first))  # Q8_0 of what Q8_0 says is the same


def test_a_tokenizer_json_becomes_keys_that_give_the_same_ids(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from loadkit.sources.local import LocalSource
    from loadkit.tokenization.tokenizer_json import from_source
    from loadkit_gguf.loader import GGUFModelLoader

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    steps = tokenizers.pre_tokenizers
    made.pre_tokenizer = steps.Sequence(
        [steps.Digits(individual_digits=True), steps.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=steps.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(["the cat sat on the mat in 1984, the hat"] * 20, trainer)
    folder = tmp_path / "plain"
    write_llama(folder, vocab=made.get_vocab_size())
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": "{{ messages }}", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    report = export(load(folder), tmp_path / "model.gguf")
    assert report.not_copied == {}
    keys = read_metadata(tmp_path / "model.gguf")
    assert keys["tokenizer.ggml.pre"] == "smollm"
    assert keys["tokenizer.chat_template"] == "{{ messages }}"
    with LocalSource(folder, QUIET) as one, LocalSource(tmp_path / "model.gguf", QUIET) as other:
        theirs, ours = from_source(one), GGUFModelLoader.read_tokenizer(other)
        for text in ("the cat sat", "in 2024: hats!", "tab\tand\nline <|end|> é"):
            assert ours.encode(text) == theirs.encode(text)
        assert ours.eos_id == theirs.eos_id


def test_a_source_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    write_llama(tmp_path / "plain")
    report = export(load(tmp_path / "plain"), tmp_path / "model.gguf")
    assert report.not_copied == {"tokenizer": "the source has no tokenizer.json"}


def test_llama_3s_rope_factors_and_other_scalings_come_back(tmp_path: Path) -> None:
    for name, scaling in {
        "llama3": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "linear": {"rope_type": "linear", "factor": 4.0},
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    }.items():  # fmt: skip
        folder = tmp_path / name
        write_llama(folder, hidden=64, rope_theta=500_000.0, rope_scaling=scaling)
        export(load(folder), tmp_path / f"{name}.gguf")
        found: Any = load(tmp_path / f"{name}.gguf").__dict__["loadkit_origin"]
        config = found.config.model_config.hf_config
        assert config.rope_scaling.to_dict() == scaling
        assert config.rope_theta == 500_000.0


# -- files -----------------------------------------------------------------------------------------


def test_a_folder_gets_one_file_and_its_config_and_replaces_what_was_saved(tmp_path: Path) -> None:
    write_llama(tmp_path / "plain")
    model = load(tmp_path / "plain")
    out = tmp_path / "out"
    loadkit.save(model, out)
    (out / "notes.txt").write_text("mine")
    report = export(model, out, "F16")
    assert report.files == ("model.gguf",)
    assert set(contents(out)) == {"config.json", "model.gguf", "notes.txt"}
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_parts_are_those_of_llama_gguf_split(tmp_path: Path) -> None:
    write_llama(tmp_path / "plain", layers=3)
    model = load(tmp_path / "plain")
    report = export(model, tmp_path / "m.gguf", max_shard_bytes=8_000)
    assert len(report.files) > 2
    assert report.files[0] == f"m-00001-of-{len(report.files):05d}.gguf"
    same(load(tmp_path / report.files[0]), model)
    kinds = GGUFReader(tmp_path / report.files[1]).fields
    assert kinds["split.no"].types[0].name == "UINT16"


def test_a_save_into_its_own_source_keeps_the_models_numbers(tmp_path: Path) -> None:
    path = lone_llama(tmp_path / "m.gguf")
    model = load(path)
    before = {name: tensor.clone() for name, tensor in parameters(model).items()}
    export(model, path, "F32")
    for name, tensor in before.items():
        assert torch.equal(parameters(model)[name], tensor)
    same(load(path), model)


def test_a_save_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(lone_llama(tmp_path / "m.gguf"))
    out = tmp_path / "out"
    out.mkdir()
    old = (out / "model.gguf", out / "single.gguf")
    for path in old:
        shutil.copy(tmp_path / "m.gguf", path)
    before = contents(out)

    def broken(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", broken)
    for target in (out, out / "single.gguf"):
        with pytest.raises(WriteError):
            export(model, target)
        assert contents(out) == before


def test_metadata_becomes_keys_and_cannot_take_a_files_own(tmp_path: Path) -> None:
    model = load(lone_llama(tmp_path / "m.gguf"))
    export(model, tmp_path / "out.gguf", metadata={"general.name": "mine"})
    assert read_metadata(tmp_path / "out.gguf")["general.name"] == "mine"
    for name in ("general.architecture", "llama.block_count", "tokenizer.ggml.model", "split.no"):
        with pytest.raises(OptionError, match=name):
            export(model, tmp_path / "out.gguf", metadata={name: "x"})


# -- what is refused -------------------------------------------------------------------------------


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    path = lone_llama(tmp_path / "m.gguf")
    with pytest.raises(UsageError) as caught:
        export(load(path, tp=2), tmp_path / "out.gguf")
    assert caught.value.code == "PARTIAL_MODEL"


def test_a_packed_model_is_refused(tmp_path: Path) -> None:
    path = alphabet_gguf(tmp_path / "m.gguf")
    packed = load(path, quantization="gguf")
    with pytest.raises((UsageError, ModelError)) as caught:
        export(packed, tmp_path / "out.gguf")
    assert caught.value.code in ("QUANTIZED", "E_DTYPE")


def test_a_setting_that_gguf_cannot_say_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    for number, change in enumerate(
        ({"hidden_act": "gelu"}, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    ):
        folder = tmp_path / f"plain{number}"
        write_llama(folder)
        model = load(folder)
        config = {**json.loads((folder / "config.json").read_text()), **change}
        for target in (tmp_path / "out.gguf", tmp_path / "out"):
            with pytest.raises(ModelError) as caught:
                export(model, target, config=config)
            assert caught.value.code == "GGUF_CONFIG"
            assert next(iter(change)).removesuffix("_scaling") in str(caught.value)
            assert not target.exists()


def test_a_model_without_a_gguf_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="it writes BertModel") as caught:
        export(torch.nn.Linear(4, 4), tmp_path / "out.gguf", config={"architectures": ["X"]})
    assert caught.value.code == "E_ARCHITECTURE"


# -- one of several in a folder --------------------------------------------------------------------


def test_a_folder_of_several_quantisations_is_chosen_from_after_a_colon(tmp_path: Path) -> None:
    write_llama(tmp_path / "plain", hidden=64, ffn=64)
    model = load(tmp_path / "plain")
    folder = tmp_path / "several"
    for kind in ("F16", "Q8_0", "Q4_0"):
        export(model, folder / f"toy-{kind}.gguf", kind)
    export(model, folder / "toy-F32.gguf", "F32", max_shard_bytes=50_000)
    for kind in ("F16", "q8_0", "Q4_0", "F32"):
        found = load(Path(f"{folder}:{kind}"))
        origin: Any = found.__dict__["loadkit_origin"]
        assert origin.config.load_config.load_format == "gguf"
        assert len(parameters(found)) == len(parameters(model))
    same(load(Path(f"{folder}:F32")), model)
    with pytest.raises(NoWeightsError, match="toy-Q8_0") as caught:
        load(Path(f"{folder}:Q6_K"))
    assert caught.value.detail["word"] == "Q6_K"
    with pytest.raises(NoWeightsError) as caught:
        load(Path(f"{folder}:toy"))
    assert caught.value.code == "E_AMBIGUOUS"


def test_sizes_of_blocks_are_those_of_gguf_py() -> None:
    for kind in ENCODERS:
        block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        assert encode_rows(kind, torch.zeros(1, block)).shape == (1, nbytes)
