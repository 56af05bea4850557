"""Which tensors of a checkpoint are the model's, and what they are called there.

A trainer saves a nested state dict; the metadata says which keys led to each tensor. As for
archives of ``torch.save``:

1. ``weights_key`` names the dict that counts (``a/b``: of a dict inside of one);
2. else what holds the optimizer's state is left out, and of what remains the top-level dict counts,
   if a tensor is directly in it;
3. else the only dict in it, and so on inwards; of several none is guessed.

A checkpoint whose metadata does not say the keys has names alone: there ``weights_key`` is what
they begin with.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from loadkit.errors import FormatError, OptionError
from loadkit.file_checks import show
from loadkit.text import nearest
from loadkit_dcp.metadata import Path

__all__ = ["Chosen", "choose"]

logger = logging.getLogger(__name__)

_TRAINING = re.compile(
    r"(optims?|optimizers?|optim(izer)?_states?(_dict)?|optim(izer)?_\d+|lr_schedulers?|"
    r"schedulers?|scheduler_state(_dict)?|data_?loader|train_state|trainer_state|rng_states?|"
    r"random_states?|grad_scaler|scaler)",
    re.IGNORECASE,
)
_SHOWN = 10


@dataclass(frozen=True)
class Chosen:
    """The model's tensors.

    Attributes:
        names: the checkpoint's name of a tensor -> the model's.
        skipped: dicts and entries that are not read, with the reason.
        key: the dict that counts, ``a/b``; empty: the top-level one.
    """

    names: dict[str, str]
    skipped: dict[str, str]
    key: str


def choose(paths: dict[str, Path], weights_key: str | None, file: str) -> Chosen:
    """Choose among all tensors.

    Args:
        paths: every tensor's name -> the keys that lead to it.
        weights_key: of ``LoadConfig``.
        file: the metadata's name, for errors.

    Raises:
        OptionError: nothing is under ``weights_key``.
        FormatError: E_STRUCTURE, several dicts hold tensors, or only training state does.
        FormatError: E_DUPLICATE, two tensors have one name.
    """
    if weights_key is not None:
        key, chosen = _under(paths, weights_key, file)
        return _named(paths, chosen, len(key), "/".join(map(str, key)), file)
    chosen = {name: path for name, path in paths.items() if not _is_training(name, path)}
    if not chosen:
        raise FormatError(
            f"{show(file)}: none of its {len(paths)} tensor(s) is a weight"
            + (f"; they are under {_some(_tops(paths.values()))}" if paths else ""),
            code="E_STRUCTURE",
            file=file,
            hint="this is the folder of an optimizer; the model's is another one, or name its dict "
            "by weights_key",
        )
    depth = 0
    entered: list[str] = []
    while all(len(path) > depth + 1 for path in chosen.values()):
        inner = _tops(path[depth:] for path in chosen.values())
        if len(inner) > 1:
            _several(inner, entered, file)
        entered.append(inner[0])
        depth += 1
    key_text = "/".join(entered)
    if entered:
        logger.info("%s: %s is the only dict with weights", show(file), show(key_text))
    return _named(paths, chosen, depth, key_text, file)


def _is_training(name: str, path: Path) -> bool:
    """Whether it is state of an optimizer, or of the training."""
    keys = path[:-1] if len(path) > 1 else (name.partition(".")[0],)
    return any(type(key) is str and _TRAINING.fullmatch(key) for key in keys)


def _under(paths: dict[str, Path], weights_key: str, file: str) -> tuple[Path, dict[str, Path]]:
    """The keys that were asked for, and what is under them."""
    for asked in ((weights_key,), tuple(weights_key.split("/"))):
        depth = len(asked)
        found = {
            name: path
            for name, path in paths.items()
            if len(path) > depth and tuple(map(str, path[:depth])) == asked
        }
        if found:
            return asked, found
    prefix = weights_key.replace("/", ".") + "."
    found = {
        name: (prefix[:-1], name[len(prefix) :])
        for name, path in paths.items()
        if path == (name,) and name.startswith(prefix) and len(name) > len(prefix)
    }
    if found:
        return (weights_key,), found
    keys = _tops(path for path in paths.values() if len(path) > 1)
    near = nearest(weights_key, keys, 3)
    raise OptionError(
        f"LoadConfig.weights_key = {weights_key!r}: {show(file)} has no tensor there; dicts are "
        f"under {_some(keys) or 'no key'}",
        file=file,
        detail={"keys": keys[:100], "nearest": near},
        hint=f"did you mean {show(near[0])}?" if near else None,
    )


def _tops(paths: Iterable[Path]) -> list[str]:
    return list(dict.fromkeys(str(path[0]) for path in paths))


def _several(inner: list[str], entered: list[str], file: str) -> NoReturn:
    keys = ["/".join([*entered, key]) for key in inner]
    raise FormatError(
        f"{show(file)}: no tensor is at the top, and {len(inner)} dicts hold tensors: "
        f"{_some(keys)}",
        code="E_STRUCTURE",
        file=file,
        detail={"keys": keys[:100]},
        hint=f"say which by weights_key={keys[0]!r}",
    )


def _named(
    paths: dict[str, Path], chosen: dict[str, Path], depth: int, key: str, file: str
) -> Chosen:
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, path in chosen.items():
        called = ".".join(map(str, path[depth:]))
        if taken.setdefault(called, name) != name:
            raise FormatError(
                f"{show(file)}: {show(taken[called])} and {show(name)} are both {show(called)}",
                code="E_DUPLICATE",
                file=file,
                tensor=called,
            )
        names[name] = called
    counts: dict[tuple[str, bool], int] = {}
    for name, path in paths.items():
        if name not in chosen:
            where = str(path[0]) if len(path) > 1 else name.partition(".")[0]
            told = where, _is_training(name, path)
            counts[told] = counts.get(told, 0) + 1
    told_of: dict[str, list[str]] = {}
    for (where, training), count in counts.items():
        whose = "the training's state"
        if not training:
            whose = f"another dict than {show(key or 'the top')}"
        told_of.setdefault(where, []).append(f"{count} tensor(s) of {whose}")
    skipped = {where: "; ".join(parts) for where, parts in told_of.items()}
    return Chosen(names, skipped, key)


def _some(names: list[str]) -> str:
    shown = ", ".join(map(show, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
