"""The command itself: help, exit codes, the way errors end a run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from helpers.cli import FakeLine, Problem, Ran, spawn
from loadkit.cli.app import COMMANDS
from loadkit.errors import (
    ArchitectureImportError,
    FormatError,
    LoadkitError,
    OptionError,
    PlanError,
    ReadError,
    UnknownNameError,
)

Run = Callable[..., Ran]


@pytest.mark.parametrize(
    "args", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_imports_neither_torch_nor_rich(args: list[str]) -> None:
    code = (
        "import sys, time\n"
        "from loadkit.cli import main\n"
        f"code = main({args!r})\n"
        "heavy = {'torch', 'rich', 'tqdm', 'numpy', 'pluggy'} & set(sys.modules)\n"
        "print('cpu', time.process_time(), sorted(heavy), file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: loadkit")
    _, seconds, heavy = done.stderr.strip().split(" ", 2)
    assert heavy == "[]"
    assert float(seconds) < 0.3


def test_help_lists_every_command_and_the_exit_codes(run: Run) -> None:
    shown = run("--help")
    assert shown.code == 0
    for name in COMMANDS:
        assert f"  {name} " in shown.out
    assert "130 interrupted" in " ".join(shown.out.split())


def test_without_arguments_the_help_is_shown(run: Run) -> None:
    assert run().out == run("--help").out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_json_and_debug(run: Run, name: str) -> None:
    shown = run(name, "--help").out
    assert "--json" in shown
    assert "--debug" in shown


@pytest.mark.parametrize("name", ["plan", "load"])
def test_plan_and_load_take_every_common_option(run: Run, name: str) -> None:
    shown = run(name, "--help").out
    options = "tp pp ep rank load-format dtype device set strict no-strict quantization"
    for option in [*options.split(), "trust-remote-code", "model-impl"]:
        assert f"--{option} " in shown


def test_an_unknown_command_is_a_usage_error_with_the_nearest_name(run: Run) -> None:
    ran = run("plann")
    assert ran.code == 2
    assert "no command 'plann'; did you mean plan?" in ran.err
    assert ran.out == ""


@pytest.mark.parametrize(
    "args", [["plan"], ["plan", "x", "--tp", "zero"], ["plan", "x", "--nope"], ["plan", "x", "y"]]
)
def test_a_usage_error_exits_2_and_is_json_on_stdout_when_asked(run: Run, args: list[str]) -> None:
    ran = run(*args, "--json")
    assert ran.code == 2
    assert ran.json()["ok"] is False
    assert ran.json()["schema"] == "loadkit.plan/1"
    assert ran.json()["error"]["code"] == "E_USAGE"
    assert ran.err.startswith("error: E_USAGE: ")
    assert ran.err.rstrip().endswith("hint: loadkit plan --help")


ERROR = FormatError(
    "tensor 'a.weight' overlaps", code="E_LAYOUT", file="model.safetensors", tensor="a.weight",
    offset=16, parameter="a.weight", hint="download it again",
)  # fmt: skip


def test_UX_01_the_typed_error_is_the_last_lines_and_nothing_else(run: Run, line: FakeLine) -> None:
    line.error = ERROR
    ran = run("load", "x")
    assert ran.code == 1
    assert ran.out == ""
    assert ran.err.splitlines() == [
        "error: E_LAYOUT: tensor 'a.weight' overlaps",
        "  file: model.safetensors",
        "  tensor: a.weight",
        "  offset: 16",
        "  parameter: a.weight",
        "  hint: download it again",
    ]


def test_UX_01_debug_puts_the_traceback_before_the_typed_error(run: Run, line: FakeLine) -> None:
    line.error = ERROR
    ran = run("load", "x", "--debug")
    assert ran.err.startswith("Traceback")
    assert ran.err.splitlines()[-1] == "  hint: download it again"


def test_UX_01_the_error_object_is_on_stdout_and_the_text_on_stderr(
    run: Run, line: FakeLine
) -> None:
    line.error = ERROR
    ran = run("load", "x", "--json")
    assert ran.json() == {"schema": "loadkit.load/1", "ok": False, "error": ERROR.to_dict()}
    assert "error: E_LAYOUT" in ran.err


def test_a_cause_is_named(run: Run, line: FakeLine) -> None:
    line.error = ArchitectureImportError("cannot import x")
    line.error.__cause__ = ModuleNotFoundError("No module named 'nope'")
    assert "  cause: ModuleNotFoundError: No module named 'nope'" in run("plan", "x").err


def test_a_note_is_a_line_and_a_traceback_of_many_lines_is_none(run: Run, line: FakeLine) -> None:
    line.error = ArchitectureImportError("no")
    line.error.add_note("server was left: it is not reached")
    line.error.add_note("in rank 1:\nTraceback")
    said = run("plan", "x").err
    assert "  note: server was left: it is not reached" in said.splitlines()
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LoadkitError("x"), 1),
        (OptionError("x"), 2),
        (UnknownNameError("x"), 2),
        (ReadError("x", errno=5), 3),
        (PermissionError(13, "no", "w.safetensors"), 3),
        (MemoryError(), 1),
        (ZeroDivisionError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
@pytest.mark.parametrize("extra", [[], ["--json"]], ids=["text", "json"])
def test_exit_codes(
    run: Run, line: FakeLine, error: BaseException, code: int, extra: list[str]
) -> None:
    line.error = error
    ran = run("load", "x", *extra)
    assert ran.code == code
    assert "Traceback" not in ran.err
    if extra:
        assert ran.json()["ok"] is False
        assert ran.json()["error"]["code"].startswith("E_")


def test_a_defect_says_so_in_two_lines_and_names_debug(run: Run, line: FakeLine) -> None:
    line.error = ZeroDivisionError("by zero")
    ran = run("plan", "x")
    assert len(ran.err.splitlines()) == 2
    assert ran.err.startswith("error: E_INTERNAL: ZeroDivisionError: by zero")
    assert "--debug" in ran.err


def test_a_load_shows_ten_problems_and_their_number_and_json_has_all(
    run: Run, line: FakeLine
) -> None:
    problems = [Problem(parameter=f"layers.{i}.weight") for i in range(25)]
    line.error = PlanError("the plan found 25 problems", problems=problems)
    ran = run("load", "x")
    assert ran.err.count("MISSING") == 10
    assert "... and 15 more (25 in all" in ran.err
    assert len(run("load", "x", "--json").json()["problems"]) == 25


def test_a_reader_that_leaves_is_no_traceback() -> None:
    shell = f"{sys.executable} -m loadkit.cli --help | true; exit ${{PIPESTATUS[0]}}"
    for _ in range(3):
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
        assert done.returncode in (0, 3)
        assert done.stderr == ""


@pytest.mark.parametrize("to", [">&-", ">/dev/full"])
def test_a_stdout_that_takes_nothing_is_no_traceback(to: str) -> None:
    shell = f"{sys.executable} -m loadkit.cli --help {to}"
    done = subprocess.run(["bash", "-c", shell], stderr=subprocess.PIPE, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.returncode == (3 if "full" in to else 0)


def test_ctrl_c_exits_130() -> None:
    code = (
        "import os, signal, sys, time, types\n"
        "module = types.ModuleType('loadkit.loader')\n"
        "def load(*a, **k):\n    os.kill(os.getpid(), signal.SIGINT); time.sleep(30)\n"
        "module.load = load\n"
        "import loadkit; loadkit.loader = sys.modules['loadkit.loader'] = module\n"
        "from loadkit.cli import main; sys.exit(main(['load', 'x', '--json']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr == "interrupted\n"
    assert json.loads(done.stdout)["error"]["code"] == "E_INTERRUPTED"


def test_it_runs_as_a_module() -> None:
    ran = spawn("--version")
    assert ran.code == 0
    assert ran.out.startswith("loadkit ")
