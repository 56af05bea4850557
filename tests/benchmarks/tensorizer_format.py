"""Reading a tensorizer file here against the library alone: ``tensorizer_format.py [--mib N]``.

Every variant ends with the tensors in memory of their own, copied into a model's parameters, which
is what a load gives. The file is warm. By itself it prints one table; ``run_all.py`` races it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmarks.generate import CACHE
from benchmarks.harness import Variant

Go = Callable[[], Any]

ROWS, WIDTH = 2048, 1024  # of one tensor: 4 MiB in bfloat16


def write_file(path: Path, mib: int) -> Path:
    """A file of as many mebibytes, if it is not there."""
    from tensorizer import TensorSerializer

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(0)
        module = _empty(max(1, mib // 4))
        for param in module.parameters():
            param.data.copy_(torch.randn(ROWS, WIDTH, generator=generator))
        writer = TensorSerializer(path)
        writer.write_module(module)
        writer.close()
    return path


def _module(path: str) -> nn.Module:
    """A module whose parameters the file's tensors are, not initialised."""
    from loadkit.sources.local_file import LocalFile
    from loadkit_tensorizer.header import read_index

    file = LocalFile(Path(path).name, path)
    count = len(read_index(file).entries)
    file.close()
    return _empty(count)


def _empty(count: int) -> nn.Module:
    module = nn.Module()
    module.layers = nn.ModuleList(nn.Module() for _ in range(count))
    for layer in module.layers:
        layer.weight = nn.Parameter(torch.empty(ROWS, WIDTH, dtype=torch.bfloat16))
    return module


def _toy() -> str:
    """A file of one tensor: a load of it does the lazy imports, which are not measured."""
    return str(write_file(CACHE / "toy.tensors", 4))


def library(path: str, verify: bool) -> Go:
    """``TensorDeserializer.load_into_module``: it replaces parameters by its own tensors."""
    from tensorizer import TensorDeserializer

    def load(where: str) -> nn.Module:
        module = _module(where)
        with TensorDeserializer(where, device="cpu", lazy_load=True, verify_hash=verify) as reader:
            reader.load_into_module(module)
        return module

    load(_toy())
    return lambda: load(path)


def ours(path: str, verify: bool) -> Go:
    """``loadkit.load_into``, memory owned."""
    import loadkit
    from loadkit.config import LoadConfig

    config = LoadConfig(
        load_format="tensorizer",
        alias="never",
        use_tqdm_on_load=False,
        model_loader_extra_config={"verify_hash": verify},
    )

    def load(where: str) -> nn.Module:
        module = _module(where)
        loadkit.load_into(module, where, load_config=config)
        return module

    load(_toy())
    return lambda: load(path)


def variants(path: Path) -> list[Variant]:
    """The library and loadkit, with hashes and without."""
    at = {"folder": str(path.parent), "pattern": path.name}
    found = [Variant("floor: one buffer, over and over", "dense:floor", at)]
    for verify, word in ((False, "no hashes"), (True, "hashes")):
        args = {"path": str(path), "verify": verify}
        for name, call in (("tensorizer", "library"), ("loadkit", "ours")):
            needs = ("tensorizer",)
            found.append(Variant(f"{name}, {word}", f"tensorizer_format:{call}", args, needs))
    return found


def main() -> None:
    """Race them in this process; seconds are the best of three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    mib = parser.parse_args().mib
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_file(Path(folder) / "model.tensors", mib))
        for verify in (False, True):
            took = {}
            for name, make in (("tensorizer", library), ("loadkit", ours)):
                go = make(path, verify)
                took[name] = min(_seconds(go) for _ in range(3))
            told = ", ".join(f"{n} {s:.3f} s ({mib / 1024 / s:.2f} GiB/s)" for n, s in took.items())
            ratio = took["loadkit"] / took["tensorizer"]
            print(f"verify_hash={verify}: {told}; loadkit / tensorizer {ratio:.2f}")


def _seconds(go: Go) -> float:
    begin = time.perf_counter()
    go()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
