"""``FastSafetensorsLoader``: safetensors, read by fastsafetensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from loadkit.options import OptionSpec
from loadkit.reader_loader import ReaderLoader
from loadkit_fastsafetensors.options import OPTIONS

__all__ = ["FastSafetensorsLoader"]


class FastSafetensorsLoader(ReaderLoader):
    """The load format ``fastsafetensors``. Parameters own their memory."""

    reader: ClassVar[str] = "fastsafetensors"
    options: ClassVar[Mapping[str, OptionSpec]] = OPTIONS
