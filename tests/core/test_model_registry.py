"""An architecture's name becomes a class, or one of five different errors."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import loadkit
from helpers.plugin_world import World, plugin_world
from loadkit import architecture_names, model_inspection, tables
from loadkit.errors import (
    ArchitectureError,
    ArchitectureImportError,
    ConflictError,
    NotInstalledError,
)
from loadkit.model_registry import ModelRegistry, RegistrationWarning, architectures_of
from loadkit.tables import models

MODEL = """
from torch import nn
class {name}(nn.Module):
    supports_lora = True
    supports_pp = True
    packed_modules_mapping = {{"qkv_proj": ["q_proj", "k_proj"]}}
    def forward(self, input_ids, positions, intermediate_tensors=None): ...
    def compute_logits(self, hidden): ...
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("LOADKIT_CACHE", str(tmp_path / "cache"))
    with plugin_world(tmp_path) as made:
        monkeypatch.setattr(ModelRegistry, "_adapters", {})
        yield made


def toy(world: World, family: str, text: str | None = None) -> None:
    name = f"{family}ForCausalLM"
    module = f"{family.lower()}mod"
    world.dist(
        f"dist-{family.lower()}", f"[loadkit.models]\n{name} = {module}:{name}\n",
        **{module: MODEL.format(name=name) if text is None else text},
    )  # fmt: skip


# -- resolving -----------------------------------------------------------------------------------


def test_the_first_architecture_that_is_known_gives_its_class(world: World) -> None:
    toy(world, "Toy")
    toy(world, "Other", "raise RuntimeError('never')")
    cls, arch = ModelRegistry.resolve_model_cls(["NobodyForCausalLM", "ToyForCausalLM"])
    assert (cls.__name__, arch) == ("ToyForCausalLM", "ToyForCausalLM")
    assert not world.imported("othermod")
    assert ModelRegistry.resolve_model_cls("ToyForCausalLM")[0] is cls


def test_a_class_and_a_string_can_be_registered(world: World) -> None:
    class Mine(nn.Module):
        pass

    ModelRegistry.register_model("MineForCausalLM", Mine)
    assert ModelRegistry.resolve_model_cls("MineForCausalLM") == (Mine, "MineForCausalLM")
    (world.folder / "latermod.py").write_text(MODEL.format(name="Later"))
    ModelRegistry.register_model("LaterForCausalLM", "latermod:Later")
    assert not world.imported("latermod")
    assert ModelRegistry.resolve_model_cls("LaterForCausalLM")[0].__name__ == "Later"
    with pytest.raises(ConflictError):
        ModelRegistry.register_model("LlamaForCausalLM", Mine)
    ModelRegistry.register_model("LlamaForCausalLM", Mine, override=True)
    assert ModelRegistry.resolve_model_cls("LlamaForCausalLM")[0] is Mine


def test_REG_01_unknown_and_import_failed_are_different_errors(world: World) -> None:
    toy(world, "Broken", "import not_installed_dep\nclass BrokenForCausalLM: pass\n")
    toy(world, "Fine")
    with pytest.raises(ArchitectureImportError) as failed:
        ModelRegistry.resolve_model_cls(["BrokenForCausalLM"])
    assert "brokenmod:BrokenForCausalLM" in str(failed.value)
    assert "not_installed_dep" in str(failed.value)
    assert isinstance(failed.value.__cause__, ModuleNotFoundError)
    with pytest.raises(ArchitectureError) as unknown:
        ModelRegistry.resolve_model_cls(["BrokennForCausalLM"])
    assert "did you mean 'BrokenForCausalLM'" in str(unknown.value)
    assert unknown.value.detail["state"] == "unknown"
    assert ModelRegistry.resolve_model_cls(["FineForCausalLM"])[1] == "FineForCausalLM"


def test_REG_01_listing_and_testing_import_nothing(world: World) -> None:
    toy(world, "Broken", "raise SystemExit(3)")
    assert "BrokenForCausalLM" in ModelRegistry.get_supported_archs()
    assert loadkit.is_supported({"architectures": ["BrokenForCausalLM"]})
    assert not loadkit.is_supported({"architectures": ["NobodyForCausalLM"]})
    assert "BrokenForCausalLM" in ModelRegistry.tables()["text_generation"]
    assert not world.imported("brokenmod")


def test_a_string_registration_that_fails_says_so_too(world: World) -> None:
    ModelRegistry.register_model("GoneForCausalLM", "no_such_module:X")
    with pytest.raises(ArchitectureImportError, match="no_such_module"):
        ModelRegistry.resolve_model_cls("GoneForCausalLM")


def test_what_is_no_module_class_is_refused(world: World) -> None:
    toy(world, "Odd", "class OddForCausalLM: pass\n")
    with pytest.raises(ArchitectureImportError, match="no subclass of Module"):
        ModelRegistry.resolve_model_cls("OddForCausalLM")


def test_known_but_not_installed_says_the_pip_line(world: World) -> None:
    with pytest.raises(NotInstalledError, match=r'pip install "loadkit\[transformers\]"'):
        ModelRegistry.resolve_model_cls(["TransformersForCausalLM"])


def test_once_supported_names_the_last_version(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(architecture_names.ONCE_SUPPORTED, "OldForCausalLM", "0.0.9")
    with pytest.raises(ArchitectureError, match=r"supported until loadkit 0\.0\.9"):
        ModelRegistry.resolve_model_cls(["OldForCausalLM"])


@pytest.mark.parametrize("given", [[], "", None, [None], [3]])
def test_no_architecture_at_all_is_the_same_error_type(given: Any) -> None:
    with pytest.raises(ArchitectureError):
        ModelRegistry.resolve_model_cls(given)


def test_F36_a_look_alike_name_is_unknown_and_shown_escaped(world: World) -> None:
    with pytest.raises(ArchitectureError) as hit:
        ModelRegistry.resolve_model_cls(["Ll\u0430maForCausalLM"])
    assert r"Ll\u0430maForCausalLM" in str(hit.value)
    assert "'LlamaForCausalLM'" in str(hit.value)


def test_other_spellings_and_tasks(world: World) -> None:
    toy(world, "Llama2Toy")
    assert ModelRegistry._normalize("LLaMAForCausalLM") == "LlamaForCausalLM"
    with pytest.raises(ArchitectureError, match="its family has Llama2ToyForCausalLM"):
        ModelRegistry.resolve_model_cls("Llama2ToyForSequenceClassification")

    def adapter(cls: type) -> type:
        return type("Adapted", (cls,), {})

    ModelRegistry.register_adapter("ForSequenceClassification", adapter)
    cls, arch = ModelRegistry.resolve_model_cls("Llama2ToyForSequenceClassification")
    assert arch == "Llama2ToyForSequenceClassification"
    assert cls.__mro__[1].__name__ == "Llama2ToyForCausalLM"


def test_model_impl_decides_whom_to_ask(world: World) -> None:
    text = """
        from loadkit.hookspecs import hookimpl
        @hookimpl(trylast=True)
        def loadkit_resolve_architecture(architecture, model_config):
            return "shimmod:Shim" if architecture != "Nobody" else None
    """
    world.dist("shim", "[loadkit]\nshim = shim_hooks\n", shim_hooks=textwrap.dedent(text))
    (world.folder / "shimmod.py").write_text(MODEL.format(name="Shim"))
    toy(world, "Toy")

    def resolve(impl: str, arch: str) -> str:
        config = loadkit.ModelConfig.from_dict({"architectures": [arch]}, model_impl=impl)
        return ModelRegistry.resolve_model_cls(config.architectures, config)[0].__name__

    assert resolve("auto", "ToyForCausalLM") == "ToyForCausalLM"
    assert resolve("auto", "RareForCausalLM") == "Shim"
    assert resolve("transformers", "ToyForCausalLM") == "Shim"
    with pytest.raises(ArchitectureError):
        resolve("loadkit", "RareForCausalLM")
    with pytest.raises(NotInstalledError, match="transformers"):
        resolve("transformers", "Nobody")


def test_is_supported_never_raises() -> None:
    for config in (None, 3, [], "x", {}, {"architectures": None}, {"architectures": [3]}, object()):
        assert loadkit.is_supported(config) is False
    config = loadkit.ModelConfig.from_dict({}, architecture="LlamaForCausalLM")
    assert loadkit.is_supported(config)


def test_model_type_finds_its_installed_architectures() -> None:
    assert architectures_of("llama") == ["LlamaForCausalLM"]
    assert architectures_of("nobody") == []


@pytest.mark.parametrize(
    ("architecture", "table"),
    [
        ("LlamaForCausalLM", "text_generation"), ("GPT2LMHeadModel", "text_generation"),
        ("T5ForConditionalGeneration", "text_generation"), ("BertModel", "embedding"),
        ("LlavaForConditionalGeneration", "multimodal"),
        ("EagleLlamaForCausalLM", "speculative_decoding"),
        ("DeepSeekMTPModel", "speculative_decoding"),
        ("TransformersForCausalLM", "transformers_backend"),
    ],
)  # fmt: skip
def test_architectures_are_listed_in_the_usual_tables(architecture: str, table: str) -> None:
    assert architecture_names.table_of(architecture) == table


# -- inspecting ----------------------------------------------------------------------------------


def test_inspection_answers_without_importing_here_and_keeps_the_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "print('noise')\n" + MODEL.format(name="ToyForCausalLM")
    toy(world, "Toy", text)
    info, arch = ModelRegistry.inspect_model_cls(["ToyForCausalLM"])
    assert arch == "ToyForCausalLM"
    assert (info.supports_lora, info.supports_pp, info.is_text_generation_model) == (True,) * 3
    assert (info.is_pooling_model, info.supports_multimodal) == (False, False)
    assert info.packed_modules_mapping == {"qkv_proj": ["q_proj", "k_proj"]}
    assert not world.imported("toymod")

    asked: list[str] = []

    def no_process(architecture: str, path: str, timeout: float) -> dict[str, Any]:
        asked.append(path)
        raise RuntimeError

    monkeypatch.setattr(model_inspection, "_ask", no_process)
    assert ModelRegistry.inspect_model_cls(["ToyForCausalLM"])[0] == info
    assert asked == []
    (world.folder / "toymod.py").write_text(text + "# changed\n")
    with pytest.raises(RuntimeError):
        ModelRegistry.inspect_model_cls(["ToyForCausalLM"])
    assert asked == ["toymod:ToyForCausalLM"]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("import os\nos._exit(9)", "ended with 9"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended with -9"),
        ("import time\ntime.sleep(60)", "more than 2 seconds"),
    ],
)
def test_F37_an_inspection_that_fails_is_its_own_error(world: World, text: str, cause: str) -> None:
    toy(world, "Bad", text)
    with pytest.raises(ArchitectureImportError) as hit:
        ModelRegistry.inspect_model_cls("BadForCausalLM", timeout=2 if "sleep" in text else 60)
    assert hit.value.code == "E_INSPECT"
    assert cause in str(hit.value)


def test_a_class_of_this_process_is_inspected_here(world: World) -> None:
    class Mine(nn.Module):
        is_pooling_model = True

    ModelRegistry.register_model("MineModel", Mine)
    info, _ = ModelRegistry.inspect_model_cls("MineModel")
    assert (info.is_pooling_model, info.supports_pp) == (True, False)


# -- other processes -----------------------------------------------------------------------------


def test_REG_02_registrations_travel_to_spawned_workers(world: World) -> None:
    ModelRegistry.register_model("TravelForCausalLM", "toy:TravelForCausalLM")
    exported = ModelRegistry.export_registrations()
    assert exported == {"TravelForCausalLM": "toy:TravelForCausalLM"}
    code = f"""
        import json, sys
        from loadkit.model_registry import ModelRegistry as R
        print("TravelForCausalLM" in R.get_supported_archs())
        R.import_registrations({exported!r})
        print("TravelForCausalLM" in R.get_supported_archs(), "torch" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True", "False"]
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        seen = pool.apply(ModelRegistry.export_registrations)
        assert seen == {}  # nothing travels by itself
        pool.apply(ModelRegistry.import_registrations, (exported,))


def test_REG_02_a_class_of_main_warns(world: World) -> None:
    cls = type("MainForCausalLM", (nn.Module,), {"__module__": "__main__"})
    with pytest.warns(RegistrationWarning, match=r"__main__.*spawn.*module:Class"):
        ModelRegistry.register_model("MainForCausalLM", cls)
    assert models.names().count("MainForCausalLM") == 1
    assert ModelRegistry.export_registrations() == {}
    assert tables.bound_here() == ["architecture 'MainForCausalLM'"]


def test_REG_02_a_class_of_main_warns_in_every_table(world: World) -> None:
    from loadkit.readers.pread import PreadReader

    cls = type("MainReader", (PreadReader,), {"__module__": "__main__"})
    with pytest.warns(
        RegistrationWarning, match=r"'mine'.*__main__.*group loadkit\.readers"
    ) as told:
        tables.register_reader("mine")(cls)
    assert told[0].filename == __file__
    tables.readers.register("theirs", "loadkit.readers.pread:PreadReader")
    assert tables.export_registrations() == {
        "readers": {"theirs": "loadkit.readers.pread:PreadReader"}
    }
