"""Tensors through the library: of encrypted files, and of URIs. They come as real data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from loadkit.errors import FormatError, OptionError
from loadkit.file_checks import show
from loadkit.tensor_info import torch_dtype
from loadkit_tensorizer.library import library, read_key, reading_errors
from loadkit_tensorizer.streams import CheckedStream, StreamedFile

if TYPE_CHECKING:
    import torch

    from loadkit_tensorizer.entries import Entry, Index

__all__ = ["check_key", "decoded"]

_CHUNK = 64 << 20  # bytes of tensors that the library holds at once


def check_key(index: Index, keyfile: str | None) -> bytes | None:
    """The key that a file needs.

    Raises:
        OptionError: it is encrypted and no key was given, or the other way round.
    """
    name = show(index.file.name)
    if index.encrypted and keyfile is None:
        raise OptionError(
            f"{name} is encrypted, and no key was given",
            file=index.file.name,
            detail={"option": "encryption_keyfile"},
            hint="name the file of its key as encryption_keyfile in model_loader_extra_config",
        )
    if keyfile is None:
        return None
    if not index.encrypted:
        raise OptionError(
            f"{name} is not encrypted, and a key was given",
            file=index.file.name,
            detail={"option": "encryption_keyfile"},
            hint="leave encryption_keyfile out, if this is the file that you mean",
        )
    return read_key(keyfile)


def decoded(index: Index, key: bytes | None, *, verify: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with its numbers, in file order; at most ``_CHUNK`` bytes of them are held here.

    Args:
        index: of the file.
        key: of an encrypted file.
        verify: compare hashes; refuse tensors without one.

    Raises:
        IntegrityError: E_HASH; E_DECRYPT, the key is another one.
        FormatError: a tensor's header breaks a rule.
        ReadFailure: the file, or the way to it.
    """
    tensorizer = library()
    name, remote = index.file.name, isinstance(index.file, StreamedFile)
    with reading_errors(name, remote=remote):
        secret = None if key is None else tensorizer.DecryptionParams.from_key(key)
    for chunk in _chunks(index.entries):
        names = {entry.path: entry for entry in chunk}
        with reading_errors(name, remote=remote):
            reader = tensorizer.TensorDeserializer(
                CheckedStream(index, verify=verify),
                device="cpu",
                filter_func=names.__contains__,
                lazy_load=True,
                num_readers=1,
                verify_hash=verify,
                encryption=secret,
            )
        with closing(reader):
            tensors = reader.read_tensors()
            with closing(tensors):
                for _ in chunk:
                    with reading_errors(name, remote=remote):
                        _, _, stored, tensor = next(tensors)
                    entry = names[stored]
                    yield entry.name, _checked(index, entry, tensor.detach())
                    del tensor


def _checked(index: Index, entry: Entry, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if it is what the index says."""
    if tuple(tensor.shape) == entry.shape and tensor.dtype == torch_dtype(entry.dtype):
        return tensor
    raise FormatError(
        f"{show(index.file.name)}: the library gives {show(entry.name)} as {tensor.dtype} "
        f"{list(tensor.shape)}; the index says {entry.dtype} {list(entry.shape)}",
        code="E_LAYOUT",
        file=index.file.name,
        tensor=entry.name,
        offset=entry.offset,
    )


def _chunks(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    chunk: list[Entry] = []
    held = 0
    for entry in entries:
        if chunk and held + entry.full_bytes > _CHUNK:
            yield chunk
            chunk, held = [], 0
        chunk.append(entry)
        held += entry.full_bytes
    if chunk:
        yield chunk
