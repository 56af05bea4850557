"""Names are found without importing anything else, and what is wrong with one harms that one."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.plugin_world import World, plugin_world
from loadkit import entry_index, tables
from loadkit.errors import (
    ConflictError,
    NotInstalledError,
    OptionError,
    PluginError,
    UnknownNameError,
    UsageError,
)
from loadkit.name_table import NameTable
from loadkit.readers.base import Reader
from loadkit.sources.base import Source

LOADER = """
from loadkit.base_loader import BaseModelLoader
class {name}(BaseModelLoader):
    def download_model(self, model_config): pass
    def load_weights(self, model, model_config): pass
"""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with plugin_world(tmp_path) as made:
        yield made


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of this project only the core and the default formats are installed."""
    real = entry_index._ours
    kept = {"loadkit-core", "loadkit-default"}
    monkeypatch.setattr(
        entry_index, "_ours", lambda found: [d for d in real(found) if d.name in kept]
    )
    entry_index.refresh()
    yield
    monkeypatch.undo()
    entry_index.refresh()


def loader(name: str = "X") -> str:
    return LOADER.format(name=name)


# -- the hit, and nothing but the hit ------------------------------------------------------------


def test_looking_up_a_name_imports_that_one_and_listing_imports_none(world: World) -> None:
    world.dist(
        "toy", "[loadkit.loaders]\ntoy = toymod:X\nother = othermod:X\n",
        toymod=loader(), othermod="raise RuntimeError('never')\n",
    )  # fmt: skip
    assert {"toy", "other"} <= set(tables.loaders.names())
    assert {"toy", "other"} <= {entry.name for entry in tables.loaders.entries()}
    assert "other" in tables._LOAD_FORMAT_TO_MODEL_LOADER
    assert not world.imported("toymod")
    found: Any = tables.loaders.lookup("toy")
    assert (found.__module__, found.__name__) == ("toymod", "X")
    assert tables._LOAD_FORMAT_TO_MODEL_LOADER["toy"] is found
    assert not world.imported("othermod")


def test_an_entry_says_where_it_comes_from(world: World) -> None:
    world.dist("toy", "[loadkit.readers]\ntoy = toymod:X\n", version="0.3")
    entry = next(each for each in tables.readers.entries() if each.name == "toy")
    assert (entry.value, entry.distribution, entry.version, entry.state) == (
        "toymod:X", "toy", "0.3", "ready",
    )  # fmt: skip


@pytest.mark.usefixtures("few")
def test_known_names_that_are_not_installed_are_listed_with_their_pip_line() -> None:
    entry = next(each for each in tables.loaders.entries() if each.name == "tensorizer")
    assert (entry.state, entry.install) == ("not installed", 'pip install "loadkit[tensorizer]"')
    assert "tensorizer" not in tables.loaders.names()


def test_this_process_can_register_classes_strings_and_overrides(world: World) -> None:
    class Mine(Reader):
        pass

    assert tables.register_reader("mine")(Mine) is Mine
    assert tables.readers.lookup("mine") is Mine
    tables.readers.register("mine", Mine)  # again: the same class is no conflict
    with pytest.raises(ConflictError, match=r"mine.*this process"):
        tables.readers.register("mine", "other:Reader")
    tables.register_reader("pread", override=True)(Mine)
    assert tables.readers.lookup("pread") is Mine
    assert [
        each.value.endswith("Mine") for each in tables.readers.entries() if each.name == "pread"
    ] == [True]

    class Place(Source):
        pass

    tables.register_source("toy")(Place)
    assert tables.sources.lookup("toy") is Place
    (world.folder / "strmod.py").write_text(loader())
    tables.loaders.register("later", "strmod:X")
    assert not world.imported("strmod")
    assert tables.loaders.lookup("later").__name__ == "X"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("auto", "m:X"), ("", "m:X"), ("a b", "m:X"), ("x\n", "m:X"), (3, "m:X"),
        ("x", "no colon"), ("x", "m:X; import os"), ("x", "os.system:"), ("x", object()),
        ("x", int),
    ],
)  # fmt: skip
def test_what_cannot_be_registered_is_refused(name: Any, value: Any) -> None:
    with pytest.raises(OptionError):
        tables.loaders.register(name, value)


def test_auto_is_a_decision_and_never_a_row(world: World) -> None:
    world.dist("sly", "[loadkit.loaders]\nauto = slymod:X\n")
    with pytest.raises(UsageError, match="decision"):
        tables.loaders.lookup("auto")
    assert "auto" not in tables.loaders.names()


def test_a_loader_decorated_in_its_own_package_is_the_one_of_its_entry_point(world: World) -> None:
    text = "from loadkit.tables import register_model_loader as r\n" + loader()
    text = text.replace("class X", '@r("toy")\nclass X')
    world.dist("toy", "[loadkit.loaders]\ntoy = toymod:X\n", toymod=text)
    found: Any = tables.loaders.lookup("toy")
    assert found.__name__ == "X"
    assert tables.loaders.lookup("toy") is found
    assert [each.distribution for each in tables.loaders.entries() if each.name == "toy"] == ["toy"]


# -- what is wrong with one name -----------------------------------------------------------------


def test_PLG_03_a_misspelt_name_says_what_is_installed_and_what_was_meant(world: World) -> None:
    world.dist("toyplug", "[loadkit.loaders]\ntoy = toy:X\n", version="0.2")
    with pytest.raises(UnknownNameError, match=r"no load format 'toyy'.*did you mean 'toy'") as hit:
        tables.loaders.lookup("toyy")
    assert "installed:" in str(hit.value)
    assert hit.value.exit_code == 2


def test_PLG_03_a_stale_record_is_mentioned_and_not_used(world: World) -> None:
    world.dist("toyplug", "[loadkit.loaders]\nother = toy:Y\n", version="0.1", suffix="egg-info")
    world.dist("toyplug", "[loadkit.loaders]\ntoy = toy:X\n", version="0.2", toy=loader())
    assert "toy" in tables.loaders.names()
    with pytest.raises(UnknownNameError) as hit:
        tables.loaders.lookup("other")
    assert "two metadata records: 0.2" in str(hit.value)
    assert "0.1" in str(hit.value)
    assert "stale" in str(hit.value)
    assert tables.loaders.lookup("toy").__name__ == "X"  # type: ignore[attr-defined]


def test_PLG_03_two_equal_records_of_one_version_are_no_news(world: World) -> None:
    for suffix in ("dist-info", "egg-info"):
        world.dist("toyplug", "[loadkit.loaders]\ntoy = toy:X\n", suffix=suffix)
    assert entry_index.index().duplicates == ()
    assert tables.loaders.names().count("toy") == 1


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("tensorizer", 'pip install "loadkit[tensorizer]"'),
        ("runai_streamer", 'pip install "loadkit[runai-streamer]"'),
        ("runai_streamer_sharded", 'pip install "loadkit[sharded-state]"'),
        ("bitsandbytes", 'pip install "loadkit[bitsandbytes]"'),
    ],
)
def test_PLG_03_a_known_format_that_is_missing_says_the_pip_line(name: str, line: str) -> None:
    with pytest.raises(NotInstalledError) as hit:
        tables.loaders.lookup(name)
    assert line in str(hit.value)


def test_PLG_03_the_allow_list_is_checked_and_empty_means_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.dist("toyplug", "[loadkit.loaders]\ntoy = toymod:X\n", toymod=loader())
    monkeypatch.setenv("LOADKIT_PLUGINS", "toyplugg")
    with pytest.raises(UnknownNameError, match=r"LOADKIT_PLUGINS names 'toyplugg'.*'toyplug'"):
        tables.loaders.lookup("toy")
    monkeypatch.setenv("LOADKIT_PLUGINS", "")
    assert "toy" not in tables.loaders.names()
    assert "safetensors" in tables.loaders.names()
    with pytest.raises(UnknownNameError, match="LOADKIT_PLUGINS does not name toyplug"):
        tables.loaders.lookup("toy")
    monkeypatch.setenv("LOADKIT_PLUGINS", ["Toy_Plug", "toyplug"][1])
    assert "toy" in tables.loaders.names()


def test_the_block_list_switches_a_distribution_off(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.dist("toy.plug", "[loadkit.loaders]\ntoy = toymod:X\n")
    monkeypatch.setenv("LOADKIT_DISABLE_PLUGINS", "Toy_Plug,nobody")
    with caplog.at_level(logging.WARNING, "loadkit"):
        assert "toy" not in tables.loaders.names()
    assert "nobody" in caplog.text
    states = {each.name: each.state for each in tables.loaders.entries()}
    assert states["toy"] == "disabled"


def test_who_switched_a_known_format_off_is_not_told_to_install_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.dist("loadkit-gguf", "[loadkit.loaders]\ngguf = toymod:X\n")
    monkeypatch.setenv("LOADKIT_DISABLE_PLUGINS", "loadkit-gguf")
    with pytest.raises(NotInstalledError, match="which is switched off") as caught:
        tables.loaders.lookup("gguf")
    assert "LOADKIT_DISABLE_PLUGINS names loadkit-gguf" in str(caught.value)
    assert "pip" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        pytest.param("raise RuntimeError('boom')", "RuntimeError: boom", id="L01"),
        pytest.param("class K(KeyboardInterrupt): pass\nraise K('k')", "K: k", id="L03-interrupt"),
        pytest.param("raise SystemExit(3)", "SystemExit: 3", id="L03-exit"),
        pytest.param("raise GeneratorExit", "GeneratorExit", id="L03-base"),
        pytest.param("Y = 1", "AttributeError", id="L07"),
        pytest.param("import nope_not_here", "nope_not_here", id="PLG-01"),
        pytest.param("def X(): pass", "no subclass of BaseModelLoader", id="L08-no-loader"),
        pytest.param("X = (", "SyntaxError", id="syntax"),
    ],
)
def test_a_broken_plugin_breaks_only_itself(world: World, text: str, cause: str) -> None:
    world.dist(
        "bad", "[loadkit.loaders]\nbad = badmod:X\ngood = goodmod:X\n",
        badmod=text, goodmod=loader(), version="2.5",
    )  # fmt: skip
    assert tables.loaders.lookup("good").__name__ == "X"  # type: ignore[attr-defined]
    for _ in range(2):  # the recorded failure is told again
        with pytest.raises(PluginError) as hit:
            tables.loaders.lookup("bad")
        assert "bad 2.5" in str(hit.value)
        assert cause in str(hit.value)
    if "subclass" not in cause:
        assert hit.value.__cause__ is not None
        states = {each.name: each.state for each in tables.loaders.entries()}
        assert (states["bad"], states["good"]) == ("broken", "ready")


def test_the_users_own_interrupt_passes(world: World) -> None:
    world.dist("bad", "[loadkit.loaders]\nbad = badmod:X\n", badmod="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        tables.loaders.lookup("bad")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("import time\ntime.sleep(60)\n", id="L04"),
        pytest.param("import os\nos._exit(7)\n", id="L05"),
        pytest.param("import torch\ntorch.load = None\n", id="L13"),
    ],
)
def test_listing_and_other_names_never_run_a_plugin(world: World, text: str) -> None:
    world.dist(
        "bad", "[loadkit.loaders]\nbad = badmod:X\n[loadkit.readers]\nb = badmod:X\n", badmod=text
    )
    start = time.monotonic()
    tables.loaders.names()
    tables.loaders.entries()
    tables.readers.lookup("pread")
    with pytest.raises(UnknownNameError):
        tables.loaders.lookup("nobody")
    assert time.monotonic() - start < 2
    assert not world.imported("badmod")


def test_L08_a_plugin_for_another_core_is_refused_before_it_is_imported(world: World) -> None:
    world.dist(
        "old", "[loadkit.loaders]\nold = oldmod:X\n",
        requires=["loadkit_core >=99", "numpy"], oldmod="raise RuntimeError\n",
    )  # fmt: skip
    with pytest.raises(PluginError, match=r"requires loadkit_core >=99, and loadkit-core is"):
        tables.loaders.lookup("old")
    assert not world.imported("oldmod")
    entry = next(each for each in tables.loaders.entries() if each.name == "old")
    assert entry.state == "incompatible"


def test_a_requirement_of_an_extra_does_not_count(world: World) -> None:
    world.dist(
        "opt", "[loadkit.loaders]\nopt = optmod:X\n", optmod=loader(),
        requires=['loadkit-core>=99; extra == "future"', "loadkit-core>=0.0.1"],
    )  # fmt: skip
    assert tables.loaders.lookup("opt").__name__ == "X"  # type: ignore[attr-defined]


def test_L09_two_distributions_with_one_name_are_an_error_of_that_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.dist("one", "[loadkit.loaders]\nshared = onemod:X\nfirst = onemod:X\n", onemod=loader())
    world.dist("two", "[loadkit.loaders]\nshared = twomod:X\n", twomod=loader())
    with pytest.raises(ConflictError) as hit:
        tables.loaders.lookup("shared")
    assert "one 1.0" in str(hit.value)
    assert "two 1.0" in str(hit.value)
    assert tables.loaders.lookup("first").__name__ == "X"  # type: ignore[attr-defined]
    states = {(each.name, each.distribution): each.state for each in tables.loaders.entries()}
    assert states["shared", "one"] == states["shared", "two"] == "conflict"
    monkeypatch.setenv("LOADKIT_DISABLE_PLUGINS", "two")
    assert tables.loaders.lookup("shared").__module__ == "onemod"


def test_L09_a_name_of_the_core_cannot_be_shadowed(world: World) -> None:
    world.dist("evil", "[loadkit.readers]\npread = evilmod:X\n", evilmod="raise RuntimeError\n")
    with pytest.raises(ConflictError, match=r"loadkit-core.*evil|evil.*loadkit-core"):
        tables.readers.lookup("pread")
    assert not world.imported("evilmod")

    class Mine(Reader):
        pass

    with pytest.raises(ConflictError, match="loadkit-core"):
        tables.register_reader("mmap")(Mine)


def test_L11_a_near_miss_is_no_hit(world: World) -> None:
    world.dist(
        "near", "[loadkit.loaders]\nsafetensor = nearmod:X\n", nearmod="raise RuntimeError\n"
    )
    assert "safetensors" in tables.loaders.names()
    with pytest.raises(UnknownNameError, match="'safetensor'"):
        tables.loaders.lookup("safetensorz")
    assert not world.imported("nearmod")


@pytest.mark.parametrize(
    "text",
    [
        "[loadkit.loaders]\nthis is no entry point\ngood = goodmod:X\n",
        "[loadkit.loaders]\nbad = a b c\ngood = goodmod:X [extra]\n",
        "[loadkit.loaders]\nbad = __import__('os').system('x')\ngood = goodmod:X\n",
        "[unclosed\nx = y\n[loadkit.loaders]\n# comment\n\ngood=goodmod:X\n= m:X\n",
        "no section\x00\x1b[2J\n[loadkit.loaders]\ngood = goodmod : X\n",
    ],
)
def test_L12_a_broken_line_costs_its_own_name(world: World, text: str) -> None:
    world.dist("half", text, goodmod=loader())
    assert tables.loaders.lookup("good").__name__ == "X"  # type: ignore[attr-defined]
    for entry in tables.loaders.entries():
        assert entry.state != "broken" or "entry_points.txt" in entry.error
    assert "bad" not in tables.loaders.names()


def test_L12_a_file_that_is_no_text_costs_its_own_distribution(world: World) -> None:
    world.dist("torn", "", goodmod=loader())
    (world.folder / "torn-1.0.dist-info" / "entry_points.txt").write_bytes(
        b"\xff\xfe[loadkit.loaders]\nx\xff = y:z\n"
    )
    (world.folder / "torn-1.0.dist-info" / "METADATA").write_bytes(b"\xff\xfe\x00")
    world.dist("fine", "[loadkit.loaders]\ngood = goodmod:X\n")
    assert tables.loaders.lookup("good").__name__ == "X"  # type: ignore[attr-defined]
    assert isinstance(tables.loaders.entries(), list)


def test_what_a_plugin_registered_before_it_failed_is_taken_back(world: World) -> None:
    text = (
        "from loadkit import tables\ntables.loaders.register('left', 'm:X')\nraise SystemExit(3)\n"
    )
    world.dist("half", "[loadkit.loaders]\nhalf = halfmod:X\n", halfmod=text)
    with pytest.raises(PluginError, match="SystemExit"):
        tables.loaders.lookup("half")
    assert "left" not in tables.loaders.names()


# -- other processes -----------------------------------------------------------------------------


def test_registrations_travel_to_another_process(world: World) -> None:
    tables.loaders.register("later", "strmod:X")
    tables.register_source("toyscheme")(type("Place", (Source,), {}))
    exported = tables.export_registrations()
    assert exported["loaders"] == {"later": "strmod:X"}
    code = (
        "import json, sys\nfrom loadkit import tables\n"
        "tables.import_registrations(json.load(sys.stdin))\nprint(tables.loaders.names())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(exported), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert "later" in done.stdout


def test_a_table_without_a_base_takes_any_object() -> None:
    table = NameTable("toys", "toy.group", "toy")
    table.register("seven", 7)
    assert table.lookup("seven") == 7
    with pytest.raises(UnknownNameError, match="no toy 'eight'"):
        table.lookup("eight")


def test_an_index_of_two_hundred_distributions_is_read_in_a_moment(world: World) -> None:
    for number in range(200):
        world.dist(f"d{number}", f"[loadkit.models]\nA{number}ForCausalLM = m{number}:X\n")
    start = time.process_time()
    assert len(entry_index.index().rows) >= 200
    assert time.process_time() - start < 2
    start = time.process_time()
    for _ in range(100):
        entry_index.index()
    assert time.process_time() - start < 0.5
