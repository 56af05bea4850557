"""What was saved as ranks hold it: its read step against reading the files into one buffer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.dense import reported
from benchmarks.generate import CACHE, TOY, written

__all__ = ["loadkit", "safetensors", "save", "saved", "variants"]

Go = Callable[[], Any]


def save(folder: str, to: str) -> None:
    """Save a checkpoint in the runtime's layout."""
    import loadkit
    from loadkit.config import LoadConfig

    model = loadkit.load_model(folder, load_config=LoadConfig(use_tqdm_on_load=False))
    loadkit.save(model, to, save_format="sharded_state")


def saved(folder: Path) -> Path:
    """Where it lies; saved in a process of its own if it is not there."""
    import subprocess

    to = CACHE / f"{folder.name}-sharded"
    if not (to / "loadkit_manifest.json").is_file():
        command = [sys.executable, "-m", "benchmarks.presharded", str(folder), str(to)]
        tests = str(Path(__file__).resolve().parent.parent)
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": tests})
    return to


def loadkit(folder: str) -> Go:
    """``loadkit.load`` of rank files at the topology they were saved at."""
    package: Any = __import__("loadkit")
    from loadkit.config import LoadConfig

    config = LoadConfig(use_tqdm_on_load=False)
    package.load(str(saved(written(TOY))), load_config=config)
    kept: list[Any] = []

    def go() -> tuple[Any, dict[str, Any]]:
        kept.append(package.load(folder, load_config=config))
        return kept[-1].model, reported(kept[-1].report)

    return go


def one_buffer(folder: str) -> Go:
    """The files into one buffer of fresh memory; its time is its read step."""
    from benchmarks.dense import floor

    go = floor(folder, 1, "fresh")

    def timed() -> tuple[Any, dict[str, Any]]:
        import time

        start = time.perf_counter()
        result = go()
        return result, {"read_s": time.perf_counter() - start}

    return timed


def safetensors(folder: str) -> Go:
    """``load_file`` of every file, assigned to the same model on meta: its tensors are mapped."""
    _assigned(saved(written(TOY)))
    return lambda: _assigned(Path(folder))


def _assigned(folder: Path) -> Any:
    from safetensors.torch import load_file

    from benchmarks.dense import real_model
    from loadkit.build import parameters_on_meta

    with parameters_on_meta():
        model = real_model(folder)
    state: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= load_file(str(path))
    found = model.load_state_dict(state, strict=False, assign=True)
    if found.unexpected_keys or set(found.missing_keys) - {"lm_head.weight"}:
        raise RuntimeError(f"other names: {found}")
    model.lm_head.weight = model.model.embed_tokens.weight  # tied
    return model


def variants(folder: Path) -> list[dict[str, Any]]:
    """Every variant, as keyword arguments of ``Variant``."""
    at = {"folder": os.fspath(folder)}
    return [
        {"name": "reading into one buffer", "call": "presharded:one_buffer", "args": at},
        {"name": "safetensors, assigned", "call": "presharded:safetensors", "args": at},
        {"name": "loadkit, sharded_state", "call": "presharded:loadkit", "args": at},
    ]


if __name__ == "__main__":
    save(sys.argv[1], sys.argv[2])
