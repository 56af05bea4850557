"""Step 2: the model on meta. Parameters take no memory, buffers are real."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loadkit.errors import ModelError
from loadkit.interfaces import supports_pp
from loadkit.local_memory import with_memory
from loadkit.origin import Origin, remember
from loadkit.secondary_weights import secondary_weights
from loadkit.tracing.recorder import Recorder, active_recorder
from loadkit.weight_memory import weights_on_meta

if TYPE_CHECKING:
    from loadkit.config import LoadkitConfig, ParallelConfig
    from loadkit.resolve import Job

__all__ = [
    "Built",
    "build",
    "initialize_model",
    "parameters_on_meta",
    "set_default_torch_dtype",
]


@dataclass(eq=False)
class Built:
    """A model without weights, and the recorder that saw it being made."""

    model: nn.Module
    recorder: Recorder


def build(job: Job) -> Built:
    """Construct the job's model; a module the user built is taken as it is.

    The checkpoints that its ``secondary_weights`` names are opened.

    Raises:
        LoadkitError: one of those cannot be read.
        ModelError: the constructor failed, or this parallelism does not fit the model.
    """
    recorder = Recorder()
    model = job.module
    if model is None:
        with recorder, parameters_on_meta():
            model = initialize_model(job.config, job.model_class, job.prefix)
    stated = secondary_weights(model)
    if stated:
        job.loader.attach(stated)
    return Built(model, recorder)


def initialize_model(
    config: LoadkitConfig, model_class: type[nn.Module], prefix: str = ""
) -> nn.Module:
    """Call a model's constructor, whatever its style, under the model's default dtype.

    New style is ``(*, config, prefix)``. A ``vllm_config`` gets the same bundle. Older styles get
    what they name of ``config`` (config.json's values), ``quant_config``, ``parallel``,
    ``cache_config`` (None), ``lora_config`` (None), ``prefix``, and with ``**kwargs`` all of them.

    Raises:
        ModelError: ``PP_UNSUPPORTED``, a stage of a model that is only built whole; or its style of
            constructor is not known.
    """
    _check_stages(config.parallel_config, model_class)
    with set_default_torch_dtype(config.model_config.dtype):
        model = model_class(**_arguments(config, model_class, prefix))
    remember(model, Origin(config))
    return model


def _check_stages(parallel: ParallelConfig, model_class: type[nn.Module]) -> None:
    """Refuse a stage of a model that would be built whole on each of them.

    Raises:
        ModelError: ``PP_UNSUPPORTED``.
    """
    if parallel.pp_size == 1 or supports_pp(model_class):
        return
    raise ModelError(
        f"{model_class.__name__} cannot be split over {parallel.pp_size} pipeline stages: it is "
        "not marked SupportsPP, or its forward takes no intermediate_tensors",
        code="PP_UNSUPPORTED",
        detail={"legal": [1], "pp_size": parallel.pp_size},
        hint="use pp_size 1, and tp_size for more ranks",
    )


def _arguments(config: LoadkitConfig, model_class: type[nn.Module], prefix: str) -> dict[str, Any]:
    parameters = inspect.signature(model_class.__init__).parameters
    named = set(parameters)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "vllm_config" in named:
        return {"vllm_config": config, "prefix": prefix}
    old = named & {"quant_config", "cache_config", "lora_config", "hf_config"}
    if "config" in named and not old:
        return {"config": config} | ({"prefix": prefix} if "prefix" in named or takes_all else {})
    offered: dict[str, Any] = {
        "config": config.model_config.hf_config,
        "hf_config": config.model_config.hf_config,
        "quant_config": config.quant_config,
        "parallel": config.parallel_config,
        "cache_config": None,
        "lora_config": None,
        "prefix": prefix,
    }
    given = {key: value for key, value in offered.items() if takes_all or key in named}
    needed = [
        name
        for name, p in parameters.items()
        if name not in ("self", *given)
        and p.default is p.empty
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if needed:
        raise ModelError(
            f"{model_class.__module__}:{model_class.__qualname__} wants {', '.join(needed)} to be "
            "constructed, which a checkpoint does not say",
            hint="give it __init__(self, *, config, prefix='')",
        )
    return given


@contextmanager
def set_default_torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Torch's default dtype inside the block. Integer and 8-bit dtypes leave it as it is."""
    old = torch.get_default_dtype()
    if dtype.is_floating_point and dtype.itemsize > 1:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Turn every parameter that this thread registers to meta, keeping the object itself.

    Identity, type and attributes stay, so a ``weight_loader`` set before or after is kept, and a
    parameter registered twice stays one. Buffers are left alone.
    """
    original = nn.Module.register_parameter
    thread = threading.get_ident()

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == thread:
            with torch._C.DisableTorchFunction():
                to_meta(param)
                if original is _REGISTER and not _registration_hooks():
                    return original(module, name, param)  # nothing that a recorder must see
        return original(module, name, param)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign,assignment]
    try:
        with weights_on_meta(), _plain_attributes_at_once():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


_REGISTER = nn.Module.register_parameter


@contextmanager
def _plain_attributes_at_once() -> Iterator[None]:
    """Numbers, names and the like become attributes of a module without torch's search.

    ``nn.Module.__setattr__`` asks of every value in four ways whether it is a parameter, a buffer
    or a module: 40 % of a model's construction.
    """
    original = nn.Module.__setattr__
    if original is not _SET:  # somebody else looks on
        yield
        return
    plain: dict[type, bool] = {}
    set_any = object.__setattr__

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        kind, held = type(value), module.__dict__
        if kind not in plain:
            plain[kind] = not issubclass(kind, (torch.Tensor, nn.Module))
        if plain[kind] and (
            "_modules" not in held  # before the module's own constructor: nothing is registered
            or (
                name not in held["_modules"]
                and name not in held["_parameters"]
                and name not in held["_buffers"]
            )
        ):
            set_any(module, name, value)
        else:
            original(module, name, value)

    nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]


_SET = nn.Module.__setattr__


def _registration_hooks() -> Any:
    """What other code has called where a parameter is registered."""
    return torch.nn.modules.module._global_parameter_registration_hooks


def to_meta(param: torch.Tensor) -> None:
    """Give up a parameter's memory, in place."""
    if param.device.type == "meta" or torch.nn.parameter.is_lazy(param):
        return
    with torch._C._DisableTorchDispatch():  # a recorder need not see it
        data = torch.empty_strided(
            tuple(param.size()), param.stride(), dtype=param.dtype, device="meta"
        )
    recorder = active_recorder()
    if recorder is not None:
        recorder.note_initial(param, data)
    swap(param, data)


def swap(param: torch.Tensor, data: torch.Tensor) -> None:
    """Put other data behind a parameter: same object, same type, same attributes."""
    twin = with_memory(param, data)
    try:
        torch.utils.swap_tensors(param, twin)
    except RuntimeError as error:
        raise ModelError(
            f"a parameter of size {list(param.size())} is held in a way that its memory cannot be "
            f"exchanged: {error}",
            hint="do not keep views or weak references of parameters in the constructor",
        ) from error
