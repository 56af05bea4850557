"""What README.md shows can be run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.alphabet import alphabet_gguf
from helpers.checkpoints import write_llama
from loadkit.cli import main


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``path/to/model`` and ``model.gguf`` are models."""
    folder = tmp_path_factory.mktemp("readme")
    write_llama(folder / "path/to/model")
    alphabet_gguf(folder / "model.gguf")
    return folder


def test_the_five_lines_of_python_run(root: Path, place: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True ")


def test_a_command_of_the_readme_runs_from_a_shell(root: Path, place: Path) -> None:
    line = "plan path/to/model --tp 2"
    assert line.split()[0] in (root / "README.md").read_text()
    command: list[str | Path] = [Path(sys.executable).with_name("loadkit"), *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "load path/to/model --json",
        "generate model.gguf --prompt TEXT",
        "inspect path/to/model",
        "convert path/to/model path/to/out",
        "diff path/to/model path/to/out",
        "verify path/to/out",
        "formats",
        "models",
        "plugins",
    ],
)
def test_a_command_of_the_readme_runs(
    root: Path,
    place: Path,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: each command of its own would import torch."""
    assert line.split()[0] in (root / "README.md").read_text()
    monkeypatch.chdir(place)
    assert main(line.split()) == 0, capsys.readouterr().err


def test_the_targets_it_names_exist(root: Path) -> None:
    named = set(re.findall(r"`make ([a-z-]+)`", (root / "README.md").read_text()))
    makefile = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    assert named and named <= makefile


def test_the_install_lines_name_every_distribution(root: Path) -> None:
    text = (root / "README.md").read_text()
    lines = re.findall(r"^pip (?:install|wheel).* \./core .*$", text, re.MULTILINE)
    rooms = ("core", "layers", "loaders/*", "plugins/*")
    members = {path.parent for room in rooms for path in root.glob(f"{room}/pyproject.toml")}
    assert len(lines) == 2
    for line in lines:
        assert line.endswith((" .", ' ".[all]"'))  # the umbrella
        asked = [word[2:] for word in line.split() if word.startswith("./")]
        assert {path for word in asked for path in root.glob(word) if path.is_dir()} == members
