"""What planning costs: tracing against running the same loader, and plans of many tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.generate import TOY, written

Go = Callable[[], Any]


def plan(folder: str) -> Go:
    """``loadkit.plan``: from headers to all rows."""
    import loadkit

    loadkit.plan(str(written(TOY)))

    def go() -> dict[str, Any]:
        made = loadkit.plan(folder)
        tensors = len({row.tensor for row in made.rows if row.tensor})
        return {"tensors": tensors, "ok": made.ok}

    return _per_tensor(go)


def trace(folder: str) -> Go:
    """``model.load_weights`` on lazy tensors, parameters on meta, under the recorder."""
    _traced(written(TOY))()
    return _per_tensor(_traced(Path(folder)))


def real(folder: str) -> Go:
    """The same ``model.load_weights`` on real tensors that are in memory, real parameters."""
    _real(written(TOY))()
    return _per_tensor(_real(Path(folder)))


def _per_tensor(go: Go) -> Go:
    def timed() -> dict[str, Any]:
        cpu, start = time.process_time(), time.perf_counter()
        found: dict[str, Any] = go()
        each = 1e6 / found["tensors"]
        found["us_per_tensor"] = (time.perf_counter() - start) * each
        found["cpu_us_per_tensor"] = (time.process_time() - cpu) * each
        return found

    return timed


def _traced(folder: Path) -> Go:
    from loadkit.build import initialize_model, parameters_on_meta
    from loadkit.tracing.recorder import Recorder

    config, loader, model_class = _parts(folder)
    recorder = Recorder()
    with recorder, parameters_on_meta():
        model: Any = initialize_model(config, model_class)
    weights = list(loader.catalogue(config.model_config))

    def go() -> dict[str, Any]:
        with recorder:
            recorder.phase = "load"
            model.load_weights(iter(weights))
        return {"tensors": len(weights)}

    return go


def _real(folder: Path) -> Go:
    import torch

    from loadkit.build import initialize_model

    config, loader, model_class = _parts(folder)
    model: Any = initialize_model(config, model_class)
    weights = [
        (name, torch.zeros(tuple(lazy.shape), dtype=lazy.dtype))
        for name, lazy in loader.catalogue(config.model_config)
    ]

    def go() -> dict[str, Any]:
        model.load_weights(iter(weights))
        return {"tensors": len(weights)}

    return go


def _parts(folder: Path) -> tuple[Any, Any, Any]:
    """The bundle, the loader with its source open, and the model class of a checkpoint."""
    from loadkit.config import LoadConfig, LoadkitConfig, ModelConfig, ParallelConfig
    from loadkit.sources.local import LocalSource
    from loadkit_default.loader import DefaultModelLoader
    from loadkit_models.llama import LlamaForCausalLM

    source = LocalSource(str(folder), LoadConfig())
    model_config = ModelConfig.from_source(source, dtype="bfloat16")
    loader = DefaultModelLoader(LoadConfig(load_format="safetensors"))
    loader.source, loader.parallel = source, ParallelConfig()
    return LoadkitConfig(model_config=model_config), loader, LlamaForCausalLM
