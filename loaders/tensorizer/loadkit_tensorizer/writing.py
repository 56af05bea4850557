"""One tensorizer file, written by the library into a file that is open already."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.errors import LoadkitError, ModelError, OptionError, PluginError, WriteError
from loadkit.file_checks import show, show_path
from loadkit.manifest import FileEntry, TensorEntry
from loadkit.output_file import write_error
from loadkit.safetensors_writer import entry_of
from loadkit.sources.local_file import LocalFile
from loadkit.tensor_info import DTYPES
from loadkit.text import printable
from loadkit_tensorizer.header import read_index
from loadkit_tensorizer.library import KEY_BYTES, library, read_key
from loadkit_tensorizer.tensor_header import read_tensor_headers

if TYPE_CHECKING:
    import torch

__all__ = ["entry_of_file", "saving_key", "write_file"]

_BATCH = 256 << 20  # bytes of tensors that the library is given at once


def saving_key(path: str | None) -> bytes | None:
    """The key of a key file, which is made where there is none; ranks that race get one key.

    Raises:
        OptionError: what is there is no key.
        WriteError: it cannot be made.
    """
    if path is None:
        return None
    made = Path(path)
    if not made.exists():
        key = os.urandom(KEY_BYTES)
        own = made.with_name(f"{made.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(key)
                    file.flush()
                    os.fsync(file.fileno())
                with suppress(FileExistsError):  # another rank was first
                    os.link(own, made)
            finally:
                own.unlink()
        except OSError as error:
            raise write_error(error, path, "make") from error
    return read_key(path)


def write_file(
    path: Path, name: str, tensors: Iterable[tuple[str, torch.Tensor]], key: bytes | None
) -> None:
    """Write tensors with their hashes, in order.

    The library encrypts a tensor's memory where it lies, and then decrypts it again: what it is
    given is a copy then, so that nobody who uses the model meets encrypted weights.

    Args:
        path: an empty file; it is written, and not made durable.
        name: what it is called in errors.
        tensors: by name; made one batch at a time.
        key: to encrypt them with, or None.

    Raises:
        ModelError: E_DTYPE, E_NAME, or E_LIMIT: more tensors than the library's index holds.
        WriteError: the operating system refused.
        NotInstalledError: the library is missing.
    """
    tensorizer = library()
    with _writing_errors(name):
        secret = None if key is None else tensorizer.EncryptionParams(key)
        with path.open("r+b") as file:  # the library asks for one that can be read, too
            writer = tensorizer.TensorSerializer(file, encryption=secret)
            try:
                for batch in _batches(tensors):
                    if key is not None:
                        batch = {name: tensor.clone() for name, tensor in batch.items()}
                    writer.write_state_dict(batch)
            except BaseException:
                with suppress(Exception):
                    writer.close()
                raise
            writer.close()


def _batches(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    batch: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in tensors:
        _check(name, tensor)
        if batch and held + tensor.nbytes > _BATCH:
            yield batch
            batch, held = {}, 0
        batch[name] = tensor.detach()
        held += tensor.nbytes
    if batch:
        yield batch


def _check(name: str, tensor: torch.Tensor) -> None:
    """Refuse what could not be read back."""
    kind = entry_of(name, tensor).dtype
    if DTYPES[kind][0] < 8:
        raise ModelError(
            f"tensor {show(name)} is {tensor.dtype}: tensorizer files cannot hold that",
            code="E_DTYPE",
            tensor=name,
        )


@contextmanager
def _writing_errors(name: str) -> Iterator[None]:
    try:
        yield
    except LoadkitError:
        raise
    except OSError as error:
        raise write_error(error, name, "write") from error
    except Exception as error:
        if "Metadata overflow" in str(error):
            raise ModelError(
                f"{show(name)}: the model has more tensors than the index of a tensorizer file "
                "holds, which is 256 KiB",
                code="E_LIMIT",
                file=name,
                hint="save it by ranks, or as safetensors",
            ) from error
        raise PluginError(
            f"the tensorizer library cannot write {show(name)}: {type(error).__name__}: "
            f"{printable(error)}",
            file=name,
        ) from error


def entry_of_file(path: Path, name: str, rank: int) -> FileEntry:
    """What the manifest says of a file that was written; its headers are read back, and checked.

    Raises:
        WriteError: it is not what was written.
    """
    file = LocalFile(name, os.path.realpath(path))
    try:
        index = read_index(file)
        read_tensor_headers(index, verify=True)
    except LoadkitError as error:
        raise WriteError(
            f"{show_path(name)} cannot be read back: {error.message}", file=name
        ) from error
    finally:
        file.close()
    tensors = {
        entry.name: TensorEntry(entry.dtype, entry.shape, entry.start) for entry in index.entries
    }
    return FileEntry(file.size, None, rank, tensors)


def refuse_idle(given: dict[str, Any]) -> None:
    """Refuse arguments of ``loadkit.save`` that would do nothing.

    Raises:
        OptionError: names them.
    """
    if given:
        raise OptionError(
            f"save_format 'tensorizer' has no {', '.join(given)}",
            detail={"option": next(iter(given))},
        )
