"""Real models compute what llama.cpp computes on the same weights, dequantised to float32.

Only the order of sums differs. Measured: 4e-5 at most over SmolLM2's whole vocabulary, 2e-5 over
the stored logits of the others, 6e-5 of a margin that is stored with four decimals.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import loadkit
from loadkit.config import LoadConfig
from loadkit.generate import greedy

TOLERANCE = 1e-3  # of a logit, in float32
ROUNDING = 5e-5  # of a stored margin
ORACLES = {
    "smollm2": "smollm2-135m-dequant-f32.llamacpp",
    "gemma3": "gemma3-270m-dequant-f32-exactgelu.llamacpp",
    "qwen25": "qwen2.5-coder-0.5b-dequant-f32.llamacpp",
}
LARGE, SLOW = pytest.mark.large, pytest.mark.slow
MODELS = ["smollm2", pytest.param("gemma3", marks=LARGE), pytest.param("qwen25", marks=LARGE)]


class Real(NamedTuple):
    """A model, what llama.cpp says of each prompt, and its logits [V] where they are kept."""

    model: Any
    prompts: dict[str, Any]
    logits: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=MODELS)
def real(request: pytest.FixtureRequest, root: Path) -> Real:
    path = request.getfixturevalue(request.param)
    data = root / "tests/data"
    name = ORACLES[request.param]
    oracle = json.loads((data / f"{name}.json").read_text())
    logits = {}
    if (data / f"{name}.logits.npz").exists():
        with np.load(data / f"{name}.logits.npz") as stored:
            logits = {prompt: torch.from_numpy(stored[prompt]) for prompt in stored}
    quiet = LoadConfig(use_tqdm_on_load=False)
    model = loadkit.load_model(str(path), dtype="float32", load_config=quiet)
    return Real(model, oracle["prompts"], logits)


def logits_of(model: Any, ids: list[int], last: int = 1) -> torch.Tensor:
    """The logits [last, V] at the last positions of a text."""
    with torch.inference_mode():
        hidden = model(torch.tensor(ids), torch.arange(len(ids)))
        logits: torch.Tensor = model.compute_logits(hidden[-last:])
    return logits


def check_steps(prompt: dict[str, Any], ids: list[int], margins: list[float]) -> None:
    """Each step's id is the oracle's, and as much better than the next one."""
    expected, stored = prompt["greedy24_ids"], prompt["top1_minus_top2"]
    assert len(expected) == len(stored) == 24
    assert min(stored) > TOLERANCE  # no step is a toss-up: every id is compared
    assert ids == expected
    for ours, theirs in zip(margins, stored, strict=True):
        assert abs(ours - theirs) <= 2 * TOLERANCE + ROUNDING


def margin(logits: torch.Tensor) -> float:
    """How much the best of [V] is better than the second."""
    first, second = logits.topk(2).values
    gap: float = (first - second).item()
    return gap


def test_the_whole_vocabularys_logits_are_kept_for_smollm2(root: Path) -> None:
    with np.load(root / f"tests/data/{ORACLES['smollm2']}.logits.npz") as stored:
        assert {name: stored[name].shape for name in stored} == dict.fromkeys(
            ("p1", "p2", "p3"), (49_152,)
        )


@pytest.mark.parametrize("name", ["p1", "p2", "p3"])
def test_the_logits_after_a_prompt_are_llama_cpps(real: Real, name: str) -> None:
    prompt = real.prompts[name]
    (found,) = logits_of(real.model, prompt["prompt_ids"])
    best = torch.tensor(prompt["top10_logits"])
    assert (found[prompt["top10_ids"]] - best).abs().max() <= TOLERANCE
    assert -best.diff().max() > 2 * TOLERANCE  # so their order is as firm as they are
    assert found.topk(10).indices.tolist() == prompt["top10_ids"]
    # Two numbers about all the others.
    assert abs(found.mean().item() - prompt["logits_mean"]) <= TOLERANCE
    assert abs(found.std(correction=0).item() - prompt["logits_std"]) <= TOLERANCE
    if name in real.logits:
        assert found.shape == real.logits[name].shape
        assert (found - real.logits[name]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["p1", "p2", "p3"])
def test_the_best_id_after_each_of_the_oracles_is_its_next(real: Real, name: str) -> None:
    """All 24 steps in one call, so without a cache."""
    prompt = real.prompts[name]
    text = [*prompt["prompt_ids"], *prompt["greedy24_ids"][:-1]]
    logits = logits_of(real.model, text, last=24)
    check_steps(prompt, logits.argmax(-1).tolist(), [margin(row) for row in logits])


@pytest.mark.parametrize("name", ["p1", *(pytest.param(n, marks=SLOW) for n in ("p2", "p3"))])
def test_the_greedy_ids_are_llama_cpps(real: Real, name: str) -> None:
    """Step by step, with a cache."""
    prompt = real.prompts[name]
    margins: list[float] = []

    def note(token: int, logits: torch.Tensor) -> None:
        margins.append(margin(logits))

    found = greedy(real.model, prompt["prompt_ids"], max_new_tokens=24, on_step=note)
    check_steps(prompt, found, margins)
