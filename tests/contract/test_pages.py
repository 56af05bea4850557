"""The pages about load formats show code that runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import loadkit
from helpers.checkpoints import write_llama
from loadkit import availability

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
SNIPPET = re.compile(r'--8<-- "([^"]+)"')


def test_the_page_about_writing_a_loader_shows_the_files_that_are_tested(root: Path) -> None:
    page = (root / "docs/writing-a-loader.md").read_text()
    shown = SNIPPET.findall(page)
    package = root / "plugins/example/loadkit_example"
    files = {str(path.relative_to(root)) for path in package.glob("*.py")}
    files -= {"plugins/example/loadkit_example/__init__.py"}  # one line
    assert set(shown) == files | {
        "plugins/example/pyproject.toml",
        "tests/contract/test_example.py",
    }
    assert BLOCK.findall(page) == []  # all code is theirs


def test_what_an_author_copies_from_the_page_is_a_plugin_that_passes(
    root: Path, tmp_path: Path
) -> None:
    """Copied under another name, as somebody else's distribution on a path."""
    package = tmp_path / "their_format"
    shutil.copytree(root / "plugins/example/loadkit_example", package)
    for path in package.glob("*.py"):
        text = path.read_text().replace("loadkit_example", "their_format")
        path.write_text(text.replace("raw_folder", "theirs"))
    meta = tmp_path / "their_format-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: their-format\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text(
        "[loadkit.loaders]\ntheirs = their_format.loader:RawFolderLoader\n"
        "[loadkit.availability]\ntheirs = their_format.availability:state\n"
    )
    test = (root / "tests/contract/test_example.py").read_text()
    (tmp_path / "test_theirs.py").write_text(test.replace("raw_folder", "theirs"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_theirs.py"]
    done = subprocess.run(
        [*command, "-k", "default_loader and 2 or damaged or CFG_06"],
        cwd=tmp_path, capture_output=True, text=True, env=_environment(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert re.search(r"^4 passed", done.stdout, re.MULTILINE), done.stdout


def _environment(folder: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(folder)}


def test_the_example_of_writing_a_gguf_file_runs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (root / "docs/formats-gguf.md").read_text().partition("## Write a GGUF file")[2]
    found = BLOCK.search(page)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    write_llama("folder", hidden=64, ffn=64)
    exec(found[1], {"loadkit": loadkit})
    assert loadkit.plan("model-Q8_0.gguf").ok


def test_the_example_of_an_availability_module_runs() -> None:
    text = str(availability.__doc__).partition("::\n")[2].partition("and an entry point")[0]
    lines = [line.removeprefix("    ") for line in text.splitlines()]
    names: dict[str, object] = {}
    exec("\n".join(lines), names)
    state = names["state"]
    assert callable(state) and state() in (availability.READY, availability.NEEDS_EXTRA)
