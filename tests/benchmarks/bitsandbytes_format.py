"""bitsandbytes checkpoints against transformers' own load: ``bitsandbytes_format.py [--layers N]``.

``prequantised``: the same nf4 folder, loaded by both. ``online``: the same plain folder, quantised
to nf4 by both while it loads. All end with every page of the weights touched. bitsandbytes alone
makes no model: its own calls on what ``safetensors`` mapped. By itself it prints one table, seconds
the best of three with imports excluded; ``run_all.py`` races it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.generate import CACHE
from benchmarks.harness import Variant

Go = Callable[[], Any]

CONFIG = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 8192,
}
SIZES = {"hidden": 1024, "heads": 16, "kv_heads": 4, "ffn": 2816, "vocab": 8192}


def write_folders(root: Path, layers: int) -> tuple[Path, Path]:
    """A plain bfloat16 Llama, and the same in nf4, if they are not there: 92 MiB for 8 layers."""
    from helpers.bitsandbytes_files import write_quantised
    from helpers.checkpoints import llama_sd, write_cfg, write_st

    plain, packed = root / f"bnb-plain-{layers}", root / f"bnb-nf4-{layers}"
    if not packed.exists():
        state = llama_sd(dtype=torch.bfloat16, layers=layers, **SIZES)
        config = {**CONFIG, "num_hidden_layers": layers, "torch_dtype": "bfloat16"}
        write_cfg(plain, **config)
        write_st(plain / "model.safetensors", state, {"format": "pt"})
        stated = {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": False}
        tensors = write_quantised(packed, state=state, stated=stated, **config)
        own = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        write_st(packed / "model.safetensors", own, {"format": "pt"})
    return plain, packed


def _toy(online: bool) -> str:
    """A folder of one layer: a load of it does the lazy imports, which are not measured."""
    return str(write_folders(CACHE, 1)[0 if online else 1])


def library(folder: str, online: bool) -> Go:
    """``AutoModelForCausalLM.from_pretrained`` on the CPU."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    importlib.import_module("bitsandbytes")

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}}
    if online:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )

    def load(where: str) -> Any:
        return _touched(AutoModelForCausalLM.from_pretrained(where, **options))

    load(_toy(online))
    return lambda: load(folder)


def alone(folder: str, online: bool) -> Go:
    """``quantize_4bit`` of each linear layer's matrix, or ``QuantState.from_dict`` of each."""
    import bitsandbytes.functional as functional
    from safetensors.torch import load_file

    from helpers.bitsandbytes_files import is_linear

    path = str(Path(folder) / "model.safetensors")

    def quantised() -> list[torch.Tensor]:
        found = []
        for name, tensor in load_file(path).items():
            if is_linear(name):
                codes, state = functional.quantize_4bit(tensor, quant_type="nf4")
                found += [codes, state.absmax]
            else:
                found.append(tensor)
        return found

    def stored() -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in load_file(path).items():
            matrix, dot, _ = name.partition("_proj.weight.")
            if dot:
                parts.setdefault(matrix, {})[name] = tensor
            else:
                found.append(tensor)
        states = [functional.QuantState.from_dict(each, device="cpu") for each in parts.values()]
        return found + [state.absmax for state in states]

    return quantised if online else stored


def ours(folder: str, online: bool) -> Go:
    """``loadkit.load_model``."""
    import loadkit
    from loadkit.config import LoadConfig

    importlib.import_module("bitsandbytes")
    quantization = "bitsandbytes" if online else None

    def load(where: str) -> Any:
        config = LoadConfig(use_tqdm_on_load=False)
        model = loadkit.load_model(
            where, quantization=quantization, dtype="bfloat16", load_config=config
        )
        return _touched(model)

    load(_toy(online))
    return lambda: load(folder)


def _touched(model: torch.nn.Module) -> torch.nn.Module:
    """The model, every page of its weights read."""
    for param in model.parameters():
        flat = param.detach().contiguous().view(-1).view(torch.uint8)
        flat[::4096].sum().item()
    return model


def variants(plain: Path, packed: Path) -> list[Variant]:
    """All three, of the quantised folder and of the plain one."""
    found = []
    for online, folder, word in ((False, packed, "nf4 folder"), (True, plain, "quantising")):
        args = {"folder": str(folder), "online": online}
        calls = {"bitsandbytes alone": "alone", "transformers": "library", "loadkit": "ours"}
        for name, call in calls.items():
            needs = ("bitsandbytes", *(("transformers", "accelerate") if call == "library" else ()))
            found.append(Variant(f"{name}, {word}", f"bitsandbytes_format:{call}", args, needs))
    return found


def main() -> None:
    """Race them in this process, by turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    layers = parser.parse_args().layers
    with tempfile.TemporaryDirectory() as root:
        plain, packed = write_folders(Path(root), layers)
        for online, folder in ((False, packed), (True, plain)):
            runs = {
                "transformers": library(str(folder), online),
                "loadkit": ours(str(folder), online),
            }
            took: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(4):  # the first one of each does not count
                for name, go in runs.items():
                    begin = time.perf_counter()
                    go()
                    took[name].append(time.perf_counter() - begin)
            best = {name: min(seconds[1:]) for name, seconds in took.items()}
            told = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in best.items())
            ratio = best["transformers"] / best["loadkit"]
            print(f"{'quantising' if online else 'nf4 folder'}: {told}; {ratio:.1f} x")


if __name__ == "__main__":
    main()
