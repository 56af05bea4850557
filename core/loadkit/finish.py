"""Step 5: the read memory becomes the model; then post-processing, checks and the report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from loadkit.build import swap
from loadkit.errors import CoverageError, LoadkitError, ModelError
from loadkit.execution import Target
from loadkit.module_walk import attribute_of, named_modules, named_paths
from loadkit.processed_layout import is_processed_layout
from loadkit.quantization_base import QuantizeMethodBase
from loadkit.text import printable
from loadkit.tracing.evaluate import strided
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.turns import Turn

if TYPE_CHECKING:
    from loadkit.config import ModelConfig

__all__ = [
    "Finisher",
    "check_ready",
    "device_loading_context",
    "finalize_layerwise_processing",
    "process_weights_after_loading",
    "tell_loaded",
]


class Finisher:
    """Gives a model its memory, and finishes its modules as their weights come.

    Args:
        model: the model; its parameters are on meta, or a live module's own.
        model_config: what attention layers are told the dtype by; may be None.
        target_device: where modules are finished.
        processed: the weights were post-processed before they were saved.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: ModelConfig | None,
        target_device: torch.device,
        *,
        processed: bool = False,
    ) -> None:
        self._model = model
        self._model_config = model_config
        self._device = target_device
        self._processed = processed
        self._done: set[int] = set()
        self._by_name: dict[str, torch.Tensor] = {}
        for prefix, module in named_paths(model):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._by_name[f"{prefix}.{name}" if prefix else name] = tensor

    def take(self, turn: Turn, memory: dict[int, torch.Tensor]) -> None:
        """Give a turn's targets their memory, then let its module's method finish it.

        Raises:
            ModelError: a module's post-processing failed; names it, chained to the cause.
        """
        place(self._by_name, turn.targets, memory)
        if turn.module is not None:
            memory.clear()
            for name in (name for target in turn.targets for name in target.names):
                self._by_name.pop(name, None)  # a method may put another in its place
            self._finish_weights(turn.name, turn.module)

    def finish(self) -> None:
        """Finish the modules that had no turn, then attention layers.

        Raises:
            ModelError: a module's post-processing failed; names it, chained to the cause.
        """
        modules = [
            (name, module)
            for name, module in named_modules(self._model)
            if not (self._processed and is_processed_layout(module))
        ]
        for name, module in modules:
            if id(module) not in self._done:
                self._finish_weights(name, module)
        dtype = self._model_config.dtype if self._model_config is not None else None
        for name, module in modules:
            own = attribute_of(module, "process_weights_after_loading")
            if callable(own):
                with _named(name, module), device_loading_context(module, self._device):
                    own(dtype)

    def _finish_weights(self, name: str, module: nn.Module) -> None:
        self._done.add(id(module))
        method = attribute_of(module, "quant_method")
        if isinstance(method, QuantizeMethodBase):
            with _named(name, module), device_loading_context(module, self._device):
                method.process_weights_after_loading(module)


def place(
    by_name: Mapping[str, torch.Tensor],
    targets: Iterable[Target],
    memory: Mapping[int, torch.Tensor],
) -> None:
    """Give each parameter its memory: the same objects, with their attributes. Ties stay ties.

    So do buffers that loading made. ``by_name`` holds a model's parameters and buffers.
    """
    for target in targets:
        if target.storage.real is not None or target.names[0] not in by_name:
            continue
        flat = memory.get(id(target.storage))
        if flat is None:  # no elements
            flat = torch.empty(target.storage.numel, dtype=target.dtype)
        data = strided(flat, target.view, target.dtype)
        done: set[int] = set()
        for name in target.names:
            param = by_name[name]
            if id(param) not in done:
                swap(param, data)
                done.add(id(param))


def process_weights_after_loading(
    model: nn.Module, model_config: ModelConfig | None, target_device: torch.device
) -> None:
    """Let each module's quantisation method, then each attention layer, finish its weights.

    Runs once per module, in ``named_modules`` order, on ``target_device``.

    Raises:
        ModelError: a module's post-processing failed; names it, chained to the cause.
    """
    Finisher(model, model_config, target_device).finish()


@contextmanager
def _named(name: str, module: nn.Module) -> Iterator[None]:
    """Anybody's post-processing: what it raises says which module it was."""
    try:
        yield
    except LoadkitError:
        raise
    except Exception as error:
        raise ModelError(
            f"post-processing the weights of {name or 'the model'} ({type(module).__name__}) "
            f"failed: {type(error).__name__}: {printable(error)}",
            detail={"module": name},
        ) from error


@contextmanager
def device_loading_context(module: nn.Module, target_device: torch.device) -> Iterator[nn.Module]:
    """A module's parameters on ``target_device`` inside the block, and back where they were."""
    if target_device.type == "cpu":
        yield module
        return
    homes: dict[str, torch.device] = {}
    for name, param in module.named_parameters(recurse=False):
        if param.device != target_device:
            homes[name] = param.device
            param.data = param.data.to(target_device)
    try:
        yield module
    finally:
        for name, param in module.named_parameters(recurse=False):
            if name in homes:
                param.data = param.data.to(homes[name])


def tell_loaded(model: nn.Module) -> None:
    """Call what parts of a module registered for the end of ``load_state_dict``.

    A module may keep more than its parameters: ``fully_shard`` has flat views of their memory, and
    renews them here.

    Raises:
        ModelError: a hook failed; names the module.
    """
    nothing = _IncompatibleKeys([], [])
    for name, module in named_modules(model):
        for hook in list(module._load_state_dict_post_hooks.values()):
            with _named(name, module):
                hook(module, nothing)


def finalize_layerwise_processing(model: nn.Module, model_config: ModelConfig | None) -> None:
    """The last look at a loaded model; loaders written for vLLM call it by this name.

    A load has finished every module by then, so there is nothing left to process.

    Raises:
        CoverageError: a module still has no memory.
    """
    check_ready(model)


def check_ready(model: nn.Module) -> None:
    """Refuse a model that has a parameter or buffer without memory.

    Raises:
        CoverageError: names the first ones.
    """
    bad: dict[int, str] = {}
    for prefix, module in named_modules(model):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and (
                tensor.device.type == "meta" or isinstance(tensor, LazyTensor)
            ):
                bad.setdefault(id(tensor), f"{prefix}.{name}" if prefix else name)
    if bad:
        names = list(bad.values())
        raise CoverageError(
            f"{len(names)} parameter(s) have no memory after the load: {', '.join(names[:5])}",
            parameter=names[0],
            detail={"parameters": names},
        )
