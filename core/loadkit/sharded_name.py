"""The name of a tensor on its way from the checkpoint to a parameter."""

from __future__ import annotations

from typing import Any, Self

from loadkit.packed_modules import Packed

__all__ = ["ShardedName"]


class ShardedName(str):
    """A tensor's name on its way through a model, with what must not be lost on that way.

    It is a plain ``str`` to anybody who wants one. Loaders that know it pass the rest on to the
    loaders they call, so a shard id given at the root reaches the parameter.

    Attributes:
        shard_id: the part of a fused parameter this tensor is, or None.
        checkpoint_name: the name in the checkpoint, whole and unmapped.
        prefix: the path from the outermost module to the one this name is relative to, with its
            dot (``"model."``), or "".
        packed: an outer class's ``packed_modules_mapping``, inverted, for the modules inside.
    """

    __slots__ = ("checkpoint_name", "packed", "prefix", "shard_id")

    shard_id: Any
    checkpoint_name: str
    prefix: str
    packed: Packed | None

    def __new__(cls, text: str, shard_id: Any = None, *, like: str | None = None) -> Self:
        """The name ``text``; all but the text and a given shard id is taken from ``like``."""
        new = super().__new__(cls, text)
        new.shard_id = shard_id
        if isinstance(like, ShardedName):
            new.shard_id = like.shard_id if shard_id is None else shard_id
            new.checkpoint_name, new.prefix = like.checkpoint_name, like.prefix
            new.packed = like.packed
        else:
            new.checkpoint_name = str(text if like is None else like)
            new.prefix, new.packed = "", None
        return new

    @property
    def path(self) -> str:
        """The dotted name from the outermost module."""
        return self.prefix + self
