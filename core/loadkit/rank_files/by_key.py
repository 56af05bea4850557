"""Placing saved parameters by their own names: no mapper, no weight loader, no cutting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from loadkit.errors import ShardedError
from loadkit.processed_layout import is_processed_layout
from loadkit.text import nearest, printable
from loadkit.tracing import report_misfit
from loadkit.tracing.recorder import active_recorder

__all__ = ["place_by_key", "state_of"]

State = dict[str, torch.Tensor]


def state_of(model: nn.Module) -> State:
    """Every parameter and buffer under every name it has."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def place_by_key(
    model: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    tied: Mapping[str, str],
    processed: bool = False,
) -> None:
    """Copy every tensor into the parameter or buffer of its name.

    What does not fit is told to the plan; what gets nothing is found by coverage.

    Args:
        model: its parameters on meta, or real.
        weights: names and tensors.
        tied: parameter -> the parameter whose tensor it shares.
        processed: the tensors are what post-processing made: modules that do that get parameters
            of these shapes first.

    Raises:
        ShardedError: something does not fit, and no plan is under way.
    """
    weights = list(weights) if processed else weights
    recorder = active_recorder()
    if processed:
        with recorder.paused() if recorder is not None else nullcontext():
            _restore_layouts(model, dict(weights))
    if recorder is not None:
        weights = recorder.observe(weights)
    state = state_of(model)
    aliases: dict[str, list[str]] = {}
    for name, written in tied.items():
        aliases.setdefault(written, []).append(name)
    for name, tensor in weights:
        done: set[int] = set()
        for alias in (name, *aliases.get(name, ())):
            target = state.get(alias)
            if target is None and alias != name:
                continue  # a name that this model ties in another way
            if target is None:
                _unexpected(name, state)
            elif id(target) not in done:
                done.add(id(target))
                _copy(alias, target, tensor, exactly=processed)


def _copy(name: str, target: torch.Tensor, tensor: torch.Tensor, *, exactly: bool) -> None:
    if is_lazy(target) or target.size() != tensor.size():
        shown = "no shape" if is_lazy(target) else str(list(target.size()))
        _misfit(
            "SHAPE",
            name,
            f"tensor '{printable(name)}' is {list(tensor.size())}; the parameter has {shown}",
            "rank files fit the config, topology and quantization that they were saved with",
        )
        return
    if exactly and target.dtype != tensor.dtype:
        _misfit(
            "SHAPE",
            name,
            f"tensor '{printable(name)}' is {tensor.dtype}; the parameter is {target.dtype}",
            "a layout that post-processing made is loaded in the dtype it was saved in",
        )
        return
    with torch.no_grad():
        target.data.copy_(tensor)


def _unexpected(name: str, state: State) -> None:
    close = nearest(name, state)
    hint = f"nearest: {', '.join(printable(one) for one in close)}" if close else None
    message = f"tensor '{printable(name)}' has no place: the model has no such parameter"
    _misfit("UNEXPECTED", name, message, hint)


def _misfit(kind: str, name: str, message: str, hint: str | None) -> None:
    if not report_misfit(kind, name=name, target=name, message=message, hint=hint):
        raise ShardedError(message, tensor=name, parameter=name, hint=hint)


# -- the skeleton of a processed layout --------------------------------------------------------


def _restore_layouts(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give every module that post-processes the parameters that a saved state has."""
    for path, module in model.named_modules():
        if not is_processed_layout(module):
            continue
        prefix = f"{path}." if path else ""
        own = {
            name.removeprefix(prefix): torch.empty(tensor.size(), dtype=tensor.dtype, device="meta")
            for name, tensor in tensors.items()
            if name.startswith(prefix) and "." not in name[len(prefix) :]
        }
        _restore_layout(module, own)


def _restore_layout(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for owner, arguments in ((getattr(module, "quant_method", None), (module,)), (module, ())):
        restore = getattr(owner, "restore_layout", None)
        if callable(restore):
            restore(*arguments, tensors)
            return
    for name, param in [*module._parameters.items()]:
        if name not in tensors and param is not None:  # None: a bias that the layer does not have
            del module._parameters[name]
    for name, meta in tensors.items():
        old = module._parameters.get(name)
        if name in module._buffers:
            module._buffers[name] = torch.empty(meta.size(), dtype=meta.dtype)
        elif old is None or (old.size(), old.dtype) != (meta.size(), meta.dtype):
            made = nn.Parameter(meta, requires_grad=False)
            if old is not None:
                made.__dict__.update(old.__dict__)
            module._parameters[name] = made
