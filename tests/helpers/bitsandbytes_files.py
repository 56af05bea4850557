"""Checkpoints quantised by bitsandbytes itself, as Hugging Face saves them; and its own numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import bitsandbytes.functional as F
import torch
from bitsandbytes.functional import QuantState

from helpers.checkpoints import llama_sd, write_cfg, write_st

__all__ = [
    "SIZES",
    "dequantised",
    "is_linear",
    "pack",
    "pack_eight",
    "quantised",
    "write_quantised",
]

State = dict[str, torch.Tensor]

# A toy whose rows are whole blocks of 64, at tp 1, 2 and 4 in columns too.
SIZES = {"hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 512}
_CONFIG = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
}


def is_linear(name: str) -> bool:
    """Whether Hugging Face quantises it by default: linear layers, without the head."""
    return name.endswith("_proj.weight")


_made: dict[tuple[Any, ...], State] = {}


def _once(asked: tuple[Any, ...], weight: torch.Tensor, make: Callable[[], State]) -> State:
    """What ``make`` gives, made once per content: most tests quantise the same toy model."""
    content = weight.detach().contiguous().view(torch.uint8).numpy()
    key = (*asked, weight.dtype, tuple(weight.shape), hashlib.blake2b(content).digest())
    if key not in _made:
        _made[key] = make()
    return {name: tensor.clone() for name, tensor in _made[key].items()}


def pack(name: str, weight: torch.Tensor, **options: Any) -> State:
    """One 4-bit matrix as it is saved; ``options`` of ``quantize_4bit``."""

    def make() -> State:
        codes, state = F.quantize_4bit(weight, **{"quant_type": "nf4", **options})
        return {"": codes, **{f".{k}": v for k, v in state.as_dict(packed=True).items()}}

    asked = ("4bit", *sorted((key, str(value)) for key, value in options.items()))
    return {f"{name}{end}": value for end, value in _once(asked, weight, make).items()}


def pack_eight(name: str, weight: torch.Tensor) -> State:
    """One int8 matrix as it is saved."""

    def make() -> State:
        codes, scales, _ = F.int8_vectorwise_quant(weight.to(torch.float16))
        form = torch.tensor(0, dtype=torch.uint8)
        return {"weight": codes, "SCB": scales, "weight_format": form}

    codes, scales, form = _once(("int8",), weight, make).values()
    stem = name.removesuffix("weight")
    return {name: codes, f"{stem}SCB": scales, f"{stem}weight_format": form}


def quantised(
    state: Mapping[str, torch.Tensor],
    make: Callable[[str, torch.Tensor], State] = pack,
    chosen: Callable[[str], bool] = is_linear,
) -> State:
    """A state dict with some of its matrices quantised."""
    found: State = {}
    for name, tensor in state.items():
        found |= make(name, tensor) if chosen(name) and tensor.dim() == 2 else {name: tensor}
    return found


def dequantised(state: Mapping[str, torch.Tensor]) -> State:
    """What bitsandbytes makes of a quantised state dict."""
    found: State = {}
    for name, tensor in state.items():
        own = {k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")}
        stem = name.removesuffix("weight")
        if any(key.startswith("quant_state") for key in own):
            held = QuantState.from_dict(dict(own), device=torch.device("cpu"))
            found[name] = F.dequantize_4bit(tensor.view(torch.uint8).view(-1, 1), held)
        elif tensor.dtype == torch.int8:
            found[name] = torch.ops.bitsandbytes.int8_vectorwise_dequant(
                tensor, state[f"{stem}SCB"]
            )
        elif ".weight." not in name and not name.endswith((".SCB", ".weight_format")):
            found[name] = tensor
    return found


def write_quantised(
    folder: Path,
    make: Callable[[str, torch.Tensor], State] = pack,
    *,
    state: State | None = None,
    stated: Mapping[str, Any] | None = None,
    chosen: Callable[[str], bool] = is_linear,
    **config: Any,
) -> State:
    """A toy Llama folder, quantised; returns the state dict that was written."""
    plain = llama_sd(seed=3, **SIZES) if state is None else state
    tensors = quantised(plain, make, chosen)
    eight = any(tensor.dtype == torch.int8 for tensor in tensors.values())
    said = {"quant_method": "bitsandbytes", "load_in_4bit": not eight, "load_in_8bit": eight}
    said |= {"bnb_4bit_quant_type": _kind(tensors)} if not eight else {}
    quantization = {**said, **(stated or {})}
    write_cfg(folder, **{**_CONFIG, "quantization_config": quantization, **config})
    write_st(folder / "model.safetensors", tensors)
    return tensors


def _kind(tensors: State) -> str:
    states = [t for name, t in tensors.items() if ".quant_state." in name]
    return str(json.loads(bytes(states[0].tolist()))["quant_type"]) if states else "nf4"
