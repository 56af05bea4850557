"""``mistral``: Mistral's own files give the parameters and the words that Hugging Face's give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import loadkit
from helpers.checkpoints import write_st
from helpers.mistral_files import params_of, to_mistral, write_mistral
from helpers.tiny_families import write_family
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import ConfigFileError, FormatError, LoadkitError, PlanError
from loadkit_default.mistral.names import NAMES
from loadkit_default.mistral.params import config_of, unknown_keys

QUIET = LoadConfig(use_tqdm_on_load=False)
PROMPT = [3, 14, 15, 92, 65]


class Pair(NamedTuple):
    """One model twice: in Hugging Face's layout, and what it is made of."""

    folder: Path
    weights: dict[str, torch.Tensor]
    config: dict[str, Any]


def pair(folder: Path, family: str = "mistral", **changes: Any) -> Pair:
    write_family(folder, family, **changes)
    config = json.loads((folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(7)
    weights = {  # large enough that attention looks at some tokens more than at others
        name: torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    write_st(folder / "model.safetensors", weights)
    return Pair(folder, weights, config)


def load(folder: Path, *, tp: int = 1, rank: int = 0, **options: Any) -> Any:
    return loadkit.load(
        folder, parallel=ParallelConfig(tp_size=tp, tp_rank=rank), load_config=QUIET, **options
    )


def check_same(
    mistral: Path, other: Path, *, tps: tuple[int, ...] = (1, 2), **options: Any
) -> None:
    for tp in tps:
        for rank in range(tp):
            found, wanted = (load(f, tp=tp, rank=rank, **options) for f in (mistral, other))
            assert found.plan.load_format == "mistral"
            have = dict(found.model.named_parameters())
            want = dict(wanted.model.named_parameters())
            assert have.keys() == want.keys()
            for name, parameter in want.items():
                assert torch.equal(have[name], parameter), name
            rows = [row for row in found.plan.rows if row.parameter is not None]
            assert {row.exact for row in rows} == {"exact"}
            assert found.report.bytes_read == found.plan.bytes_to_read


@pytest.mark.parametrize("shards", [1, 3])
def test_a_consolidated_checkpoint_gives_what_hugging_faces_gives(
    shards: int, tmp_path: Path
) -> None:
    made = pair(tmp_path / "hf", sliding_window=16, rope_theta=1e6)
    folder = write_mistral(tmp_path / "own", made.weights, made.config, shards=shards)
    check_same(folder, made.folder)
    said = [
        loadkit.generate(load(f).model, PROMPT, max_new_tokens=6) for f in (folder, made.folder)
    ]
    assert said[0] == said[1]


def test_it_computes_the_same_logits(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf", rope_theta=1e6, sliding_window=None)
    folder = write_mistral(tmp_path / "own", made.weights, made.config)
    logits = []
    for each in (folder, made.folder):
        model = load(each).model
        with torch.inference_mode():
            hidden = model(torch.tensor(PROMPT), torch.arange(len(PROMPT)))
            logits.append(model.compute_logits(hidden))
    assert torch.equal(*logits)
    plain = load_file(folder / "consolidated.safetensors")
    assert not torch.equal(
        plain["layers.0.attention.wq.weight"],
        made.weights["model.layers.0.self_attn.q_proj.weight"],
    )  # or the rotation would not be seen


def test_a_load_in_inference_mode_gives_the_same(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf")
    folder = write_mistral(tmp_path / "own", made.weights, made.config)
    with torch.inference_mode():  # there a reshape comes whole, and it may be a copy
        found = load(folder)
    assert found.report.bytes_read == found.plan.bytes_to_read
    have = dict(found.model.named_parameters())
    for name, parameter in load(made.folder).model.named_parameters():
        assert torch.equal(have[name], parameter), name


def test_a_rank_reads_its_own_rows_of_rotated_matrices_only(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf")
    folder = write_mistral(tmp_path / "own", made.weights, made.config)
    own, other = (
        loadkit.plan(f, parallel=ParallelConfig(tp_size=2, tp_rank=1))
        for f in (folder, made.folder)
    )
    assert own.ok and own.bytes_needed == other.bytes_needed
    whole = loadkit.plan(folder)
    assert own.bytes_to_read < 0.7 * whole.bytes_to_read


@pytest.mark.parametrize("style", ["feed_forward", "block_sparse_moe", "stacked"])
def test_experts_under_every_name_that_mixtral_files_have(style: str, tmp_path: Path) -> None:
    made = pair(tmp_path / "hf", "mixtral", rope_theta=1e6)
    folder = write_mistral(tmp_path / "own", made.weights, made.config)
    file = folder / "consolidated.safetensors"
    tensors = load_file(file)
    if style != "feed_forward":
        renamed = {
            name.replace("feed_forward", "block_sparse_moe"): t for name, t in tensors.items()
        }
        tensors = stacked(renamed) if style == "stacked" else renamed
        write_st(file, tensors)
    check_same(folder, made.folder)


def stacked(tensors: dict[str, torch.Tensor], experts: int = 8) -> dict[str, torch.Tensor]:
    """All experts of a projection in one matrix, w2 lying on its side."""
    left = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in (0, 1):
        at = f"layers.{layer}.block_sparse_moe"
        for which in ("w1", "w2", "w3"):
            parts = [tensors[f"{at}.experts.{index}.{which}.weight"] for index in range(experts)]
            parts = [part.t() for part in parts] if which == "w2" else parts
            left[f"{at}.{which}"] = torch.cat(parts).contiguous()
    return left


@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"tp_size": 2, "ep_size": 2}])
@pytest.mark.parametrize("style", ["feed_forward", "stacked"])
def test_stages_and_experts_of_other_ranks_are_left_where_they_are(
    style: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    made = pair(tmp_path / "hf", "mixtral", rope_theta=1e6)
    folder = write_mistral(tmp_path / "own", made.weights, made.config)
    file = folder / "consolidated.safetensors"
    if style == "stacked":
        tensors = {
            n.replace("feed_forward", "block_sparse_moe"): t for n, t in load_file(file).items()
        }
        write_st(file, stacked(tensors))
    for rank in (0, 1):
        place = ParallelConfig.for_rank(rank, **sizes)
        found, wanted = (
            loadkit.load(each, parallel=place, load_config=QUIET) for each in (folder, made.folder)
        )
        have = dict(found.model.named_parameters())
        for name, parameter in wanted.model.named_parameters():
            assert torch.equal(have[name], parameter), name
        assert found.plan.bytes_needed == wanted.plan.bytes_needed


def test_tied_embeddings_need_no_output(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf", tie_word_embeddings=True, sliding_window=None)
    assert "lm_head.weight" not in made.weights
    check_same(write_mistral(tmp_path / "own", made.weights, made.config), made.folder, tps=(1,))


def test_an_output_that_is_not_there_and_not_tied_is_missed(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf", tie_word_embeddings=True)
    folder = write_mistral(tmp_path / "own", made.weights, made.config, tied_embeddings=None)
    plan = loadkit.plan(folder)
    assert [(one.code, one.parameter) for one in plan.problems] == [("MISSING", "lm_head.weight")]


def test_biases_are_rotated_with_their_matrices(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf", "llama", attention_bias=True, mlp_bias=True)
    assert "model.layers.0.self_attn.q_proj.bias" in made.weights
    folder = write_mistral(tmp_path / "own", made.weights, made.config)
    biased = {"attention_bias": True, "mlp_bias": True}
    check_same(folder, made.folder, hf_overrides=biased)
    codes = {one.code for one in loadkit.plan(folder).problems}
    assert codes == {"UNEXPECTED_TENSOR"}  # without the word of the caller they are not swallowed


def test_yarn_gives_hugging_faces_frequencies(tmp_path: Path) -> None:
    yarn = {"factor": 4, "original_max_position_embeddings": 64, "beta": 32, "alpha": 1}
    scaling = {
        "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64,
        "beta_fast": 32, "beta_slow": 1,
    }  # fmt: skip
    made = pair(tmp_path / "hf", rope_scaling=scaling, rope_theta=1e6, sliding_window=None)
    folder = write_mistral(tmp_path / "own", made.weights, made.config, yarn=yarn)
    hidden = []
    for each in (folder, made.folder):
        with torch.inference_mode():
            hidden.append(load(each).model(torch.tensor(PROMPT), torch.arange(60, 65)))
    assert torch.equal(*hidden)


# -- params.json ---------------------------------------------------------------------------------

PARAMS = params_of(
    {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
     "intermediate_size": 64, "vocab_size": 99, "rope_theta": 1e6}
)  # fmt: skip


def params(*drop: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**PARAMS, **changes}.items() if key not in drop}


def test_what_params_json_leaves_out_is_what_mistrals_code_fills_in() -> None:
    bare = config_of(params("rope_theta", "head_dim", "n_kv_heads", "norm_eps"))
    assert bare["rope_theta"] == 1e6 and bare["sliding_window"] is None
    assert (bare["head_dim"], bare["num_key_value_heads"]) == (4, 8)
    assert bare["max_position_embeddings"] == 128_000 and not bare["tie_word_embeddings"]
    assert config_of(params("rope_theta", sliding_window=4096))["rope_theta"] == 1e4
    assert config_of(params(max_seq_len=512))["max_position_embeddings"] == 512
    assert config_of(params(dtype="bfloat16"))["torch_dtype"] == "bfloat16"


def test_mixtral_is_told_by_its_experts() -> None:
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "route_every_n": 1}
    config = config_of(params(moe=moe))
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, 2)


@pytest.mark.parametrize(
    ("stated", "window"),
    [(None, None), (4096, 4096), ("4096", 4096), ([4096, 4096], 4096), ([None], None)],
)
def test_a_window_is_read_in_every_spelling(stated: Any, window: int | None) -> None:
    assert config_of(params(sliding_window=stated))["sliding_window"] == window


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dim", 0), ("dim", "32"), ("dim", True), ("n_layers", 1 << 60), ("vocab_size", -1),
        ("head_dim", 1.5), ("n_kv_heads", []), ("sliding_window", [4096, None]),
        ("sliding_window", []), ("sliding_window", "all"), ("sliding_window", -1),
        ("max_seq_len", "long"), ("model_type", "mamba"), ("yarn", {"factor": 4}), ("yarn", 7),
        ("moe", {"num_experts": 8}), ("moe", [8]), ("vision_encoder", {"hidden_size": 1024}),
        ("moe", {"num_experts": 8, "num_experts_per_tok": 2, "route_every_n": 2}),
        ("moe", {"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1}),
        ("quantization", {"qformat_weight": "fp8_e4m3"}), ("llama_4_scaling", {"beta": 0.1}),
        ("q_lora_rank", 512), ("lora", {"rank": 8}),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigFileError) as caught:
        config_of(params(**{key: value}))
    assert (caught.value.code, caught.value.file) == ("E_CONFIG", "params.json")
    assert key in str(caught.value)


@pytest.mark.parametrize("key", ["tied_embeddings", "norm_eps", "rope_theta", "dtype"])
def test_other_values_are_refused_when_the_config_is_made(key: str, tmp_path: Path) -> None:
    made = pair(tmp_path / "hf")
    folder = write_mistral(tmp_path / "own", made.weights, made.config, **{key: ["no"]})
    with pytest.raises(ConfigFileError) as caught:
        loadkit.load(folder, load_config=QUIET)
    assert caught.value.code == "E_CONFIG"


def test_all_missing_keys_are_named() -> None:
    with pytest.raises(ConfigFileError) as caught:
        config_of(params("dim", "hidden_dim"))
    assert caught.value.detail["missing"] == ["dim", "hidden_dim"]


def test_keys_that_nobody_follows_are_reported_and_known_ones_are_not(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf")
    odd = {"max_batch_size": 3, "new_gate": 0.5, "yarn": None, "vision_encoder": None, "gone": None}
    folder = write_mistral(tmp_path / "own", made.weights, made.config, **odd)
    assert unknown_keys({"moe": {"capacity": 1, "route_every_n": 1}}) == ["moe.capacity"]
    plan = loadkit.plan(folder)
    assert plan.ok
    assert [note.message for note in plan.notes if note.code == "UNKNOWN_SETTING"] == [
        "params.json: nothing here follows 'new_gate'"
    ]
    assert any("'new_gate'" in warning for warning in load(folder).report.warnings)


def test_params_json_counts_beside_a_config_json_of_another_model(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf")
    folder = write_mistral(tmp_path / "own", made.weights, made.config)
    (folder / "config.json").write_text(json.dumps({**made.config, "hidden_size": 64}))
    assert loadkit.plan(folder).ok


def test_a_config_json_does_where_there_is_no_params_json(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf")
    folder = write_mistral(tmp_path / "own", made.weights, made.config)
    (folder / "params.json").unlink()
    with pytest.raises(ConfigFileError, match=r"neither params\.json nor config\.json"):
        loadkit.plan(folder)
    (folder / "config.json").write_text(json.dumps(made.config))
    check_same(folder, made.folder)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attention.wq.qscale_weight",
        "layers.1.feed_forward.w1.qscale_act",
        "layers.0.attention.kv_fake_quantizer.qscale_act",
    ],
)
def test_mistrals_own_quantisation_is_refused_and_not_guessed(name: str, tmp_path: Path) -> None:
    made = pair(tmp_path / "hf")
    folder = write_mistral(tmp_path / "own", made.weights, made.config)
    tensors = load_file(folder / "consolidated.safetensors")
    write_st(folder / "consolidated.safetensors", {**tensors, name: torch.ones(1)})
    with pytest.raises(FormatError) as caught:
        load(folder)
    assert (caught.value.code, caught.value.tensor) == ("E_QUANT", name)


def test_a_tensor_of_another_name_is_unexpected(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf")
    folder = write_mistral(tmp_path / "own", made.weights, made.config)
    tensors = load_file(folder / "consolidated.safetensors")
    extra = {"layers.0.attention.wz.weight": torch.ones(2), "vision.wq.weight": torch.ones(2)}
    write_st(folder / "consolidated.safetensors", {**tensors, **extra})
    plan = loadkit.plan(folder)
    assert {(one.code, one.tensor) for one in plan.problems} == {
        ("UNEXPECTED_TENSOR", name) for name in extra
    }


def test_heads_that_do_not_fit_are_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf")
    wrong = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 4}
    folder = write_mistral(tmp_path / "own", made.weights, made.config, **wrong)
    with pytest.raises(PlanError, match=r"layers\.\d\.attention\.wq\.weight"):
        load(folder)


def test_archives_options_do_nothing_here_and_are_refused(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf")
    folder = write_mistral(tmp_path / "own", made.weights, made.config)
    with pytest.raises(LoadkitError, match="weights_key"):
        loadkit.plan(folder, load_config=LoadConfig(weights_key="model"))


# -- everything else that takes a checkpoint -----------------------------------------------------


def test_tensors_come_under_their_own_names_one_by_one(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf")
    folder = write_mistral(tmp_path / "own", made.weights, made.config, shards=2)
    found = dict(loadkit.iter_weights(folder))
    wanted = to_mistral(made.weights, made.config)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_it_is_verified_saved_and_reloaded(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf")
    folder = write_mistral(tmp_path / "own", made.weights, made.config, shards=2)
    assert loadkit.verify(folder, finite=True).ok
    model = load(folder).model
    loadkit.save(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == made.weights.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in made.weights.items())
    assert load(tmp_path / "saved").plan.load_format == "safetensors"


def test_names_of_both_sides_are_each_others(tmp_path: Path) -> None:
    made = pair(tmp_path / "hf")
    for name in to_mistral(made.weights, made.config):
        mapped = NAMES.map_name(name)
        assert mapped is not None and mapped.name in made.weights
