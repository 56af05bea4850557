"""Small checkpoints made on the spot, honest ones and ones that lie, and fake distributions.

Letters: D hidden, H heads, K kv heads, F ffn width, V vocabulary.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from loadkit.tensor_info import DTYPES

__all__ = [
    "LFS_POINTER",
    "fake_distribution",
    "llama_sd",
    "llama_shapes",
    "raw_st",
    "sparse_safetensors",
    "st_header",
    "write_cfg",
    "write_index",
    "write_llama",
    "write_shards",
    "write_sparse_llama",
    "write_st",
]

LFS_POINTER = (
    f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
)


# -- Llama checkpoints with Hugging Face names ---------------------------------------------------


def llama_shapes(
    *,
    layers: int = 2,
    hidden: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 32,
    vocab: int = 40,
    head: bool = True,
    prefix: str = "model.",
) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama checkpoint and its shape: 9 per layer, plus embedding, norm, head."""
    size = hidden // heads
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"{prefix}layers.{layer}."
        shapes[f"{at}self_attn.q_proj.weight"] = (heads * size, hidden)
        shapes[f"{at}self_attn.k_proj.weight"] = (kv_heads * size, hidden)
        shapes[f"{at}self_attn.v_proj.weight"] = (kv_heads * size, hidden)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, heads * size)
        shapes[f"{at}mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[f"{at}mlp.up_proj.weight"] = (ffn, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, ffn)
        shapes[f"{at}input_layernorm.weight"] = (hidden,)
        shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    shapes[f"{prefix}norm.weight"] = (hidden,)
    if head:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def llama_sd(
    *, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: Any
) -> dict[str, torch.Tensor]:
    """A whole toy Llama state dict, random and seeded; ``sizes`` as ``llama_shapes`` takes them."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, shape in llama_shapes(**sizes).items():
        value = torch.randn(shape, generator=generator)
        if len(shape) == 1:  # norms near one, so that nothing hides behind an identity
            value = 1 + 0.1 * value
        state[name] = value.to(dtype)
    return state


def write_cfg(folder: str | Path, drop: Iterable[str] = (), **changes: Any) -> dict[str, Any]:
    """Write the config.json that fits ``llama_sd()``'s defaults, with changes; returns it."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "vocab_size": 40,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "rms_norm_eps": 1e-5,
        **changes,
    }
    for key in drop:
        config.pop(key, None)
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return config


def write_st(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: dict[str, str] | None = None,
) -> Path:
    """An honest safetensors file, written by the safetensors library."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, str(path), metadata=metadata)
    return Path(path)


def write_index(folder: str | Path, weight_map: Mapping[str, Any], **metadata: Any) -> Path:
    """Write model.safetensors.index.json as given, right or wrong."""
    path = Path(folder) / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": metadata, "weight_map": dict(weight_map)}))
    return path


def write_shards(
    folder: str | Path,
    tensors: Mapping[str, torch.Tensor],
    n: int = 2,
    *,
    total: int | None = None,
    stem: str = "model",
    index: bool = True,
) -> dict[str, str]:
    """Deal the tensors round-robin over ``n`` files; returns the weight map.

    ``total`` is what the names claim ("-of-00004"), ``index=False`` leaves the index out.
    """
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(n):
        file = f"{stem}-{shard + 1:05d}-of-{total or n:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::n]}
        write_st(Path(folder) / file, part, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if index:
        write_index(folder, weight_map, total_size=sum(t.nbytes for t in tensors.values()))
    return weight_map


def write_llama(
    folder: str | Path,
    *,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 32,
    vocab: int = 40,
    head: bool = True,
    **config: Any,
) -> dict[str, torch.Tensor]:
    """A complete toy Llama folder (config.json and weights); returns its state dict."""
    state = llama_sd(
        dtype=dtype,
        seed=seed,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        head=head,
    )
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": not head,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    write_cfg(folder, **{**sizes, **config})
    if shards == 1:
        write_st(Path(folder) / "model.safetensors", state, {"format": "pt"})
    else:
        write_shards(folder, state, shards)
    return state


# -- safetensors by hand -------------------------------------------------------------------------


def raw_st(path: str | Path, header: Any, payload: bytes = b"", *, n: int | None = None) -> Path:
    """Safetensors bytes by hand: ``header`` is bytes or JSON, ``n`` a length that may lie."""
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(body) if n is None else n) + body + payload)
    return Path(path)


def st_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, int]:
    """A true header (padded to 8 bytes) for ``{name: (dtype, shape)}``, and the data's size."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * DTYPES[dtype][0] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    body = json.dumps(header, separators=(",", ":")).encode()
    return body + b" " * (-len(body) % 8), end


def sparse_safetensors(
    path: str | Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> Path:
    """A file with a true header and no data blocks: full size, almost no disk, all zeros."""
    body, size = st_header(tensors)
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(body)) + body)
        file.truncate(8 + len(body) + size)
    return Path(path)


def write_sparse_llama(
    folder: str | Path,
    *,
    layers: int = 126,
    hidden: int = 16384,
    heads: int = 128,
    kv_heads: int = 8,
    ffn: int = 53248,
    vocab: int = 128256,
    files: int = 64,
    dtype: str = "BF16",
) -> dict[str, str]:
    """A made-up Llama checkpoint of real scale that takes no disk; returns the weight map.

    The defaults are Llama 3.1 405B's sizes: 1,137 tensors over 64 files. Tensors fill the files
    in model order, by bytes; within a file they lie sorted by name, as savers write them.
    """
    shapes = llama_shapes(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab
    )
    write_cfg(
        folder,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=layers,
        intermediate_size=ffn,
        vocab_size=vocab,
        torch_dtype={"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype],
    )
    sizes = {name: math.prod(shape) * DTYPES[dtype][0] // 8 for name, shape in shapes.items()}
    total = sum(sizes.values())
    parts: list[dict[str, tuple[str, tuple[int, ...]]]] = [{} for _ in range(files)]
    before = 0
    for name, shape in shapes.items():
        parts[min(files - 1, before * files // total)][name] = (dtype, shape)
        before += sizes[name]
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{files:05d}.safetensors"
        sparse_safetensors(Path(folder) / file, dict(sorted(part.items())))
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map, total_size=total)
    return weight_map


# -- distributions -------------------------------------------------------------------------------


def fake_distribution(
    folder: str | Path,
    name: str,
    entry_points: str,
    *,
    version: str = "1.0",
    suffix: str = "dist-info",
    requires: Iterable[str] = (),
) -> Path:
    """An installed distribution on a path: put ``folder`` on sys.path and it is found."""
    meta = Path(folder) / f"{name.replace('-', '_')}-{version}.{suffix}"
    meta.mkdir(parents=True, exist_ok=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    file = "METADATA" if suffix == "dist-info" else "PKG-INFO"
    (meta / file).write_text("\n".join(lines) + "\n")
    (meta / "entry_points.txt").write_text(entry_points)
    return meta
