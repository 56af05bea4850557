"""``modelexpress``: safetensors files that a ModelExpress server sends."""

from __future__ import annotations

import atexit
import hashlib
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from contract.formats.base import MatrixFormat
from loadkit.config import LoadConfig
from loadkit.testing import write_checkpoint

if TYPE_CHECKING:
    from helpers.model_express import Hub

_running: list[tuple[Hub, str]] = []


def running() -> tuple[Hub, str]:
    """The server of all tests, which starts when the first one asks, and a folder for a cache."""
    if not _running:
        from helpers.model_express import model_express

        stack = ExitStack()
        folder = stack.enter_context(TemporaryDirectory(prefix="modelexpress-"))
        _running.append((stack.enter_context(model_express()), folder))
        atexit.register(stack.close)
    return _running[0]


def served(folder: Path) -> str:
    """The address of a folder on the server."""
    name = f"org/m{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    server, _ = running()
    server.models[name] = folder
    return f"mx://{server.address}/{name}"


class ModelExpress(MatrixFormat):
    load_format = "modelexpress"
    distribution = "loadkit-modelexpress"
    zero_copy = True  # once the files are here
    remote_plan = True

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        write_checkpoint(folder, weights)

    def source(self, folder: Path) -> str | Path:
        return served(folder)

    def load_config(self, **changes: Any) -> LoadConfig:
        return super().load_config(**{"cache_dir": running()[1], **changes})


FORMATS = [ModelExpress()]
