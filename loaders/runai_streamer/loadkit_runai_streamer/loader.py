"""``RunaiModelStreamerLoader``: safetensors, read by the Run:ai model streamer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from loadkit.options import OptionSpec
from loadkit.reader_loader import ReaderLoader
from loadkit.streamer_options import STREAMER_OPTIONS, for_streamer

__all__ = ["RunaiModelStreamerLoader"]


class RunaiModelStreamerLoader(ReaderLoader):
    """The load format ``runai_streamer``. Parameters own their memory."""

    reader: ClassVar[str] = "runai"
    options: ClassVar[Mapping[str, OptionSpec]] = STREAMER_OPTIONS

    def reader_options(self) -> Mapping[str, Any]:
        return for_streamer(self.extra_config)
