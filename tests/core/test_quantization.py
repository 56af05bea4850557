"""How a checkpoint's quantisation is found, and what a method is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.plugin_world import plugin_world
from loadkit import plugins, tables
from loadkit.config import LoadConfig, ModelConfig
from loadkit.errors import (
    ConfigFileError,
    ConflictError,
    NotInstalledError,
    OptionError,
    UnknownNameError,
)
from loadkit.hookspecs import hookimpl
from loadkit.quantization import (
    LinearMethodBase,
    QuantizationConfig,
    QuantizeMethodBase,
    configure_quant_config,
    get_quant_config,
    get_quantization_config,
    method_has_implemented_embedding,
    register_quantization_config,
)
from loadkit.sources import open_source


class ToyMethod(LinearMethodBase):
    def create_weights(self, layer, *args, **kwargs):
        layer.register_parameter("weight", torch.nn.Parameter(torch.zeros(2)))

    def apply(self, layer, x, bias=None):
        return x


class ToyConfig(QuantizationConfig):
    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = values

    @classmethod
    def get_name(cls) -> str:
        return "toy"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return ["toy.json"]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ToyConfig:
        if "group" in config:
            int(config["group"])
        return cls(config)

    def get_quant_method(self, layer, prefix: str) -> QuantizeMethodBase | None:
        return ToyMethod()


class Greedy(ToyConfig):
    @classmethod
    def get_name(cls) -> str:
        return "greedy"

    @classmethod
    def override_quantization_method(cls, config, asked):
        return "greedy" if config.get("quant_method") == "toy" else None


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tables.quantization, "_local", {})
    register_quantization_config("toy")(ToyConfig)
    register_quantization_config("greedy")(Greedy)
    return


def found(
    values: dict[str, Any], *, load_format: str = "auto", source: Any = None, **options: Any
) -> QuantizationConfig | None:
    model_config = ModelConfig.from_dict(values, **{"dtype": "float32", **options})
    return get_quant_config(model_config, LoadConfig(load_format=load_format), source=source)


# -- where it is looked for ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"quantization_config": {"quant_method": "toy"}}, id="quantization_config"),
        pytest.param({"compression_config": {"quant_method": "toy"}}, id="compression_config"),
        pytest.param(
            {"text_config": {"quantization_config": {"quant_method": "toy"}}}, id="text-model"
        ),
    ],
)
def test_the_config_is_found_in_every_place_of_config_json(values: dict[str, Any]) -> None:
    config = found(values)
    assert isinstance(config, ToyConfig)
    assert config.values["quant_method"] == "toy"


def test_hf_overrides_change_it() -> None:
    config = found(
        {"quantization_config": {"quant_method": "toy", "group": 1}},
        hf_overrides={"quantization_config": {"group": 7}},
    )
    assert isinstance(config, ToyConfig)
    assert config.values["group"] == 7


def test_no_quantisation_is_None() -> None:
    assert found({}) is None


def test_a_method_asked_for_quantises_while_loading() -> None:
    config = found({}, quantization="toy")
    assert isinstance(config, ToyConfig)
    assert config.values == {}


def test_the_methods_own_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "toy.json").write_text(json.dumps({"group": 3}))
    with open_source(tmp_path, LoadConfig()) as source:
        config = found({}, quantization="toy", source=source)
    assert isinstance(config, ToyConfig)
    assert config.values == {"group": 3}


def test_quantize_config_json_is_read_and_names_its_method(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(json.dumps({"quant_method": "toy"}))
    with open_source(tmp_path, LoadConfig()) as source:
        assert isinstance(found({}, source=source), ToyConfig)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4}))
    with open_source(tmp_path, LoadConfig()) as source:
        with pytest.raises((NotInstalledError, ConfigFileError), match="gptq"):
            found({}, source=source)


def test_config_json_counts_before_a_file(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text("{not json")
    with open_source(tmp_path, LoadConfig()) as source:
        config = found({"quantization_config": {"quant_method": "toy"}}, source=source)
        assert isinstance(config, ToyConfig)
        with pytest.raises(ConfigFileError, match="quantize_config"):
            found({}, source=source)


def test_load_format_bitsandbytes_asks_for_bitsandbytes() -> None:
    config = found({}, load_format="bitsandbytes")
    assert config is not None
    assert config.get_name() == "bitsandbytes"


class Describes:
    """A plugin for configs that say it in their own way."""

    @hookimpl
    def loadkit_detect_quantization(self, hf_config: Any, model_config: Any) -> str | None:
        return "toy" if getattr(hf_config, "our_bits", None) else None


def test_a_plugin_names_the_method_that_a_config_describes_in_its_own_way(tmp_path: Path) -> None:
    (tmp_path / "toy.json").write_text(json.dumps({"group": 3}))
    with plugin_world(tmp_path / "site"), open_source(tmp_path, LoadConfig()) as source:
        assert found({"our_bits": 4}) is None
        plugins.register(Describes())
        assert found({}) is None
        asked = found({"our_bits": 4}, source=source)
        assert isinstance(asked, ToyConfig) and asked.values == {"group": 3}
        bare = found({"our_bits": 4, "quantization_config": {"bits": 4}})
        assert isinstance(bare, ToyConfig) and bare.values == {"bits": 4}
        with pytest.raises(ConfigFileError, match="other"):
            found({"our_bits": 4, "quantization_config": {"quant_method": "other"}})


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    ["no_such_method", "os:system", "os.system", "loadkit.errors.LoadkitError", "../x", "", 3, []],
)
def test_a_method_nobody_has_is_a_config_error_and_nothing_is_imported(method: object) -> None:
    with pytest.raises(ConfigFileError) as caught:
        found({"quantization_config": {"quant_method": method}})
    assert caught.value.code == "E_CONFIG"
    assert caught.value.file == "config.json"


def test_a_config_without_a_method_says_so() -> None:
    with pytest.raises(ConfigFileError, match="without its quant_method"):
        found({"quantization_config": {"bits": 4}})
    assert isinstance(found({"quantization_config": {"bits": 4}}, quantization="toy"), ToyConfig)


def test_bad_values_are_a_config_error_with_the_cause() -> None:
    with pytest.raises(ConfigFileError, match="toy") as caught:
        found({"quantization_config": {"quant_method": "toy", "group": "many"}})
    assert isinstance(caught.value.__cause__, ValueError)


def test_another_method_than_the_files_is_refused_unless_it_takes_over() -> None:
    values = {"quantization_config": {"quant_method": "greedy"}}
    with pytest.raises(ConfigFileError, match=r"'greedy'.*'toy'"):
        found(values, quantization="toy")
    values = {"quantization_config": {"quant_method": "toy"}}
    assert type(found(values, quantization="greedy")) is Greedy


def test_a_dtype_the_method_does_not_compute_in_is_an_option_error() -> None:
    with pytest.raises(OptionError, match="float16, float32"):
        found({"quantization_config": {"quant_method": "toy"}}, dtype="bfloat16")


# -- registering, and the interface --------------------------------------------------------------


def test_a_class_is_registered_by_name_and_a_conflict_names_both() -> None:
    assert get_quantization_config("toy") is ToyConfig
    with pytest.raises(ConflictError):
        register_quantization_config("toy")(Greedy)
    register_quantization_config("toy", override=True)(Greedy)
    assert get_quantization_config("toy") is Greedy
    with pytest.raises(OptionError):
        register_quantization_config("other")(int)


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="greedy"):
        get_quantization_config("greddy")


def test_the_model_says_what_is_packed() -> None:
    class Model(torch.nn.Module):
        packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    config = ToyConfig({})
    configure_quant_config(config, Model)
    assert config.packed_modules_mapping == Model.packed_modules_mapping
    config.packed_modules_mapping["x"] = []
    assert "x" not in Model.packed_modules_mapping
    configure_quant_config(config, torch.nn.Module)
    assert config.packed_modules_mapping == {}
    configure_quant_config(None, Model)


def test_a_method_without_an_embedding_says_so() -> None:
    assert not method_has_implemented_embedding(ToyMethod())
    with pytest.raises(NotImplementedError, match="ToyMethod"):
        ToyMethod().embedding(torch.nn.Module(), torch.tensor([0]))
    ToyMethod().process_weights_after_loading(torch.nn.Module())
    assert ToyMethod.uses_meta_device is False


def test_keys_of_a_config_are_found_or_missed_by_name() -> None:
    get = QuantizationConfig.get_from_keys
    assert get({"w_bit": 4}, ["bits", "w_bit"]) == 4
    with pytest.raises(ConfigFileError, match="w_bit"):
        get({"b": 4}, ["bits", "w_bit"])
    assert QuantizationConfig.get_from_keys_or({}, ["bits"], 8) == 8
