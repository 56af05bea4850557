"""model.safetensors.index.json: read as untrusted data, and held against the files.

Only ``weight_map`` is used. ``metadata.total_size`` is often wrong and never read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

from loadkit.errors import IndexFileError, PathError
from loadkit.file_checks import show
from loadkit.json_safe import parse_json
from loadkit.sources.paths import check_name

if TYPE_CHECKING:
    from loadkit.sources.base import File
    from loadkit.tensor_info import TensorInfo

__all__ = ["MAX_INDEX_BYTES", "Header", "index_problems", "read_index", "report"]

MAX_INDEX_BYTES = 100_000_000
MAX_ENTRIES = 1_000_000  # tensors, as in a header
_MAX_BRACKETS = 10_000
_SHOWN = 10  # problems in a message; all are in ``detail``
_HINT = "fix or remove the index, or set ignore_index=true to read the files that are there"


class Header(Protocol):
    """What a file's header says lies in it, whatever its format."""

    @property
    def file(self) -> File:
        """The file."""

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """In file order."""


def read_index(file: File, patterns: Sequence[str]) -> dict[str, str]:
    """The weight map: ``{tensor: file}``.

    Args:
        file: the open index.
        patterns: what its files may be called (``*.safetensors``).

    Raises:
        IndexFileError: too large, not JSON, a key twice, no weight map, or names of files that
            are no plain names of weight files; all of the last are listed.
    """
    if file.size > MAX_INDEX_BYTES:
        raise _broken(file.name, f"is {file.size} bytes; the limit is {MAX_INDEX_BYTES}")
    data = file.read(0, file.size)
    if data.count(b",") > MAX_ENTRIES or data.count(b"[") + data.count(b"{") > _MAX_BRACKETS:
        raise _broken(file.name, f"lists more than {MAX_ENTRIES} tensors, or more than tensors")
    content = parse_json(data, file=file.name, max_bytes=MAX_INDEX_BYTES, error=IndexFileError)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise _broken(file.name, "has no object 'weight_map'")
    if not weight_map:
        raise _broken(file.name, "names no tensors")
    problems = _name_problems(weight_map, patterns)
    if problems:
        raise report(file.name, problems)
    return weight_map


def _name_problems(weight_map: Mapping[str, Any], patterns: Sequence[str]) -> list[str]:
    """What is wrong with the files' names, one line for each wrong name."""
    first: dict[Any, str] = {}
    problems: list[str] = []
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            problems.append(f"tensor {show(tensor)}: the file's name is no string but {show(name)}")
        else:
            first.setdefault(name, tensor)
    for name, tensor in first.items():
        try:
            check_name(name)
        except PathError as error:
            problems.append(f"tensor {show(tensor)}: {error.message}")
            continue
        if not any(fnmatchcase(name.rpartition("/")[2], pattern) for pattern in patterns):
            wanted = " or ".join(patterns)
            problems.append(f"tensor {show(tensor)}: file {show(name)} is no {wanted}")
    return problems


def index_problems(index: Mapping[str, str], headers: Iterable[Header]) -> list[str]:
    """Where the index and the files' headers disagree, one line for each tensor.

    A second copy of a listed tensor in another file is no problem: the index says which counts.
    """
    holders: dict[str, list[str]] = {}
    for header in headers:
        for info in header.tensors:
            holders.setdefault(info.name, []).append(header.file.name)
    problems: list[str] = []
    for tensor, file in index.items():
        found = holders.get(tensor)
        if found is None:
            problems.append(f"tensor {show(tensor)} is listed in {show(file)}; no file holds it")
        elif file not in found:
            problems.append(
                f"tensor {show(tensor)} is listed in {show(file)}; {show(found[0])} holds it"
            )
    problems += [
        f"tensor {show(tensor)} is in {show(files[0])}; the index does not list it"
        for tensor, files in holders.items()
        if tensor not in index
    ]
    return problems


def report(index_file: str, problems: Sequence[str], hint: str = _HINT) -> IndexFileError:
    """One error that lists all problems (ten are shown, all are in ``detail``)."""
    shown = "; ".join(problems[:_SHOWN])
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return IndexFileError(
        f"{show(index_file)} does not describe the files: {shown}{more}",
        file=index_file,
        detail={"problems": list(problems), "count": len(problems)},
        hint=hint,
    )


def _broken(file: str, problem: str) -> IndexFileError:
    return IndexFileError(f"{show(file)} {problem}", file=file, hint=_HINT)
