"""``InstantTensorLoader``: safetensors, read by InstantTensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from loadkit.options import OptionSpec
from loadkit.reader_loader import ReaderLoader
from loadkit_instanttensor.options import OPTIONS

__all__ = ["InstantTensorLoader"]


class InstantTensorLoader(ReaderLoader):
    """The load format ``instanttensor``. Whole tensors pass over a CUDA device."""

    reader: ClassVar[str] = "instanttensor"
    options: ClassVar[Mapping[str, OptionSpec]] = OPTIONS
