"""What one rank saves: its tensors, what ties them, and what a load needs to know of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loadkit.entry_index import core_version
from loadkit.errors import ModelError, ShardedError, UsageError
from loadkit.file_checks import show
from loadkit.load_plan import problems_text
from loadkit.manifest import Manifest, Quantization, RankEntry, Topology, WholeTensor
from loadkit.module_walk import named_paths
from loadkit.origin import Origin
from loadkit.processed_layout import processors_of
from loadkit.rank_files.by_key import place_by_key
from loadkit.rank_files.layouts import layout_versions
from loadkit.retrace import Boxes, boxes_of, retrace
from loadkit.safetensors_writer import entry_of
from loadkit.tracing.given import Given

__all__ = ["Contents", "contents_of"]


@dataclass(frozen=True)
class Contents:
    """One rank's tensors by name, and its manifest, which lacks the files yet."""

    tensors: dict[str, torch.Tensor]
    manifest: Manifest

    @property
    def tied(self) -> dict[str, list[str]]:
        """Parameter -> those that share its tensor and are not written."""
        found: dict[str, list[str]] = {}
        for name, written in self.manifest.ranks[0].tied.items():
            found.setdefault(written, []).append(name)
        return found


def contents_of(
    model: nn.Module, origin: Origin | None, topology: Topology, *, finished: bool = True
) -> Contents:
    """What a model saves, checked: a load of it will ask for these names and shapes.

    Args:
        model: its parameters may be on meta.
        origin: what it remembers.
        topology: of its ranks.
        finished: post-processing has run on it; False for a model that was planned only.

    Raises:
        ModelError: LAYOUT_UNKNOWN, post-processing changed weights and does not say to what.
        ShardedError: a load would not take these tensors back.
        UsageError: a parameter is a shard of a DTensor.
    """
    tensors, tied = _state(model, origin)
    versions = _versions(model, origin) if finished else {}
    rank = 0 if origin is None else topology.rank_of(origin.config.parallel_config)
    boxes, whole = Boxes(), dict[str, WholeTensor]()
    if origin is not None and origin.architecture:
        _check_loadable(model, origin, tensors, tied, processed=bool(versions))
        if not versions:
            boxes, whole = _boxes(model, origin, tensors)
    entry = RankEntry(rank, tied, boxes.of, _unknown(model, origin, tensors, boxes))
    config = None if origin is None else origin.config
    return Contents(
        tensors,
        Manifest(
            layout="runtime-processed" if versions else "runtime",
            files={},
            topology=topology,
            dtype="" if config is None else config.model_config.dtype_name,
            architecture="" if origin is None else origin.architecture,
            quantization=_quantization(origin),
            layout_versions=versions,
            tensors=whole,
            ranks=(entry,),
            source="" if config is None else config.model_config.source,
            loadkit_version=core_version() or "",
        ),
    )


def _state(
    model: nn.Module, origin: Origin | None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Every parameter, persistent buffer and loaded buffer once, and who shares its tensor."""
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in _named(model, origin):
        if hasattr(tensor, "to_local"):
            raise UsageError(
                f"{name} is a shard of a DTensor; rank files hold plain tensors",
                code="PARTIAL_MODEL",
                parameter=name,
            )
        written = first.setdefault(_memory(tensor), name)
        if written == name:
            tensors[name] = tensor.detach()
        else:
            tied[name] = written
    return tensors, tied


def _named(model: nn.Module, origin: Origin | None) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    loaded = frozenset() if origin is None else origin.buffers
    for path, module in named_paths(model):
        for name, buffer in module._buffers.items():
            full = f"{path}.{name}" if path else name
            persistent = name not in module._non_persistent_buffers_set
            if buffer is not None and (persistent or full in loaded):
                yield full, buffer


def _memory(tensor: torch.Tensor) -> Any:
    """What two names of the very same elements have in common."""
    if not tensor.numel():
        return id(tensor)
    storage = tensor.untyped_storage()
    memory = storage._cdata if tensor.device.type == "meta" else storage.data_ptr()
    layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return (memory, *layout)


def _versions(model: nn.Module, origin: Origin | None) -> dict[str, str]:
    """The layouts that post-processing made; none where nothing post-processes.

    Raises:
        ModelError: LAYOUT_UNKNOWN.
    """
    versions = layout_versions(model)
    unsaid = [name for name, version in versions.items() if not version]
    loaded = origin is not None and origin.is_loaded
    if not unsaid and (loaded or not versions):
        return versions
    name = (unsaid or list(versions))[0]
    where = next(
        path
        for path, module in model.named_modules()
        for one in processors_of(module)
        if f"{type(one).__module__}:{type(one).__qualname__}" == name
    )
    if unsaid:
        problem = (
            "has no layout_version, so nobody could tell its saved weights from a checkpoint's"
        )
        hint = "give the class layout_version = 0 (weights stay) or 1 (see processed_layout)"
    else:
        problem = "may have run or not: loadkit did not load this model"
        hint = "load the model with loadkit.load or load_into, then save it"
    raise ModelError(
        f"{show(name)} post-processes the weights of {where or 'the model'} and {problem}",
        code="LAYOUT_UNKNOWN",
        detail={"classes": unsaid or list(versions)},
        hint=hint,
    )


def _check_loadable(
    model: nn.Module,
    origin: Origin,
    tensors: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    *,
    processed: bool,
) -> None:
    """A new model takes these tensors by key, and lacks none.

    Raises:
        ShardedError: lists what does not fit.
    """
    given = {
        name: Given(tuple(tensor.shape), tensor.dtype, name) for name, tensor in tensors.items()
    }
    found = retrace(
        origin.config,
        type(model),
        given,
        lambda new, weights: place_by_key(new, weights, tied=tied, processed=processed),
    )
    missing = [name for name, _ in _named(found.model, None) if name not in {*tensors, *tied}]
    plan = found.plan
    if plan.ok and not missing:
        return
    said = problems_text(plan.problems, "the saved model") if not plan.ok else ""
    if missing:
        said += f" missing: {', '.join(missing[:10])}"
    raise ShardedError(
        f"the saved model could not be loaded back: {said.strip()}",
        parameter=missing[0] if missing else plan.problems[0].parameter,
        detail={"missing": missing, "problems": [one.to_dict() for one in plan.problems]},
        hint="the model has changed since it was loaded: save it as it was built, or register its "
        "class as it is now",
    )


def _boxes(
    model: nn.Module, origin: Origin, tensors: Mapping[str, torch.Tensor]
) -> tuple[Boxes, dict[str, WholeTensor]]:
    """Which parts of which checkpoint tensors the parameters are."""
    if not origin.given:
        return Boxes(), {}
    plan = retrace(origin.config, type(model), origin.given).plan
    found = boxes_of(plan, origin.given)
    whole: dict[str, WholeTensor] = {}
    for parameter in [*found.of]:
        tensor = tensors.get(parameter)
        if tensor is None:
            del found.of[parameter]
            continue
        dtype = entry_of(parameter, tensor).dtype
        for box in found.of[parameter]:
            size, _, stored = origin.given[box.tensor]
            whole.setdefault(
                box.tensor, WholeTensor(dtype, size, None if stored == box.tensor else stored)
            )
    return found, whole


def _unknown(
    model: nn.Module,
    origin: Origin | None,
    tensors: Mapping[str, torch.Tensor],
    boxes: Boxes,
) -> dict[str, str]:
    """Saved tensors of which nobody knows what of the checkpoint they are, with the reason."""
    if origin is None or not origin.architecture:
        general = "the module was not built by loadkit"
    elif not origin.given:
        general = "its loader does not say what it gave to the model"
    else:
        general = "nothing of the checkpoint went into it"
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    loaded = frozenset() if origin is None else origin.buffers
    return {
        name: boxes.unknown.get(name, general)
        for name, tensor in tensors.items()
        if name not in boxes.of and tensor.numel() and (name in parameters or name in loaded)
    }


def _quantization(origin: Origin | None) -> Quantization | None:
    config = None if origin is None else origin.config.quant_config
    return None if config is None else Quantization(config.get_name(), config.to_saved())
