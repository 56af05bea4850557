"""The keys of one architecture in a GGUF header, read with their types checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from loadkit.errors import ConfigFileError
from loadkit.file_checks import show

if TYPE_CHECKING:
    from loadkit_gguf.tensor_entries import GGUFTensor

__all__ = ["REQUIRED", "Keys"]

MAX_COUNT = 1 << 40  # of anything: context lengths are the largest


class _Required:
    """The mark of a key without which there is no config."""


REQUIRED = _Required()
Default = _Required | int | None


class Keys:
    """Keys by their names without the architecture: ``count("block_count")``.

    A required key that is missing reads as 0 and is noted; ``check`` raises for all of them.

    Attributes:
        tensors: every tensor of all parts, by name.
        missing: required keys that are not there, by their full names.
    """

    def __init__(
        self,
        architecture: str,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, GGUFTensor],
        file: str,
    ) -> None:
        self.architecture = architecture
        self.metadata = metadata
        self.tensors = tensors
        self.file = file
        self.missing: list[str] = []

    def check(self) -> None:
        """Raise if a required key was missing.

        Raises:
            ConfigFileError: E_CONFIG, names all of them.
        """
        if self.missing:
            missing = list(dict.fromkeys(self.missing))
            raise ConfigFileError(
                f"{show(self.file)} lacks {', '.join(map(show, missing))}, which the config of a "
                f"{show(self.architecture)} model needs",
                file=self.file,
                detail={"missing": missing},
                hint="put the model's config.json beside the file",
            )

    def get(self, name: str) -> Any:
        """The raw value, or None."""
        return self.metadata.get(f"{self.architecture}.{name}")

    def count(self, name: str, default: Default = REQUIRED) -> Any:
        """A whole number; a list of one number per layer is that number if all are equal.

        Raises:
            ConfigFileError: it is something else.
        """
        value = self.get(name)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                self.bad(name, "differs from layer to layer", "one number for all layers")
            value = int(value[0])
        if value is None:
            return self._default(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
            self.bad(name, f"is {_shown(value)}", f"a whole number up to {MAX_COUNT}")
        return value

    def real(self, name: str, default: float | None = None) -> Any:
        """A finite number; a float32 as the shortest decimal that means it.

        Raises:
            ConfigFileError: it is something else.
        """
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.bad(name, f"is {_shown(value)}", "a number")
        if not math.isfinite(value):
            self.bad(name, f"is {value}", "a finite number")
        short = np.float32(value)
        return float(str(short)) if float(short) == value else float(value)

    def text(self, name: str) -> str | None:
        """A string, or None.

        Raises:
            ConfigFileError: it is something else.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            self.bad(name, f"is {_shown(value)}", "a string")
        return value

    def layer_kinds(self, name: str, default: int) -> list[str]:
        """``sliding_attention`` or ``full_attention`` of each layer.

        The key is a list (true: sliding), or a number n: every n-th layer is full.
        """
        layers, value = self.count("block_count"), self.get(name)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biu":
            if len(value) != layers:
                self.bad(name, f"has {len(value)} entries", f"one for each of {layers} layers")
            sliding: Sequence[bool] = [bool(item) for item in value]
        else:
            every = self.count(name, default) or 1
            sliding = [(index + 1) % every != 0 for index in range(min(layers, 1 << 16))]
        return ["sliding_attention" if item else "full_attention" for item in sliding]

    def bad(self, name: str, found: str, accepted: str) -> NoReturn:
        """Raise the error of a key whose value cannot be."""
        key = f"{self.architecture}.{name}"
        raise ConfigFileError(
            f"{show(self.file)}: {show(key)} {found}; accepted: {accepted}",
            file=self.file,
            detail={"key": key},
        )

    def _default(self, name: str, default: Default) -> Any:
        if not isinstance(default, _Required):
            return default
        self.missing.append(f"{self.architecture}.{name}")
        return 0


def _shown(value: object) -> str:
    if isinstance(value, str):
        return show(value)
    if isinstance(value, (bool, int, float)):
        return str(value)
    return f"an array of {len(value)}" if hasattr(value, "__len__") else type(value).__name__
