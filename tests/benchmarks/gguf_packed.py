"""GGUF: file to ready model, against reading the file once and against transformers' GGUF path.

Each function prepares (imports, and one load of a toy file by the same path, so that lazy imports
are not measured) and returns what is measured. The model is SmolLM2-135M: 93 MiB of blocks.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.generate import CACHE, ROOT
from benchmarks.harness import Variant

__all__ = ["load_variants", "packed_variants", "smollm2"]

Go = Callable[[], Any]


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1), fetched where it is not there."""
    spec = importlib.util.spec_from_file_location("fetch_model", ROOT / "scripts/fetch_model.py")
    if spec is None or spec.loader is None:
        raise RuntimeError("scripts/fetch_model.py is gone")
    script: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    return Path(script.fetch("smollm2"), script.MODELS["smollm2"].weights)


def _toy() -> Path:
    """A Llama of two layers whose matrices are Q8_0."""
    from helpers.gguf_blocks import quantised
    from helpers.gguf_files import LLAMA_KEYS, llama_tensors, write_gguf

    CACHE.mkdir(parents=True, exist_ok=True)
    sizes = {"embedding_length": 64, "feed_forward_length": 128}
    keys = [(key, sizes.get(key.removeprefix("llama."), value)) for key, value in LLAMA_KEYS]
    tensors = quantised(llama_tensors(hidden=64, ffn=128), lambda _: "Q8_0")
    return write_gguf(CACHE / "toy.gguf", tensors, keys)


def floor(path: str) -> Go:
    """The whole file into one buffer of fresh memory, on one thread."""

    def go() -> list[torch.Tensor]:
        buffer = torch.empty(Path(path).stat().st_size, dtype=torch.uint8)
        with Path(path).open("rb", buffering=0) as file:
            view, at = memoryview(buffer.numpy()), 0
            while count := file.readinto(view[at:]):
                at += count
        return [buffer]

    return go


def loadkit(path: str, quantization: str | None = None, alias: str = "auto") -> Go:
    """``loadkit.load`` in bfloat16; with ``quantization="gguf"`` blocks stay packed."""
    package: Any = importlib.import_module("loadkit")
    config = importlib.import_module("loadkit.config")
    options = {
        "dtype": "bfloat16",
        "quantization": quantization,
        "load_config": config.LoadConfig(use_tqdm_on_load=False, alias=alias),
    }
    package.load(str(_toy()), **options)
    kept: list[Any] = []

    def go() -> Any:
        kept.append(package.load(path, **options))
        return kept[-1].model

    return go


def transformers(path: str) -> Go:
    """``from_pretrained`` with ``gguf_file``, in bfloat16, as its documentation says."""
    library: Any = importlib.import_module("transformers")
    for module in ("gguf", "transformers.modeling_gguf_pytorch_utils"):
        importlib.import_module(module)
    library.utils.logging.disable_progress_bar()
    folder, name = os.path.split(path)
    model_class = library.LlamaForCausalLM
    return lambda: model_class.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)


def packed_variants(path: Path) -> list[Variant]:
    """Packed loads beside reading the file."""
    at = {"path": str(path)}
    packed = {**at, "quantization": "gguf"}
    return [
        Variant("reading the file once", "gguf_packed:floor", at),
        Variant("loadkit, packed", "gguf_packed:loadkit", packed),
        Variant(
            "loadkit, packed, alias never", "gguf_packed:loadkit", {**packed, "alias": "never"}
        ),
    ]


def load_variants(path: Path) -> list[Variant]:
    """Decoding loads."""
    at = {"path": str(path)}
    return [
        Variant("transformers", "gguf_packed:transformers", at),
        Variant("gguf-py, tensors alone", "gguf_export:decoded_by_gguf_py", at),
        Variant("loadkit", "gguf_packed:loadkit", at),
    ]
