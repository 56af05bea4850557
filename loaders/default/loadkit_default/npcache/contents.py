"""``weight_names.json``: which tensor lies where in the cache's numpy files.

Names of tensors are data and never paths: the files have names of the cache's own making.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from loadkit.errors import FormatError
from loadkit.file_checks import show
from loadkit.json_safe import parse_json
from loadkit.safetensors_format import MAX_DIM, MAX_DIMS, MAX_NAME_BYTES, MAX_TENSORS
from loadkit.tensor_info import DTYPES, bits_of

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["NAMES", "SCHEMA", "CachedTensor", "file_name", "read_names", "spell_names"]

SCHEMA = "loadkit.npcache/1"
NAMES = "weight_names.json"
MAX_NAMES_BYTES = 100_000_000
_FILE = re.compile(r"npcache-[0-9a-f]{16}-\d{5}\.npy")


class CachedTensor(NamedTuple):
    """One tensor: ``offset`` in bytes of the file's array; dtype as headers name it."""

    name: str
    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements; ``shape`` counts as torch does (F4: pairs)."""
        return math.prod(self.shape) * max(bits_of(self.dtype) // 8, 1)


def file_name(key: str, number: int) -> str:
    """What a numpy file of a cache is called."""
    return f"npcache-{key[:16]}-{number:05d}.npy"


def spell_names(key: str, tensors: Iterable[CachedTensor], skipped: dict[str, str]) -> bytes:
    """The file's bytes."""
    content = {
        "schema": SCHEMA,
        "key": key,
        "tensors": [[*each[:4], list(each.shape)] for each in tensors],
        "skipped": skipped,
    }
    return json.dumps(content).encode()


def read_names(file: File, key: str) -> tuple[list[CachedTensor], dict[str, str]]:
    """The tensors in order, and what the checkpoint held beside them.

    Raises:
        FormatError: E_NAME, a name of a tensor or file is none, is there twice, or there are more
            than a million; E_LAYOUT, a place, dtype or shape is none, or two tensors overlap;
            E_JSON.
        ReadFailure: the file could not be read.
    """
    if file.size > MAX_NAMES_BYTES:
        _wrong(file, f"has {file.size} bytes; the limit is {MAX_NAMES_BYTES}")
    data = file.read(0, file.size)
    if data.count(b"[") > MAX_TENSORS * 2 + 2:
        _wrong(file, f"names more than {MAX_TENSORS} tensors")
    found = parse_json(data, file=file.name, max_bytes=MAX_NAMES_BYTES)
    good = isinstance(found, dict) and found.get("schema") == SCHEMA and found.get("key") == key
    if not good or not isinstance(found.get("tensors"), list):
        _wrong(file, f"is no {SCHEMA} of this checkpoint")
    skipped = found.get("skipped")
    if not isinstance(skipped, dict) or not all(isinstance(v, str) for v in skipped.values()):
        _wrong(file, "does not say what was skipped")
    tensors = [_entry(file, entry) for entry in found["tensors"]]
    if len({tensor.name for tensor in tensors}) != len(tensors):
        _wrong(file, "names a tensor twice")
    ends: dict[str, int] = {}
    for tensor in sorted(tensors, key=lambda each: (each.file, each.offset, each.nbytes)):
        if tensor.offset < ends.get(tensor.file, 0):
            _wrong(file, f"lets tensor {show(tensor.name)} overlap another one", "E_LAYOUT", tensor)
        ends[tensor.file] = tensor.offset + tensor.nbytes
    return tensors, skipped


def _entry(file: File, entry: Any) -> CachedTensor:
    if not isinstance(entry, list) or len(entry) != 5:
        _wrong(file, f"has an entry {show(entry)[:80]} that is none")
    name, place, offset, dtype, shape = entry
    if not isinstance(name, str) or not 0 < len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES:
        _wrong(file, f"names a tensor {show(name)[:80]}")
    if any(unicodedata.category(char) == "Cc" for char in name):
        _wrong(file, f"names a tensor {show(name)}: it holds control characters")
    if not isinstance(place, str) or not _FILE.fullmatch(place):
        _wrong(file, f"names a file {show(place)[:80]} that is none of a cache")
    sizes: list[Any] = shape if isinstance(shape, list) else [None]
    if (
        type(offset) is not int
        or not 0 <= offset < 2**63
        or dtype not in {*DTYPES, "C128"}
        or len(sizes) > MAX_DIMS
        or any(type(size) is not int or not 0 <= size <= MAX_DIM for size in sizes)
    ):
        _wrong(file, f"says of tensor {show(name)} what cannot be", "E_LAYOUT")
    return CachedTensor(name, place, offset, dtype, tuple(sizes))


def _wrong(
    file: File, problem: str, code: str = "E_NAME", tensor: CachedTensor | None = None
) -> NoReturn:
    raise FormatError(
        f"{show(file.name)} {problem}",
        code=code,
        file=file.name,
        tensor=None if tensor is None else tensor.name,
        hint="remove the cache; the next load makes it again",
    )
