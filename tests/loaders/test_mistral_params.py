"""Values of params.json: an error says the key that the file has, and no other name of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from helpers.mistral_files import params_of
from loadkit.errors import ConfigFileError
from loadkit.model_config import ModelConfig
from loadkit_default.mistral.params import config_of
from loadkit_layers.rotary_embedding.frequencies import number

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 99}  # fmt: skip
YARN = {"factor": 4, "original_max_position_embeddings": 64, "beta": 32, "alpha": 1}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm_eps", "1e-5"), ("norm_eps", -1), ("norm_eps", True), ("rope_theta", math.nan),
        ("rope_theta", math.inf), ("rope_theta", [1e6]), ("rope_theta", 10**400),
        ("activation", 3), ("activation", ["silu"]), ("tied_embeddings", "yes"),
        ("tied_embeddings", 1), ("dtype", 16), ("dtype", ["bfloat16"]),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_its_own_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigFileError) as caught:
        config_of(params_of(SIZES, **{key: value}))
    assert caught.value.file == "params.json"
    assert caught.value.detail["key"] == key
    assert f"'{key}' is" in caught.value.message


@pytest.mark.parametrize("value", ["no", 0, []])
def test_whether_yarn_scales_attention_is_no_guess(value: Any) -> None:
    with pytest.raises(ConfigFileError, match="apply_scale"):
        config_of(params_of(SIZES, yarn={**YARN, "apply_scale": value}))


@pytest.mark.parametrize(("stated", "factor"), [(None, None), (True, None), (False, 1.0)])
def test_yarn_scales_attention_unless_it_is_said_not_to(stated: Any, factor: Any) -> None:
    config = config_of(params_of(SIZES, yarn={**YARN, "apply_scale": stated}))
    assert config["rope_scaling"].get("attention_factor") == factor


@pytest.mark.parametrize("value", [10**400, -(10**400), math.inf, math.nan, "4", True])
def test_a_factor_that_no_float_holds_is_refused(value: Any) -> None:
    with pytest.raises(ConfigFileError, match=r"rope factor is .*, not a finite number"):
        number({"factor": value}, "factor")


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
def test_a_config_json_has_no_number_that_no_float_holds(key: str) -> None:
    with pytest.raises(ConfigFileError, match=key):
        ModelConfig.from_dict({**SIZES, key: 10**400})


def test_null_is_not_there() -> None:
    nothing = dict.fromkeys(("activation", "tied_embeddings", "dtype", "norm_eps", "rope_theta"))
    config = config_of(params_of(SIZES, **nothing))
    assert config["hidden_act"] == "silu" and config["tie_word_embeddings"] is False
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 1e6
    assert "torch_dtype" not in config
