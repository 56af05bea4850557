"""llama.cpp reads the GGUF files that we write, and says what our model says.

Compared are the log-probabilities of SmolLM2's ten likeliest tokens after two prompts. From plain
numbers they are the same; from blocks they are not, since llama.cpp's kernels round what comes in
to 8 bits as well: there they are near, and their likeliest token is one of our three.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.llama_cpp import first_tokens, wheel_folder
from loadkit.config import LoadConfig
from loadkit.sources.local import LocalSource
from loadkit_gguf.loader import GGUFModelLoader

pytestmark = pytest.mark.slow

QUIET = LoadConfig(use_tqdm_on_load=False)
PROMPTS = ("The capital of France is", "Once upon a time, there was a little")


@pytest.fixture(scope="module")
def model(smollm2: Path) -> torch.nn.Module:
    wheel_folder()
    return loadkit.load_model(str(smollm2), dtype="float32", load_config=QUIET)


def ours(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [V] of what comes next."""
    with torch.inference_mode():
        hidden = model(torch.tensor(ids), torch.arange(len(ids)))
        logits: torch.Tensor = model.compute_logits(hidden[-1:])[-1]
    return logits.log_softmax(-1)


@pytest.mark.parametrize(
    ("kind", "bound"),
    [("F32", 1e-3), ("F16", 0.05), ("Q8_0", 1.0), ("Q4_0", 1.0)],  # measured: 2e-4 0.01 0.2 0.3
)
def test_llama_cpp_reads_back_what_we_write(
    kind: str, bound: float, model: torch.nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "smollm2.gguf"
    loadkit.save(model, path, save_format="gguf", model_loader_extra_config={"quantization": kind})
    theirs = first_tokens(path, PROMPTS)
    again = loadkit.load_model(str(path), dtype="float32", load_config=QUIET)
    with LocalSource(str(path), QUIET) as source:
        tokenizer = GGUFModelLoader.read_tokenizer(source)
    path.unlink()
    for prompt, expected in zip(PROMPTS, theirs, strict=True):
        found = ours(again, tokenizer.encode(prompt))
        gap = max(abs(float(found[token]) - logprob) for token, logprob in expected)
        print(f"{kind}: {gap:.2g} after {prompt!r}")
        assert gap <= bound
        likeliest = found.topk(1 if kind.startswith("F") else 3).indices.tolist()
        assert expected[0][0] in likeliest
