"""Checkpoints to measure on, written in a stream and kept under .cache/bench."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

__all__ = [
    "FULL",
    "MANY",
    "MIDDLE",
    "MOE",
    "MOE_MANY",
    "MOE_SMALL",
    "MOE_TOY",
    "SMALL",
    "TINY",
    "TOY",
    "Llama",
    "Moe",
    "clear",
    "sparse",
    "with_architecture",
    "written",
]

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".cache" / "bench"
BLOCK = 8 << 20  # bytes of random numbers that every tensor is cut from


@dataclass(frozen=True)
class Llama:
    """Sizes of a made-up Llama in bfloat16 with tied embeddings."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    files: int

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "rope_theta": 10000.0,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor, in model order."""
        from helpers.checkpoints import llama_shapes

        return llama_shapes(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=self.ffn,
            vocab=self.vocab,
            head=False,
        )


@dataclass(frozen=True)
class Moe:
    """Sizes of a made-up Qwen3-MoE in bfloat16 with a head of its own."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    experts: int
    vocab: int
    files: int

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "num_hidden_layers": self.layers,
            "intermediate_size": 4 * self.ffn,
            "moe_intermediate_size": self.ffn,
            "num_experts": self.experts,
            "num_experts_per_tok": min(8, self.experts),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "vocab_size": self.vocab,
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "rope_theta": 10000.0,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor, in model order."""
        width, size = self.hidden, self.head_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, width)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            shapes[f"{at}self_attn.q_proj.weight"] = (self.heads * size, width)
            shapes[f"{at}self_attn.k_proj.weight"] = (self.kv_heads * size, width)
            shapes[f"{at}self_attn.v_proj.weight"] = (self.kv_heads * size, width)
            shapes[f"{at}self_attn.o_proj.weight"] = (width, self.heads * size)
            shapes[f"{at}self_attn.q_norm.weight"] = (size,)
            shapes[f"{at}self_attn.k_norm.weight"] = (size,)
            shapes[f"{at}input_layernorm.weight"] = (width,)
            shapes[f"{at}post_attention_layernorm.weight"] = (width,)
            shapes[f"{at}mlp.gate.weight"] = (self.experts, width)
            for expert in range(self.experts):
                to = f"{at}mlp.experts.{expert}."
                shapes[f"{to}gate_proj.weight"] = (self.ffn, width)
                shapes[f"{to}up_proj.weight"] = (self.ffn, width)
                shapes[f"{to}down_proj.weight"] = (width, self.ffn)
        shapes["model.norm.weight"] = (width,)
        shapes["lm_head.weight"] = (self.vocab, width)
        return shapes


FULL = Llama("llama-6g", 28, 3072, 24, 8, 8192, 128256, 5)  # 254 tensors, 5.98 GiB
MIDDLE = Llama("llama-2g", 22, 2048, 32, 4, 5632, 32000, 3)  # 200 tensors, 1.93 GiB
SMALL = Llama("llama-small", 14, 1280, 20, 4, 3584, 16384, 3)  # 128 tensors, 0.51 GiB
TINY = Llama("llama-tiny", 8, 768, 12, 4, 2048, 16384, 2)  # 74 tensors, 0.12 GiB
TOY = Llama("llama-toy", 2, 64, 4, 2, 96, 256, 2)  # to have lazy imports done
MANY = Llama("llama-many", 2222, 64, 4, 2, 96, 256, 8)  # 20,000 tensors
MOE = Moe("moe-2g", 8, 1024, 16, 4, 64, 768, 64, 32000, 3)  # 1,611 tensors, 2.4 GiB
MOE_SMALL = Moe("moe-small", 4, 512, 8, 2, 64, 384, 32, 8000, 2)  # 0.17 GiB
MOE_MANY = Moe("moe-many", 51, 64, 4, 2, 16, 32, 128, 256, 8)  # 20,046 tensors
MOE_TOY = Moe("moe-toy", 2, 64, 4, 2, 16, 32, 4, 256, 2)
Sized = Llama | Moe


def written(model: Sized) -> Path:
    """The folder of a checkpoint with real numbers; written if it is not there."""
    folder = CACHE / model.name
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    block = _block()
    weight_map: dict[str, str] = {}
    at = 0
    for file, tensors in _files(model):
        with (folder / file).open("wb") as out:
            header = _header(tensors)
            out.write(struct.pack("<Q", len(header)) + header)
            for shape in tensors.values():
                at = _write(out, block, at, 2 * math.prod(shape))
        weight_map |= dict.fromkeys(tensors, file)
    _finish(folder, model, weight_map)
    return folder


def sparse(model: Sized, layers: int) -> Path:
    """A checkpoint of ``layers`` layers whose data are holes: for measuring plans."""
    from helpers.checkpoints import sparse_safetensors

    folder = CACHE / f"{model.name}-{layers}"
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    sized = replace(model, layers=layers)
    weight_map: dict[str, str] = {}
    for file, tensors in _files(sized):
        sparse_safetensors(folder / file, {name: ("BF16", s) for name, s in tensors.items()})
        weight_map |= dict.fromkeys(tensors, file)
    _finish(folder, sized, weight_map)
    return folder


def with_architecture(folder: Path, architecture: str) -> Path:
    """The same files (hard links) in a folder whose config names another architecture."""
    other = folder.with_name(f"{folder.name}-{architecture}")
    other.mkdir(exist_ok=True)
    for path in folder.iterdir():
        link = other / path.name
        if path.name != "config.json" and not link.exists():
            link.hardlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return other


def clear() -> None:
    """Delete every generated checkpoint."""
    shutil.rmtree(CACHE, ignore_errors=True)


def _files(model: Sized) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    """File names and their tensors: dealt by bytes in model order, sorted by name within."""
    shapes = model.shapes()
    total = sum(math.prod(shape) for shape in shapes.values())
    parts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(model.files)]
    before = 0
    for name, shape in shapes.items():
        parts[min(model.files - 1, before * model.files // total)][name] = shape
        before += math.prod(shape)
    for number, part in enumerate(parts, 1):
        yield f"model-{number:05d}-of-{model.files:05d}.safetensors", dict(sorted(part.items()))


def _header(tensors: Mapping[str, tuple[int, ...]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    body = json.dumps(header, separators=(",", ":")).encode()
    return body + b" " * (-len(body) % 8)


def _block() -> memoryview:
    """Random finite bfloat16 numbers, about 0.02 wide."""
    import torch

    generator = torch.Generator().manual_seed(1)
    numbers = 0.02 * torch.randn(BLOCK // 2, generator=generator)
    return memoryview(numbers.to(torch.bfloat16).view(torch.uint8).numpy().data)


def _write(out: Any, block: memoryview, at: int, nbytes: int) -> int:
    """Write ``nbytes`` bytes of the block from ``at`` on, round and round; where it ended.

    The block's length and every tensor's are even, so numbers stay whole; each tensor starts
    elsewhere, a prime further.
    """
    while nbytes:
        piece = block[at : at + nbytes]
        out.write(piece)
        nbytes -= len(piece)
        at = (at + len(piece)) % BLOCK
    return (at + 2 * 7919) % BLOCK


def _finish(folder: Path, model: Sized, weight_map: Mapping[str, str]) -> None:
    index = {"metadata": {}, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(model.config()))
