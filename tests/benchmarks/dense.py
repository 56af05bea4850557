"""Dense safetensors: loadkit against transformers, the vLLM way, other readers, and the floor.

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


def floor(
    folder: str, threads: int = 1, memory: str = "reused", pattern: str = "*.safetensors"
) -> Go:
    """Every weight file read by plain calls: see ``loadkit.bench.floor``."""
    from loadkit.bench.floor import read_files

    paths = [str(path) for path in sorted(Path(folder).glob(pattern))]
    return read_files(paths, memory, threads)


def transformers(folder: str) -> Go:
    """``from_pretrained`` in bfloat16, as its documentation says."""
    library: Any = importlib.import_module("transformers")
    library.utils.logging.disable_progress_bar()
    model_class = library.LlamaForCausalLM
    model_class.from_pretrained(str(written(TOY)), dtype=torch.bfloat16)
    return lambda: model_class.from_pretrained(folder, dtype=torch.bfloat16)


def vllm_way(folder: str, tp: int = 1, rank: int = 0) -> Go:
    """The shape every engine uses: real parameters, and ``safe_open`` tensor by tensor.

    The weight loaders are ours (fused qkv and gate_up); on real tensors they narrow and copy.
    """
    _vllm_way(written(TOY), tp, rank)
    return lambda: _vllm_way(Path(folder), tp, rank)


def _vllm_way(folder: Path, tp: int, rank: int) -> Any:
    model = real_model(folder, tp, rank)
    model.load_weights(_tensors(folder))
    model.eval()
    return model


def real_model(folder: Path, tp: int = 1, rank: int = 0) -> Any:
    """A fused Llama whose parameters are memory that nobody has written to yet."""
    from loadkit.build import initialize_model
    from loadkit.config import LoadConfig, LoadkitConfig, ModelConfig, ParallelConfig
    from loadkit.sources.local import LocalSource
    from loadkit_models.llama import LlamaForCausalLM

    with LocalSource(str(folder), LoadConfig()) as source:
        model_config = ModelConfig.from_source(source, dtype="bfloat16")
    parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
    config = LoadkitConfig(model_config=model_config, parallel_config=parallel)
    return initialize_model(config, LlamaForCausalLM)


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)


def loadkit_fused(folder: str, tp: int = 1, rank: int = 0, **load_config: Any) -> Go:
    """``loadkit.load`` of the Llama family: qkv and gate_up are one parameter each."""
    return loading(written(TOY), Path(folder), load_config, tp, rank)


def loadkit_unfused(folder: str, **load_config: Any) -> Go:
    """``loadkit.load`` of a model with one parameter for each tensor, as transformers has."""
    from benchmarks.unfused import UnfusedLlama
    from loadkit.model_registry import ModelRegistry

    name = UnfusedLlama.__name__
    ModelRegistry.register_model(name, UnfusedLlama)
    toy, real = with_architecture(written(TOY), name), with_architecture(Path(folder), name)
    return loading(toy, real, load_config)


def loading(toy: Path, folder: Path, load_config: dict[str, Any], tp: int = 1, rank: int = 0) -> Go:
    """A load of one rank; the report's figures come along."""
    import loadkit
    from loadkit.config import LoadConfig, ParallelConfig

    options: dict[str, Any] = {
        "load_config": LoadConfig(use_tqdm_on_load=False, **load_config),
        "parallel": ParallelConfig(tp_size=tp, tp_rank=rank),
    }
    if load_config.get("distribute"):
        options["process_group"] = torch.distributed.group.WORLD
    loadkit.load(str(toy), **options)
    kept: list[Any] = []

    def go() -> tuple[Any, dict[str, Any]]:
        result = loadkit.load(str(folder), **options)
        kept.append(result)
        return result.model, reported(result.report)

    return go


def reported(report: Any) -> dict[str, Any]:
    """What a report says, as figures."""
    return {
        "plan_s": report.seconds["build"] + report.seconds["plan"],
        "read_s": report.seconds["read"],
        "bytes_read": report.bytes_read,
        "reader": report.reader,
    }


def into_touched(folder: str, threads: int = 2) -> Go:
    """``load_into`` a live model whose memory was written before; ``read_s`` is the read step."""
    import loadkit
    from loadkit.config import LoadConfig

    config = LoadConfig(alias="never", reader="pread", num_threads=threads, use_tqdm_on_load=False)
    _touched(written(TOY), loadkit, config)()
    return _touched(Path(folder), loadkit, config)


def _touched(folder: Path, loadkit: Any, config: Any) -> Go:
    model = real_model(folder)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1)

    def go() -> tuple[Any, dict[str, Any]]:
        result = loadkit.load_into(model, str(folder), load_config=config)
        return result.model, reported(result.report)

    return go


def limit_touched(folder: str, threads: int = 2) -> Go:
    """The same bytes by ``preadv`` into one touched buffer: the machine's limit."""
    go = floor(folder, threads, "touched")

    def timed() -> dict[str, Any]:
        import time

        start = time.perf_counter()
        go()
        return {"read_s": time.perf_counter() - start}

    return timed


def variants(folder: Path, peers: bool, tensors: Path | None) -> list[dict[str, Any]]:
    """Every variant, as keyword arguments of ``Variant``."""
    at = {"folder": os.fspath(folder)}

    def row(name: str, call: str, needs: tuple[str, ...] = (), **args: Any) -> dict[str, Any]:
        return {"name": name, "call": call, "args": {**at, **args}, "needs": needs}

    rows = [
        row("floor: one buffer, over and over", "dense:floor"),
        row("floor: fresh memory, 2 threads", "dense:floor", threads=2, memory="fresh"),
        row("transformers (unfused)", "dense:transformers", ("transformers",)),
        row("loadkit unfused", "dense:loadkit_unfused"),
        row("the vLLM way (fused)", "dense:vllm_way", ("safetensors",)),
        row("loadkit fused", "dense:loadkit_fused"),
        row("loadkit fused, alias never", "dense:loadkit_fused", alias="never"),
    ]
    if not peers:
        return rows
    rows += [
        row("accelerate, device_map", "peers:accelerate", ("transformers", "accelerate")),
        row("safetensors, backend pread", "peers:safetensors_pread", ("safetensors",)),
        row("runai streamer", "peers:runai", ("runai_model_streamer",)),
        row("fastsafetensors, nogds", "peers:fastsafetensors", ("fastsafetensors",)),
    ]
    if tensors is not None:
        args = {"path": os.fspath(tensors)}
        rows.append(
            {"name": "tensorizer, 2 readers", "call": "peers:tensorizer", "args": args,
             "needs": ("tensorizer",), "files": [tensors]}
        )  # fmt: skip
    return rows


def library_variants(folder: Path) -> list[dict[str, Any]]:
    """Load formats with a library's reader, and that library alone."""
    at = {"folder": os.fspath(folder)}
    runai, fast = ("runai_model_streamer",), ("fastsafetensors",)
    ours = "dense:loadkit_unfused"
    warm = {**at, "direct": False}
    return [
        {"name": "floor: one buffer, over and over", "call": "dense:floor", "args": at},
        {"name": "runai streamer", "call": "peers:runai", "args": at, "needs": runai},
        {"name": "loadkit, runai_streamer", "call": ours, "needs": runai,
         "args": {**at, "load_format": "runai_streamer"}},
        {"name": "fastsafetensors", "call": "peers:fastsafetensors", "args": at, "needs": fast},
        {"name": "fastsafetensors, buffered", "call": "peers:fastsafetensors", "args": warm,
         "needs": fast},
        {"name": "loadkit, fastsafetensors", "call": ours, "needs": fast,
         "args": {**at, "load_format": "fastsafetensors"}},
    ]  # fmt: skip
