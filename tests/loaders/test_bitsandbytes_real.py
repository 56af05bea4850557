"""SmolLM2 quantised while it loads, against what transformers and bitsandbytes made of it.

The oracle's logits are those of its dequantised weights in float32; ours multiply the same numbers,
so only the order of sums differs: 1e-3 is allowed, as against llama.cpp. Its CPU kernels, which it
measured too, are up to 0.17 off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("bitsandbytes")

import loadkit
from helpers.packed_linear import shards_by_name
from loadkit.config import LoadConfig

pytestmark = pytest.mark.slow

ORACLE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "smollm2-135m-bnb.json").read_text()
)
QUIET = LoadConfig(use_tqdm_on_load=False)
OPTIONS: dict[str, dict[str, Any]] = {
    "nf4-dq": {"bnb_4bit_use_double_quant": True},
    "nf4": {},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def plain(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    model = loadkit.load_model(smollm2, dtype="float32", load_config=QUIET)
    loadkit.save(model, folder)
    return folder


@pytest.mark.parametrize("way", OPTIONS)
def test_smollm2_is_quantised_as_transformers_does(way: str, plain: Path, tmp_path: Path) -> None:
    config = LoadConfig(
        load_format="bitsandbytes", use_tqdm_on_load=False, model_loader_extra_config=OPTIONS[way]
    )
    model: Any = loadkit.load_model(plain, load_config=config)
    loadkit.save(model, tmp_path / "out")
    expected = ORACLE[way]
    # safetensors pads headers; what it holds is the same to the last tensor
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert abs(size - expected["size"]) < 1 << 18
    again: Any = loadkit.load_model(tmp_path / "out", load_config=QUIET)
    found = shards_by_name([again])
    for name, (total, absolute) in expected["dequant_sum_abssum_layer0"].items():
        numbers = found[f"{name}.weight"].double()
        # int8 is times 1/127 or by 127: the last bit; 4 bits are the same numbers
        bound = 1e-9 if way != "int8" else 1e-7
        assert float(numbers.sum()) == pytest.approx(total, abs=bound * absolute)
        assert float(numbers.abs().sum()) == pytest.approx(absolute, rel=bound)
    if way == "int8":
        return  # its products quantise inputs too
    for prompt in expected["dequantised_fp32_model"].values():
        ids = torch.tensor(prompt["prompt_ids"])
        with torch.inference_mode():
            logits = again.compute_logits(again(ids, torch.arange(len(ids))))[-1]
        best = torch.tensor(prompt["top10_ids"])
        assert (logits[best] - torch.tensor(prompt["top10_logits"])).abs().max() < 1e-3
