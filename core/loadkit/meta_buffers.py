"""Buffers on meta that no checkpoint fills: what a module computes for itself.

A module made under ``torch.device("meta")`` has its tables of positions and frequencies there too.
Those that the model can make again, by the ``_init_weights(module)`` of Hugging Face's models, are
made again; the others stand against the load.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from loadkit.local_memory import is_spread, local_of
from loadkit.module_walk import Modules, named_modules
from loadkit.tracing.recorder import Recorder

__all__ = ["buffers_without_memory", "complete_buffers"]

log = logging.getLogger("loadkit")

Key = tuple[str, str]
"""A module's dotted name, and the buffer's name in it."""


def buffers_without_memory(model: nn.Module, modules: Modules, recorder: Recorder) -> Iterator[str]:
    """Names of buffers on meta that the load does not write and the model cannot make again."""
    made = _computed(model, torch.device("cpu"))
    for prefix, module in modules:
        for name, buffer in _on_meta(module) if module._buffers else ():
            if (prefix, name) not in made and not recorder.is_changed(local_of(buffer)):
                yield f"{prefix}.{name}" if prefix else name


def complete_buffers(model: nn.Module, device: torch.device) -> None:
    """Give buffers that are still on meta their memory and numbers, where the model makes them."""
    modules = dict(named_modules(model))
    for (prefix, name), tensor in _computed(model, device).items():
        modules[prefix]._buffers[name] = tensor


def _on_meta(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, buffer)
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.device.type == "meta"
    ]


def _computed(model: nn.Module, device: torch.device) -> dict[Key, torch.Tensor]:
    """What the model makes of its buffers on meta; the model is left as it is."""
    initialise: Any = getattr(model, "_init_weights", None)
    found: dict[Key, torch.Tensor] = {}
    if not callable(initialise):
        return found
    for prefix, module in named_modules(model):
        empty = [item for item in _on_meta(module) if not is_spread(item[1])]
        if not empty:
            continue
        try:
            first, second = (_made(initialise, module, empty, number, device) for number in (0, 1))
        except Exception as error:  # noqa: BLE001 - anybody's code; its buffers are told as problems
            log.warning("%s._init_weights failed for %s: %s", type(model).__name__, prefix, error)
            continue
        # What does not depend on what was there before was computed, all of it.
        for name, _ in empty:
            if torch.equal(first[name], second[name]):
                found[prefix, name] = first[name]
    return found


def _made(
    initialise: Any,
    module: nn.Module,
    empty: list[tuple[str, torch.Tensor]],
    number: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The buffers after the model initialised a module in which all of them were ``number``."""
    made = {
        name: torch.full(buffer.shape, number, dtype=buffer.dtype, device=device)
        for name, buffer in empty
    }
    before = {name: module._buffers[name] for name in made}
    module._buffers.update(made)
    try:
        with torch.no_grad(), _parameters_away(module):
            initialise(module)
        return {name: module._buffers[name] for name in made}  # type: ignore[misc]
    finally:
        module._buffers.update(before)


@contextmanager
def _parameters_away(module: nn.Module) -> Iterator[None]:
    """Others on meta in their place, so that initialising a module does not touch them."""
    registries = [part._parameters for part in module.modules()]
    before = [dict(registry) for registry in registries]
    for registry in registries:
        for name, param in registry.items():
            if param is not None:
                empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
                registry[name] = nn.Parameter(empty, requires_grad=False)
    try:
        yield
    finally:
        for registry, held in zip(registries, before, strict=True):
            registry.update(held)
