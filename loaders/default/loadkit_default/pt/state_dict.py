"""Which dict of a pickle counts:

1. ``weights_key`` names it: a key of the top-level dict (``a/b``: of a dict inside that one);
2. else the top-level dict, if a tensor is directly in it;
3. else the only dict in it that holds tensors directly; of several none is guessed.

Everything beside it, and all in it that is no tensor, is listed as skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping as Items
from typing import TYPE_CHECKING, Any, NoReturn

from loadkit.errors import OptionError
from loadkit.file_checks import show
from loadkit.safetensors_format import MAX_TENSORS
from loadkit.text import nearest
from loadkit.torch_archive.errors import refused
from loadkit.torch_archive.tensors import Selected
from loadkit.torch_archive.values import Mapping, TensorRef, kind_of

if TYPE_CHECKING:
    from loadkit.sources.base import File

__all__ = ["select"]

logger = logging.getLogger(__name__)


def select(value: Any, file: File, weights_key: str | None) -> Selected:
    """The dict of tensors in a pickle's value.

    Raises:
        FormatError: E_STRUCTURE, it is no dict, its keys are no strings, it holds no tensors, or
            several dicts in it do; E_NAME, a tensor's name is empty, too long, or unprintable.
        OptionError: nothing is under ``weights_key``; the error lists the keys.
    """
    top = _dict(value, file, "the pickle")
    skipped: dict[str, str] = {}
    key = weights_key
    if key is not None:
        chosen = _entered(top, key, file, skipped)
    else:
        chosen = top
        inner = {} if _tensors(top) else _holders(top)
        if len(inner) == 1:
            key, chosen = next(iter(inner.items()))
            logger.info("%s: %s is the only dict with tensors", show(file.name), show(key))
            _skip_others(top, key, "", skipped)
        elif inner:
            _several(file, inner)
    found = _tensors(chosen)
    if not found and chosen.items:
        more = _deeper(chosen, key) or _keys(chosen)
        _wrong(file, f"there is no tensor in a dict of {len(chosen.items)}", more)
    if len(found) > MAX_TENSORS:
        _wrong(file, f"there are more than {MAX_TENSORS} tensors", "")
    prefix = "" if key is None else f"{key}/"
    for name, item in (chosen.items or {}).items():
        if type(item) is not TensorRef:
            holds = len(_tensors(item)) if type(item) is Mapping else 0
            more = f" with {holds} tensors: weights_key={prefix + name!r} reads it" if holds else ""
            skipped[prefix + name] = f"no tensor but {kind_of(item)}{more}"
    return Selected(found, skipped, key)


def _dict(value: Any, file: File, what: str) -> Mapping:
    if type(value) is not Mapping:
        _wrong(file, f"{what} is {kind_of(value)}, not a dict of tensors", "")
    if value.odd is not None:
        kind, at = value.odd
        raise refused(
            "E_STRUCTURE", file.name, f"a key of {what} is {kind}, not a string", _HINT, offset=at
        )
    return value


_SHOWN = 10
_HINT = "save a plain dict of tensors: torch.save(model.state_dict(), ...)"


def _wrong(file: File, problem: str, more: str) -> NoReturn:
    raise refused("E_STRUCTURE", file.name, problem, more or _HINT)


def _tensors(found: Mapping) -> dict[str, TensorRef]:
    items = found.items or {}
    return {name: item for name, item in items.items() if type(item) is TensorRef}


def _holders(top: Mapping) -> dict[str, Mapping]:
    """The dicts directly in it that hold a tensor directly."""
    inner = ((name, item) for name, item in (top.items or {}).items() if type(item) is Mapping)
    return {
        name: item
        for name, item in inner
        if any(type(value) is TensorRef for value in (item.items or {}).values())
    }


def _entered(top: Mapping, key: str, file: File, skipped: dict[str, str]) -> Mapping:
    """The dict under a key, or under the keys of a path."""
    if type((top.items or {}).get(key)) is Mapping:
        path = [key]
    else:
        path = key.split("/")
    here, before = top, ""
    for part in path:
        item = (here.items or {}).get(part)
        if type(item) is not Mapping:
            names = [name for name, each in (here.items or {}).items() if type(each) is Mapping]
            near = nearest(part, names, 3)
            raise OptionError(
                f"LoadConfig.weights_key = {key!r}: {show(file.name)} has "
                f"{'no such key' if item is None else kind_of(item) + ' there'}; dicts are under "
                f"{', '.join(map(show, names[:10])) or 'no key'}",
                file=file.name,
                detail={"keys": names[:100], "nearest": near},
                hint=f"did you mean {show(near[0])}?" if near else None,
            )
        _skip_others(here, part, before, skipped)
        here, before = item, f"{before}{part}/"
    return _dict(here, file, f"what {show(key)} holds")


def _skip_others(parent: Mapping, key: str, before: str, skipped: dict[str, str]) -> None:
    for name, item in (parent.items or {}).items():
        if name != key:
            skipped[before + name] = f"beside {show(key)}: {kind_of(item)}"


def _several(file: File, inner: Items[str, Mapping]) -> NoReturn:
    told = ", ".join(f"{show(n)} ({len(_tensors(m))} tensors)" for n, m in list(inner.items())[:10])
    raise refused(
        "E_STRUCTURE",
        file.name,
        f"no tensor is at the top, and {len(inner)} dicts hold tensors: {told}",
        f"say which by weights_key={next(iter(inner))!r}",
        keys=list(inner)[:100],
    )


def _deeper(found: Mapping, key: str | None) -> str:
    """Which ``weights_key`` leads to tensors; empty: none does."""
    names: list[str] = []
    at, seen = 0, {id(found)}  # a dict may be in several, and in itself
    left = [("" if key is None else f"{key}/", found)]
    while at < len(left) and len(names) < _SHOWN:
        before, here = left[at]
        at += 1
        for name, item in (here.items or {}).items():
            if type(item) is not Mapping or id(item) in seen:
                continue
            seen.add(id(item))
            left.append((f"{before}{name}/", item))
            count = len(_tensors(item))
            names += [f"weights_key={show(before + name)} ({count} tensors)"] if count else []
    return f"tensors are deeper in it: {', '.join(names[:_SHOWN])}" if names else ""


def _keys(found: Mapping) -> str:
    names = [show(name) for name in found.items or ()]
    return f"its keys are {', '.join(names[:10])}" + (" ..." if len(names) > 10 else "")
