"""The checkpoint of the contract: a small decoder in Llama's names, random and seeded.

D model width, H heads, K kv heads, F inner width, V vocabulary, L layers. Every size can be cut
over 1, 2 and 4 ranks, into whole blocks of 32 numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from loadkit.safetensors_writer import entry_of, write_safetensors

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "ARCHITECTURE",
    "contract_config",
    "contract_shapes",
    "contract_weights",
    "known_here",
    "write_checkpoint",
]

ARCHITECTURE = "LoadkitContractForCausalLM"
METHOD = "loadkit_contract"  # a quantisation
V, D, H, K, F, L = 2048, 128, 8, 4, 512, 2

Weights = Mapping[str, torch.Tensor]


def contract_shapes(
    *, vocab: int = V, width: int = D, inner: int = F, layers: int = L
) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape, in Hugging Face's names."""
    size = width // H
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (width,),
            f"{at}self_attn.q_proj.weight": (H * size, width),
            f"{at}self_attn.k_proj.weight": (K * size, width),
            f"{at}self_attn.v_proj.weight": (K * size, width),
            f"{at}self_attn.o_proj.weight": (width, H * size),
            f"{at}post_attention_layernorm.weight": (width,),
            f"{at}mlp.gate_proj.weight": (inner, width),
            f"{at}mlp.up_proj.weight": (inner, width),
            f"{at}mlp.down_proj.weight": (width, inner),
        }
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocab, width)}


def contract_weights(
    *, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: int
) -> dict[str, torch.Tensor]:
    """The tensors: normal numbers; norms near one, so that nothing hides behind an identity."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in contract_shapes(**sizes).items():
        value = torch.randn(shape, generator=generator)
        weights[name] = (1 + 0.1 * value if len(shape) == 1 else value).to(dtype)
    return weights


def contract_config(weights: Weights, architecture: str = ARCHITECTURE) -> dict[str, Any]:
    """The config.json that fits such weights."""
    embedding = weights["model.embed_tokens.weight"]
    layers = {name.split(".")[2] for name in weights if name.startswith("model.layers.")}
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": embedding.shape[1],
        "num_attention_heads": H,
        "num_key_value_heads": K,
        "num_hidden_layers": len(layers),
        "intermediate_size": weights["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": False,
        "torch_dtype": str(embedding.dtype).removeprefix("torch."),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    }


def write_checkpoint(
    folder: str | Path, weights: Weights, config: Mapping[str, Any] | None = None
) -> Path:
    """``model.safetensors``, with ``config.json`` beside it where one is given."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(dict(config)))
    with (folder / "model.safetensors").open("wb") as file:
        entries = [entry_of(name, tensor) for name, tensor in weights.items()]
        write_safetensors(_Plain(file), entries, {"format": "pt"})
    return folder


class _Plain:
    """A file as what a writer writes to."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: memoryview | bytes, tensor: str | None = None) -> None:
        self._file.write(data)


@contextmanager
def known_here() -> Iterator[None]:
    """The contract's model and quantisation, registered in this process inside the block."""
    from loadkit import tables

    given = [
        (tables.models, ARCHITECTURE, "loadkit.testing.model:ContractModel"),
        (tables.quantization, METHOD, "loadkit.testing.doubling:DoublingConfig"),
    ]
    new = [(table, name) for table, name, _ in given if name not in table.names()]
    for table, name, path in given:
        if (table, name) in new:
            table.register(name, path)
    try:
        yield
    finally:
        for table, name in new:
            with table._lock:
                table._local.pop(name, None)
