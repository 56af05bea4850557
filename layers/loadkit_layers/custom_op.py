"""Operations that a device or a third party may bring a faster version of."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, Self, TypeVar

import torch

from loadkit.errors import ConflictError, PluginError, UnknownNameError

__all__ = ["CustomOp"]

_ops: dict[str, type[CustomOp]] = {}
_overrides: dict[str, type[CustomOp] | str] = {}
_disabled: set[str] = set()

OpT = TypeVar("OpT", bound="type[CustomOp]")


class CustomOp(torch.nn.Module):
    """A module with one plain torch version and any number of others.

    A subclass writes ``forward_native``; it may write ``forward_cuda``, ``forward_cpu``, ... (by
    torch's device type), which are used on tensors of that device while the op is enabled. A third
    party replaces a whole op through the table of overrides: its class, a subclass of the op, is
    made wherever the op is asked for.
    """

    op_name: ClassVar[str] = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        chosen = cls
        if _ops.get(cls.op_name) is cls and cls.op_name in _overrides:
            chosen = _resolve_override(cls)
        return super().__new__(chosen)

    @classmethod
    def register(cls, name: str) -> Callable[[OpT], OpT]:
        """Decorate an op class with the name that overrides and switches use.

        Raises:
            ConflictError: the name is taken by another class.
        """

        def decorate(op: OpT) -> OpT:
            if _ops.setdefault(name, op) is not op:
                raise ConflictError(f"custom op {name!r} is {_ops[name]!r}; {op!r} wants it too")
            op.op_name = name
            return op

        return decorate

    @classmethod
    def register_override(
        cls, name: str, value: type[CustomOp] | str, *, override: bool = False
    ) -> None:
        """Have ``value``, a class or ``"module:Class"``, made wherever op ``name`` is asked for.

        Raises:
            ConflictError: the op has an override already, and ``override`` is not set.
        """
        if _overrides.get(name, value) != value and not override:
            raise ConflictError(
                f"custom op {name!r} is overridden by {_overrides[name]!r} already; {value!r} "
                "wants it too",
                hint="pass override=True to replace it",
            )
        _overrides[name] = value

    @classmethod
    def remove_override(cls, name: str) -> None:
        """Forget an override; modules made with it stay as they are."""
        _overrides.pop(name, None)

    @classmethod
    def names(cls) -> list[str]:
        """Every registered op, sorted."""
        return sorted(_ops)

    @classmethod
    def set_enabled(cls, name: str, enabled: bool) -> None:
        """Switch the device versions of an op on (the default) or off, for this process.

        Raises:
            UnknownNameError: no such op.
        """
        if name not in _ops:
            raise UnknownNameError(f"no custom op {name!r}; there are {', '.join(sorted(_ops))}")
        if enabled:
            _disabled.discard(name)
        else:
            _disabled.add(name)

    @classmethod
    def enabled(cls) -> bool:
        """Whether the op's device versions are used."""
        return cls.op_name not in _disabled

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """The plain torch version; right on every device."""
        raise NotImplementedError(f"{type(self).__name__} has no forward_native")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The version for the device of the first tensor."""
        if self.enabled():
            for value in args:
                if isinstance(value, torch.Tensor):
                    method = getattr(self, f"forward_{value.device.type}", self.forward_native)
                    return method(*args, **kwargs)
        return self.forward_native(*args, **kwargs)


def _resolve_override(op: type[CustomOp]) -> type[Any]:
    """The class that replaces an op, imported if it was given as a string."""
    value = _overrides[op.op_name]
    if isinstance(value, str):
        module, _, name = value.partition(":")
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError) as cause:
            raise PluginError(f"override {value!r} of custom op {op.op_name!r}: {cause}") from cause
        _overrides[op.op_name] = value = found
    if not (isinstance(value, type) and issubclass(value, op)):
        raise PluginError(
            f"override {value!r} of custom op {op.op_name!r} is not a subclass of {op.__name__}"
        )
    return value
