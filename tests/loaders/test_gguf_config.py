"""Configs made of GGUF keys and tensors alone, and which files make a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.gguf_files import (
    ARCH,
    LLAMA_KEYS,
    Tensor,
    f32,
    llama_tensors,
    lone_llama,
    write_gguf,
)
from loadkit.config import LoadConfig, ModelConfig
from loadkit.errors import ArchitectureError, ConfigFileError, FormatError, NoWeightsError
from loadkit.sources.local import LocalSource
from loadkit_gguf.loader import GGUFModelLoader
from loadkit_gguf.splits import find_first_file, read_parts


def config_of(path: Path, **options: Any) -> ModelConfig:
    with LocalSource(path, LoadConfig()) as source:
        return GGUFModelLoader.read_model_config(source, LoadConfig(), **options)


def values_of(path: Path, **options: Any) -> dict[str, Any]:
    return config_of(path, **options).hf_config.to_dict()


def keys_for(architecture: str, **more: Any) -> list[tuple[str, Any]]:
    """The required keys of an architecture, and more of its own (dots as ``__``)."""
    keys: list[tuple[str, Any]] = [("general.architecture", architecture)]
    keys += [(key.replace("llama", architecture), value) for key, value in LLAMA_KEYS[1:]]
    named = {key.replace("__", "."): value for key, value in more.items()}
    return [*keys, *((f"{architecture}.{key}", value) for key, value in named.items())]


def written(
    tmp_path: Path, architecture: str, *, tensors: list[Tensor] | None = None, **more: Any
) -> Path:
    tensors = llama_tensors() if tensors is None else tensors
    return write_gguf(tmp_path / "m.gguf", tensors, keys_for(architecture, **more))


# -- the config ------------------------------------------------------------------------------------


def test_GG_06_a_lone_file_has_its_config_from_keys_and_tensors(tmp_path: Path) -> None:
    tensors = [
        f32("token_embd.weight", 41, 16),
        f32("rope_freqs.weight", 2, values=[0.0, 0.0]),
        f32("output_norm.weight", 16),
    ]
    keys = [key for key in LLAMA_KEYS if key[0] != "llama.attention.head_count_kv"]
    config = config_of(write_gguf(tmp_path / "lone.gguf", tensors, keys))
    assert config.hf_config.to_dict() == {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 41,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    assert (config.config_file, config.architectures) == ("lone.gguf", ("LlamaForCausalLM",))


def test_GG_06_missing_required_keys_are_listed_together(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", [f32("output_norm.weight", 16)], [ARCH])
    with pytest.raises(ConfigFileError) as caught:
        config_of(path)
    missing = caught.value.detail["missing"]
    assert missing == [
        "llama.attention.head_count",
        "llama.block_count",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "token_embd.weight",
    ]
    assert caught.value.code == "E_CONFIG" and all(key in str(caught.value) for key in missing)


def test_GG_06_a_config_json_beside_the_file_wins(tmp_path: Path) -> None:
    path = lone_llama(tmp_path / "m.gguf")
    stated = {"architectures": ["MistralForCausalLM"], "hidden_size": 16, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    config = config_of(path)
    assert config.architectures == ("MistralForCausalLM",) and config.dtype_name == "float16"
    assert config.tie_word_embeddings is True
    (tmp_path / "config.json").write_text("{}")
    assert config_of(path).architectures == ("LlamaForCausalLM",)


def test_a_file_that_does_not_say_what_it_is_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA_KEYS[1:])
    with pytest.raises(ConfigFileError, match=r"general\.architecture"):
        config_of(path)


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    path = written(tmp_path, "qwen9")
    with pytest.raises(ArchitectureError, match="gemma3, llama, qwen2, qwen3"):
        config_of(path)
    assert values_of(path, architecture="Qwen9ForCausalLM")["hidden_size"] == 16


def test_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    assert config_of(lone_llama(tmp_path / "m.gguf", head=True)).tie_word_embeddings is False


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        ((0, 0), "float32"),
        ((1, 1), "float16"),
        ((30, 30), "bfloat16"),
        ((1, 2), "bfloat16"),
        ((0, 8), "bfloat16"),
    ],
    ids=["F32", "F16", "BF16", "some Q4_0", "some Q8_0"],
)
def test_the_dtype_is_bfloat16_unless_all_matrices_are_plain(
    kinds: tuple[int, int], dtype: str, tmp_path: Path
) -> None:
    size = {0: 4, 1: 2, 30: 2, 2: 18 / 32, 8: 34 / 32}
    tensors = [
        Tensor(name, [32, 4], kind, b"\0" * int(128 * size[kind]))
        for name, kind in zip(("token_embd.weight", "output.weight"), kinds, strict=True)
    ]
    tensors.append(f32("output_norm.weight", 4096))
    config = config_of(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_KEYS))
    assert (config.dtype_name, config.dtype_from) == (dtype, "config")


def test_float32_keys_are_the_decimals_that_were_meant(tmp_path: Path) -> None:
    path = written(
        tmp_path, "llama", attention__layer_norm_rms_epsilon=1e-5, rope__freq_base=500_000.0
    )
    values = values_of(path)
    assert (values["rms_norm_eps"], values["rope_theta"]) == (1e-5, 500_000.0)


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    values = values_of(written(tmp_path, "llama", attention__sliding_window=4096))
    assert values["architectures"] == ["MistralForCausalLM"] and values["sliding_window"] == 4096


def test_biases_are_seen_in_the_tensors(tmp_path: Path) -> None:
    tensors = [*llama_tensors(), f32("blk.0.attn_q.bias", 16)]
    values = values_of(written(tmp_path, "llama", tensors=tensors))
    assert (values["attention_bias"], values["mlp_bias"]) == (True, False)


def test_heads_of_another_size_and_partial_rotation(tmp_path: Path) -> None:
    values = values_of(
        written(
            tmp_path,
            "llama",
            attention__key_length=8,
            attention__value_length=8,
            rope__dimension_count=4,
        )
    )
    assert (values["head_dim"], values["partial_rotary_factor"]) == (8, 0.5)
    with pytest.raises(ConfigFileError, match="value_length"):
        values_of(written(tmp_path, "llama", attention__key_length=8, attention__value_length=4))


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32_768,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
        ),
    ],
)
def test_rope_scaling(keys: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    assert values_of(written(tmp_path, "qwen2", **keys)).get("rope_scaling") == scaling


def llama3_factors(factor: float, size: int, theta: float) -> list[float]:
    """The factors that the converter stores for Llama 3.1's settings."""
    found = []
    for index in range(size // 2):
        wave = 2 * math.pi * theta ** (2 * index / size)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192:
            found.append(factor)
        else:
            blend = (8192 / wave - 1) / 3
            found.append(1 / ((1 - blend) / factor + blend))
    return found


def test_rope_factors_are_the_settings_they_come_from(tmp_path: Path) -> None:
    factors = llama3_factors(8.0, 128, 500_000.0)
    tensors = [*llama_tensors(), f32("rope_freqs.weight", 64, values=factors)]
    keys = {"rope__dimension_count": 128, "attention__key_length": 128}
    keys |= {"attention__value_length": 128, "rope__freq_base": 500_000.0}
    path = written(tmp_path, "llama", tensors=tensors, **keys)
    assert values_of(path)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors[40] = 3.0
    tensors[-1] = f32("rope_freqs.weight", 64, values=factors)
    path = written(tmp_path, "llama", tensors=tensors, **keys)
    with pytest.raises(ConfigFileError, match="number 40 is 3"):
        values_of(path)
    own = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert values_of(path, hf_overrides=own)["rope_scaling"] == own["rope_scaling"]
    tensors[-1] = f32("rope_freqs.weight", 63)
    with pytest.raises(ConfigFileError, match=r"F32 \[64\]"):
        values_of(written(tmp_path, "llama", tensors=tensors, **keys))


def test_gemma3_layers_windows_and_scale(tmp_path: Path) -> None:
    keys = {"block_count": 8, "attention__key_length": 8, "attention__value_length": 8}
    values = values_of(
        write_gguf(
            tmp_path / "m.gguf",
            llama_tensors(),
            [
                *[k for k in keys_for("gemma3") if k[0] != "gemma3.block_count"],
                *[(f"gemma3.{k.replace('__', '.')}", v) for k, v in keys.items()],
                ("gemma3.attention.sliding_window", 512),
            ],
        )
    )
    kinds = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2
    assert values["layer_types"] == kinds
    assert (values["sliding_window"], values["query_pre_attn_scalar"]) == (512, 8)
    assert (values["rope_theta"], values["rope_local_base_freq"]) == (1_000_000.0, 10_000.0)
    assert values["architectures"] == ["Gemma3ForCausalLM"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", "two"),
        ("block_count", True),
        ("block_count", ["1", "2"]),
        ("embedding_length", 1.5),
        ("attention.head_count_kv", np.array([1, 2], dtype=np.int32)),
        ("rope.freq_base", float("nan")),
        ("rope.freq_base", "x"),
        ("rope.scaling.type", 3),
        ("rope.scaling.type", "longrope"),
        ("block_count", (10, (2**63).to_bytes(8, "little"))),
        ("block_count", 1_000_000),
        ("attention.head_count", 2**31),
    ],
)
def test_values_that_cannot_be_are_typed_errors(key: str, value: Any, tmp_path: Path) -> None:
    keys = [item for item in LLAMA_KEYS if item[0] != f"llama.{key}"]
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), [*keys, (f"llama.{key}", value)])
    with pytest.raises(ConfigFileError) as caught:
        config_of(path)
    assert caught.value.code == "E_CONFIG" and caught.value.file == "m.gguf"


def test_one_number_per_layer_is_one_number_where_all_are_equal(tmp_path: Path) -> None:
    keys = [item for item in LLAMA_KEYS if item[0] != "llama.feed_forward_length"]
    keys.append(("llama.feed_forward_length", np.array([32, 32], dtype=np.int32)))
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), keys)
    assert values_of(path)["intermediate_size"] == 32


def test_smollm2_has_the_config_it_was_published_with(smollm2: Path) -> None:
    values = values_of(smollm2)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: values.get(key) for key in expected} == expected
    assert "rope_scaling" not in values and "partial_rotary_factor" not in values


@pytest.mark.large
def test_gemma3_and_qwen25_have_theirs(gemma3: Path, qwen25: Path) -> None:
    gemma, qwen = values_of(gemma3), values_of(qwen25)
    assert (gemma["hidden_size"], gemma["num_hidden_layers"], gemma["head_dim"]) == (640, 18, 256)
    assert (gemma["vocab_size"], gemma["num_key_value_heads"]) == (262_144, 1)
    assert gemma["layer_types"].count("full_attention") == 3 and gemma["tie_word_embeddings"]
    assert (qwen["hidden_size"], qwen["num_attention_heads"]) == (896, 14)
    assert (qwen["vocab_size"], qwen["tie_word_embeddings"]) == (151_936, False)


# -- the files -------------------------------------------------------------------------------------


def part_keys(number: int, count: int, total: int) -> list[tuple[str, Any]]:
    return [
        ("split.no", (2, number.to_bytes(2, "little"))),
        ("split.count", (2, count.to_bytes(2, "little"))),
        ("split.tensors.count", (5, total.to_bytes(4, "little"))),
    ]


def split_llama(folder: Path, count: int = 3, **options: Any) -> list[Path]:
    """A toy Llama in parts, as llama-gguf-split makes them: keys in the first only."""
    tensors = llama_tensors(**options)
    paths = []
    for number in range(count):
        keys = [*(LLAMA_KEYS if number == 0 else []), *part_keys(number, count, len(tensors))]
        path = folder / f"toy-{number + 1:05d}-of-{count:05d}.gguf"
        paths.append(write_gguf(path, tensors[number::count], keys))
    return paths


def parts_of(path: Path) -> list[str]:
    with LocalSource(path, LoadConfig()) as source:
        first, _ = find_first_file(source, LoadConfig())
        return [part.file.name for part in read_parts(source, first)]


def split_error(path: Path) -> FormatError:
    with pytest.raises(FormatError) as caught:
        parts_of(path)
    assert caught.value.code == "E_SPLIT"
    return caught.value


def test_a_split_file_is_found_by_its_folder_and_by_any_part(tmp_path: Path) -> None:
    paths = split_llama(tmp_path)
    names = [path.name for path in paths]
    for given in (tmp_path, *paths):
        assert parts_of(given) == names
    assert values_of(tmp_path)["vocab_size"] == 40


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_G61_a_missing_part_is_named(lost: int, tmp_path: Path) -> None:
    paths = split_llama(tmp_path)
    paths[lost].unlink()
    for given in (tmp_path, *(path for path in paths if path.exists())):
        error = split_error(given)
        assert error.file == paths[lost].name and paths[lost].name in str(error)
        assert error.detail == {"missing": [paths[lost].name]}


def test_G61_a_part_that_is_there_twice_is_named(tmp_path: Path) -> None:
    paths = split_llama(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    error = split_error(tmp_path)
    assert error.file == paths[2].name and "part 2" in str(error)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"count": 4}, id="of-another-count"),
        pytest.param({"layers": 3}, id="of-another-size"),
        pytest.param({"keys": ("general.name", "other")}, id="of-another-name"),
        pytest.param({"no": 7}, id="number-past-the-count"),
        pytest.param({"shift": True}, id="with-the-first-ones-tensors"),
    ],
)
def test_G61_a_part_of_another_model_is_named(change: dict[str, Any], tmp_path: Path) -> None:
    paths = split_llama(tmp_path)
    total = len(llama_tensors())
    tensors = llama_tensors()[1::3]
    count, number, keys = change.get("count", 3), change.get("no", 1), change.get("keys")
    if "layers" in change:
        total, tensors = len(llama_tensors(layers=3)), llama_tensors(layers=3)[1::3]
    if "shift" in change:
        tensors = llama_tensors()[0::3]
    write_gguf(paths[1], tensors, [*([keys] if keys else []), *part_keys(number, count, total)])
    error = split_error(tmp_path)
    assert error.file == paths[1].name and paths[1].name in str(error)


def test_G61_a_count_of_65535_names_what_is_missing(tmp_path: Path) -> None:
    for name, what in (
        ("toy-00001-of-65535.gguf", "toy-00002-of-65535.gguf"),
        ("toy.gguf", "part 1 of 65535"),
        ("toy-00001-of-00002.gguf", "65535"),
    ):
        path = write_gguf(
            tmp_path / name, llama_tensors(), [*LLAMA_KEYS, *part_keys(0, 65_535, 20)]
        )
        for given in (tmp_path, path):
            assert what in str(split_error(given))
        path.unlink()


def test_a_count_that_does_not_fit_the_tensors_is_an_error(tmp_path: Path) -> None:
    paths = split_llama(tmp_path)
    total = len(llama_tensors())
    write_gguf(paths[2], llama_tensors()[2::3][1:], part_keys(2, 3, total))
    assert f"hold {total} tensors; they hold {total - 1}" in str(split_error(tmp_path))


def test_several_models_in_a_folder_are_not_guessed_among(tmp_path: Path) -> None:
    lone_llama(tmp_path / "a.Q4_0.gguf")
    lone_llama(tmp_path / "a.Q8_0.gguf")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"")
    with pytest.raises(NoWeightsError, match=r"a\.Q4_0\.gguf.*a\.Q8_0\.gguf") as caught:
        parts_of(tmp_path)
    assert caught.value.code == "E_AMBIGUOUS"
    with LocalSource(tmp_path, LoadConfig()) as source:
        chosen = LoadConfig(allow_patterns_overrides=("*Q8_0*",))
        assert find_first_file(source, chosen)[0] == "a.Q8_0.gguf"
        ignoring = LoadConfig(ignore_patterns=("*Q8_0*",))
        first, skipped = find_first_file(source, ignoring)
        assert first == "a.Q4_0.gguf"
        assert set(skipped) == {"a.Q8_0.gguf", "mmproj-a.gguf"}


def test_a_folder_without_gguf_files_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(NoWeightsError, match="nothing matches"):
        parts_of(tmp_path)
