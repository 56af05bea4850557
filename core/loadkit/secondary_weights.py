"""Weights of a model that is made of two checkpoints: what a model says of the second one.

A model's ``secondary_weights`` (an attribute of the class or of the model, or a property) gives a
``WeightSource`` for each checkpoint beside the one that is loaded. Their tensors are catalogued
under a prefix; from there on nothing tells them from the primary ones: they are planned, read,
counted and verified with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from loadkit.errors import LoadkitError, ModelError
from loadkit.text import printable

__all__ = ["WeightSource", "secondary_weights"]


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """One checkpoint whose tensors a model takes beside its own.

    Attributes:
        model_or_path: a folder, a file or a URI, as ``loadkit.load`` takes them.
        revision: of a hub's repository.
        prefix: what is put before its tensors' names (``"encoder."``).
        subfolder: the folder of it that holds the checkpoint.
        fall_back_to_pt: archives of ``torch.save`` are read where there are no safetensors.
        allow_patterns_overrides: patterns of its weight files, in place of its format's own.
    """

    model_or_path: str
    revision: str | None = None
    prefix: str = ""
    subfolder: str | None = None
    fall_back_to_pt: bool = True
    allow_patterns_overrides: tuple[str, ...] | None = None


def secondary_weights(model: Any) -> tuple[WeightSource, ...]:
    """What a model's ``secondary_weights`` says; () where it has none.

    Raises:
        ModelError: it fails, or gives anything but ``WeightSource``s with texts for their
            ``model_or_path`` and ``prefix``.
    """
    try:
        stated = getattr(model, "secondary_weights", None)
        found = list(stated) if isinstance(stated, Iterable) else stated
    except LoadkitError:
        raise
    except Exception as error:
        raise _bad(model, f"raised {type(error).__name__}: {printable(error)}") from error
    if found is None:
        return ()
    if not isinstance(found, list):
        raise _bad(model, f"is {type(found).__name__}, and no list")
    for one in found:
        if not isinstance(one, WeightSource):
            raise _bad(model, f"holds {type(one).__name__}")
        texts: list[object] = [one.model_or_path, one.prefix]
        if not all(isinstance(text, str) for text in texts):
            raise _bad(model, "holds a WeightSource whose place or prefix is no text")
    return tuple(found)


def _bad(model: Any, problem: str) -> ModelError:
    return ModelError(
        f"{type(model).__qualname__}.secondary_weights {problem}",
        code="SECONDARY_WEIGHTS",
        hint="it has to be a list of loadkit.WeightSource",
    )
