"""One model in every load format that can hold it: how it is made, written, loaded, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import loadkit
from contract.formats import MatrixFormat
from helpers.checkpoints import llama_sd
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.testing import write_checkpoint
from loadkit.testing.loader_case import bits, relative_gap, write_config

__all__ = [
    "PLAIN", "SMALL", "SMOLLM2", "TINY", "Model", "check_same", "load", "made", "plain", "save",
    "written",
]  # fmt: skip

PLAIN = LoadConfig(load_format="safetensors", use_tqdm_on_load=False)
SMOLLM2 = {
    "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49_152,
    "max_position_embeddings": 8192, "rope_theta": 100_000.0,
}  # fmt: skip
# Widths as SmolLM2's, so that blocks of 64 numbers are cut on their borders at tp 3.
SMALL = {**SMOLLM2, "num_hidden_layers": 2, "intermediate_size": 768, "vocab_size": 768}
# The same with one layer of half the width, for what is tried with every format again and again.
TINY = {
    **SMOLLM2, "hidden_size": 288, "num_hidden_layers": 1, "intermediate_size": 384,
    "vocab_size": 384,
}  # fmt: skip
BASE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
}  # fmt: skip


class Model(NamedTuple):
    """The same weights as tensors, and as a safetensors folder."""

    weights: dict[str, torch.Tensor]
    config: dict[str, Any]
    folder: Path


def made(folder: Path, sizes: dict[str, Any]) -> Model:
    """Random numbers of some sizes."""
    config = {**BASE, **sizes}
    names = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
    names |= {"kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "vocab": "vocab_size"}
    weights = llama_sd(
        dtype=torch.bfloat16, head=False, **{key: config[name] for key, name in names.items()}
    )
    write_checkpoint(folder, weights, config)
    return Model(weights, config, folder)


def written(form: MatrixFormat, model: Model, folder: Path) -> Path:
    """The model in a format; skips where the format cannot be had here."""
    reason = form.unavailable()
    if reason is not None:
        pytest.skip(reason)
    write_config(folder, model.config)
    form.write(folder, dict(model.weights), dict(model.config), model.folder)
    return folder


def load(form: MatrixFormat, folder: Path, tp: int = 1, rank: int = 0, **changes: Any) -> Any:
    """Load a rank; ``changes`` are fields of ``LoadConfig``."""
    return loadkit.load(
        form.source(folder), dtype="bfloat16", parallel=ParallelConfig(tp_size=tp, tp_rank=rank),
        load_config=form.load_config(**changes), **form.load_arguments,
    )  # fmt: skip


def plain(model: Model, tp: int = 1, rank: int = 0) -> torch.nn.Module:
    """The same rank from safetensors."""
    parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
    return loadkit.load_model(model.folder, parallel=parallel, load_config=PLAIN)


def save(form: MatrixFormat, model: torch.nn.Module, folder: Path) -> None:
    """Save a loaded model in a format."""
    loadkit.save(
        model,
        folder,
        save_format=form.save_format or form.load_format,
        model_loader_extra_config=form.save_options,
    )


def check_same(
    form: MatrixFormat, found: torch.nn.Module, expected: torch.nn.Module, *, exact: bool = False
) -> None:
    """Bit for bit, or within the format's bound; ``exact``: two models of this format."""
    have = form.parameters(found)
    if exact:
        wanted = form.parameters(expected)
    else:
        wanted = {name: param.detach() for name, param in expected.named_parameters()}
    assert have.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (have[name].dtype, have[name].shape) == (tensor.dtype, tensor.shape), name
        if form.lossless or exact:
            assert torch.equal(bits(have[name]), bits(tensor)), name
        else:
            assert relative_gap(have[name], tensor) <= form.bound, name
