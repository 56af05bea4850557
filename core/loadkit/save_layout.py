"""Which checkpoint tensors a model's parameters are: names, shards, padding, ties, buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loadkit.errors import ModelError
from loadkit.file_checks import show
from loadkit.module_walk import named_paths
from loadkit.save_layers import check_whole, part_of, required_part
from loadkit.save_names import CheckpointNames
from loadkit.save_rows import inverse, is_copy
from loadkit.tracing.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    from loadkit.mapper import WeightsMapper
    from loadkit.origin import Origin

__all__ = ["Layout", "Part", "lay_out"]

SHOWN = 5  # names in an error's text; all of them are in ``detail``


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor: a view of the parameter's memory.

    With ``make`` it has to be computed: then ``tensor`` is on meta, and ``make()`` gives it.
    """

    name: str
    tensor: torch.Tensor
    parameter: str
    make: Callable[[], torch.Tensor] | None = None


@dataclass(frozen=True)
class Layout:
    """What to write. ``groups``: the tensors of each parameter, in the model's order.

    ``ties``: name -> the names that share its tensor, which are not written.
    """

    groups: list[list[Part]] = field(default_factory=list)
    ties: dict[str, list[str]] = field(default_factory=dict)


def lay_out(
    model: nn.Module, origin: Origin | None, mapper: WeightsMapper | None, *, tied: bool
) -> Layout:
    """Find the checkpoint tensors of a whole model (tp 1).

    Args:
        model: the model, its weights in memory.
        origin: what it remembers of its load.
        mapper: its mapper, in place of its class's.
        tied: write a tensor that several parameters share once; else once per name.

    Raises:
        ModelError: NOT_INVERTIBLE, what loading did cannot be undone; NAME_NOT_REVERSIBLE, a name
            has no way back; NAME_COLLISION, two tensors have one name; REPACKED.
    """
    finder = _Finder(model, origin, mapper)
    layout = Layout()
    for names, tensor, layer in _places(model, origin, tied=tied):
        chosen = finder.preferred(names)
        layout.groups.append(finder.parts(chosen, tensor, layer))
        if len(names) > 1:
            layout.ties[chosen] = [name for name in names if name != chosen]
    finder.raise_if_bad()
    _check_unique(layout.groups)
    return layout


def _places(
    model: nn.Module, origin: Origin | None, *, tied: bool
) -> Iterator[tuple[list[str], torch.Tensor, nn.Module]]:
    """Every tensor to save with its names and its layer: parameters, then buffers.

    Buffers are saved if the checkpoint had them; where no load is known, persistent ones are.
    """
    names: dict[Any, list[str]] = {}
    first: dict[Any, tuple[torch.Tensor, nn.Module]] = {}
    loaded = origin is not None and bool(origin.sizes)
    buffers: list[tuple[str, torch.Tensor, nn.Module]] = []
    for prefix, module in named_paths(model):
        for name, param in module._parameters.items():
            if param is not None:
                path = f"{prefix}.{name}" if prefix else name
                key = _place(param) if tied else path
                names.setdefault(key, []).append(path)
                first.setdefault(key, (param, module))
        for name, buffer in module._buffers.items():
            path = f"{prefix}.{name}" if prefix else name
            if buffer is None:
                continue
            if loaded and origin is not None:
                wanted = path in origin.buffers
            else:
                wanted = name not in module._non_persistent_buffers_set
            if wanted:
                buffers.append((path, buffer, module))
    for key, (tensor, module) in first.items():
        yield names[key], tensor, module
    for path, buffer, module in buffers:
        yield [path], buffer, module


def _place(tensor: torch.Tensor) -> Any:
    """What two names of one tensor have in common; a tensor without elements is its own."""
    if not tensor.numel():
        return id(tensor)
    layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return (_memory(tensor), *layout)


def _memory(tensor: torch.Tensor) -> int:
    """Whose memory a tensor lies in; on meta, where there is none, whose it would be."""
    if isinstance(tensor, LazyTensor):
        return id(tensor)  # computed from parameters that are not read yet
    storage = tensor.untyped_storage()
    return int(storage._cdata if tensor.device.type == "meta" else storage.data_ptr())


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors lie in one piece of memory."""
    return _memory(a) == _memory(b)


def _same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two views of one memory are the same elements in the same order."""
    if not a.numel() or a.shape != b.shape:
        return a.shape == b.shape
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.storage_offset() == b.storage_offset() and all(
        n == 1 or mine == other for n, mine, other in strides
    )


class _Finder:
    def __init__(
        self, model: nn.Module, origin: Origin | None, mapper: WeightsMapper | None
    ) -> None:
        self.origin = origin
        if mapper is None and origin is not None:
            mapper = origin.mapper
        known = origin.offered if origin is not None else frozenset()
        self.names = CheckpointNames(model, mapper, known)
        self.by_rows = not self.names.has_rules and callable(getattr(model, "load_weights", None))
        self.nameless: list[str] = []
        self.lost: dict[str, str] = {}  # parameter -> why it cannot be undone

    def preferred(self, names: list[str]) -> str:
        """Of the names of one tensor, the one that the checkpoint had, else the first."""
        if len(names) > 1 and self.origin is not None:
            for name in names:
                found = self.names.of(name)
                if found and found[0][0] in self.origin.offered:
                    return name
        return names[0]

    def parts(self, parameter: str, tensor: torch.Tensor, layer: nn.Module) -> list[Part]:
        """The checkpoint tensors of one parameter."""
        check_whole(parameter, tensor)
        if (packed := self._packed(parameter, tensor, layer)) is not None:
            return packed
        if self.by_rows and (named := self._as_read(parameter, tensor)) is not None:
            return named
        found = self.names.of(parameter)
        if found is None:
            self.nameless.append(parameter)
            return []
        parts: list[Part] = []
        for name, shard_id in found:
            part = self._part(name, shard_id, parameter, tensor, layer)
            if part is None:
                continue
            make: Callable[[], torch.Tensor] | None = None
            if not _shares(part, tensor):
                make = partial(required_part, layer, parameter, tensor, shard_id)
                part = torch.empty_like(part, device="meta")
            parts.append(Part(name, part, parameter, make))
        self._check_complete(parameter, tensor, layer, parts, found)
        return parts

    def _packed(self, parameter: str, tensor: torch.Tensor, layer: nn.Module) -> list[Part] | None:
        """The tensors of a parameter whose method says itself what a checkpoint has of it.

        ``quant_method.checkpoint_tensors(layer, name, shard_id)`` gives them by what is put after
        the weight's name, or after a ``/`` in the place of its last component; None: it does not
        say, none: they go with those of another parameter.
        """
        own = getattr(getattr(layer, "quant_method", None), "checkpoint_tensors", None)
        if not callable(own):
            return None
        found = self.names.of(parameter)
        leaf = parameter.rpartition(".")[2]
        parts: list[Part] = []
        for name, shard_id in found or []:
            made = own(layer, leaf, shard_id)
            if made is None:
                return None
            stem = name.rpartition(".")[0]
            for suffix, part in made.items():
                called = f"{stem}.{suffix[1:]}" if suffix.startswith("/") else name + suffix
                parts.append(Part(called, part, parameter))
        return parts

    def _part(
        self, name: str, shard_id: Any, parameter: str, tensor: torch.Tensor, layer: nn.Module
    ) -> torch.Tensor | None:
        part = part_of(layer, parameter, tensor, shard_id)
        computed = part is not None and not _shares(part, tensor)  # the layer undoes its loading
        as_read = None if computed else self._inverse(name, parameter, tensor)
        if part is None or (as_read is not None and part.shape != as_read.shape):
            part = as_read if as_read is not None else part
        if part is None:
            why = f"its layer does not say which part shard {shard_id!r} is"
            self.lost.setdefault(parameter, why)
            return None
        if as_read is not None and _shares(part, tensor) and not _same_elements(part, as_read):
            self.lost[parameter] = f"{show(name)} was read into another part of it"
        shape = self.origin.shapes.get(name) if self.origin is not None else None
        if shape is not None and part.numel() == 1 and len(shape) != part.dim():
            return part.reshape((1,) * len(shape))
        return part

    def _rows(self, parameter: str, tensor: torch.Tensor) -> list[Any]:
        """The plan's rows of a parameter that still has the shape it was loaded with."""
        if self.origin is None or self.origin.sizes.get(parameter) != tuple(tensor.shape):
            return []
        return [row for row in self.origin.rows.get(parameter, ()) if row.tensor is not None]

    def _inverse(self, name: str, parameter: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """What the plan says of a tensor of this name; notes where it was not just copied."""
        rows = [r for r in self._rows(parameter, tensor) if r.tensor == name and r.kind != "tied"]
        if not rows or self.origin is None:
            return None
        if not all(is_copy(row) for row in rows):
            self.lost[parameter] = f"it was computed from {show(name)}"
            return None
        shape = self.origin.shapes.get(name)
        return None if shape is None else inverse(rows, tensor, shape)

    def _as_read(self, parameter: str, tensor: torch.Tensor) -> list[Part] | None:
        """A model with loading code of its own and no rules: its tensors as the plan read them.

        None where nothing was read into the parameter, or the plan's names are not those that
        the model's code was given (another format's).
        """
        names = dict.fromkeys(r.tensor for r in self._rows(parameter, tensor) if r.kind != "tied")
        if not names or self.origin is None or not self.origin.offered.issuperset(names):
            return None
        parts: list[Part] = []
        for name in names:
            part = self._inverse(name, parameter, tensor)
            if part is None:
                self.lost.setdefault(parameter, f"{show(name)} is not in one piece in it")
            else:
                parts.append(Part(name, part, parameter))
        return parts

    def _check_complete(
        self,
        parameter: str,
        tensor: torch.Tensor,
        layer: nn.Module,
        parts: list[Part],
        found: list[tuple[str, Any]],
    ) -> None:
        """The parts of a fused parameter are all of it."""
        if parameter in self.lost or len(found) == 1:
            return
        views = all(_shares(part.tensor, tensor) for part in parts)
        if views and sum(part.tensor.numel() for part in parts) != tensor.numel():
            named = ", ".join(show(part.name) for part in parts)
            self.lost[parameter] = f"{named} are not all of it"

    def raise_if_bad(self) -> None:
        """One error for all parameters that cannot be saved."""
        if self.lost:
            first = next(iter(self.lost))
            listed = [f"{name}: {why}" for name, why in list(self.lost.items())[:SHOWN]]
            raise ModelError(
                f"{len(self.lost)} parameter(s) cannot be turned back into checkpoint tensors: "
                + "; ".join(listed),
                code="NOT_INVERTIBLE",
                parameter=first,
                detail={"parameters": dict(self.lost)},
                hint="give the layer a method checkpoint_part(name, shard_id) that undoes its "
                "loading",
            )
        if self.nameless:
            raise ModelError(
                f"the mapper has no way back for {len(self.nameless)} parameter(s): "
                + ", ".join(map(show, self.nameless[:SHOWN])),
                code="NAME_NOT_REVERSIBLE",
                parameter=self.nameless[0],
                detail={"parameters": self.nameless},
                hint="add a rule that leads from the name to itself ('model.': 'model.')",
            )


def _check_unique(groups: list[list[Part]]) -> None:
    taken: dict[str, str] = {}
    for part in (part for group in groups for part in group):
        if part.name in taken:
            raise ModelError(
                f"{taken[part.name]} and {part.parameter} would both be saved as {show(part.name)}",
                code="NAME_COLLISION",
                tensor=part.name,
                parameter=part.parameter,
            )
        taken[part.name] = part.parameter
