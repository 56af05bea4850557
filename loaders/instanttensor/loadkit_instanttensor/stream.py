"""The library as the reader needs it: some tensors of one file, in file order, on a device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from loadkit.errors import ReadError, UsageError
from loadkit.readers.library import library
from loadkit.text import printable
from loadkit_instanttensor.tensors import Located

__all__ = ["InstantTensor", "require_cuda"]


def require_cuda() -> None:
    """Refuse to go on without CUDA: the library is of no use then, and may fail at its import.

    Raises:
        UsageError: there is none.
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "InstantTensor needs CUDA: torch.cuda.is_available() is False",
            detail={"needs": "CUDA"},
            hint="load_format='safetensors' reads the same files; or reader='auto'",
        )


class InstantTensor:
    """Opens files by the library's ``safe_open``.

    Args:
        options: its keywords; those that are None are left to it.

    Raises:
        UsageError: there is no CUDA.
        NotInstalledError: the package is not installed.
        PluginError: it cannot be imported.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        require_cuda()
        self._library: Any = library(
            "instanttensor", package="instanttensor", extra="instanttensor"
        )
        self._options = {name: value for name, value in options.items() if value is not None}
        name = self._options.get("backend")
        if name is not None:
            kinds = self._library.BackendPolicy if name == "BUFFERED" else self._library.Backend
            self._options["backend"] = kinds[name]

    @contextmanager
    def tensors(
        self, wanted: Sequence[Located], device: torch.device
    ) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Name and bytes (uint8, on the device) of each; bytes are good until the next is taken.

        Args:
            wanted: tensors of one file, in file order.
            device: a CUDA device.

        Raises:
            ReadError: the library failed.
        """
        first = wanted[0]
        try:
            with warnings.catch_warnings():
                # It warns that views are overwritten: they are used before the next one comes.
                warnings.simplefilter("ignore", UserWarning)
                opened = self._library.safe_open(
                    [first.file.path],
                    framework="pt",
                    device=device,
                    copy=False,
                    tensor_filter=[one.name for one in wanted],
                    tensor_name_match_mode="exact",
                    **self._options,
                )
        except Exception as error:
            raise _failed(first, error) from error
        with torch.cuda.device(device), opened as file:
            yield self._each(file, wanted)

    @staticmethod
    def finish(device: torch.device) -> None:
        """Wait for what was copied on a device."""
        torch.cuda.current_stream(device).synchronize()

    def _each(self, file: Any, wanted: Sequence[Located]) -> Iterator[tuple[str, torch.Tensor]]:
        given = iter(file.tensors())
        for one in wanted:
            try:
                name, tensor = next(given)
            except Exception as error:  # StopIteration too: it gave fewer than it was asked for
                raise _failed(one, error) from error
            flat = tensor.reshape(-1).view(torch.uint8)
            if name != one.name or flat.numel() != one.end - one.start:
                raise _failed(one, ValueError(f"it gave {flat.numel()} bytes of {name!r}"))
            yield name, flat


def _failed(one: Located, error: Exception) -> ReadError:
    said = str(error) or type(error).__name__
    return ReadError(
        f"reading tensor {printable(one.name)} from {printable(one.file.name)} at byte {one.start} "
        f"failed: InstantTensor says: {printable(said)}",
        file=one.file.name,
        tensor=one.name,
        offset=one.start,
        hint="load again, or name another reader: reader='pread'",
    )
