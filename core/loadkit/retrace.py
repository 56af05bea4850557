"""The plan of a load without its files: the same code on the names and shapes that it was given.

Saving asks it two things: which parts of which checkpoint tensors a rank's parameters are, and
whether what is about to be written can be loaded back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import torch
from torch import nn

from loadkit.base_loader import BaseModelLoader
from loadkit.build import build
from loadkit.config import LoadConfig, LoadkitConfig, ModelConfig
from loadkit.errors import PathError, TraceError
from loadkit.execution import Target
from loadkit.load_plan import LoadPlan, Region
from loadkit.manifest import Box
from loadkit.origin import Origin, with_plan
from loadkit.plan import Planned, make_plan
from loadkit.resolve import Job
from loadkit.sources.base import File, FileInfo, Source
from loadkit.text import printable
from loadkit.tracing.expressions import Call, Expr, Filled, Src
from loadkit.tracing.given import Given
from loadkit.tracing.lazy_tensor import generated
from loadkit.tracing.recorder import active_recorder
from loadkit.tracing.storage import GeneratedLeaf
from loadkit.tracing.view import View

__all__ = ["Boxes", "boxes_of", "checkpoint_origin", "retrace"]

Weights = Iterator[tuple[str, torch.Tensor]]
Place = Callable[[nn.Module, Weights], object]


def retrace(
    config: LoadkitConfig,
    model_class: type[nn.Module],
    given: Mapping[str, Given],
    place: Place | None = None,
) -> Planned:
    """The model on meta and the plan of loading tensors that exist by name and shape only.

    Args:
        config: the bundle that the model is built from; its ``parallel_config`` says which rank.
        model_class: the model.
        given: the tensors, under the names that the model is given them by.
        place: puts them into the model; None: the model's own ``load_weights``.

    Raises:
        ModelError: the model cannot be built.
    """
    load_config = LoadConfig(load_format="dummy", missing_ok=config.load_config.missing_ok)
    config = replace(config, load_config=load_config)
    loader = _Nothing(load_config, given, place)
    loader.source, loader.parallel = _Nowhere("", load_config), config.parallel_config
    loader.config, loader.model_class = config, model_class
    job = Job(
        config, "", loader, "", model_class, model_class.__qualname__, "", "",
        "cpu", True,
    )  # fmt: skip
    planned = make_plan(job, build(job))
    planned.reader.close()
    return planned


@dataclass(frozen=True)
class Boxes:
    """Parameters (and buffers) as parts of checkpoint tensors.

    Attributes:
        of: parameter -> its parts; none where it is all padding.
        unknown: parameter -> why its parts are not known.
        used: the names of the checkpoint tensors among them.
    """

    of: dict[str, tuple[Box, ...]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)


def boxes_of(plan: LoadPlan, given: Mapping[str, Given]) -> Boxes:
    """What a plan's parameters are made of, where that is copies of parts of tensors.

    Args:
        plan: of this rank, with its targets.
        given: the tensors that it was made with; where the plan calls one by its stored name, the
            box has the name it was given by.
    """
    names = {one.stored: name for name, one in given.items()}
    found = Boxes()
    for problem in plan.problems:
        if problem.parameter is not None:
            found.unknown[problem.parameter] = problem.message
    for target in plan.targets:
        name = target.names[0]
        try:
            boxes = tuple(_boxes(target, names))
        except _UnknownError as error:
            found.unknown.setdefault(name, str(error))
            continue
        if name not in found.unknown:
            found.of[name] = boxes
            found.used.update(box.tensor for box in boxes)
    return found


def checkpoint_origin(model: nn.Module, origin: Origin | None) -> Origin | None:
    """What a model remembers, in terms of checkpoint tensors.

    A model that was loaded from parts of parameters remembers which checkpoint tensors those were
    parts of, if its files said so: the plan of loading them is made.
    """
    if origin is None or not origin.indirect:
        return origin
    bare = replace(origin, rows={}, shapes={}, offered=frozenset(origin.given), indirect=False)
    if not origin.given or not origin.architecture:
        return bare
    given = {name: one._replace(stored=name) for name, one in origin.given.items()}
    return with_plan(bare, retrace(origin.config, type(model), given).plan, given)


class _UnknownError(Exception):
    """Why a parameter is no plain copy of parts of tensors."""


def _boxes(target: Target, names: Mapping[str, str]) -> Iterator[Box]:
    for view, expr in target.pieces:
        if isinstance(expr, Filled):
            continue
        source = _copied(expr)
        if source is None or source.size != view.size:
            raise _UnknownError("it is computed from what the checkpoint holds")
        if source.leaf.name not in names:
            raise _UnknownError(f"{printable(source.leaf.name)} is no tensor the model was given")
        if not target.view.is_contiguous():
            raise _UnknownError("its memory is not row-major")
        start = view.offset - target.view.offset
        yield Box(
            names[source.leaf.name],
            Region(source.view.offset, source.view.size, source.view.stride),
            Region(start, view.size, view.stride),
        )


def _copied(expr: Expr) -> Src | None:
    """The region whose numbers an expression is, as far as the dtype goes."""
    if isinstance(expr, Call) and expr.func is torch.ops.aten._to_copy.default:
        expr = expr.args[0]
    if isinstance(expr, Src) and expr.view.itemsize == expr.leaf.dtype.itemsize:
        return expr
    return None


class _Nothing(BaseModelLoader):
    """Tensors without numbers."""

    needs_source = False

    def __init__(
        self, load_config: LoadConfig, given: Mapping[str, Given], place: Place | None
    ) -> None:
        super().__init__(load_config)
        self._given, self._place = given, place

    def catalogue(self, model_config: ModelConfig) -> Weights:
        for name, one in self._given.items():
            leaf = GeneratedLeaf(one.stored, one.size, one.dtype, partial(_no_numbers, one.stored))
            yield name, generated(leaf)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        weights: Iterable[tuple[str, torch.Tensor]] = self.catalogue(model_config)
        recorder = active_recorder()
        if recorder is not None:
            weights = recorder.observe(weights)
        if self._place is not None:
            self._place(model, iter(weights))
        else:
            model.load_weights(weights)  # type: ignore[operator]  # every model has it


def _no_numbers(name: str, view: View) -> NoReturn:
    raise TraceError(
        f"the numbers of {printable(name)} were asked for, and only its shape is known",
        tensor=name,
        detail={"tensors": [name]},
    )


class _Nowhere(Source):
    """A source without files."""

    def list(self) -> Sequence[FileInfo]:
        return ()

    def open(self, name: str) -> File:
        raise PathError(f"{printable(name)}: there are no files", file=name)

    def close(self) -> None:
        pass
