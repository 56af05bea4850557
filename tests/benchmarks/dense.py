"""Dense safetensors: loadkit against transformers, the vLLM way, and the machine's floor.

Each function prepares (imports, and one load of a toy checkpoint by the same path, so that lazy
imports are not measured) and returns what is measured.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.generate import TOY, with_architecture, written

Go = Callable[[], Any]


def floor(folder: str, threads: int = 2) -> Go:
    """Every weight file read into one buffer of fresh memory; the floor of an owned load."""
    from loadkit.config import LoadConfig
    from loadkit.readers.base import Extent
    from loadkit.readers.pread import PreadReader
    from loadkit.sources.local_file import LocalFile

    paths = sorted(Path(folder).glob("*.safetensors"))

    def go() -> list[torch.Tensor]:
        files = [LocalFile(path.name, str(path)) for path in paths]
        buffer = torch.empty(sum(file.size for file in files), dtype=torch.uint8)
        extents, at = [], 0
        for file in files:
            into = buffer[at : at + file.size]
            extents.append(Extent(file, 0, file.size, 1, file.size, into, file.size, file.name))
            at += file.size
        PreadReader(LoadConfig(num_threads=threads)).read(extents)
        for file in files:
            file.close()
        return [buffer]

    return go


def transformers(folder: str) -> Go:
    """``from_pretrained`` in bfloat16, as its documentation says."""
    library: Any = importlib.import_module("transformers")
    library.utils.logging.disable_progress_bar()
    model_class = library.LlamaForCausalLM
    model_class.from_pretrained(str(written(TOY)), dtype=torch.bfloat16)
    return lambda: model_class.from_pretrained(folder, dtype=torch.bfloat16)


def vllm_way(folder: str) -> Go:
    """The shape every engine uses: real parameters, and ``safe_open`` tensor by tensor.

    The weight loaders are ours (fused qkv and gate_up); on real tensors they narrow and copy.
    """
    _vllm_way(written(TOY))
    return lambda: _vllm_way(Path(folder))


def _vllm_way(folder: Path) -> Any:
    from loadkit.build import initialize_model
    from loadkit.config import LoadConfig, LoadkitConfig, ModelConfig
    from loadkit.sources.local import LocalSource
    from loadkit_models.llama import LlamaForCausalLM

    with LocalSource(str(folder), LoadConfig()) as source:
        model_config = ModelConfig.from_source(source, dtype="bfloat16")
    model: Any = initialize_model(LoadkitConfig(model_config=model_config), LlamaForCausalLM)
    model.load_weights(_tensors(folder))
    model.eval()
    return model


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)


def loadkit_fused(folder: str, **load_config: Any) -> Go:
    """``loadkit.load`` of the Llama family: qkv and gate_up are one parameter each."""
    return _loadkit(written(TOY), Path(folder), load_config)


def loadkit_unfused(folder: str, **load_config: Any) -> Go:
    """``loadkit.load`` of a model with one parameter for each tensor, as transformers has."""
    from benchmarks.unfused import UnfusedLlama
    from loadkit.model_registry import ModelRegistry

    name = UnfusedLlama.__name__
    ModelRegistry.register_model(name, UnfusedLlama)
    toy, real = with_architecture(written(TOY), name), with_architecture(Path(folder), name)
    return _loadkit(toy, real, load_config)


def _loadkit(toy: Path, folder: Path, load_config: dict[str, Any]) -> Go:
    import loadkit
    from loadkit.config import LoadConfig

    options = LoadConfig(use_tqdm_on_load=False, **load_config)
    loadkit.load(str(toy), load_config=options)
    kept: list[Any] = []

    def go() -> Any:
        result = loadkit.load(str(folder), load_config=options)
        kept.append(result)
        return result.model

    return go


def variants(folder: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, function and arguments of every variant."""
    at = {"folder": os.fspath(folder)}
    return [
        ("floor: one buffer, 2 threads", "dense:floor", at),
        ("transformers (unfused)", "dense:transformers", at),
        ("loadkit unfused", "dense:loadkit_unfused", at),
        ("the vLLM way (fused)", "dense:vllm_way", at),
        ("loadkit fused", "dense:loadkit_fused", at),
        ("loadkit fused, alias never", "dense:loadkit_fused", {**at, "alias": "never"}),
    ]
