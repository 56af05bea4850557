"""Greedy generation says what transformers says, and leaves the model as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loadkit
from helpers.checkpoints import write_llama
from loadkit.errors import ModelError, UsageError
from loadkit.generate import greedy
from loadkit_layers.attention import Attention
from loadkit_layers.kv_cache import KVCache

transformers = pytest.importorskip(
    "transformers", reason="the oracle of these tests, in the development requirements"
)

STEPS = 24
PROMPT = [3, 17, 5, 41, 41, 8, 90]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # far from uniform, so that the likeliest token is no accident
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "tied": {"tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads": {"num_key_value_heads": 8, "attention_bias": True},
    "sliding window": {"sliding_window": 4},
    "a window longer than the prompt": {"sliding_window": 12},
}


def oracle(folder: Path, name: str) -> Any:
    """transformers' model of a variant, its checkpoint in ``folder``."""
    torch.manual_seed(7)
    values = {**SIZES, **VARIANTS[name]}
    family = "Mistral" if "sliding_window" in values else "Llama"
    config = getattr(transformers, f"{family}Config")(**values)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_the_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = oracle(tmp_path, name)
    options = transformers.GenerationConfig(
        max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, pad_token_id=0
    )
    prompt = torch.tensor([PROMPT])
    answer = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), generation_config=options
    )
    with torch.inference_mode():
        expected = theirs(answer[:, :-1]).logits[0, len(PROMPT) - 1 :]
    steps: list[tuple[int, torch.Tensor]] = []
    ours = loadkit.load_model(tmp_path, dtype="float32")
    ids = greedy(ours, PROMPT, max_new_tokens=STEPS, on_step=lambda *step: steps.append(step))
    assert ids == answer[0, len(PROMPT) :].tolist()
    assert [token for token, _ in steps] == ids
    # float32 against float32: sums in another order
    torch.testing.assert_close(
        torch.stack([logits for _, logits in steps]), expected, rtol=0, atol=1e-4
    )


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """A toy Llama."""
    write_llama(tmp_path)
    return loadkit.load_model(tmp_path)


def attentions(model: nn.Module) -> list[Attention]:
    found = [module for module in model.modules() if isinstance(module, Attention)]
    assert found
    return found


def test_the_package_exports_it(model: Any) -> None:
    assert loadkit.generate(model, [1, 2], max_new_tokens=3) == greedy(
        model, [1, 2], max_new_tokens=3
    )


def test_no_cache_stays_bound(model: Any) -> None:
    seen: list[int] = []

    def look(token: int, logits: torch.Tensor) -> None:
        seen.extend({len(layer.kv_cache or ()) for layer in attentions(model)})

    greedy(model, [1, 2, 3], max_new_tokens=3, on_step=look)
    assert seen == [3, 4, 5]
    assert all(layer.kv_cache is None for layer in attentions(model))


def test_no_cache_stays_bound_after_an_error(model: Any) -> None:
    def fail(token: int, logits: torch.Tensor) -> None:
        raise RuntimeError("the reader left")

    with pytest.raises(RuntimeError, match="the reader left"):
        greedy(model, [1], max_new_tokens=3, on_step=fail)
    assert all(layer.kv_cache is None for layer in attentions(model))


def test_a_cache_that_somebody_bound_is_neither_used_nor_lost(model: Any) -> None:
    mine = KVCache()
    layer = attentions(model)[0]
    layer.kv_cache = mine
    greedy(model, [1, 2], max_new_tokens=2)
    assert layer.kv_cache is mine
    assert len(mine) == 0


def test_two_calls_say_the_same(model: Any) -> None:
    assert greedy(model, [5, 6], max_new_tokens=9) == greedy(model, [5, 6], max_new_tokens=9)


def test_it_ends_with_the_token_that_ends_a_text(model: Any) -> None:
    ids = greedy(model, [1, 2, 3], max_new_tokens=8)
    end = ids[3]
    first = ids.index(end)
    assert greedy(model, [1, 2, 3], max_new_tokens=8, eos_ids={end}) == ids[: first + 1]


def test_no_new_tokens_are_no_work(model: Any) -> None:
    model.forward = None
    assert greedy(model, [1], max_new_tokens=0) == []


@pytest.mark.parametrize("prompt", [[], [40], [1, -1]], ids=str)
def test_a_prompt_the_model_cannot_read_is_refused(model: Any, prompt: list[int]) -> None:
    with pytest.raises(UsageError):
        greedy(model, prompt, max_new_tokens=1)


def test_a_negative_count_is_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="max_new_tokens"):
        greedy(model, [1], max_new_tokens=-1)


def test_logits_that_are_no_numbers_are_an_error(model: Any) -> None:
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(ModelError, match="new token 0") as caught:
        greedy(model, [1], max_new_tokens=2)
    assert caught.value.code == "E_LOGITS"


def test_a_model_without_logits_is_refused() -> None:
    with pytest.raises(ModelError, match="compute_logits"):
        greedy(nn.Linear(2, 2), [1], max_new_tokens=1)


class Speaker(nn.Module):
    """Has logits, and one attention that a test gives."""

    def __init__(self, attention: nn.Module | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.attention = attention

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def _without_factory() -> nn.Module:
    layer = nn.Identity()
    layer.kv_cache = None  # type: ignore[assignment]
    return layer


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (None, "no module of it keeps a kv cache"),
        (Attention(2, 4, 1.0, causal=False), "sees later tokens"),
        (_without_factory(), "has no new_kv_cache"),
    ],
    ids=["no attention", "an encoder", "no factory"],
)
def test_a_model_that_keeps_no_cache_is_refused(attention: nn.Module | None, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        greedy(Speaker(attention), [1], max_new_tokens=1)
