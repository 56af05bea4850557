"""The values of a load are checked when they are made, and config.json before it is used."""

from __future__ import annotations

import dataclasses
import json
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.plugin_world import plugin_world
from loadkit.config import (
    HFConfig,
    LoadConfig,
    LoadkitConfig,
    ModelConfig,
    OptionSpec,
    ParallelConfig,
    parse_settings,
    validate_extra_config,
)
from loadkit.errors import ArchitectureError, ConfigFileError, ModelError, OptionError
from loadkit.sources.base import File, FileInfo, Source

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 40,
    "torch_dtype": "bfloat16",
}


class MemoryFile(File):
    def __init__(self, name: str, data: bytes) -> None:
        self.name, self.data, self.size = name, data, len(data)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.data[offset : offset + nbytes]

    def check_unchanged(self) -> None: ...

    def close(self) -> None: ...


class MemorySource(Source):
    def __init__(self, **files: bytes) -> None:
        super().__init__("memory", LoadConfig())
        self.files = {name.replace("_json", ".json"): data for name, data in files.items()}

    def list(self) -> Sequence[FileInfo]:
        return [FileInfo(name, len(data)) for name, data in self.files.items()]

    def open(self, name: str) -> File:
        return MemoryFile(name, self.files[name])

    def close(self) -> None: ...


def model(**changes: Any) -> ModelConfig:
    values = {key: value for key, value in {**LLAMA, **changes}.items() if value != "drop"}
    return ModelConfig.from_bytes(json.dumps(values).encode())


# -- LoadConfig ----------------------------------------------------------------------------------


def test_every_field_is_an_option_with_help_and_a_good_default() -> None:
    config = LoadConfig()
    for each in dataclasses.fields(LoadConfig):
        spec = LoadConfig.options()[each.name]
        assert spec.help
        assert spec.check(getattr(config, each.name), owner="x") == getattr(config, each.name)
    assert (config.safetensors_prefetch_num_threads, config.safetensors_prefetch_block_size) == (
        8, 16 << 20,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("safetensors_load_strategy", "prefech", "did you mean 'prefetch'?"),
        ("safetensors_load_strategy", 3, "is an integer"),
        ("safetensors_prefetch_num_threads", 0, "from 1 to 1024"),
        ("safetensors_prefetch_num_threads", True, "is a boolean"),
        ("safetensors_prefetch_block_size", 16.5, "is a number"),
        ("alias", "allways", "'auto', 'never'"),
        ("alias", None, "is null"),
        ("verify", "digests", "did you mean 'digest'?"),
        ("distribute", "all", "'broadcast'"),
        ("gguf_misaligned", "decod", "did you mean 'decode'?"),
        ("reader", "../x", "does not match"),
        ("load_format", "", "empty"),
        ("device", "cuda;rm", "does not match"),
        ("use_tqdm_on_load", "yes", "true or false"),
        ("ignore_patterns", ["a", 3], "a list of strings"),
        ("ignore_patterns", [""], "a list of strings"),
        ("missing_ok", {"a": 3}, "the reason"),
        ("missing_ok", 3, "an object or a list"),
        ("subfolder", "../x", "relative path"),
        ("subfolder", "/abs", "relative path"),
        ("model_loader_extra_config", [1], "is a list"),
        ("num_threads", -1, "from 0"),
        ("revision", "", "empty"),
    ],
)
def test_a_bad_value_names_field_value_and_what_is_accepted(
    field: str, value: Any, said: str
) -> None:
    with pytest.raises(OptionError) as hit:
        LoadConfig(**{field: value})
    assert f"LoadConfig.{field}" in str(hit.value)
    assert said in str(hit.value)
    assert hit.value.exit_code == 2


def test_values_are_normalised_frozen_hashable_and_picklable() -> None:
    config = LoadConfig(
        ignore_patterns="*.bin",  # type: ignore[arg-type]
        allowed_roots=[Path("/a"), "~/b"],  # type: ignore[arg-type]
        missing_ok=["head.*"],  # type: ignore[arg-type]
        download_dir=Path("~/x"),  # type: ignore[arg-type]
        model_loader_extra_config='{"a": [1, {"b": 2}]}',  # type: ignore[arg-type]
        device=torch.device("cuda:0"),  # type: ignore[arg-type]
        subfolder="unet/",
    )
    assert config.ignore_patterns == ("*.bin",)
    assert config.allowed_roots == ("/a", str(Path("~/b").expanduser()))
    assert list(config.missing_ok) == ["head.*"]
    assert config.download_dir == str(Path("~/x").expanduser())
    assert (config.device, config.subfolder) == ("cuda:0", "unet")
    assert config.model_loader_extra_config == {"a": (1, {"b": 2})}
    assert json.loads(json.dumps(config.model_loader_extra_config)) == {"a": [1, {"b": 2}]}
    with pytest.raises(TypeError, match="frozen"):
        config.model_loader_extra_config["a"] = 1  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.alias = "never"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(pickle.loads(pickle.dumps(config))) == hash(config)


def test_settings_of_the_command_line_are_typed() -> None:
    load, options = parse_settings(
        {
            "safetensors_prefetch_block_size": "4MiB",
            "use_tqdm_on_load": "off",
            "download_dir": "none",
            "ignore_patterns": "*.bin, *.pt",
            "allow_patterns_overrides": '["a,b*"]',
            "missing_ok": '{"head.*": "tied elsewhere"}',
            "model_loader_extra_config": '{"n": 1}',
            "pt_load_map_location": '{"cuda:0": "cpu"}',
            "hf_overrides.text_config.hidden_size": "32",
            "hf_overrides.rope_scaling": '{"type": "yarn"}',
            "hf_overrides.name": "plain text",
            "dtype": "bf16",
            "trust_remote_code": "false",
        }
    )
    assert load == LoadConfig(
        safetensors_prefetch_block_size=4 << 20,
        use_tqdm_on_load=False,
        ignore_patterns=("*.bin", "*.pt"),
        allow_patterns_overrides=("a,b*",),
        missing_ok={"head.*": "tied elsewhere"},
        model_loader_extra_config={"n": 1},
        pt_load_map_location={"cuda:0": "cpu"},
    )
    assert options["hf_overrides"] == {
        "text_config.hidden_size": 32, "rope_scaling": {"type": "yarn"}, "name": "plain text",
    }  # fmt: skip
    config = ModelConfig.from_dict(LLAMA, load_config=load, **options)
    assert config.dtype_name == "bfloat16"
    assert config.hf_config.text_config.hidden_size == 32


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"aliass": "never"}, "did you mean 'alias'?"),
        ({"num_threads": "many"}, "LoadConfig.num_threads = 'many'"),
        ({"num_threads": "9" * 400}, "cannot be read"),
        ({"stream": "maybe"}, "true or false"),
        ({"model_loader_extra_config": "{not json"}, "{not json"),
        ({"hf_overrides": "[1]"}, "hf_overrides"),
        ({"hf_overrides.a": "{x"}, "{x"),
        ({"model_impl": "transformer"}, "did you mean 'transformers'?"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError) as hit:
        parse_settings(settings)
    assert said in str(hit.value)


# -- options of loaders --------------------------------------------------------------------------

OPTIONS = {
    "concurrency": OptionSpec("concurrency", int, 8, "threads", low=1),
    "memory_limit": OptionSpec("memory_limit", int, None, "bytes"),
    "pattern": OptionSpec("pattern", str, "r{rank}-{part}.safetensors", "file names"),
    "ratio": OptionSpec("ratio", float, 0.5, "a share"),
}


@pytest.mark.parametrize(
    ("given", "load_format", "said"),
    [
        pytest.param({"concurency": 8}, "runai_streamer", "did you mean 'concurrency'?", id="typo"),
        pytest.param({"num_threads": 4}, "sharded_state", "it takes: concurrency", id="sibling"),
        pytest.param({"concurrency": "8"}, "x", "accepted: an integer", id="type"),
        pytest.param({"concurrency": True}, "x", "is a boolean", id="bool-is-no-int"),
        pytest.param({"concurrency": 0}, "x", "out of range", id="range"),
        pytest.param({"ratio": float("nan")}, "x", "a number", id="nan"),
        pytest.param("{not json", "safetensors", "{not json", id="json"),
        pytest.param("[1]", "safetensors", "is a list", id="no-object"),
        pytest.param('{"ratio": 1, "ratio": 2}', "safetensors", "twice", id="twice"),
    ],
)
def test_CFG_06_a_bad_loader_option_is_an_error(given: Any, load_format: str, said: str) -> None:
    with pytest.raises(OptionError) as hit:
        validate_extra_config(OPTIONS, given, load_format)
    assert said in str(hit.value)
    assert load_format in str(hit.value) or "json" in said or "twice" in said


def test_CFG_06_a_loader_without_options_says_so() -> None:
    with pytest.raises(OptionError, match="'dummy' has no option 'num_threads'; it takes no"):
        validate_extra_config({}, {"num_threads": 4}, "dummy")


def test_CFG_06_good_options_come_back_with_the_defaults() -> None:
    found = validate_extra_config(OPTIONS, '{"concurrency": 4, "ratio": 1}', "x")
    assert found == {
        "concurrency": 4, "memory_limit": None, "pattern": "r{rank}-{part}.safetensors",
        "ratio": 1.0,
    }  # fmt: skip
    assert validate_extra_config(OPTIONS, None, "x")["concurrency"] == 8


# -- ParallelConfig ------------------------------------------------------------------------------


def test_ranks_of_a_world_are_all_different_and_count_up() -> None:
    sizes = {"tp_size": 4, "pp_size": 3, "ep_size": 8, "dp_size": 2}
    ranks = [ParallelConfig.for_rank(rank, **sizes) for rank in range(24)]
    assert [each.rank for each in ranks] == list(range(24))
    assert len(set(ranks)) == 24
    assert {each.world_size for each in ranks} == {24}
    stage0 = [each for each in ranks if each.pp_rank == 0]
    assert sorted(each.ep_rank for each in stage0) == list(range(8))


@pytest.mark.parametrize(
    "given",
    [
        {"tp_size": 0}, {"tp_rank": 1}, {"tp_rank": -1}, {"tp_size": 2.0}, {"tp_size": True},
        {"tp_size": 2, "ep_size": 4}, {"tp_size": "2"}, {"dp_size": 1 << 30},
    ],
)  # fmt: skip
def test_impossible_parts_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"ParallelConfig|world"):
        ParallelConfig(**given)
    with pytest.raises(OptionError):
        ParallelConfig.for_rank(2, tp_size=2)


# -- HFConfig ------------------------------------------------------------------------------------


def test_a_config_is_attributes_and_a_mapping() -> None:
    values = {"a": {"b": [1, {"c": 2}]}, "get": 3, "_values": 4, "__class__": 5}
    config = HFConfig.from_dict(values)
    assert config.a.b[1].c == config["a"]["b"][1]["c"] == 2
    assert config.get("get") == 3
    assert config["_values"] == 4
    assert type(config) is HFConfig
    assert config.to_dict() == values
    assert "a" in config
    assert dict(config.a) == {"b": [1, HFConfig(c=2)]}
    assert getattr(config, "nothing", None) is None
    with pytest.raises(AttributeError, match="no 'nothing'"):
        _ = config.nothing
    config.new = {"x": 1}
    assert config.new.x == 1
    assert pickle.loads(pickle.dumps(config)) == config
    assert HFConfig(hidden_size=4).hidden_size == 4


# -- reading config.json -------------------------------------------------------------------------


def test_config_json_is_read_from_a_source() -> None:
    source = MemorySource(config_json=json.dumps(LLAMA).encode())
    load_config = LoadConfig(revision="main", trust_remote_code=True)
    config = ModelConfig.from_source(source, load_config=load_config, quantization="fp8")
    assert (config.source, config.revision, config.trust_remote_code) == ("memory", "main", True)
    assert config.architectures == ("LlamaForCausalLM",)
    assert config.quantization == "fp8"
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_missing_config_says_what_is_there() -> None:
    with pytest.raises(ConfigFileError, match=r"no config\.json; it has: other\.json"):
        ModelConfig.from_source(MemorySource(other_json=b"{}"))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"null", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b'{"a":1,"a":2}', b"{" * 100_000,
        b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"hidden_size": ' + b"9" * 5_000 + b"}",
        b'{"\\ud800": 1}', b"{" + b" " * (33 << 20) + b"}",
    ],
    ids=lambda data: str(data[:12]),
)  # fmt: skip
def test_a_hostile_config_is_one_error_type(data: bytes) -> None:
    start = time.thread_time()
    with pytest.raises(ConfigFileError) as hit:
        ModelConfig.from_bytes(data)
    assert time.thread_time() - start < 2
    assert (hit.value.code, hit.value.file) == ("E_CONFIG", "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "16"), ("hidden_size", 16.0), ("hidden_size", 0), ("hidden_size", -1),
        ("hidden_size", True), ("hidden_size", 1 << 60), ("hidden_size", 10**4000),
        ("num_attention_heads", [4, "x"]), ("num_hidden_layers", 10**9), ("vocab_size", {}),
        ("num_key_value_heads", float("nan")), ("rope_theta", "10000"), ("rms_norm_eps", -1),
        ("rope_theta", float("inf")),
    ],
)  # fmt: skip
def test_impossible_numbers_name_key_and_value(key: str, value: Any) -> None:
    for values, path in (({**LLAMA, key: value}, key), ({"x": {key: value}}, f"x.{key}")):
        with pytest.raises(ConfigFileError) as hit:
            ModelConfig.from_dict(values)
        assert f"'{path}'" in str(hit.value)
        assert "accepted:" in str(hit.value)
        assert len(str(hit.value)) < 400


def test_odd_but_published_configs_are_fine() -> None:
    config = model(
        num_key_value_heads=[4, 2], intermediate_size=None, head_dim=None,
        time_step_limit=[0.0, float("inf")], rope_theta=1e6, vision_config={"hidden_size": 8},
    )  # fmt: skip
    assert config.hf_config.num_key_value_heads == [4, 2]


def test_overrides_are_nested_or_dotted() -> None:
    values = {**LLAMA, "text_config": {"hidden_size": 8, "deep": {"x": 1}}, "a.b": 1}
    overrides = {
        "hidden_size": 32, "text_config": {"deep": {"y": 2}}, "text_config.deep.x": 5, "a.b": 2,
        "new.key": [1],
    }  # fmt: skip
    config = ModelConfig.from_dict(values, hf_overrides=overrides)
    assert config.hf_config.hidden_size == 32
    assert config.hf_config.text_config.to_dict() == {"hidden_size": 8, "deep": {"x": 5, "y": 2}}
    assert config.hf_config["a.b"] == 2
    assert config.hf_config.new.key == [1]
    assert values["hidden_size"] == 16
    with pytest.raises(OptionError, match=r"'hidden_size\.x' leads through 'hidden_size'"):
        ModelConfig.from_dict(values, hf_overrides={"hidden_size.x": 1})
    with pytest.raises(ConfigFileError, match="'hidden_size'"):
        ModelConfig.from_dict(values, hf_overrides={"hidden_size": "x"})


def test_unknown_model_options_are_refused() -> None:
    with pytest.raises(OptionError, match="did you mean 'dtype'"):
        ModelConfig.from_dict(LLAMA, dtypes="auto")


# -- architectures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        pytest.param({"architectures": None}, "'architectures' is null", id="CFG-01-null"),
        pytest.param({"architectures": []}, "'architectures' is []", id="CFG-01-empty"),
        pytest.param({"architectures": "drop"}, "no 'architectures'", id="CFG-01-missing"),
        pytest.param({"architectures": {"a": 1}}, "not a list of names", id="CFG-01-object"),
        pytest.param({"architectures": "Llama"}, "not a list of names", id="CFG-01-string"),
        pytest.param({"architectures": [None]}, "not a list of names", id="CFG-01-null-inside"),
        pytest.param({"architectures": ["x" * 500]}, "not a list", id="CFG-01-long"),
        pytest.param({"architectures": ["x"] * 100}, "not a list", id="CFG-01-many"),
    ],
)
def test_no_architecture_is_one_error_type(changes: dict[str, Any], found: str) -> None:
    config = model(**changes)
    with pytest.raises(ArchitectureError) as hit:
        _ = config.architectures
    said = str(hit.value)
    assert "config.json" in said
    assert found in said
    assert "architecture='...'" in said
    assert "model_type 'llama' is 'LlamaForCausalLM'" in said
    assert hit.value.file == "config.json"
    assert not loadkit.is_supported(config)
    assert not loadkit.is_supported(config.hf_config.to_dict())
    assert dataclasses.replace(config, architecture="X").architectures == ("X",)


def test_CFG_01_a_nested_architecture_is_named() -> None:
    values = {"model_type": "toy_vl", "language_config": LLAMA}
    with pytest.raises(ArchitectureError) as hit:
        _ = ModelConfig.from_dict(values).architectures
    assert "its language_config names 'LlamaForCausalLM'" in str(hit.value)
    assert hit.value.detail["suggested"] == ["LlamaForCausalLM"]


def test_CFG_01_an_ambiguous_model_type_lists_what_it_may_be(tmp_path: Path) -> None:
    with plugin_world(tmp_path) as world:
        world.dist("t", "[loadkit.models]\nToyForCausalLM = m:X\nToyModel = m:Y\n")
        with pytest.raises(ArchitectureError, match="may be 'ToyForCausalLM', 'ToyModel'"):
            _ = ModelConfig.from_dict({"model_type": "toy"}).architectures


# -- dtype, tying, quantisation ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "asked", "name", "by"),
    [
        ({"torch_dtype": "bfloat16"}, "auto", "bfloat16", "config"),
        ({"dtype": "float16"}, "auto", "float16", "config"),
        ({"text_config": {"torch_dtype": "float16"}}, "auto", "float16", "config"),
        ({"dtype": None, "llm_config": {"dtype": "torch.bfloat16"}}, "auto", "bfloat16", "config"),
        ({"torch_dtype": "auto"}, "auto", "auto", "default"),
        ({}, "auto", "auto", "default"),
        ({"torch_dtype": "bfloat16"}, "half", "float16", "requested"),
        ({"torch_dtype": "nonsense"}, torch.float32, "float32", "requested"),
        ({}, "bf16", "bfloat16", "requested"),
        ({}, "float", "float32", "requested"),
    ],
)  # fmt: skip
def test_CFG_02_the_dtype_follows_the_config_unless_asked(
    values: dict[str, Any], asked: Any, name: str, by: str
) -> None:
    config = ModelConfig.from_dict(values, dtype=asked)
    assert (config.dtype_name, config.dtype_from) == (name, by)
    if name == "auto":
        with pytest.raises(ModelError, match="not decided"):
            _ = config.dtype
        config = config.with_dtype("f16")
        assert (config.dtype, config.dtype_from) == (torch.float16, "checkpoint")
    else:
        assert config.dtype is getattr(torch, name)


def test_CFG_02_a_dtype_that_is_none_is_refused_where_it_stands() -> None:
    with pytest.raises(ConfigFileError, match=r"config\.json: text_config\.dtype is 'bfloat'"):
        ModelConfig.from_dict({"text_config": {"dtype": "bfloat"}})
    for value in (3, ["float16"], {"x": 1}):
        with pytest.raises(ConfigFileError, match="torch_dtype"):
            ModelConfig.from_dict({"torch_dtype": value})
    with pytest.raises(OptionError, match="did you mean 'bfloat16'"):
        ModelConfig.from_dict({}, dtype="bfloat61")


def test_CFG_04_the_tie_flag_is_found_outside_and_inside() -> None:
    assert model(tie_word_embeddings=False).tie_word_embeddings is False
    assert model().tie_word_embeddings is None
    assert model(text_config={"tie_word_embeddings": True}).tie_word_embeddings is True
    inner = model(tie_word_embeddings=False, text_config={"tie_word_embeddings": True})
    assert inner.tie_word_embeddings is True
    with pytest.raises(ConfigFileError, match="'tie_word_embeddings'"):
        _ = model(tie_word_embeddings="yes").tie_word_embeddings


def test_the_text_model_is_the_nested_config_that_describes_one() -> None:
    flag_only = model(text_config={"tie_word_embeddings": True})
    assert flag_only.hf_text_config is flag_only.hf_config
    nested = model(language_config={"hidden_size": 8})
    assert nested.hf_text_config.hidden_size == 8
    bundle = LoadkitConfig(nested).with_hf_config(nested.hf_text_config)
    assert bundle.model_config.hf_config.hidden_size == 8


def test_quantisation_is_looked_up_in_its_usual_places() -> None:
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    assert model().quantization_config is None
    assert model(quantization_config=quant).quantization_config == quant
    assert model(compression_config=quant).quantization_config == quant
    assert model(text_config={"quantization_config": quant}).quantization_config == quant


@pytest.mark.parametrize(
    "quant",
    [
        {"quant_method": "os.system"}, {"quant_method": "a/b"}, {"quant_method": 3},
        {"quant_method": "x" * 100}, {"quant_algo": "torch:load"}, {"bits": 0}, {"bits": "4"},
        {"bits": -(2**63)}, {"w_bit": 1000}, {"group_size": 0}, {"group_size": -(2**63)},
        {"config_groups": {"g": {"weights": {"num_bits": 0}}}}, [1], "gptq",
        {"modules": {str(i): i for i in range(100_001)}},
    ],
    ids=lambda quant: str(quant)[:40],
)  # fmt: skip
def test_F31_an_impossible_quantisation_is_refused(quant: Any) -> None:
    with pytest.raises(ConfigFileError) as hit:
        _ = model(quantization_config=quant).quantization_config
    assert hit.value.code == "E_CONFIG"
    assert "quantization_config" in str(hit.value)
    assert len(str(hit.value)) < 500


# -- the package ---------------------------------------------------------------------------------


def test_the_public_names_are_sorted_and_there() -> None:
    assert loadkit.__all__ == sorted(loadkit.__all__)
    assert set(loadkit.__all__) <= set(dir(loadkit))
    for name in loadkit.__all__:
        assert getattr(loadkit, name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = loadkit.nothing
    assert loadkit.__version__


def test_plan_stays_a_function_whatever_is_imported() -> None:
    import importlib

    module = importlib.import_module("loadkit.plan")
    assert callable(loadkit.plan)
    assert loadkit.plan is not module
