"""GGUF files of plain numbers keep the whole contract, files of blocks within their steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter

from loadkit.testing import LoaderContract
from loadkit_gguf.architectures import GGUF_ARCHITECTURES
from loadkit_gguf.config_keys import config_keys
from loadkit_gguf.ggml_types import GGML_TYPES
from loadkit_gguf.stored import Piece, stored_tensor
from loadkit_gguf.writer import StoredTensor, write_file

_TYPES = {kind.name: kind for kind in GGML_TYPES.values()}


class TestPlain(LoaderContract):
    """Written by gguf-py."""

    load_format = "gguf"
    follows_quantization = False  # what a config.json beside the file says of other files
    quantization_by_request = True

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        hf_config = _Config(config)
        writer = GGUFWriter(folder / "model.gguf", "llama")
        for key, value in config_keys("llama", hf_config.values).items():
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(key, value)
        for name, tensor in weights.items():
            stored = _stored(name, tensor, hf_config)
            writer.add_tensor(stored[0], stored[1].float().contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


class TestBlocks(LoaderContract):
    """Q8_0, by the exporter's own writer."""

    load_format = "gguf"
    follows_quantization = False
    quantization_by_request = True
    read_ahead = 512 << 10
    lossless = False
    bound = 0.5 / 127 + 2**-11  # half a step, and the scale rounded to F16

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        hf_config = _Config(config)
        tensors: list[StoredTensor] = []
        for name, tensor in weights.items():
            stored, value = _stored(name, tensor, hf_config)
            kind = _TYPES["Q8_0" if tensor.dim() > 1 else "F32"]
            tensors.append(stored_tensor(stored, [Piece(value, None, lambda t: t)], False, kind))
        keys = {"general.architecture": "llama", **config_keys("llama", hf_config.values)}
        with (folder / "model.gguf").open("wb") as file:
            write_file(_Sink(file), keys, tensors)


class _Sink:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any, tensor: str | None = None) -> None:
        self._file.write(data)


class _Config:
    """A config.json as attributes."""

    def __init__(self, config: dict[str, Any]) -> None:
        from loadkit.config import HFConfig

        self.values = HFConfig.from_dict(json.loads(json.dumps(config)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)


def _stored(name: str, tensor: torch.Tensor, config: Any) -> tuple[str, torch.Tensor]:
    """A tensor as converters store it; one without a place in GGUF keeps its name."""
    mapper: Any = GGUF_ARCHITECTURES["llama"].mapper
    return mapper.gguf_name(name) or name, mapper.undo(name, tensor, config)
