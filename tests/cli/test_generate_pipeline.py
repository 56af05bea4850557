"""``loadkit generate --pp``: real processes, hidden states sent from stage to stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loadkit
from helpers.checkpoints import write_cfg, write_llama
from helpers.cli import Ran, spawn
from loadkit.generate import greedy

Run = Callable[..., Ran]
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy Llama of three layers, with heads for tp 3."""
    folder = tmp_path_factory.mktemp("pipeline") / "model"
    write_llama(folder, layers=3, hidden=24, heads=6, kv_heads=3, ffn=36)
    return folder


def speak(model: Path, *options: object) -> Ran:
    line: list[Any] = ["generate", model, "--prompt-ids", "1,2,3", "--max-new-tokens", 12]
    return spawn(*line, *options, timeout=240)


SHAPES = [
    pytest.param((2, 1), id="pp2"),
    pytest.param((3, 1), id="pp3", marks=pytest.mark.slow),
    pytest.param((2, 3), id="pp2-tp3", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_TP_05_stages_say_what_one_process_says(model: Path, shape: tuple[int, int]) -> None:
    pp, tp = shape
    ran = speak(model, "--pp", pp, "--tp", tp)  # people get each token as it comes, once
    assert ran.code == 0, ran.err
    whole = greedy(loadkit.load_model(model), PROMPT, max_new_tokens=12)
    assert ran.out == " ".join(map(str, whole)) + "\n"


def test_more_stages_than_layers_are_refused_before_any_rank_starts(run: Run, model: Path) -> None:
    ran = run("generate", model, "--prompt-ids", "1", "--pp", 4, "--json")
    assert ran.code == 1
    error = ran.json()["error"]
    assert (error["code"], error["detail"]["legal"]) == ("PP_INDIVISIBLE", [1, 2, 3])


def test_every_rank_is_planned_and_one_is_loaded(run: Run, model: Path) -> None:
    plan = run("plan", model, "--pp", 2, "--tp", 3, "--ep", 3, "--json").json()
    places = [(r["pp_rank"], r["tp_rank"], r["ep_rank"]) for r in plan["ranks"]]
    assert places == [(pp, tp, tp) for pp in range(2) for tp in range(3)]
    assert plan["ok"]
    for rank, (pp, tp, ep) in ((1, places[1]), (4, places[4])):
        ran = run("load", model, "--pp", 2, "--tp", 3, "--ep", 3, "--rank", rank, "--json")
        (report,) = ran.json()["ranks"]
        assert (report["pp_rank"], report["tp_rank"], report["ep_rank"]) == (pp, tp, ep)
        assert report["bytes_read"] == plan["ranks"][rank]["bytes_to_read"]


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 2])
def test_experts_over_ep_ranks_and_stages_say_what_one_process_says(
    tmp_path: Path, ep: int
) -> None:
    """Four ranks: two stages of two, and in each stage the experts are cut or dealt."""
    write_cfg(
        tmp_path, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", head_dim=4,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_hidden_layers=3,
        norm_topk_prob=True,
    )  # fmt: skip
    whole = loadkit.load_model(tmp_path, load_format="dummy")
    loadkit.save(whole, tmp_path)
    ran = speak(tmp_path, "--pp", 2, "--tp", 2, "--ep", ep)
    assert ran.code == 0, ran.err
    answer = greedy(loadkit.load_model(tmp_path), PROMPT, max_new_tokens=12)
    assert ran.out == " ".join(map(str, answer)) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (2, 3)], ids=str)
def test_TP_05_smollm2_says_the_same_over_stages(smollm2: Path, shape: tuple[int, int]) -> None:
    """Against what llama.cpp said of the same weights (``test_generate_smollm2``)."""
    pytest.importorskip("loadkit_gguf.loader", reason="needs loadkit[gguf]")
    answer = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33]
    pp, tp = shape
    ran = spawn(
        "generate", smollm2, "--prompt", "The capital of France is", "--max-new-tokens",
        len(answer), "--dtype", "float32", "--json", "--pp", pp, "--tp", tp, timeout=280,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.json()["output_ids"] == answer
