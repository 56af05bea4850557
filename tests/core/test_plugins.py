"""Hook plugins are imported and called one by one; what one raises stays its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.plugin_world import World, plugin_world
from loadkit import plugins, tables
from loadkit.errors import ArchitectureError, ConflictError, PluginError, UnknownNameError
from loadkit.hookspecs import hookimpl

HEAD = "from loadkit.hookspecs import hookimpl\n"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with plugin_world(tmp_path) as made:
        yield made


def hooks(world: World, name: str, text: str, **more: Any) -> None:
    world.dist(
        name, f"[loadkit]\n{name} = {name}_hooks\n", **{f"{name}_hooks": HEAD + text}, **more
    )


REGISTER = """
@hookimpl
def loadkit_register(registry):
    registry.register_reader("{name}", "{name}_mod:X")
"""


def test_a_miss_asks_the_hook_plugins_and_a_hit_does_not(world: World) -> None:
    hooks(world, "toy", REGISTER.format(name="toy"))
    tables.readers.lookup("pread")
    assert not world.imported("toy_hooks")
    (world.folder / "toy_mod.py").write_text(
        "from loadkit.readers.base import Reader\nclass X(Reader): pass\n"
    )
    found: Any = tables.readers.lookup("toy")
    assert found.__module__ == "toy_mod"
    entry = next(each for each in tables.readers.entries() if each.name == "toy")
    assert (entry.distribution, entry.version) == ("toy", "1.0")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("import nope_not_here", id="PLG-01-import"),
        pytest.param("raise SystemExit(3)", id="PLG-01-exit"),
        pytest.param(REGISTER.format(name="half") + "    raise SystemExit(3)\n", id="PLG-01-half"),
        pytest.param("@hookimpl\ndef loadkit_regster(registry): pass\n", id="no-such-hook"),
        pytest.param("@hookimpl\ndef loadkit_register(registry, more): pass\n", id="signature"),
    ],
)
def test_PLG_01_a_broken_plugin_is_told_once_undone_and_listed(
    world: World, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    hooks(world, "bad", text, version="7.1")
    hooks(world, "good", REGISTER.format(name="fine"))
    with caplog.at_level(logging.WARNING, "loadkit"):
        for _ in range(2):
            with pytest.raises(UnknownNameError, match=r"these plugins failed: bad 7\.1"):
                tables.loaders.lookup("nobody")
    told = [record for record in caplog.records if "bad 7.1" in record.getMessage()]
    assert len(told) == 1
    assert "half" not in tables.readers.names()
    assert "fine" in tables.readers.names()
    states = {entry.name: entry.state for kind, entry in plugins.entries() if kind == "plugins"}
    assert states == {"bad": "broken", "good": "ready"}


def test_PLG_01_strict_mode_raises(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADKIT_STRICT_PLUGINS", "1")
    hooks(world, "bad", "import nope_not_here")
    with pytest.raises(PluginError, match="nope_not_here") as hit:
        tables.loaders.lookup("nobody")
    assert isinstance(hit.value.__cause__, ModuleNotFoundError)


def test_listing_imports_no_plugin(world: World) -> None:
    hooks(world, "toy", "raise RuntimeError\n")
    assert ("plugins", "toy", "ready") in [(k, e.name, e.state) for k, e in plugins.entries()]
    assert not world.imported("toy_hooks")


def test_a_hook_that_raises_does_not_stop_the_others(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    hooks(world, "bad", "@hookimpl\ndef loadkit_detect_load_format(files): raise ValueError('x')\n")
    hooks(
        world, "good", "@hookimpl(trylast=True)\ndef loadkit_detect_load_format(): return 'toy'\n"
    )
    hooks(world, "none", "@hookimpl\ndef loadkit_detect_load_format(source): return None\n")
    values: dict[str, Any] = {"source": "s", "files": [], "model_config": None}
    with caplog.at_level(logging.WARNING, "loadkit"):
        assert plugins.call("detect_load_format", **values) == "toy"
        assert plugins.call("detect_load_format", **values) == "toy"
    assert caplog.text.count("its hook loadkit_detect_load_format raised ValueError") == 1
    assert [failure.row.distribution for failure in plugins.failures()] == ["bad"]


def test_an_answering_hook_may_say_a_typed_error(world: World) -> None:
    class Plugin:
        @hookimpl
        def loadkit_resolve_architecture(self, architecture: str) -> str:
            raise ArchitectureError(f"{architecture} needs a newer shim")

    plugins.register(Plugin(), "toy")
    with pytest.raises(ArchitectureError, match="newer shim"):
        plugins.call("resolve_architecture", architecture="A", model_config=None)


def test_the_user_can_interrupt_a_hook(world: World) -> None:
    class Plugin:
        @hookimpl
        def loadkit_plan_ready(self, plan: object) -> None:
            raise KeyboardInterrupt

    plugins.register(Plugin(), "toy")
    with pytest.raises(KeyboardInterrupt):
        plugins.call("plan_ready", plan=None)


def test_every_answer_of_a_plain_hook_is_given(world: World) -> None:
    class One:
        @hookimpl
        def loadkit_register_commands(self) -> Mapping[str, str]:
            return {"toy": "toy:command"}

    class Two(One):
        pass

    plugins.register(One(), "one")
    plugins.register(Two(), "two")
    assert plugins.call("register_commands") == [{"toy": "toy:command"}] * 2


def test_a_plugin_registered_by_the_user_fails_to_the_user(world: World) -> None:
    class Plugin:
        @hookimpl
        def loadkit_register(self, registry: plugins.Registry) -> None:
            registry.register_loader("left", "m:X")
            raise ValueError("boom")

    with pytest.raises(PluginError, match="boom"):
        plugins.register(Plugin(), "toy")
    assert "left" not in tables.loaders.names()


def test_the_lists_switch_hook_plugins_off_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks(world, "toy", REGISTER.format(name="toy"))
    monkeypatch.setenv("LOADKIT_PLUGINS", "")
    with pytest.raises(UnknownNameError):
        tables.readers.lookup("toy")
    assert not world.imported("toy_hooks")


def test_all_five_tables_are_reached_through_the_registry(world: World) -> None:
    registry = plugins.Registry()
    registry.register_loader("toyr", "m:L")
    registry.register_model("ToyForCausalLM", "m:M")
    registry.register_quantization("toyr", "m:Q")
    registry.register_source("toyr", "m:S")
    registry.register_reader("toyr", "m:R")
    exported = tables.export_registrations()
    assert {kind: list(names.values()) for kind, names in exported.items()} == {
        "loaders": ["m:L"], "models": ["m:M"], "quantization": ["m:Q"], "sources": ["m:S"],
        "readers": ["m:R"],
    }  # fmt: skip


def test_a_plugin_may_look_names_up_while_it_is_loaded(world: World) -> None:
    text = (
        "from loadkit import tables\n@hookimpl\ndef loadkit_register(registry):\n"
        "    try:\n        tables.readers.lookup('nobody')\n"
        "    except Exception as e:\n        registry.register_reader('found', 'm:X')\n"
    )
    hooks(world, "toy", text)
    with pytest.raises(UnknownNameError):
        tables.readers.lookup("other")
    assert "found" in tables.readers.names()


def test_a_name_that_a_hook_plugin_contests_is_an_error_of_that_name_only(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    text = REGISTER.format(name="pread").replace("pread_mod", "thief_mod")
    hooks(world, "thief", text + '    registry.register_reader("own", "thief_mod:X")\n')
    with caplog.at_level(logging.WARNING, "loadkit"), pytest.raises(UnknownNameError):
        tables.readers.lookup("nobody")
    assert caplog.text.count("'pread' is claimed by loadkit-core") == 1
    with pytest.raises(ConflictError, match=r"loadkit-core.*thief 1\.0"):
        tables.readers.lookup("pread")
    assert {"mmap", "own"} <= set(tables.readers.names())
    states = {entry.name: entry.state for entry in tables.readers.entries()}
    assert (states["pread"], states["mmap"]) == ("conflict", "ready")


def test_a_broken_line_is_told_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.dist("torn", "[loadkit.loaders]\nthis is no entry point\n")
    with caplog.at_level(logging.WARNING, "loadkit"):
        for _ in range(2):
            with pytest.raises(UnknownNameError):
                tables.readers.lookup("nobody")
    assert caplog.text.count("is no entry point:") == 1
