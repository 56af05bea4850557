"""``loadkit load`` over a fake line."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from helpers.cli import FakeLine, FakePlan, Ran

Run = Callable[..., Ran]

REPORT = {
    "seconds": {"resolve": 0.1, "read": 1.25},
    "bytes_needed": 1000,
    "bytes_read": 3 << 20,
    "aliased_bytes": 0,
    "peak": {"host_anonymous_bytes": 5 << 20, "device_bytes": None},
    "reader": "mmap",
    "casts": [],
    "skipped": [{"tensor": f"t\x1b{i}", "reason": "unused"} for i in range(20)],
}


def test_the_json_object_has_one_report_per_rank(run: Run, line: FakeLine) -> None:
    line.report = REPORT
    found = run("load", "x", "--tp", 2, "--json").json()
    assert found["schema"] == "loadkit.load/1"
    assert found["ok"] is True
    assert found["load_format"] == "safetensors"
    assert [(rank["tp_rank"], rank["bytes_read"]) for rank in found["ranks"]] == [
        (0, 3 << 20), (1, 3 << 20)
    ]  # fmt: skip


def test_without_options_one_whole_model_is_loaded(run: Run, line: FakeLine) -> None:
    assert len(run("load", "x", "--json").json()["ranks"]) == 1


def test_rank_loads_that_rank_only(run: Run, line: FakeLine) -> None:
    run("load", "x", "--tp", 4, "--rank", 3)
    (call,) = line.calls
    assert (call["parallel"].tp_size, call["parallel"].tp_rank) == (4, 3)


def test_people_see_units_and_the_start_of_long_lists(run: Run, line: FakeLine) -> None:
    line.report = REPORT
    ran = run("load", "x")
    ran.assert_clean()
    assert "resolve 0.100 s, read 1.250 s" in ran.out
    assert "3.00 MiB" in ran.out
    assert "host_anonymous_bytes 5.00 MiB" in ran.out
    assert "reason unused; ... (20 in all)" in ran.out


def test_one_rank_is_gone_before_the_next_is_loaded(
    run: Run, line: FakeLine, monkeypatch: Any
) -> None:
    import loadkit

    alive: list[weakref.ref[Any]] = []

    class Model:
        def __init__(self) -> None:
            self.itself = self  # a cycle, as modules have them

    def load(source: str, *, parallel: Any, **keywords: Any) -> Any:
        assert all(ref() is None for ref in alive)
        model = Model()
        alive.append(weakref.ref(model))
        report = SimpleNamespace(to_dict=dict)
        return SimpleNamespace(model=model, report=report, plan=FakePlan(parallel))

    monkeypatch.setattr(loadkit.loader, "load", load)
    gc.disable()
    try:
        assert run("load", "x", "--tp", 3).code == 0
    finally:
        gc.enable()
    assert len(alive) == 3


def test_no_progress_bar_where_nobody_looks(run: Run, line: FakeLine) -> None:
    run("load", "x")
    run("load", "x", "--set", "use_tqdm_on_load=true")
    assert [call["load_config"].use_tqdm_on_load for call in line.calls] == [False, True]


def test_settings_and_options_meet_in_the_load_config(run: Run, line: FakeLine) -> None:
    run("load", "x", "--set", "alias=never", "--set", "reader=pread", "--set", "num_threads=3")
    (call,) = line.calls
    config = call["load_config"]
    assert (config.alias, config.reader, config.num_threads) == ("never", "pread", 3)


def test_an_option_and_a_setting_that_differ_are_an_error(run: Run, line: FakeLine) -> None:
    assert run("load", "x", "--dtype", "float16", "--set", "dtype=float32").code == 2
    assert run("load", "x", "--load-format", "dummy", "--set", "load_format=hf").code == 2
    assert not line.calls
    assert run("load", "x", "--set", "load_format=dummy", "--set", "dtype=float16").code == 0
    assert run("load", "x", "--load-format", "dummy", "--set", "load_format=dummy").code == 0
    assert {call["load_format"] for call in line.calls} == {"dummy"}
    assert line.calls[0]["dtype"] == "float16"


def test_a_setting_of_the_config_reaches_the_line(run: Run, line: FakeLine) -> None:
    run("load", "x", "--set", "hf_overrides.num_hidden_layers=1")
    assert line.calls[0]["hf_overrides"] == {"num_hidden_layers": 1}


def test_CFG_06_settings_are_checked_before_anything_is_loaded(run: Run, line: FakeLine) -> None:
    for setting, expected in [
        ("alias=nevr", "never"),
        ("num_thread=3", "num_threads"),
        ("num_threads=many", "integer"),
        ("alias", "key=value"),
        ("model_loader_extra_config={not json", "{not json"),
    ]:
        ran = run("load", "x", "--set", setting)
        assert ran.code == 2, setting
        assert expected in ran.err, ran.err
    assert not line.calls
