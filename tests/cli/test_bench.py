"""``loadkit bench``: fresh processes, medians, rows beside the floor, faults with exit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import write_llama
from helpers.cli import Ran
from loadkit.bench import processes
from loadkit.bench.processes import ProcessError, Run, machine, medians, run_fresh
from loadkit.errors import LoadkitError, ResourceError

Command = Callable[..., Ran]
TESTS = str(Path(__file__).parent.parent)

FIGURES = {
    "returned_s": 0.5,
    "touched_s": 2.0,
    "cpu_s": 0.25,
    "anon_mib": 3.0,
    "rss_mib": 4.0,
    "read_gib": 0.5,
    "disk_gib": 0.25,
    "minor_faults": 12,
    "major_faults": 1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_llama(tmp_path)
    return tmp_path


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Measured processes are not started: each gives the same figures, a bit later each time."""
    seen: list[Run] = []

    def fake(run: Run, *, timeout: float) -> dict[str, Any]:
        seen.append(run)
        return FIGURES | {"returned_s": 0.5 + len(seen) / 128, "touched_s": 2.0 + len(seen) / 128}

    monkeypatch.setattr(processes, "run_fresh", fake)
    return seen


@pytest.mark.slow
def test_a_real_bench_measures_every_end_in_processes_of_its_own(
    run: Command, folder: Path
) -> None:
    found = run("bench", folder, "--repeats", 2, "--json").json()
    assert found["schema"] == "loadkit.bench/1"
    assert [row["name"] for row in found["rows"]] == ["floor", "returned", "touched", "forward"]
    size = (folder / "model.safetensors").stat().st_size
    floor, returned, touched, _ = found["rows"]
    assert floor["of_floor"] == 1.0
    assert floor["bytes_read"] >= size
    assert returned["seconds"] <= touched["seconds"]
    for row in found["rows"]:
        assert len(row["seconds_all"]) == 2
        assert row["seconds"] > 0
        assert row["minor_faults"] > 0
        assert row["gib_per_s"] / floor["gib_per_s"] == pytest.approx(row["of_floor"])


def test_runs_take_turns_and_medians_are_shown(run: Command, folder: Path, ran: list[Run]) -> None:
    found = run("bench", folder, "--repeats", 3, "--json").json()
    calls = [each.call.partition(":")[2] for each in ran]
    assert calls == ["read_files", "load", "forward"] * 3
    floor, returned, touched, _ = found["rows"]
    assert floor["seconds_all"] == [0.5 + n / 128 for n in (1, 4, 7)]
    medians = floor["seconds"], returned["seconds"], touched["seconds"]
    assert medians == (0.5 + 4 / 128, 0.5 + 5 / 128, 2.0 + 5 / 128)
    assert returned["anonymous_bytes"] == 3 << 20
    assert returned["storage_bytes"] == 1 << 28
    assert found["repeats"] == 3
    assert found["bytes_needed"] <= found["bytes_to_read"]
    assert not any("/" in str(value) for value in found["machine"].values())


def test_people_get_a_table(run: Command, folder: Path, ran: list[Run]) -> None:
    shown = run("bench", folder, "--repeats", 1)
    shown.assert_clean()
    assert shown.code == 0
    lines = [line.split() for line in shown.out.splitlines() if line.startswith(("floor", "touch"))]
    assert lines[0][:2] == ["floor", "0.508"]
    assert lines[1][:2] == ["touched", "2.016"]
    assert "3.00 MiB" in shown.out


def test_an_end_alone_is_measured_alone(run: Command, folder: Path, ran: list[Run]) -> None:
    found = run("bench", folder, "--end", "returned", "--repeats", 1, "--json").json()
    assert [row["name"] for row in found["rows"]] == ["floor", "returned"]
    assert ran[-1].measure["touch_pages"] is False
    run("bench", folder, "--end", "touched", "--repeats", 1, "--json")
    assert ran[-1].measure["touch_pages"] is True


def test_what_is_measured_is_what_was_asked_for(run: Command, folder: Path, ran: list[Run]) -> None:
    found = run(
        *("bench", folder, "--reader", "pread", "--dtype", "bfloat16", "--tp", 2, "--rank", 1),
        *("--repeats", 1, "--json"),
    ).json()
    assert found["reader"] == "pread"
    assert [row["name"] for row in found["rows"]] == ["floor", "returned", "touched"]
    asked = ran[-1].args["request"]
    assert (asked["tp"], asked["rank"], asked["dtype"]) == (2, 1, "bfloat16")
    assert asked["settings"] == ("reader=pread",)


def test_cold_files_are_dropped_before_each_run(
    run: Command, folder: Path, ran: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[list[str]] = []
    monkeypatch.setattr(
        processes, "drop_from_cache", lambda files: dropped.append([f.name for f in files])
    )
    found = run("bench", folder, "--cold", "--repeats", 2, "--end", "touched", "--json").json()
    assert found["cold"] is True
    assert dropped == [["model.safetensors"]] * 4


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        pytest.param(["nowhere-at-all"], 3, "nowhere-at-all", id="no source"),
        pytest.param([".", "--tp", 2], 2, "--rank", id="several ranks"),
        pytest.param([".", "--tp", 2, "--rank", 0, "--end", "forward"], 2, "every rank", id="part"),
        pytest.param([".", "--repeats", 0], 2, "--repeats", id="no runs"),
        pytest.param([".", "--reader", "prea"], 2, "pread", id="reader"),
        pytest.param([".", "--set", "num_threads=x"], 2, "num_threads", id="setting"),
    ],
)
def test_what_cannot_be_measured_is_a_typed_error(
    args: list[Any], code: int, said: str, run: Command, folder: Path, ran: list[Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    failed = run("bench", *args)
    failed.assert_clean()
    assert said in failed.err
    assert failed.code in ({1, 3} if code == 3 else {code})
    assert not ran


def test_a_plan_with_problems_is_not_measured(run: Command, folder: Path, ran: list[Run]) -> None:
    (folder / "config.json").write_text(
        (folder / "config.json")
        .read_text()
        .replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    )
    failed = run("bench", folder)
    assert failed.code == 1
    assert "E_PLAN" in failed.err
    assert not ran


def test_a_run_that_fails_ends_the_bench_with_its_code(
    run: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run: Run, *, timeout: float) -> dict[str, Any]:
        return run_fresh(Run("helpers.bench_calls:typed", paths=[TESTS]), timeout=60)

    monkeypatch.setattr(processes, "run_fresh", fails)
    failed = run("bench", folder, "--repeats", 1, "--json")
    assert failed.code == 3
    error = failed.json()["error"]
    assert (error["code"], error["file"], error["hint"]) == ("E_IO", "a.bin", "plug it in")


def test_a_process_that_is_killed_or_slow_is_a_typed_error() -> None:
    with pytest.raises(ResourceError, match="was killed"):
        run_fresh(Run("helpers.bench_calls:killed", paths=[TESTS]))
    with pytest.raises(ProcessError, match="took more than 0 s"):
        run_fresh(Run("helpers.bench_calls:slow", paths=[TESTS]), timeout=0.4)
    with pytest.raises(ProcessError, match="no attribute 'none'") as caught:
        run_fresh(Run("helpers.bench_calls:none", paths=[TESTS]))
    assert isinstance(caught.value, LoadkitError)


def test_a_fresh_process_gives_its_own_figures_beside_the_measured_ones() -> None:
    figures = run_fresh(Run("helpers.bench_calls:count", {"to": 3}, paths=[TESTS]))
    assert figures["counted"] == 3
    assert figures["returned_s"] >= 0
    assert figures["minor_faults"] >= 0


def test_medians_are_of_numbers_only() -> None:
    runs = [{"s": 1, "ok": True, "name": "a"}, {"s": 9}, {"s": 2}]
    assert medians(runs) == {"s": 2, "ok": True, "name": "a"}


def test_a_machine_is_described_without_a_name() -> None:
    import platform

    found = machine()
    assert found["cpus"] >= 1
    assert platform.node() not in str(found).split()
