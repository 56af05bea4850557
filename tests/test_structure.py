"""The rules of the tree: who imports whom, what stays out of a start, one version, small files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from loadkit.known_names import KNOWN

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = sorted(
    path.parent
    for pattern in ("core", "layers", "loaders/*", "plugins/*")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
)
NAMES = [str(member.relative_to(ROOT)) for member in MEMBERS]


def _project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def _package(member: Path) -> str:
    (package,) = (path.name for path in member.iterdir() if re.fullmatch(r"loadkit\w*", path.name))
    return package


def _modules(member: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((member / _package(member)).rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text(), str(path))


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and top-level name of every import, at the top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, (node.module or "").partition(".")[0]


def _foreign_imports(trees: list[tuple[Path, ast.Module]], allowed: set[str]) -> list[str]:
    return [
        f"{path}:{line} imports {name}"
        for path, tree in trees
        for line, name in _imports(tree)
        if re.fullmatch(r"loadkit(_\w+)?", name) and name not in allowed
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_room_imports_only_itself_and_the_rooms_below(name: str) -> None:
    package = _package(ROOT / name)
    below = {"core": set(), "layers": {"loadkit"}}.get(name, {"loadkit", "loadkit_layers"})
    assert _foreign_imports(list(_modules(ROOT / name)), below | {package}) == []


def test_the_import_rule_sees_a_sibling_imported_inside_a_function() -> None:
    tree = ast.parse("def f():\n    from loadkit_dummy.loader import DummyModelLoader\n")
    found = _foreign_imports([(Path("x.py"), tree)], {"loadkit", "loadkit_default"})
    assert found == ["x.py:2 imports loadkit_dummy"]


def _torch_free(code: str) -> None:
    check = f"import sys\n{code}\nsys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.parametrize(
    "module",
    [
        *("loadkit", "loadkit.config", "loadkit.errors", "loadkit.tables", "loadkit.plugins"),
        *("loadkit.hookspecs", "loadkit.cli", "loadkit.tensor_info", "loadkit.tokenization"),
    ],
)
def test_torch_is_not_imported_by(module: str) -> None:
    _torch_free(f"import {module}")


@pytest.mark.parametrize("command", [[], ["plan"], ["load"], ["formats"], ["plugins"]])
def test_help_does_not_import_torch(command: list[str]) -> None:
    _torch_free(
        "import loadkit.cli\n"
        f"sys.argv = ['loadkit', *{command!r}, '--help']\n"
        "try:\n    loadkit.cli.main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code"
    )


def test_every_distribution_has_the_same_version() -> None:
    versions = {
        project["project"]["name"]: project["project"]["version"]
        for project in map(_project, [ROOT, *MEMBERS])
    }
    assert len(set(versions.values())) == 1, versions


def test_the_umbrella_asks_for_exactly_its_own_version() -> None:
    project = _project(ROOT)["project"]
    wanted = chain(project["dependencies"], *project["optional-dependencies"].values())
    for requirement in wanted:
        assert requirement.startswith("loadkit-"), requirement
        assert requirement.endswith(f"=={project['version']}"), requirement


def test_every_extra_that_an_error_names_is_one_of_the_umbrella() -> None:
    extras = _project(ROOT)["project"]["optional-dependencies"]
    for table in KNOWN.values():
        for name, known in table.items():
            assert f"{known.distribution}==" in " ".join(extras[known.extra]), name


def test_the_extra_all_names_every_member_that_exists_and_no_other() -> None:
    project = _project(ROOT)["project"]
    existing = {_project(member)["project"]["name"] for member in MEMBERS} - {"loadkit-example"}
    lines = [*project["optional-dependencies"]["all"], *project["dependencies"]]
    named = {re.split(r"==|\[", line)[0] for line in lines}  # core[generate] is the core
    assert named == existing


def test_a_members_names_follow_its_folder() -> None:
    for member in MEMBERS:
        name = _project(member)["project"]["name"]
        package = "loadkit" if member.name == "core" else f"loadkit_{member.name}"
        assert (name, _package(member)) == (f"loadkit-{member.name}".replace("_", "-"), package)
        assert (member / package / "py.typed").is_file()


def test_who_asks_web_servers_requires_the_extra_of_the_core_that_does_it() -> None:
    extra = "loadkit-core[http]"
    asking = {
        member.name
        for member in MEMBERS
        for _, tree in _modules(member)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loadkit.network")
    }
    requiring = {
        member.name
        for member in MEMBERS
        if any(line.startswith(extra) for line in _project(member)["project"]["dependencies"])
    }
    assert asking - {"core"} == requiring == {"hub", "remote"}
    (library,) = _project(ROOT / "core")["project"]["optional-dependencies"]["http"]
    users = [
        str(path.parent)
        for member in MEMBERS
        for path, tree in _modules(member)
        if any(name == re.split("[<>=]", library)[0] for _, name in _imports(tree))
    ]
    assert set(users) == {"core/loadkit/network"}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_class_and_function_has_a_docstring(name: str) -> None:
    bare = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in _modules(ROOT / name)
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert bare == []


def test_every_lazy_export_exists() -> None:
    import loadkit

    assert [name for name in loadkit.__all__ if not hasattr(loadkit, name)] == []
    assert set(loadkit.__all__) <= set(dir(loadkit))


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """The files git tracks, or would."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"not a git checkout: {done.stderr.strip()}")
    paths = [ROOT / name for name in done.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_file_is_over_one_megabyte(tracked: list[Path]) -> None:
    assert [str(path) for path in tracked if path.stat().st_size > 1_000_000] == []


def test_no_file_names_a_path_of_this_machine(tracked: list[Path]) -> None:
    ours = {str(ROOT), str(Path.home()), sys.prefix, sys.base_prefix} - {"/", "/usr"}
    needle = re.compile("|".join(rf"(?<![\w.-]){re.escape(path)}/" for path in ours).encode())
    found = [
        f"{path.relative_to(ROOT)}: {match[0].decode()}"
        for path in tracked
        for match in needle.finditer(path.read_bytes())
    ]
    assert found == []


def test_the_root_of_the_checkout_is_not_on_the_path() -> None:
    code = "import sys; print(*sys.path, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert str(ROOT) not in done.stdout.splitlines()
