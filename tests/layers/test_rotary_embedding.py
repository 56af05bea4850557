"""Rotary embeddings equal those of transformers, at every position, for every kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loadkit.config import HFConfig
from loadkit.errors import ConfigFileError
from loadkit_layers.rotary_embedding import (
    DynamicNTKScalingRotaryEmbedding,
    RotaryEmbedding,
    get_rope,
    rope_from_config,
    rope_parameters_of,
)

transformers = pytest.importorskip(
    "transformers", reason="the oracle of these tests, in the development requirements"
)
from transformers.models.llama import modeling_llama as oracle  # noqa: E402

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
KINDS = [
    pytest.param({"rope_type": "default"}, id="default"),
    pytest.param({"rope_type": "default", "rope_theta": 500000.0}, id="theta"),
    pytest.param({"rope_type": "linear", "factor": 2.5}, id="linear"),
    pytest.param({"rope_type": "dynamic", "factor": 3.0}, id="dynamic"),
    pytest.param(YARN, id="yarn"),
    pytest.param({**YARN, "beta_fast": 16, "beta_slow": 2}, id="yarn-beta"),
    pytest.param({**YARN, "truncate": False}, id="yarn-not-truncated"),
    pytest.param({**YARN, "attention_factor": 1.5}, id="yarn-attention-factor"),
    pytest.param({**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}, id="yarn-mscale"),
    pytest.param(LLAMA3, id="llama3"),
]
HEADS, HEAD_SIZE, MAX_POSITION = 3, 32, 2048


def hf_config(rope: dict[str, Any]) -> Any:
    return transformers.LlamaConfig(
        hidden_size=HEADS * HEAD_SIZE,
        num_attention_heads=HEADS,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )


def random_inputs(limit: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, limit, (17,), generator=made)
    return positions, torch.randn(17, HEADS * HEAD_SIZE, generator=made)


def by_oracle(config: Any, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cos, sin = oracle.LlamaRotaryEmbedding(config)(x, positions[None])
    heads = x.view(1, len(x), HEADS, HEAD_SIZE).transpose(1, 2)
    rotated, _ = oracle.apply_rotary_pos_emb(heads, heads, cos, sin)
    return rotated.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("limit", [MAX_POSITION, 3 * MAX_POSITION], ids=["inside", "beyond"])
@pytest.mark.parametrize("rope", KINDS)
def test_it_equals_transformers_at_random_positions(rope: dict[str, Any], limit: int) -> None:
    config = hf_config(rope)
    positions, x = random_inputs(limit)
    ours = rope_from_config(config, head_size=HEAD_SIZE)
    query, key = ours(positions, x, x)
    expected = by_oracle(config, positions, x)
    torch.testing.assert_close(query, expected, rtol=0, atol=1e-6)
    assert key is not None
    assert torch.equal(key, query)


@pytest.mark.parametrize("rope", KINDS)
def test_bfloat16_input_is_rotated_as_transformers_does(rope: dict[str, Any]) -> None:
    config = hf_config(rope)
    positions, x = random_inputs(MAX_POSITION)
    query, _ = rope_from_config(config, head_size=HEAD_SIZE)(positions, x.bfloat16())
    assert torch.equal(query, by_oracle(config, positions, x.bfloat16()))


@pytest.mark.parametrize("rope", KINDS)
def test_the_older_spelling_gives_the_same_numbers(rope: dict[str, Any]) -> None:
    old = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    config = HFConfig(
        max_position_embeddings=MAX_POSITION,
        rope_theta=rope.get("rope_theta", 10000.0),
        rope_scaling=HFConfig(type=rope["rope_type"], **old),
    )
    positions, x = random_inputs(MAX_POSITION)
    newer = rope_from_config(hf_config(rope), head_size=HEAD_SIZE)(positions, x)[0]
    assert torch.equal(rope_from_config(config, head_size=HEAD_SIZE)(positions, x)[0], newer)


def test_partial_rotation_leaves_the_rest_of_the_head_alone() -> None:
    config = transformers.GPTNeoXConfig(
        hidden_size=HEADS * HEAD_SIZE,
        num_attention_heads=HEADS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    )
    from transformers.models.gpt_neox import modeling_gpt_neox as neox

    positions, x = random_inputs(500)
    cos, sin = neox.GPTNeoXRotaryEmbedding(config)(x, positions[None])
    heads = x.view(1, len(x), HEADS, HEAD_SIZE).transpose(1, 2)
    expected, _ = neox.apply_rotary_pos_emb(heads, heads, cos, sin)
    ours, _ = rope_from_config(config, head_size=HEAD_SIZE)(positions, x)
    torch.testing.assert_close(ours, expected.transpose(1, 2).reshape(x.shape), rtol=0, atol=1e-6)
    assert torch.equal(
        ours.view(-1, HEADS, HEAD_SIZE)[..., 8:], x.view(-1, HEADS, HEAD_SIZE)[..., 8:]
    )


def test_interleaved_pairs_equal_those_of_gptj() -> None:
    from transformers.models.gptj import modeling_gptj as gptj

    positions, x = random_inputs(500)
    table = gptj.create_sinusoidal_positions(512, 16)[positions]
    sin, cos = table.chunk(2, dim=-1)
    heads = x.view(1, len(x), HEADS, HEAD_SIZE)
    turned = gptj.apply_rotary_pos_emb(heads[..., :16], sin[None], cos[None])
    expected = torch.cat((turned, heads[..., 16:]), dim=-1).view(x.shape)
    rope = get_rope(HEAD_SIZE, rotary_dim=16, max_position=512, is_neox_style=False)
    torch.testing.assert_close(rope(positions, x)[0], expected, rtol=0, atol=1e-6)


def test_dynamic_scaling_does_not_remember_an_earlier_longer_call() -> None:
    rope = get_rope(
        HEAD_SIZE, max_position=64, rope_parameters={"rope_type": "dynamic", "factor": 2.0}
    )
    assert isinstance(rope, DynamicNTKScalingRotaryEmbedding)
    x = torch.randn(80, HEAD_SIZE, generator=torch.Generator().manual_seed(1))
    before, _ = rope(torch.arange(80), x)
    rope(torch.arange(1000, 1080), x)
    assert torch.equal(rope(torch.arange(80), x)[0], before)
    assert rope(torch.arange(0), x[:0])[0].shape == (0, HEAD_SIZE)


def test_a_huge_context_costs_no_memory_and_nothing_is_saved() -> None:
    rope = get_rope(128, max_position=10_000_000, base=5e5)
    held = sum(buffer.numel() * buffer.element_size() for buffer in rope.buffers())
    assert held == 64 * 4
    assert rope.state_dict() == {}
    assert next(rope.buffers()).device.type == "cpu"


def test_it_is_real_and_float32_whatever_the_defaults_are() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            ropes = [
                get_rope(HEAD_SIZE, max_position=64, rope_parameters=p.values[0]) for p in KINDS
            ]
    finally:
        torch.set_default_dtype(torch.float32)
    for rope, kind in zip(ropes, KINDS, strict=True):
        expected = get_rope(HEAD_SIZE, max_position=64, rope_parameters=kind.values[0])
        assert torch.equal(rope.inv_freq, expected.inv_freq)


def test_a_model_cast_to_half_keeps_float32_angles() -> None:
    rope = get_rope(HEAD_SIZE, max_position=64, rope_parameters=LLAMA3)
    expected = rope.inv_freq.clone()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), rope).to(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
    assert torch.equal(rope.inv_freq, expected)


def test_settings_are_found_per_layer_type_and_beside_the_dict() -> None:
    config = HFConfig(
        rope_theta=7.0,
        partial_rotary_factor=0.5,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": HFConfig(rope_type="default"),
        },
    )
    full = rope_parameters_of(config, "full_attention")
    assert full == {
        "rope_type": "linear", "factor": 8.0, "rope_theta": 1e6, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    assert rope_parameters_of(config, "sliding_attention")["rope_theta"] == 7.0


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "lama3"}, "did you mean 'llama3'"),
        ({"rope_type": ["yarn"]}, "there are default, dynamic"),
        ({"rope_type": "linear"}, "needs 'factor'"),
        ({"rope_type": "linear", "factor": "2"}, "not a finite number"),
        ({"rope_type": "linear", "factor": 0}, "less than"),
        ({"rope_type": "linear", "factor": True}, "not a finite number"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "low_freq_factor < high_freq_factor"),
        ({**YARN, "factor": float("nan")}, "not a finite number"),
        ({"rope_theta": -1.0}, "rope rope_theta is -1.0"),
        ({"partial_rotary_factor": 1.5}, "rotary width 48"),
        ({"partial_rotary_factor": 0.1}, "rotary width 3"),
        (["default"], "settings are list"),
    ],
)
def test_settings_that_make_no_sense_are_typed_errors(rope: Any, said: str) -> None:
    with pytest.raises(ConfigFileError, match=said):
        get_rope(HEAD_SIZE, max_position=64, rope_parameters=rope)


def test_the_plain_kind_is_the_default() -> None:
    assert type(get_rope(HEAD_SIZE, max_position=64)) is RotaryEmbedding
