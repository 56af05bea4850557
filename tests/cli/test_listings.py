"""``formats``, ``models`` and ``plugins``, with fake distributions on the path."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import fake_distribution
from helpers.cli import Ran, spawn
from loadkit import plugins
from loadkit.cli.plugin_probe import probe

Run = Callable[..., Ran]
FORMAT_KEYS = ("name", "distribution", "version", "library", "library_version", "state", "install")
FORMATS = {
    "hf": "loadkit-default",
    "safetensors": "loadkit-default",
    "pt": "loadkit-default",
    "mistral": "loadkit-default",
    "npcache": "loadkit-default",
    "dummy": "loadkit-dummy",
    "gguf": "loadkit-gguf",
    "bitsandbytes": "loadkit-bitsandbytes",
    "tensorizer": "loadkit-tensorizer",
    "sharded_state": "loadkit-sharded-state",
    "runai_streamer_sharded": "loadkit-sharded-state",
    "runai_streamer": "loadkit-runai-streamer",
    "fastsafetensors": "loadkit-fastsafetensors",
    "instanttensor": "loadkit-instanttensor",
    "modelexpress": "loadkit-modelexpress",
    "dcp": "loadkit-dcp",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that distributions are installed in."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    plugins.reset()
    yield tmp_path
    plugins.reset()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)) in map(str, tmp_path.iterdir()):
            del sys.modules[name]


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Ask only about the plugins of these distributions: torch's import is left out."""
    monkeypatch.setenv("LOADKIT_PLUGINS", ",".join(names))


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}


def test_formats_have_the_published_keys_and_no_auto(run: Run) -> None:
    found = run("formats", "--json").json()
    assert found["schema"] == "loadkit.formats/1"
    for row in found["formats"]:
        assert list(row) == list(FORMAT_KEYS)
    rows = by_name(found["formats"])
    assert "auto" not in rows
    assert rows["safetensors"]["distribution"] == "loadkit-default"
    assert rows["safetensors"]["state"] == "ready"
    assert rows["safetensors"]["install"] is None


def test_every_format_of_the_project_has_a_row_installed_or_not(run: Run) -> None:
    rows = by_name(run("formats", "--json").json()["formats"])
    assert {name: rows[name]["distribution"] for name in FORMATS} == FORMATS


def bare_site(site: Path, *names: str) -> None:
    """A path on which only some of the project's distributions are installed, as metadata."""
    for name in names:
        points = "".join(f"{f} = m:L\n" for f, owner in FORMATS.items() if owner == name)
        fake_distribution(site, name, f"[loadkit.loaders]\n{points}", version="9.9")


def rows_of_site(*sites: Path) -> list[dict[str, dict[str, Any]]]:
    """What ``formats`` lists where metadata is found in one folder alone, for each of some."""
    code = (
        "import importlib.metadata as m, sys\n"
        "from loadkit import entry_index\n"
        "from loadkit.cli import main\n"
        "found = m.distributions\n"
        "for site in sys.argv[1:]:\n"
        "    m.distributions = lambda **k: found(path=[site], **k)\n"
        "    entry_index.refresh()\n"
        "    main(['formats', '--json'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, sites)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [by_name(json.loads(line)["formats"]) for line in done.stdout.splitlines()]


def test_PLG_03_a_known_format_that_is_missing_says_the_pip_line(site: Path) -> None:
    bare_site(site, "loadkit-default")
    (rows,) = rows_of_site(site)
    assert rows["tensorizer"]["state"] == "needs pip extra"
    assert rows["tensorizer"]["install"] == 'pip install "loadkit[tensorizer]"'
    assert rows["hf"]["state"] == "ready"


def test_removing_any_distribution_changes_only_its_rows(tmp_path: Path) -> None:
    everything = sorted(set(FORMATS.values()))
    sites = [tmp_path / "full", *(tmp_path / name for name in everything)]
    for folder in sites:
        folder.mkdir()
        bare_site(folder, *(name for name in everything if name != folder.name))
    whole, *others = rows_of_site(*sites)
    assert {row["state"] for row in whole.values()} == {"ready"}
    assert {row["version"] for row in whole.values()} == {"9.9"}
    assert not any(row["install"] for row in whole.values())
    for gone, rows in zip(everything, others, strict=True):
        changed = {name for name in FORMATS if rows[name] != whole[name]}
        assert changed == {name for name, owner in FORMATS.items() if owner == gone}
        for name in changed:
            assert rows[name]["state"] == "needs pip extra"
            assert rows[name]["version"] is None
            assert rows[name]["install"].startswith("pip install")
            assert rows[name]["distribution"] == gone


LIBRARY_OF = {
    "bitsandbytes": "bitsandbytes",
    "tensorizer": "tensorizer",
    "runai_streamer": "runai-model-streamer",
    "runai_streamer_sharded": "runai-model-streamer",
    "fastsafetensors": "fastsafetensors",
    "instanttensor": "instanttensor",
    "modelexpress": "modelexpress",
    "npcache": "numpy",
    "dcp": "torch",
}


def test_every_row_has_its_library_and_version_its_state_and_its_pip_line(run: Run) -> None:
    rows = by_name(run("formats", "--json").json()["formats"])
    text = run("formats").out
    for name, owner in FORMATS.items():
        row, library = rows[name], LIBRARY_OF.get(name)
        assert row["library"] == library, name
        try:
            there = None if library is None else version(library)
        except PackageNotFoundError:
            there = None
        assert row["library_version"] == there, name
        assert row["version"] == version(owner), name
        assert row["state"] in ("ready", "needs pip extra", "needs CUDA"), (name, row["state"])
        if library is not None and there is None:
            assert row["state"] == "needs pip extra", name
        assert (row["install"] is not None) == (row["state"] == "needs pip extra"), name
        (line,) = [line for line in text.splitlines() if line.split(" ")[0] == name]
        for value in (owner, row["version"], library, there, row["state"], row["install"]):
            assert value is None or value in line, (name, value)


def test_a_format_whose_library_is_gone_says_the_pip_line_and_no_other_row_changes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = by_name(run("formats", "--json").json()["formats"])
    find = importlib.metadata.version

    def without(name: str) -> str:
        if name == "tensorizer":
            raise PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    after = by_name(run("formats", "--json").json()["formats"])
    assert {name for name in before if before[name] != after[name]} == {"tensorizer"}
    row = after["tensorizer"]
    assert (row["state"], row["library_version"]) == ("needs pip extra", None)
    assert row["install"] == 'pip install "loadkit[tensorizer]"'
    assert row["version"] is not None  # our own distribution is there


def test_a_distribution_says_the_state_of_its_format(run: Run, site: Path) -> None:
    (site / "loud.py").write_text(
        "LIBRARY = 'click'\ndef state():\n    return 'needs CUDA'\n"
        "def missing():\n    return 'needs pip extra'\n"
        "def raises():\n    raise OSError('no')\n"
        "def ends():\n    import os\n    os._exit(5)\n"
        "def number():\n    return 3\n"
    )
    names = {"cuda": "state", "gone": "missing", "bad": "raises", "dies": "ends", "odd": "number"}
    loaders = "".join(f"{name} = loader_{name}:L\n" for name in [*names, "plain"])
    states = "".join(f"{name} = loud:{function}\n" for name, function in names.items())
    points = f"[loadkit.loaders]\n{loaders}[loadkit.availability]\n{states}"
    fake_distribution(site, "toys", points, version="2.5")
    rows = by_name(run("formats", "--json").json()["formats"])
    found = {name: rows[name]["state"] for name in [*names, "plain"]}
    assert found == {
        "cuda": "needs CUDA",
        "gone": "needs pip extra",
        "bad": "broken",
        "dies": "broken",
        "odd": "broken",
        "plain": "ready",
    }
    assert rows["cuda"]["library"] == "click"
    assert rows["cuda"]["library_version"] == version("click")
    assert rows["gone"]["install"] == "pip install click"
    assert rows["safetensors"]["state"] == "ready"


@pytest.mark.parametrize("command", ["formats", "models", "plugins"])
def test_listings_import_neither_torch_nor_a_loader(command: str) -> None:
    code = (
        "import sys\nfrom loadkit.cli import main\n"
        f"main([{command!r}, '--json'])\n"
        "heavy = {'torch', 'rich', 'loadkit_default', 'loadkit_dummy', 'loadkit_models'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_models_have_the_published_keys(run: Run) -> None:
    found = run("models", "--json").json()
    assert found["schema"] == "loadkit.models/1"
    rows = {row["architecture"]: row for row in found["models"]}
    assert rows["LlamaForCausalLM"] == {
        "architecture": "LlamaForCausalLM",
        "class": "loadkit_models.llama:LlamaForCausalLM",
        "table": "text_generation",
        "distribution": "loadkit-models",
    }
    assert rows["BertModel"]["table"] == "embedding"


def test_plugins_have_the_published_keys(run: Run) -> None:
    found = run("plugins", "--json").json()
    assert found["schema"] == "loadkit.plugins/1"
    for row in found["plugins"]:
        assert set(row) == {"distribution", "version", "kind", "name", "state", "error"}
    kinds = {(row["kind"], row["name"]): row["state"] for row in found["plugins"]}
    assert kinds["loaders", "safetensors"] == "ready"
    assert kinds["readers", "mmap"] == "ready"
    assert "rows" not in found


def test_PLG_01_broken_plugins_are_listed_and_harm_nobody(
    run: Run, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "badplug.py").write_text("import nope_not_here\n")
    (site / "exitplug.py").write_text("raise SystemExit(3)\n")
    (site / "diesplug.py").write_text("import os\nos._exit(7)\n")
    (site / "noisyplug.py").write_text("print('null')\nclass Loader: pass\n")
    (site / "hooksplug.py").write_text(
        "from loadkit.hookspecs import hookimpl\n"
        "@hookimpl\ndef loadkit_plan_ready(plan, nonsense): ...\n"
    )
    points = (
        "[loadkit.loaders]\nbad = badplug:register\nexits = exitplug:register\n"
        "dies = diesplug:Loader\nfine = noisyplug:Loader\nattr = noisyplug:Nothing\n"
        "[loadkit]\nhooks = hooksplug\n"
    )
    fake_distribution(site, "toys", points, version="2.5")
    ran = run("plugins", "--json")
    assert ran.code == 0
    rows = by_name(ran.json()["plugins"])
    assert rows["fine"]["state"] == "ready"
    assert rows["safetensors"]["state"] == "ready"
    expected = {
        "bad": "No module named 'nope_not_here'",
        "exits": "SystemExit: 3",
        "dies": "exit code 7",
        "attr": "has no attribute 'Nothing'",
        "hooks": "nonsense",
    }
    for name, words in expected.items():
        assert rows[name]["state"] == "broken", name
        assert words in rows[name]["error"], name
        assert (rows[name]["distribution"], rows[name]["version"]) == ("toys", "2.5")
    only(monkeypatch, "toys")
    text = run("plugins")
    assert text.code == 0
    assert "No module named 'nope_not_here'" in text.out


def test_PLG_01_help_and_other_commands_do_not_meet_a_broken_plugin(site: Path) -> None:
    (site / "dies.py").write_text("import os\nos._exit(7)\n")
    fake_distribution(site, "toys", "[loadkit.loaders]\nd = dies:L\n[loadkit]\nd = dies\n")
    env = {"PYTHONPATH": str(site)}
    for args in (["--help"], ["formats"], ["models"], ["plan", "--help"]):
        ran = spawn(*args, env=env)
        assert ran.code == 0
        assert ran.err == ""


def test_PLG_01_strict_makes_a_broken_plugin_an_error(
    run: Run, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADKIT_STRICT_PLUGINS", "1")
    assert run("plugins").code == 0
    only(monkeypatch, "bad")
    (site / "badplug.py").write_text("import nope_not_here\n")
    fake_distribution(site, "bad", "[loadkit.loaders]\nbad = badplug:register\n")
    ran = run("plugins")
    assert ran.code == 1
    assert ran.err == "error: E_PLUGIN: 1 plugin(s) cannot be used\n"


def test_L04_a_plugin_that_hangs_is_cut_off_and_the_rest_is_still_asked(site: Path) -> None:
    (site / "hangs.py").write_text("import time\ntime.sleep(600)\n")
    (site / "fine.py").write_text("class Loader: pass\n")
    fake_distribution(site, "a", "[loadkit.loaders]\na = hangs:L\nb = fine:Loader\nc = fine:No\n")
    rows = [
        ("loaders", "a", "hangs:L"),
        ("loaders", "b", "fine:Loader"),
        ("loaders", "c", "fine:No"),
    ]
    first, second, third = probe(rows, timeout=6.0)  # or this test takes ten minutes
    assert first == "importing it took longer than 6 s"
    assert second is None
    assert third is not None


def test_L09_a_conflict_names_both_distributions(
    run: Run, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "one.py").write_text("class L: pass\n")
    fake_distribution(site, "first-dist", "[loadkit.loaders]\ntoy = one:L\n")
    fake_distribution(site, "second-dist", "[loadkit.loaders]\ntoy = two:L\n")
    only(monkeypatch, "first-dist", "second-dist")
    rows = [row for row in run("plugins", "--json").json()["plugins"] if row["name"] == "toy"]
    assert {row["state"] for row in rows} == {"conflict"}
    assert {row["distribution"] for row in rows} == {"first-dist", "second-dist"}
    assert "second-dist" in next(r for r in rows if r["distribution"] == "first-dist")["error"]


def test_PLG_03_an_allow_list_that_matches_nothing_is_told(
    run: Run, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "toymod.py").write_text("class X: pass\n")
    fake_distribution(site, "toyplug", "[loadkit.loaders]\ntoy = toymod:X\n")
    monkeypatch.setenv("LOADKIT_PLUGINS", "toyplugg")
    found = run("plugins", "--json").json()
    assert any("toyplugg" in note for note in found["notes"])
    assert by_name(found["plugins"])["toy"]["state"] == "disabled"
    assert "note: LOADKIT_PLUGINS names toyplugg" in run("plugins").out


def test_PLG_03_two_records_of_one_distribution_are_told(
    run: Run, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "toyplug")
    stale = "[loadkit.loaders]\nother = toy:Y\n"
    fake_distribution(site, "toyplug", stale, suffix="egg-info", version="0.1")
    fake_distribution(site, "toyplug", "[loadkit.loaders]\ntoy = toy:X\n", version="0.2")
    assert any("toyplug" in note for note in run("plugins", "--json").json()["notes"])


def test_a_plugins_command_runs_and_help_of_it_works(run: Run, site: Path) -> None:
    (site / "cmdhooks.py").write_text(
        "from loadkit.hookspecs import hookimpl\n"
        "@hookimpl\ndef loadkit_register_commands(): return {'greet': 'cmdmod:greet',"
        " 'plan': 'cmdmod:greet', 'gone': 'cmdmod:nothing'}\n"
    )
    (site / "cmdmod.py").write_text(
        "import click\nfrom loadkit.cli.options import output_options\n"
        "@click.command('greet')\n@output_options\n@click.pass_obj\n"
        "def greet(out):\n    'Say hello.'\n"
        "    out.emit({'hello': 1}) if out.as_json else out.line('hello')\n    return 1\n"
    )
    fake_distribution(site, "greeter", "[loadkit]\ngreeter = cmdhooks\n")
    assert run("greet").out == "hello\n"
    assert run("greet").code == 1
    assert run("greet", "--json").json() == {"schema": "loadkit.greet/1", "hello": 1}
    assert "Say hello." in run("greet", "--help").out
    assert "Plan the load" in run("plan", "--help").out  # a plugin does not shadow it
    assert "did you mean greet?" in run("greeet").err
    gone = run("gone")
    assert gone.code == 1
    assert "error: E_PLUGIN: command 'gone' (cmdmod:nothing) cannot be imported" in gone.err


def test_two_plugins_with_one_command_are_a_conflict(run: Run, site: Path) -> None:
    for letter in "ab":
        (site / f"hooks_{letter}.py").write_text(
            "from loadkit.hookspecs import hookimpl\n"
            f"@hookimpl\ndef loadkit_register_commands(): return {{'greet': 'mod_{letter}:c'}}\n"
        )
        fake_distribution(site, f"dist-{letter}", f"[loadkit]\n{letter} = hooks_{letter}\n")
    ran = run("greet")
    assert ran.code == 2
    assert "E_CONFLICT" in ran.err
    assert "mod_a:c" in ran.err
    assert "mod_b:c" in ran.err


def test_hostile_metadata_of_a_distribution_reaches_no_terminal_raw(
    run: Run, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "toys")
    fake_distribution(
        site, "toys", "[loadkit.loaders]\nto\x1b[2Jy = a\x1b[2Jb:c\x9b\n", version="1"
    )
    for command in ("formats", "plugins"):
        run(command).assert_clean()
        run(command, "--json").assert_clean()
