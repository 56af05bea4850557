"""A run in this process, and a fake in the place of the line."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest

import loadkit
from helpers.cli import FakeLine, Ran
from loadkit.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run a command line in this process."""

    def run(*args: object) -> Ran:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> FakeLine:
    """A fake in the place of the line that plans and loads."""
    fake = FakeLine()
    module = types.ModuleType("loadkit.loader")
    vars(module).update(plan=fake.plan, load=fake.load)
    monkeypatch.setitem(sys.modules, "loadkit.loader", module)
    monkeypatch.setattr(loadkit, "loader", module, raising=False)
    monkeypatch.setattr("loadkit.cli.plan.config_summary", lambda request, load_format: "a config")
    return fake
