"""From a recording to targets, rows and problems: who gets what, and what nobody got."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from loadkit.errors import TraceError
from loadkit.execution import Target, files_of
from loadkit.load_plan import SHOWN, Problem, Row
from loadkit.module_walk import Modules
from loadkit.name_hints import likely_prefix
from loadkit.plan_costs import Costs, costs_of
from loadkit.plan_places import Place, places
from loadkit.plan_rows import rows_of
from loadkit.readers.base import Reader
from loadkit.sources.base import File
from loadkit.text import nearest, printable
from loadkit.tracing.coverage import (
    Overlap,
    Piece,
    final_pieces,
    is_kept,
    missing_in,
    moved_home,
    on_top_of,
    overlaps,
    unwritten,
)
from loadkit.tracing.expressions import Const, Expr, Filled, Missing, Replay
from loadkit.tracing.lazies import view_of
from loadkit.tracing.lazy_tensor import leaf_names
from loadkit.tracing.leaks import Held
from loadkit.tracing.program import resolve, resolve_region, walk
from loadkit.tracing.replay import holes
from loadkit.tracing.storage import Fill, Storage, Value
from loadkit.tracing.view import View
from loadkit.turns import Turn, repacked_modules, turns_of

if TYPE_CHECKING:
    from loadkit.build import Built
    from loadkit.resolve import Job

__all__ = ["TargetFinder"]


_COMPARED = 500  # names that a missing one is compared with
_MISFITS = {"UNEXPECTED": "UNEXPECTED_TENSOR", "SHAPE": "SHAPE_MISMATCH"}  # kind -> code


class TargetFinder:
    """Goes through a traced model once. ``targets``, ``rows``, ``problems``, ``notes`` result."""

    def __init__(
        self,
        job: Job,
        built: Built,
        problems: list[Problem],
        opaque: set[str],
        modules: Modules,
        sweep: list[Held],
    ) -> None:
        self.job = job
        self.model = built.model
        self.recorder = built.recorder
        self.problems = problems
        self.notes: list[Problem] = []
        self.targets: list[Target] = []
        self.rows: list[Row] = []
        self.initialised: dict[str, str] = {}
        self._opaque = opaque
        self._modules = modules
        self._sweep = sweep
        self._hints = 0
        self._in_trouble = {problem.parameter for problem in problems}
        self._repacked = repacked_modules(modules)
        self._repacked_ids = {id(module) for module in self._repacked.values()}
        self._used: set[str] = {read.tensor for read in built.recorder.data_reads}

    def find(self) -> None:
        """Fill the lists."""
        self._misfits()
        for place in places(self.model, self._modules, self.recorder, self._sweep):
            self._target(place)
        self._unused()
        self._remarks()
        for found in (self.problems, self.notes):
            found[:] = [self._with_file(problem) for problem in found]

    def _with_file(self, problem: Problem) -> Problem:
        """The problem of a tensor names the tensor's file."""
        file = self.recorder.files.get(problem.tensor or "")
        return problem if problem.file or file is None else replace(problem, file=file)

    def _target(self, place: Place) -> None:
        names, tensor, is_parameter, module = place
        if is_lazy(tensor):
            text = f"parameter {names[0]} has no shape: load_weights did not give it one"
            self._problem("UNINITIALISED", text, names[0])
            return
        storage = self.recorder.track(tensor)
        view = view_of(tensor)
        try:
            pieces = final_pieces(storage, view, tensor.dtype)
        except TraceError as error:
            if set(error.detail["tensors"]) - self._opaque:
                raise
            self._problem("TRACE", f"{names[0]}: {error.message}", names[0], tensor=error.tensor)
            return
        overlapping = list(overlaps(storage))
        if _is_elsewhere(tensor, storage):
            storage, view, pieces = moved_home(view, tensor.dtype, pieces)
        target = Target(names, storage, view, tensor.dtype, is_parameter, pieces)
        repacked = id(module) in self._repacked_ids and not self.job.loader.processed
        target.may_alias = not repacked and storage.real is None
        self._overlaps(target, overlapping)
        if is_parameter:
            self._require_written(target, module)
        self.targets.append(target)
        rows = rows_of(target, getattr(tensor, "row_kind", None))
        self.rows += rows
        self._used.update(row.tensor for row in rows if row.tensor is not None)

    def _overlaps(self, target: Target, found: list[Overlap]) -> None:
        """Data over data: compared if the model ties these names, else a problem."""
        for overlap in found:
            first, second = overlap.first.value, overlap.second.value
            if isinstance(first, Fill) or isinstance(second, Fill):
                continue
            a, b = sorted(leaf_names(first)), sorted(leaf_names(second))
            if len(target.names) > 1 and overlap.first.view == overlap.second.view:
                expr = resolve(Value(first.storage, first.version, first.view, first.dtype))
                if expr.dtype != target.dtype:
                    self._used.update(a)
                target.checks.append((overlap.first.view, expr, a[0]))
                continue
            self._problem(
                "DOUBLE_WRITE",
                f"{_list(a)} and {_list(b)} are both written to the same elements of "
                f"{target.names[0]}",
                target.names[0],
                tensor=b[0],
            )

    def _require_written(self, target: Target, module: nn.Module) -> None:
        """Every element of a parameter comes from somewhere, or is on a list with a reason."""
        counted = [
            (missing_in(view, expr, untouched=self._is_untouched(target, expr)), view)
            for view, expr in target.pieces
        ]
        missing = sum(count for count, _ in counted)
        reads_nothing = unwritten(target.pieces)
        name = target.names[0]
        if reads_nothing:
            self._problem(
                "READ_UNWRITTEN",
                f"{reads_nothing} element(s) of {name} are computed from memory that nothing wrote",
                name,
            )
        if not missing:
            return
        reason = next(
            (
                why
                for pattern, why in self.job.load_config.missing_ok.items()
                if any(fnmatchcase(n, pattern) for n in target.names)
            ),
            None,
        )
        if not self._in_trouble.isdisjoint(target.names):
            return  # what should have been written there is a problem already
        total = target.view.numel
        what = "nothing" if missing == total else f"{missing} of {total} elements: nothing"
        if reason is None and self.job.strict:
            views = [view for count, view in counted if count]
            for text in _said_by(module, target, views):
                self._problem("MISSING", f"{text}; {name} stays empty there", name)
            if name not in self._in_trouble:
                self._missing(name, missing, total)
            return
        target.pieces = list(self._with_initial(target))
        why = reason or "strict=False"
        self.initialised[name] = why
        self.notes.append(
            Problem(
                "INITIALISED",
                f"{name}: {what} in the checkpoint; it holds its initial value ({why})",
                parameter=name,
            )
        )

    def _is_untouched(self, target: Target, expr: Expr) -> bool:
        return (
            id(target.storage) in self.recorder.live
            and is_kept(target.storage, expr)
            and isinstance(expr, Const)
            and expr.source is None
        )

    def _missing(self, name: str, missing: int, total: int) -> None:
        files = self._file_count
        hint = self._near(name)
        if name.rsplit(".", 2)[-2:] == ["lm_head", "weight"] or name == "lm_head.weight":
            hint = "if head and embedding are one: hf_overrides={'tie_word_embeddings': True}"
        if missing == total:
            text = f"parameter {name} is not in any of the {files} file(s)"
            self._problem("MISSING", text, name, hint=hint)
        else:
            text = f"{missing} of the {total} elements of {name} are written by no tensor"
            self._problem("PARTLY_WRITTEN", text, name, hint=hint)

    @cached_property
    def _file_count(self) -> int:
        return len(set(self.recorder.files.values())) or len(self.job.loader.files)

    def _near(self, name: str) -> str | None:
        """Unplaced tensors of nearly that name. Few are looked at, and for few: it is dear."""
        if self._hints == SHOWN:
            return None
        self._hints += 1
        leaf = name.rpartition(".")[2]
        alike = (
            misfit.name
            for misfit in self.recorder.misfits
            if misfit.kind == "UNEXPECTED" and misfit.name.rpartition(".")[2] == leaf
        )
        close = nearest(name, islice(alike, _COMPARED))
        return f"near: {', '.join(printable(n) for n in close)}" if close else None

    def _with_initial(self, target: Target) -> Iterator[Piece]:
        """The pieces, with what the constructor wrote (or zeros) where there is nothing."""
        storage = target.storage
        made = storage.writes[: storage.loaded_from]
        start = Storage(storage.base, storage.numel, storage.itemsize, made)
        for view, expr in target.pieces:
            if isinstance(expr, Replay) and holes(expr.storage, expr.version, expr.view):
                yield view, on_top_of(expr, start)
                continue
            if not isinstance(expr, Missing):
                yield view, expr
                continue
            for place, value in resolve_region(start, len(start.writes), view, view, target.dtype):
                if any(isinstance(item, Missing) for item in walk(value)):
                    value = Filled(0, place.size, target.dtype)
                yield place, value

    # ------------------------------------------------------------ rows and remarks

    def _misfits(self) -> None:
        """What loader code reported: skipped tensors with a reason, problems otherwise."""
        for misfit in self.recorder.misfits:
            self._used.add(misfit.name)
            if misfit.kind == "SKIPPED":
                self._skip(misfit.name, misfit.message)
                continue
            if misfit.kind == "METADATA":
                file = self.recorder.files.get(misfit.name)
                row = Row(misfit.name, file, None, None, None, "exact", "metadata", misfit.message)
                self.rows.append(row)
                continue
            code = _MISFITS.get(misfit.kind, misfit.kind)
            problem = Problem(code, misfit.message, misfit.name, misfit.target, hint=misfit.hint)
            if code == "UNEXPECTED_TENSOR" and not self.job.strict:
                self.notes.append(problem)
                self._skip(misfit.name, "strict=False: no place for it")
            else:
                self.problems.append(problem)
                self._in_trouble.add(problem.parameter)
        self._prefix_hint()

    def _prefix_hint(self) -> None:
        """Say on the first unexpected tensor which change of prefix would place them all."""
        at = [i for i, p in enumerate(self.problems) if p.code == "UNEXPECTED_TENSOR"]
        if not at:
            return
        known = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        packed = getattr(self.model, "packed_modules_mapping", None) or {}
        for name in list(known):
            head, _, leaf = name.rpartition(".")
            stem, _, module = head.rpartition(".")
            known.update(
                ".".join(filter(None, (stem, part, leaf))) for part in packed.get(module, ())
            )
        hint = likely_prefix([self.problems[i].tensor or "" for i in at], known)
        if hint is not None:
            first = self.problems[at[0]]
            self.problems[at[0]] = replace(
                first, hint=hint if first.hint is None else f"{hint}; {first.hint}"
            )

    def _unused(self) -> None:
        """Tensors that loader code took and used nothing of, and those it was never offered."""
        for name, reason in self.job.loader.skipped_tensors.items():
            self._skip(name, reason)
        refused = {p.tensor for p in self.problems}
        for name in dict.fromkeys(self.recorder.yielded):
            if name in self._used or name in refused:
                continue
            if name in self.recorder.opaque_bytes:
                file, why = self.recorder.files.get(name), "loader code took it as real data"
                self.rows.append(Row(name, file, None, None, None, "opaque", "opaque", why))
            else:
                self._skip(name, "the model's load_weights took it and wrote nothing of it")

        for name in dict.fromkeys(self.recorder.not_asked):
            if name not in self._used:
                self._skip(name, "the model's load_weights did not ask for it")

    def _skip(self, name: str, reason: str) -> None:
        file = self.recorder.files.get(name)
        self.rows.append(Row(name, file, None, None, None, "exact", "skipped", reason))

    def _remarks(self) -> None:
        for name in sorted(self._opaque):
            text = f"{printable(name)} is loaded as real data: its loader cannot be traced"
            self.notes.append(Problem("OPAQUE_TENSOR", text, name))
        if self.recorder.opaque_bytes.keys() - self._opaque:
            text = (
                f"the loader of {self.job.load_config.load_format} has no catalogue of its tensors"
            )
            self.notes.append(Problem("OPAQUE_LOADER", text))
        reads: dict[str, int] = {}
        for read in self.recorder.data_reads:
            reads[read.tensor] = reads.get(read.tensor, 0) + read.nbytes
        for name, nbytes in reads.items():
            text = f"{nbytes} bytes of {printable(name)} were read while planning: its loader asked"
            self.notes.append(Problem("DATA_READ", text, name))

    def _problem(
        self,
        code: str,
        message: str,
        parameter: str,
        *,
        tensor: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.problems.append(Problem(code, message, tensor, parameter, hint=hint))
        self._in_trouble.add(parameter)

    @cached_property
    def turns(self) -> list[Turn]:
        """In what turns the targets are filled."""
        job = self.job
        together = job.module is not None or job.load_config.distribute is not None
        one_turn = job.loader.processed or together
        return turns_of({} if one_turn else self._repacked, self.targets)

    @cached_property
    def files(self) -> list[File]:
        """The files that will be read."""
        return files_of(self.targets)

    def costs(self, reader: Reader) -> Costs:
        """What the load will read and hold, with this reader. Settles who may be an alias."""
        costs = costs_of(self.turns, self.files, reader, self.job)
        opaque = sum(self.recorder.opaque_bytes.values())
        return costs._replace(needed=costs.needed + opaque, read=costs.read + opaque)


def _said_by(module: nn.Module, target: Target, missing: list[View]) -> list[str]:
    """What a module with ``describe_missing(name, spans)`` says of elements that nothing wrote."""
    own = getattr(module, "describe_missing", None)
    if not callable(own):
        return []
    start, step = target.view.offset, target.view.itemsize
    spans = [
        (low // step - start, high // step - start) for low, high in (v.span() for v in missing)
    ]
    said: list[str] = own(target.names[0].rpartition(".")[2], spans)
    return said


def _is_elsewhere(tensor: torch.Tensor, storage: Storage) -> bool:
    """Whether a parameter on meta was given memory that is not its own (``param.data = w``)."""
    if tensor.device.type != "meta":
        return False
    return storage.keep is None or storage.keep._cdata != tensor.untyped_storage()._cdata


def _list(names: list[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
