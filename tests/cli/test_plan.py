"""``loadkit plan`` over a fake line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.cli import FakeLine, Problem, Ran, Row

Run = Callable[..., Ran]

RANK_KEYS = {
    "tp_rank", "pp_rank", "ep_rank", "bytes_needed", "bytes_to_read", "parameter_bytes",
    "predicted_peak_bytes", "requests", "read_amplification", "bytes_fetched",
}  # fmt: skip


def test_the_json_object_has_the_published_keys(run: Run, line: FakeLine) -> None:
    line.rows = [Row("a", "b")]
    found = run("plan", "x", "--json").json()
    assert found["schema"] == "loadkit.plan/1"
    assert found["ok"] is True
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["model_class"] == "loadkit_models.llama:LlamaForCausalLM"
    assert found["distribution"] == "loadkit-models"
    assert found["load_format"] == "safetensors"
    assert found["problems"] == []
    assert [set(rank) for rank in found["ranks"]] == [RANK_KEYS]
    assert "rows" not in found


def test_every_rank_of_tp_and_pp_is_planned(run: Run, line: FakeLine) -> None:
    found = run("plan", "x", "--tp", 4, "--pp", 2, "--ep", 2, "--json").json()
    assert [(r["pp_rank"], r["tp_rank"], r["ep_rank"]) for r in found["ranks"]] == [
        (0, 0, 0), (0, 1, 1), (0, 2, 0), (0, 3, 1), (1, 0, 0), (1, 1, 1), (1, 2, 0), (1, 3, 1)
    ]  # fmt: skip


def test_rank_plans_that_rank_only(run: Run, line: FakeLine) -> None:
    found = run("plan", "x", "--tp", 4, "--pp", 2, "--rank", 5, "--json").json()
    assert [(r["pp_rank"], r["tp_rank"]) for r in found["ranks"]] == [(1, 1)]


@pytest.mark.parametrize(
    "args", [["--tp", 2, "--rank", 2], ["--ep", 3, "--tp", 2], ["--ep", 4, "--tp", 2], ["--tp", 0]]
)
def test_sizes_that_do_not_fit_are_usage_errors(
    run: Run, line: FakeLine, args: list[object]
) -> None:
    ran = run("plan", "x", *args)
    assert ran.code == 2
    assert not line.calls


def test_rows_come_with_their_rank(run: Run, line: FakeLine) -> None:
    line.rows = [Row("a", "b"), Row("c", "d", kind="fused")]
    found = run("plan", "x", "--tp", 2, "--rows", "--json").json()
    assert [(row["tensor"], row["tp_rank"]) for row in found["rows"]] == [
        ("a", 0), ("c", 0), ("a", 1), ("c", 1)
    ]  # fmt: skip
    assert found["rows"][0]["source"] == {"offset": 0, "size": [4, 8], "stride": [8, 1]}


def test_problems_exit_1_and_the_same_one_on_two_ranks_is_one(run: Run, line: FakeLine) -> None:
    line.problems = lambda parallel: [
        Problem(parameter="a", message="nothing fills it"),
        Problem(code="SHAPE", message=f"rank {parallel.tp_rank} wants 3"),
    ]
    ran = run("plan", "x", "--tp", 2, "--json")
    assert ran.code == 1
    found = ran.json()
    assert found["ok"] is False
    assert [p["message"] for p in found["problems"]] == [
        "nothing fills it", "rank 0 wants 3", "rank 1 wants 3"
    ]  # fmt: skip
    assert set(found["problems"][0]) == set(Problem().to_dict())
    assert ran.err.startswith("error: E_PLAN: 3 problem(s)")


def test_people_see_ten_problems_and_their_number(run: Run, line: FakeLine) -> None:
    line.problems = lambda parallel: [Problem(parameter=f"p.{i}") for i in range(12)]
    ran = run("plan", "x")
    assert ran.out.count("MISSING") == 10
    assert "... and 2 more (12 in all" in ran.out
    assert "parameter p.0" in ran.err


def test_people_see_class_format_ranks_and_folded_rows(run: Run, line: FakeLine) -> None:
    line.rows = [Row(f"m.layers.{i}.up", f"layers.{i}.gate_up", "fused") for i in range(32)]
    shown = run("plan", "/some/where", "--tp", 2).out
    assert "/some/where" in shown
    assert "loadkit_models.llama:LlamaForCausalLM (loadkit-models)" in shown
    assert "safetensors: model.safetensors is there" in shown
    assert shown.count("3.00 GiB") == 2
    assert "m.layers.{0-31}.up" in shown
    assert "layers.{0-31}.gate_up" in shown


def test_rows_shows_people_every_tensor(run: Run, line: FakeLine) -> None:
    line.rows = [Row(f"m.layers.{i}.up", f"layers.{i}.up") for i in range(3)] + [
        Row(None, "pad", "fill")
    ]
    shown = run("plan", "x", "--rows").out
    for i in range(3):
        assert f"m.layers.{i}.up" in shown
    assert "fill" in shown


def test_options_reach_the_line(run: Run, line: FakeLine) -> None:
    run(
        "plan", "x", "--load-format", "dummy", "--dtype", "float16", "--device", "cpu",
        "--quantization", "fp8", "--model-impl", "loadkit", "--trust-remote-code", "--no-strict",
    )  # fmt: skip
    (call,) = line.calls
    assert call["source"] == "x"
    assert call["load_format"] == "dummy"
    assert call["dtype"] == "float16"
    assert call["device"] == "cpu"
    assert call["quantization"] == "fp8"
    assert call["model_impl"] == "loadkit"
    assert call["trust_remote_code"] is True
    assert call["strict"] is False
    assert call["parallel"].tp_size == 1
