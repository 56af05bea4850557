"""``load_into``: modules that know nothing of loadkit, plain ones and Hugging Face's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import loadkit
from loadkit import WeightsMapper
from loadkit.build import parameters_on_meta
from loadkit.config import LoadConfig
from loadkit.errors import ModelError, OptionError, PlanError

Made = Callable[[], nn.Module]


def plain() -> nn.Module:
    """An encoder whose names are its own."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.BatchNorm1d(10), nn.Linear(10, 3))


NAMES = WeightsMapper(
    orig_to_new_prefix={"encoder.in.": "0.", "encoder.bn.": "2.", "encoder.out.": "3."},
    orig_to_new_suffix={".gamma": ".weight", ".beta": ".bias"},
)


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state under a checkpoint's names."""
    heads = {"0": "encoder.in", "2": "encoder.bn", "3": "encoder.out"}
    leaves = {"2.weight": "gamma", "2.bias": "beta"}
    found = {}
    for name, tensor in state.items():
        head, leaf = name.split(".")
        found[f"{heads[head]}.{leaves.get(name, leaf)}"] = tensor.clone()
    return found


@pytest.mark.parametrize("where", ["real", "meta", "parameters on meta"])
def test_a_plain_module_takes_a_checkpoint_through_a_mapper(tmp_path: Path, where: str) -> None:
    reference = plain()
    reference(torch.randn(8, 6))  # so that the statistics are no defaults
    save_file(renamed(reference.state_dict()), tmp_path / "model.safetensors")
    with {
        "real": torch.device("cpu"), "meta": torch.device("meta"),
        "parameters on meta": parameters_on_meta(),
    }[where]:  # fmt: skip
        module = plain()
    for tensor in module.parameters():
        if where == "real":
            tensor.data.fill_(float("nan"))
    result = loadkit.load_into(module, tmp_path, mapper=NAMES)
    assert result.model is module
    expected = reference.state_dict()
    assert module.state_dict().keys() == expected.keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
    assert result.report.bytes_read == result.report.bytes_needed == nbytes


def test_a_mapper_that_is_wrong_is_a_plan_that_fails_and_touches_nothing(tmp_path: Path) -> None:
    save_file(renamed(plain().state_dict()), tmp_path / "model.safetensors")
    module = plain()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(PlanError) as caught:
        loadkit.load_into(module, tmp_path)
    assert {p.code for p in caught.value.problems} == {"UNEXPECTED_TENSOR", "MISSING"}
    assert all(torch.equal(module.state_dict()[name], old) for name, old in before.items())


class Tabled(nn.Module):
    """A module with a table that it computes and a checkpoint does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


class Initialised(Tabled):
    """The same, with Hugging Face's way to compute it again; ``spoils`` also resets weights."""

    def _init_weights(self, module: nn.Module) -> None:
        if hasattr(module, "table"):
            module.table.copy_(torch.arange(4.0))
            module.proj.weight.fill_(7)


class Halfway(Tabled):
    """Computes one element of it."""

    def _init_weights(self, module: nn.Module) -> None:
        if hasattr(module, "table"):
            module.table[0] = 0


class Failing(Tabled):
    """Cannot compute it."""

    def _init_weights(self, module: nn.Module) -> None:
        if hasattr(module, "table"):
            raise RuntimeError("no numbers")


@pytest.mark.parametrize("kind", [Tabled, Halfway, Failing])
def test_a_buffer_on_meta_that_nobody_can_fill_is_a_problem_before_the_load(
    tmp_path: Path, kind: Made
) -> None:
    save_file({k: v.clone() for k, v in Tabled().state_dict().items()}, tmp_path / "w.safetensors")
    with torch.device("meta"):
        module = kind()
    with pytest.raises(PlanError) as caught:
        loadkit.load_into(module, tmp_path / "w.safetensors")
    (problem,) = caught.value.problems
    assert (problem.code, problem.parameter) == ("BUFFER_ON_META", "table")
    assert "parameters_on_meta" in (problem.hint or "")
    assert module.proj.weight.is_meta  # type: ignore[union-attr]
    with parameters_on_meta():
        module = kind()
    loadkit.load_into(module, tmp_path / "w.safetensors")
    assert torch.equal(module.table, torch.arange(4.0))  # type: ignore[arg-type]


def test_a_buffer_on_meta_is_made_again_and_no_weight_is_touched(tmp_path: Path) -> None:
    state = {k: v.clone() for k, v in Tabled().state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    with torch.device("meta"):
        module = Initialised()
    loadkit.load_into(module, tmp_path / "w.safetensors")
    assert torch.equal(module.table, torch.arange(4.0))  # type: ignore[arg-type]
    assert torch.equal(module.proj.weight, state["proj.weight"])


def test_hooks_for_the_end_of_a_load_are_called_when_everything_is_there(tmp_path: Path) -> None:
    state = {k: v.clone() for k, v in Tabled().state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    seen: list[torch.Tensor] = []

    def hook(module: nn.Module, keys: Any) -> None:
        assert keys.missing_keys == keys.unexpected_keys == []
        seen.append(module.weight.detach().view(-1))  # type: ignore[operator, union-attr]

    with parameters_on_meta():
        module = Tabled()
    module.proj.register_load_state_dict_post_hook(hook)
    loadkit.load_into(module, tmp_path / "w.safetensors")
    (flat,) = seen
    assert torch.equal(flat, state["proj.weight"].view(-1))


def test_a_hook_that_fails_is_named_with_its_module(tmp_path: Path) -> None:
    save_file({k: v.clone() for k, v in Tabled().state_dict().items()}, tmp_path / "w.safetensors")

    def hook(module: nn.Module, keys: Any) -> None:
        raise RuntimeError("not now")

    module = Tabled()
    module.proj.register_load_state_dict_post_hook(hook)
    with pytest.raises(ModelError, match=r"proj \(Linear\) failed: RuntimeError: not now"):
        loadkit.load_into(module, tmp_path / "w.safetensors")
    assert "not now" in module.__dict__["loadkit_unusable"]


# -- Hugging Face ---------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 99,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False}),
    "Qwen2": ("ForCausalLM", {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "Bert": ("Model", SIZES),
    "Gemma3": (
        "ForCausalLM",
        {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    ),
}


def of_transformers(family: str) -> tuple[Any, Any]:
    """A config and the class of its model."""
    transformers = pytest.importorskip("transformers", reason="its models are what is loaded")
    kind, sizes = FAMILIES[family]
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**sizes)
    return config, getattr(transformers, "AutoModel" + (kind if kind != "Model" else ""))


@pytest.fixture(scope="module", params=FAMILIES)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any, Path, torch.Tensor]:
    """A family's config, class, checkpoint folder and what its model computes."""
    config, auto = of_transformers(request.param)
    torch.manual_seed(3)
    model = auto.from_config(config).eval()
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder)
    with torch.inference_mode():
        return config, auto, folder, model(torch.arange(9)[None])[0]


@pytest.mark.parametrize("alias", ["auto", "never"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_hugging_face_model_computes_what_the_saved_one_computes(
    saved: tuple[Any, Any, Path, torch.Tensor], device: str, alias: str
) -> None:
    config, auto, folder, expected = saved
    with torch.device(device):
        model = auto.from_config(config).eval()
    result = loadkit.load_into(model, folder, load_config=LoadConfig(alias=alias))
    with torch.inference_mode():
        assert torch.equal(model(torch.arange(9)[None])[0], expected)
    stored = load_file(folder / "model.safetensors")
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    assert result.report.bytes_read == nbytes
    assert result.report.skipped == {}
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None:
        assert (head.weight is table.weight) == config.tie_word_embeddings


def test_a_hugging_face_model_takes_old_names_through_a_mapper(tmp_path: Path) -> None:
    config, auto = of_transformers("Bert")
    torch.manual_seed(3)
    reference = auto.from_config(config).eval()
    state = {}
    for name, tensor in reference.state_dict().items():
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        state["bert." + old.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor.clone()
    state["cls.predictions.bias"] = torch.ones(99)
    save_file(state, tmp_path / "model.safetensors")
    mapper = WeightsMapper(
        orig_to_new_prefix={"bert.": "", "cls.": None},
        orig_to_new_suffix={".gamma": ".weight", ".beta": ".bias"},
    )
    with torch.device("meta"):
        model = auto.from_config(config).eval()
    result = loadkit.load_into(model, tmp_path, mapper=mapper)
    assert list(result.report.skipped) == ["cls.predictions.bias"]
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids)[0], reference(ids)[0])


def test_what_is_no_module_is_told(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"module is int; accepted: a torch\.nn\.Module"):
        loadkit.load_into(3, tmp_path)  # type: ignore[arg-type]
