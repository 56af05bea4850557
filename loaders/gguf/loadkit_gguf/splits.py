"""The files of one GGUF model: one file, or the parts that ``llama-gguf-split`` makes of it.

Parts are named ``STEM-00001-of-00003.gguf`` and say in their keys which of how many they are; only
the first has the model's own keys. Every part is checked before anything is made of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loadkit.detect import kind_of, no_weights
from loadkit.errors import FormatError, LoadkitError, NoWeightsError, ReadError
from loadkit.file_checks import show
from loadkit.file_patterns import first_fit
from loadkit_gguf.header import GGUFHeader, read_gguf_header

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.sources.base import Source

__all__ = ["PATTERN", "GGUFFiles", "find_first_file", "read_parts"]

PATTERN = "*.gguf"
MAX_PARTS = 65_535
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SHOWN = 10  # names in a message
_LOOKED_FOR = 32  # missing parts that are looked for by opening them

GGUFFiles = tuple[str, dict[str, str]]
"""The first file's name, and every other weight file of the root with why it is not read."""


def find_first_file(source: Source, load_config: LoadConfig) -> GGUFFiles:
    """The file, or the first part, that holds the model.

    Raises:
        NoWeightsError: there is no ``*.gguf``, or there are several models.
        FormatError: E_SPLIT, the first part of a split file is missing.
    """
    single = getattr(source, "single", None)
    if isinstance(single, str):
        part = _PART.fullmatch(single)
        return (_name(part["stem"], 1, int(part["count"])) if part else single), {}
    patterns = load_config.allow_patterns_overrides or (PATTERN,)
    listing = source.list()
    names, skipped = [], {}
    for info in listing:
        if "/" in info.name or first_fit(info.name, patterns) is None:
            if kind_of(info.name) is not None:
                skipped[info.name] = "not of this load format"
        elif first_fit(info.name, load_config.ignore_patterns) is not None:
            skipped[info.name] = "ignore_patterns has it"
        elif info.name.startswith("mmproj"):
            skipped[info.name] = "a projector of another modality, not the model"
        else:
            names.append(info.name)
    models: dict[str, str] = {}
    for name in names:
        part = _PART.fullmatch(name)
        if part is None:
            models[name] = name
        else:
            first = _name(part["stem"], 1, int(part["count"]))
            models[first] = first
    if not models:
        raise no_weights(listing, "gguf", patterns)
    if len(models) > 1:
        shown = ", ".join(map(show, sorted(models)[:_SHOWN]))
        raise NoWeightsError(
            f"{show(source.uri)} holds {len(models)} GGUF models: {shown}",
            code="E_AMBIGUOUS",
            detail={"files": sorted(models)},
            hint="name the file itself as the source",
        )
    return next(iter(models)), skipped


def read_parts(source: Source, first: str) -> list[GGUFHeader]:
    """The headers of a model's files, in order, checked against one another.

    Args:
        source: the open source.
        first: the file, or the first part of a split one.

    Raises:
        FormatError: E_SPLIT, a part is missing, there twice, or of another model; names the file.
            Otherwise what ``read_gguf_header`` raises.
    """
    named = _PART.fullmatch(first)
    try:
        header = read_gguf_header(source.open(first))
    except ReadError as error:
        if named is None or error.errno is None:
            raise
        raise _missing(first, [first], int(named["count"])) from error
    count = _number(header, "split.count", 0)
    if named is None:
        if count > 1:
            raise _wrong(
                first,
                f"it says that it is part {_number(header, 'split.no', 0) + 1} of {count}, and its "
                "name does not say where the others are",
                hint=f"name it like {_name('model', 1, count)}, as llama-gguf-split does",
            )
        return [header]
    if count != int(named["count"]):
        raise _wrong(first, f"its name says {int(named['count'])} parts and its keys say {count}")
    _check_part(header, 0, count)
    names = [_name(named["stem"], number, count) for number in range(1, count + 1)]
    missing = _absent(source, names)
    if missing:
        raise _missing(first, missing, count)
    parts = [header]
    for number, name in enumerate(names[1:], start=1):
        part = read_gguf_header(source.open(name))
        _check_part(part, number, count)
        _check_same_model(header, part)
        parts.append(part)
    _check_tensors(parts)
    return parts


def _name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def _absent(source: Source, names: Sequence[str]) -> list[str]:
    """The parts that are not there."""
    if getattr(source, "single", None) is None:
        present = {info.name for info in source.list()}
        return [name for name in names if name not in present]
    missing = []
    for name in names:  # a single file was named: its listing does not show its neighbours
        try:
            source.open(name)
        except LoadkitError:
            missing.append(name)
            if len(missing) == _LOOKED_FOR:
                break
    return missing


def _check_part(header: GGUFHeader, number: int, count: int) -> None:
    """A part is the one that its name says."""
    name = header.file.name
    found, of = _number(header, "split.no", None), _number(header, "split.count", 0)
    if of != count:
        raise _wrong(
            name, f"its keys say {of} parts, the first file's say {count}: of another model"
        )
    if found != number:
        said = "nothing" if found is None else f"part {found + 1}"
        raise _wrong(name, f"it should be part {number + 1} of {count}; its keys say {said}")


def _check_same_model(first: GGUFHeader, part: GGUFHeader) -> None:
    """What both state is the same: later parts mostly state nothing."""
    for key in ("general.architecture", "general.name", "split.tensors.count"):
        mine, theirs = first.metadata.get(key), part.metadata.get(key)
        if theirs is not None and mine != theirs:
            raise _wrong(
                part.file.name,
                f"{key} is {show(theirs)}, the first file's is {show(mine)}: it is a part of "
                "another model",
            )


def _check_tensors(parts: Sequence[GGUFHeader]) -> None:
    """Every tensor once, and as many as the first part says."""
    held: dict[str, str] = {}
    for part in parts:
        for tensor in part.tensors:
            other = held.setdefault(tensor.name, part.file.name)
            if other != part.file.name:
                raise _wrong(
                    part.file.name,
                    f"tensor {show(tensor.name)} is in {show(other)} too: one of them is of "
                    "another model, or there twice",
                    tensor=tensor.name,
                )
    said = _number(parts[0], "split.tensors.count", len(held))
    if said != len(held):
        sizes = {part.file.name: len(part.tensors) for part in parts}
        raise _wrong(
            parts[0].file.name,
            f"it says that all parts hold {said} tensors; they hold {len(held)}: one of them is of "
            "another model",
            tensors=sizes,
        )


def _number(header: GGUFHeader, key: str, default: Any) -> Any:
    value = header.metadata.get(key, default)
    if value is default:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(header.file.name, f"its {key} is no number")
    return value


def _missing(first: str, missing: Sequence[str], count: int) -> FormatError:
    shown = ", ".join(map(show, missing[:_SHOWN]))
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return _wrong(
        missing[0],
        f"it is part of a model in {count} files, and missing are {shown}{more}",
        about=first,
        hint="download all parts into one folder",
        missing=list(missing[:1000]),
    )


def _wrong(
    file: str,
    message: str,
    *,
    about: str | None = None,
    tensor: str | None = None,
    hint: str | None = None,
    **detail: Any,
) -> FormatError:
    return FormatError(
        f"{show(about or file)}: {message}",
        code="E_SPLIT",
        file=file,
        tensor=tensor,
        detail=detail or None,
        hint=hint or "all parts must come from one run of llama-gguf-split",
    )
