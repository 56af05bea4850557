"""What others make of the same files. Each function prepares, and returns what is measured.

Every peer is called as its own documentation says, and keeps what it loaded.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.generate import TOY, written

__all__ = ["accelerate", "fastsafetensors", "runai", "safetensors_pread", "tensorizer"]

Go = Callable[[], Any]


def accelerate(folder: str, model_class: str = "LlamaForCausalLM") -> Go:
    """transformers with ``device_map``: accelerate places the weights."""
    library: Any = importlib.import_module("transformers")
    library.utils.logging.disable_progress_bar()
    made = getattr(library, model_class)
    options = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}}
    if model_class == "LlamaForCausalLM":
        made.from_pretrained(str(written(TOY)), **options)
    return lambda: made.from_pretrained(folder, **options)


def safetensors_pread(folder: str) -> Go:
    """``load_file`` with the backend that reads into memory of its own."""
    from safetensors.torch import load_file

    def load(where: Path) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for path in sorted(where.glob("*.safetensors")):
            tensors += load_file(str(path), backend="pread").values()
        return tensors

    load(written(TOY))
    return lambda: load(Path(folder))


def runai(folder: str) -> Go:
    """The Run:ai model streamer; the tensors are kept, so they own their memory."""
    library: Any = importlib.import_module("runai_model_streamer")

    def load(where: Path) -> list[torch.Tensor]:
        files = [str(path) for path in sorted(where.glob("*.safetensors"))]
        with library.SafetensorsStreamer() as streamer:
            streamer.stream_files(files, device="cpu", owned=True)
            return [tensor for _, tensor in streamer.get_tensors()]

    load(written(TOY))
    return lambda: load(Path(folder))


def fastsafetensors(folder: str, direct: bool = True) -> Go:
    """Without GPU direct storage, whole files into buffers, tensors are views of them.

    ``direct``: past the page cache, as it does where it is not told otherwise.
    """
    os.environ["FASTSAFETENSORS_ODIRECT"] = str(int(direct))
    library: Any = importlib.import_module("fastsafetensors")
    kept: list[Any] = []

    def load(where: Path) -> list[torch.Tensor]:
        loader = library.SafeTensorsFileLoader(
            None, device="cpu", nogds=True, max_threads=16, bbuf_size_kb=16384
        )
        loader.add_filenames({0: [str(path) for path in sorted(where.glob("*.safetensors"))]})
        files = loader.copy_files_to_device()
        kept.append((loader, files))
        return [files.get_tensor(name) for name in files.key_to_rank_lidx]

    load(written(TOY))
    return lambda: load(Path(folder))


def tensorizer(path: str, readers: int = 2) -> Go:
    """Its own file format, written before by ``serialize``."""
    library: Any = importlib.import_module("tensorizer")

    def go() -> list[torch.Tensor]:
        return list(library.TensorDeserializer(path, device="cpu", num_readers=readers).values())

    return go


def serialize(folder: str, path: str) -> None:
    """Write a checkpoint's tensors in tensorizer's format."""
    from safetensors.torch import load_file

    library: Any = importlib.import_module("tensorizer")
    state: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        state |= load_file(str(file))
    serializer = library.TensorSerializer(path)
    serializer.write_state_dict(state)
    serializer.close()


if __name__ == "__main__":
    serialize(sys.argv[1], sys.argv[2])
