"""Wheels of every distribution, installed into clean environments as a user would.

How the environments come about: ``helpers/environments.py``.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from helpers import environments
from helpers.alphabet import alphabet_gguf
from helpers.checkpoints import write_llama

pytestmark = pytest.mark.install

VERSION = environments.project(environments.ROOT)["version"]
UMBRELLA = {"loadkit", "loadkit-core", "loadkit-layers", "loadkit-models"}
UMBRELLA |= {"loadkit-default", "loadkit-dummy"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of wheels."""
    return environments.build_wheels(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def third_parties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environments.link_third_parties(tmp_path_factory.mktemp("third") / "parties")


@pytest.fixture(scope="module")
def umbrella(
    tmp_path_factory: pytest.TempPathFactory, third_parties: Path, wheels: Path
) -> environments.Environment:
    """An environment after ``pip install loadkit``."""
    folder = tmp_path_factory.mktemp("umbrella") / "venv"
    environment = environments.Environment(folder, third_parties, wheels)
    environment.install("loadkit")
    return environment


@pytest.fixture(scope="module")
def gguf(
    tmp_path_factory: pytest.TempPathFactory, third_parties: Path, wheels: Path
) -> environments.Environment:
    """An environment after ``pip install loadkit[gguf]``."""
    folder = tmp_path_factory.mktemp("gguf") / "venv"
    environment = environments.Environment(folder, third_parties, wheels)
    environment.install("loadkit[gguf]")
    return environment


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file alone in its folder."""
    return alphabet_gguf(tmp_path_factory.mktemp("alphabet") / "model.gguf")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_llama(folder, shards=2)
    return folder


def test_a_wheel_holds_its_package_and_nothing_else(wheels: Path) -> None:
    for member in environments.MEMBERS:
        name = environments.project(member)["name"].replace("-", "_")
        package = "loadkit" if name == "loadkit_core" else name
        (wheel,) = wheels.glob(f"{name}-{VERSION}-*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        tops = {path.partition("/")[0] for path in names}
        assert tops == {package, f"{name}-{VERSION}.dist-info"}
        assert f"{package}/py.typed" in names


def test_the_umbrellas_wheel_holds_no_code(wheels: Path) -> None:
    (wheel,) = wheels.glob(f"loadkit-{VERSION}-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {path.partition("/")[0] for path in names} == {f"loadkit-{VERSION}.dist-info"}


def test_the_umbrella_alone_brings_the_first_party_members(
    umbrella: environments.Environment,
) -> None:
    assert umbrella.distributions() == UMBRELLA


def test_nothing_of_the_checkout_is_on_the_path(umbrella: environments.Environment) -> None:
    paths = umbrella.python("import sys; print(*sys.path, sep='\\n')").splitlines()
    assert [path for path in paths if Path(path).is_relative_to(environments.ROOT)] == []
    where = umbrella.python("import loadkit; print(loadkit.__file__)").strip()
    assert Path(where).is_relative_to(umbrella.bin.parent)
    for name in ("tests", "core", "layers", "loaders", "plugins", "scripts"):
        assert "None" in umbrella.python(
            f"import importlib.util; print(importlib.util.find_spec({name!r}))"
        )


def test_the_umbrella_alone_loads_a_checkpoint_from_the_command_line(
    umbrella: environments.Environment, checkpoint: Path
) -> None:
    plan = json.loads(umbrella.loadkit("plan", checkpoint, "--tp", "2", "--json"))
    assert (plan["ok"], plan["architecture"]) == (True, "LlamaForCausalLM")
    assert plan["distribution"] == "loadkit-models"
    report = json.loads(umbrella.loadkit("load", checkpoint, "--json"))
    assert report["schema"] == "loadkit.load/1"


def test_the_umbrella_alone_loads_a_checkpoint_from_python(
    umbrella: environments.Environment, checkpoint: Path
) -> None:
    out = umbrella.python(
        "import torch, loadkit\n"
        f"result = loadkit.load({str(checkpoint)!r})\n"
        "with torch.no_grad():\n"
        "    hidden = result.model(torch.arange(5), torch.arange(5))\n"
        "print(type(result.model).__name__, list(hidden.shape), result.report.bytes_read > 0)\n"
        "try:\n"
        f"    loadkit.load({str(checkpoint)!r}, load_format='gguf')\n"
        "except loadkit.NotInstalledError as error:\n"
        "    print(error)"
    )
    said, _, error = out.partition("\n")
    assert said == "LlamaForCausalLM [5, 16] True"
    assert 'pip install "loadkit[gguf]"' in error


def test_a_format_that_is_not_installed_names_its_extra(
    umbrella: environments.Environment, checkpoint: Path
) -> None:
    error = umbrella.loadkit("load", checkpoint, "--load-format", "gguf", code=2)
    assert 'pip install "loadkit[gguf]"' in error
    assert "Traceback" not in error


def test_a_scheme_that_is_not_installed_names_its_extra(umbrella: environments.Environment) -> None:
    error = umbrella.loadkit("plan", "s3://bucket/folder", code=2)
    assert 'pip install "loadkit[remote]"' in error and "Traceback" not in error


def test_a_file_whose_format_is_not_installed_names_the_extra(
    umbrella: environments.Environment, alphabet: Path
) -> None:
    error = umbrella.loadkit("plan", alphabet, code=2)
    assert 'pip install "loadkit[gguf]"' in error and "Traceback" not in error


def test_an_extra_brings_its_format(gguf: environments.Environment) -> None:
    assert gguf.distributions() == UMBRELLA | {"loadkit-gguf"}
    formats = json.loads(gguf.loadkit("formats", "--json"))["formats"]
    (row,) = [row for row in formats if row["name"] == "gguf"]
    assert (row["distribution"], row["version"]) == ("loadkit-gguf", VERSION)
    for name in ("transformers", "gguf", "sentencepiece"):  # nor does it need these
        found = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
        assert gguf.python(found) == "None\n"


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--tp", "3", "--quantization", "gguf"),
        pytest.param(("--tp", "2"), marks=pytest.mark.slow),
        pytest.param(("--quantization", "gguf"), marks=pytest.mark.slow),
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_with_the_extra_a_lone_file_speaks(
    gguf: environments.Environment, alphabet: Path, options: tuple[str, ...]
) -> None:
    said = gguf.loadkit(
        "generate", alphabet, "--prompt", "say a", "--max-new-tokens", "8", *options
    )
    assert said == "bcdefghi\n"


@pytest.mark.slow
def test_with_the_extra_smollm2_says_what_it_says_in_llama_cpp(
    gguf: environments.Environment, smollm2: Path
) -> None:
    data = environments.ROOT / "tests/data/smollm2-135m-dequant-f32.llamacpp.json"
    prompt = json.loads(data.read_text())["prompts"]["p1"]
    options = ["--prompt", prompt["text"], "--dtype", "float32", "--max-new-tokens", "12"]
    answer = json.loads(gguf.loadkit("generate", smollm2, *options, "--json"))
    assert answer["prompt_ids"] == prompt["prompt_ids"]
    assert answer["output_ids"] == prompt["greedy24_ids"][:12]


def test_the_extra_sharded_state_saves_and_loads_rank_files(
    tmp_path: Path, third_parties: Path, wheels: Path, checkpoint: Path
) -> None:
    environment = environments.Environment(tmp_path / "venv", third_parties, wheels)
    environment.install("loadkit[sharded-state]")
    assert environment.distributions() == UMBRELLA | {"loadkit-sharded-state"}
    formats = json.loads(environment.loadkit("formats", "--json"))["formats"]
    names = {row["name"] for row in formats if row["distribution"] == "loadkit-sharded-state"}
    assert names == {"runai_streamer_sharded", "sharded_state"}
    saved = tmp_path / "saved"
    environment.python(
        "import loadkit\n"
        "for rank in range(2):\n"
        "    parallel = loadkit.ParallelConfig(tp_size=2, tp_rank=rank)\n"
        f"    model = loadkit.load_model({str(checkpoint)!r}, parallel=parallel)\n"
        f"    loadkit.save(model, {str(saved)!r}, save_format='sharded_state')"
    )
    report = json.loads(environment.loadkit("load", saved, "--tp", "2", "--rank", "1", "--json"))
    assert report["ranks"][0]["load_format"] == "sharded_state"


def test_the_extra_all_installs_every_member(
    tmp_path: Path, third_parties: Path, wheels: Path
) -> None:
    environment = environments.Environment(tmp_path / "venv", third_parties, wheels)
    environment.install("loadkit[all]")
    members = {environments.project(member)["name"] for member in environments.MEMBERS}
    assert environment.distributions() == members - {"loadkit-example"} | {"loadkit"}


def test_removing_a_distribution_changes_its_own_rows_of_the_formats_alone(
    tmp_path: Path, third_parties: Path, wheels: Path
) -> None:
    environment = environments.Environment(tmp_path / "venv", third_parties, wheels)
    environment.install("loadkit[gguf,sharded-state]", "loadkit-example")

    def rows() -> dict[str, dict[str, object]]:
        found = json.loads(environment.loadkit("formats", "--json"))["formats"]
        return {row["name"]: row for row in found}

    everything = rows()
    assert everything["raw_folder"]["distribution"] == "loadkit-example"
    for gone, names in {
        "loadkit-example": {"raw_folder"},
        "loadkit-sharded-state": {"sharded_state", "runai_streamer_sharded"},
    }.items():
        environment.uninstall(gone)
        left = rows()
        assert {name for name in everything if left.get(name) != everything[name]} == names
        everything = left
    assert "raw_folder" not in everything  # nobody knows where it could come from
    assert everything["sharded_state"]["install"] == 'pip install "loadkit[sharded-state]"'


def test_the_core_alone_says_that_nothing_is_installed_for_an_architecture(
    tmp_path: Path, third_parties: Path, wheels: Path, checkpoint: Path
) -> None:
    environment = environments.Environment(tmp_path / "venv", third_parties, wheels)
    environment.install("loadkit-core")
    assert environment.distributions() == {"loadkit-core"}
    environment.loadkit("formats")
    error = environment.loadkit("load", checkpoint, "--load-format", "safetensors", code=2)
    assert "pip install" in error and "Traceback" not in error
