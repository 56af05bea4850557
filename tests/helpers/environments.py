"""Clean environments that share torch with the tests' own, and wheels to install into them.

A clean environment is a venv without pip and without loadkit. Third parties (torch alone is over
half a gigabyte) are not copied into it: a folder of links to exactly the distributions loadkit
requires, taken from the environment the tests run in, is put on its path by one ``.pth`` line. pip
sees them there as installed, so it resolves loadkit's real requirements, takes every ``loadkit*``
from the folder of wheels, and touches nothing else. No index is asked and nothing of the checkout
is visible.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What pip asks of each project's backend, in one process for all of them.
BUILD = """
import importlib, os, sys, tomllib
folder, *members = sys.argv[1:]
for member in members:
    os.chdir(member)
    with open("pyproject.toml", "rb") as file:
        backend = tomllib.load(file)["build-system"]["build-backend"]
    importlib.import_module(backend).build_wheel(folder)
"""

ROOT = Path(__file__).resolve().parent.parent.parent
MEMBERS = sorted(
    path.parent
    for pattern in ("core", "layers", "loaders/*", "plugins/*")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
)


def run(*command: str | Path, code: int = 0) -> str:
    """Standard output of a command run outside the checkout; standard error if it is to fail."""
    settings = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "2"}
    settings |= {"OMP_WAIT_POLICY": "PASSIVE"}
    settings |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1"}
    settings |= {"HOME": str(Path.home()), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    parts = [str(part) for part in command]
    done = subprocess.run(parts, capture_output=True, text=True, cwd="/", env=settings)
    assert done.returncode == code, f"{parts} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stderr if code else done.stdout


def project(member: Path) -> dict[str, Any]:
    """The ``[project]`` table of a distribution."""
    found: dict[str, Any] = tomllib.loads((member / "pyproject.toml").read_text())["project"]
    return found


def build_wheels(folder: Path) -> Path:
    """A folder with the wheel of every member and of the umbrella."""
    umbrella = folder / "umbrella"  # setuptools writes beside its pyproject: not into the checkout
    umbrella.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, umbrella)
    (folder / "wheels").mkdir()
    run(sys.executable, "-c", BUILD, folder / "wheels", *MEMBERS, umbrella)
    return folder / "wheels"


def link_third_parties(folder: Path) -> Path:
    """A folder of links to what the members require beside each other, and what that requires."""
    folder.mkdir()
    wanted = [line for member in MEMBERS for line in project(member)["dependencies"]]
    for member in MEMBERS:
        extras = project(member).get("optional-dependencies", {})
        wanted += [line for extra in ("generate", "http") for line in extras.get(extra, [])]
    seen: set[str] = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        if name in seen or name.startswith("loadkit"):
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        seen.add(name)
        distribution = metadata.distribution(name)
        wanted += distribution.requires or []
        site = Path(str(distribution.locate_file("")))
        for top in {path.parts[0] for path in distribution.files or []} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(site / top)
    return folder


class Environment:
    """One clean environment: ``pip``, ``python`` and ``loadkit`` of it."""

    def __init__(self, folder: Path, third_parties: Path, wheels: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        self.wheels = wheels
        (site,) = (folder / "lib").glob("python*/site-packages")
        (site / "third_parties.pth").write_text(f"{third_parties}\n")

    def install(self, *requirements: str) -> None:
        """``pip install``, with the folder of wheels as the only place to take from."""
        pip = (sys.executable, "-m", "pip", "--python", self.bin / "python")
        run(*pip, "install", "--quiet", "--no-compile", "--find-links", self.wheels, *requirements)
        run(*pip, "check")

    def uninstall(self, *names: str) -> None:
        """``pip uninstall``."""
        pip = (sys.executable, "-m", "pip", "--python", self.bin / "python")
        run(*pip, "uninstall", "--quiet", "--yes", *names)

    def python(self, code: str, exit_code: int = 0) -> str:
        """Run Python code; its output."""
        return run(self.bin / "python", "-c", code, code=exit_code)

    def loadkit(self, *arguments: str | Path, code: int = 0) -> str:
        """Run the installed command; its output, or standard error where ``code`` is not 0."""
        return run(self.bin / "loadkit", *arguments, code=code)

    def distributions(self) -> set[str]:
        """The names of the installed distributions of this project."""
        code = (
            "import importlib.metadata as m\n"
            "print(*{d.name for d in m.distributions() if d.name.startswith('loadkit')})"
        )
        return set(self.python(code).split())
