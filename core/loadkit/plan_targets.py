"""From a recording to targets, rows and problems: who gets what, and what nobody got."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from loadkit.execution import Target, expression_cost, files_of, moves_of, read_cost
from loadkit.load_plan import Problem, Region, Row
from loadkit.name_hints import likely_prefix
from loadkit.readers import can_alias
from loadkit.readers.base import Reader
from loadkit.sources.base import File
from loadkit.text import nearest, printable
from loadkit.tracing.blocks import DecodeBlocks
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
from loadkit.tracing.lazy_tensor import LazyTensor, leaf_names
from loadkit.tracing.leaks import held_tensors
from loadkit.tracing.operations import view_of
from loadkit.tracing.program import (
    Call,
    Const,
    Expr,
    Filled,
    Missing,
    Replay,
    Src,
    exactness,
    resolve,
    resolve_region,
    walk,
)
from loadkit.tracing.replay import holes
from loadkit.tracing.storage import FileLeaf, Fill, Storage, Value
from loadkit.tracing.view import View

if TYPE_CHECKING:
    from loadkit.build import Built
    from loadkit.resolve import Job

__all__ = ["Costs", "TargetFinder", "is_repacked"]


_MISFITS = {"UNEXPECTED": "UNEXPECTED_TENSOR", "SHAPE": "SHAPE_MISMATCH"}  # kind -> code


class Costs(NamedTuple):
    """Bytes: of needed elements, to read, mapped of it, of parameters, of memory at most."""

    needed: int
    read: int
    aliased: int
    parameters: int
    peak: int


class TargetFinder:
    """Goes through a traced model once. ``targets``, ``rows``, ``problems``, ``notes`` result."""

    def __init__(self, job: Job, built: Built, problems: list[Problem], opaque: set[str]) -> None:
        self.job = job
        self.model = built.model
        self.recorder = built.recorder
        self.problems = problems
        self.notes: list[Problem] = []
        self.targets: list[Target] = []
        self.rows: list[Row] = []
        self.initialised: dict[str, str] = {}
        self._opaque = opaque
        self._used: set[str] = {read.tensor for read in built.recorder.data_reads}

    def find(self) -> None:
        """Fill the lists."""
        self._misfits()
        for names, tensor, is_parameter, module in self._places():
            self._target(names, tensor, is_parameter, module)
        self._unused()
        self._remarks()
        for found in (self.problems, self.notes):
            found[:] = [self._with_file(problem) for problem in found]

    def _with_file(self, problem: Problem) -> Problem:
        """The problem of a tensor names the tensor's file."""
        file = self.recorder.files.get(problem.tensor or "")
        return problem if problem.file or file is None else replace(problem, file=file)

    # ------------------------------------------------------------ places

    def _places(self) -> Iterator[tuple[tuple[str, ...], torch.Tensor, bool, nn.Module]]:
        """Every parameter once, with all of its names, then every buffer that was written."""
        names: dict[tuple[int, View], list[str]] = {}
        first: dict[tuple[int, View], tuple[torch.Tensor, nn.Module]] = {}
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            for name, param in module._parameters.items():
                if param is None or isinstance(param, LazyTensor):
                    continue
                key = (param.untyped_storage()._cdata, view_of(param))
                names.setdefault(key, []).append(f"{prefix}.{name}" if prefix else name)
                first.setdefault(key, (param, module))
        for key, (param, module) in first.items():
            yield tuple(names[key]), param, True, module
        seen: set[int] = set()
        for prefix, module in self.model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or isinstance(buffer, LazyTensor) or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                if self.recorder.is_changed(buffer):
                    yield (f"{prefix}.{name}" if prefix else name,), buffer, False, module
        for name, held in self._held_elsewhere():
            yield (name,), held, False, self.model

    def _held_elsewhere(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Real tensors beside parameters and buffers that were written to: attributes, mostly."""
        parts = {
            t.untyped_storage()._cdata
            for t in (*self.model.parameters(), *self.model.buffers())
            if not isinstance(t, LazyTensor)
        }
        done: set[int] = set()
        for held in held_tensors(self.model):
            if held.is_part or isinstance(held.tensor, LazyTensor):
                continue
            if held.tensor.device.type == "meta" or held.tensor.layout != torch.strided:
                continue
            key = held.tensor.untyped_storage()._cdata
            storage = self.recorder.tracked(held.tensor)
            if key in parts or key in done or storage is None or storage.real is None:
                continue
            done.add(key)
            if storage.writes:
                yield held.where, storage.real

    def _target(
        self, names: tuple[str, ...], tensor: torch.Tensor, is_parameter: bool, module: nn.Module
    ) -> None:
        storage = self.recorder.track(tensor)
        view = view_of(tensor)
        try:
            pieces = final_pieces(storage, view, tensor.dtype)
        except RecursionError:
            self._problem(
                "TRACE", f"{names[0]} is the end of too long a chain of operations", names[0]
            )
            return
        overlapping = list(overlaps(storage))
        if _is_elsewhere(tensor, storage):
            storage, view, pieces = moved_home(view, tensor.dtype, pieces)
        target = Target(names, storage, view, tensor.dtype, is_parameter, pieces)
        target.may_alias = not is_repacked(module) and storage.real is None
        self._overlaps(target, overlapping)
        if is_parameter:
            self._require_written(target)
        self.targets.append(target)
        self._rows_of(target)

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

    def _require_written(self, target: Target) -> None:
        """Every element of a parameter comes from somewhere, or is on a list with a reason."""
        missing = sum(
            missing_in(view, expr, untouched=self._is_untouched(target, expr))
            for view, expr in target.pieces
        )
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
        if any(p.parameter in target.names for p in self.problems):
            return  # what should have been written there is a problem already
        total = target.view.numel
        what = "nothing" if missing == total else f"{missing} of {total} elements: nothing"
        if reason is None and self.job.strict:
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
        files = len({row.file for row in self.rows if row.file}) or len(self.job.loader.files)
        unused = [m.name for m in self.recorder.misfits if m.kind == "UNEXPECTED"]
        close = nearest(name, unused)
        hint = f"near: {', '.join(printable(n) for n in close)}" if close else None
        if name.rsplit(".", 2)[-2:] == ["lm_head", "weight"] or name == "lm_head.weight":
            hint = "if head and embedding are one: hf_overrides={'tie_word_embeddings': True}"
        if missing == total:
            text = f"parameter {name} is not in any of the {files} file(s)"
            self._problem("MISSING", text, name, hint=hint)
        else:
            text = f"{missing} of the {total} elements of {name} are written by no tensor"
            self._problem("PARTLY_WRITTEN", text, name, hint=hint)

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

    def _rows_of(self, target: Target) -> None:
        tensors: set[str] = set()
        rows: list[Row] = []
        for view, expr in target.pieces:
            region = Region(view.offset - target.view.offset, view.size, view.stride)
            found = list(_leaves(expr))
            word = exactness(expr) if found else "exact"
            if isinstance(expr, Filled):
                rows.append(Row(None, None, None, target.names[0], region, "exact", "fill"))
            for leaf in found:
                name = leaf[0]
                tensors.add(name)
                rows.append(Row(name, leaf[1], leaf[2], target.names[0], region, word, _kind(expr)))
        if len(tensors) > 1:
            rows = [
                Row(r.tensor, r.file, r.source, r.parameter, r.target, r.exact, "fused")
                if r.kind == "copy"
                else r
                for r in rows
            ]
        for view, expr, tensor in target.checks:
            tensors.add(tensor)
            region = Region(view.offset - target.view.offset, view.size, view.stride)
            for name, file, source in _leaves(expr):
                rows.append(
                    Row(
                        name,
                        file,
                        source,
                        target.names[0],
                        region,
                        exactness(expr),
                        "tied",
                        "tied:verify",
                    )
                )
        self._used |= tensors
        self.rows += rows

    def _misfits(self) -> None:
        """What loader code reported: skipped tensors with a reason, problems otherwise."""
        for misfit in self.recorder.misfits:
            self._used.add(misfit.name)
            if misfit.kind == "SKIPPED":
                self._skip(misfit.name, misfit.message)
                continue
            code = _MISFITS.get(misfit.kind, misfit.kind)
            problem = Problem(code, misfit.message, misfit.name, misfit.target, hint=misfit.hint)
            if code == "UNEXPECTED_TENSOR" and not self.job.strict:
                self.notes.append(problem)
                self._skip(misfit.name, "strict=False: no place for it")
            else:
                self.problems.append(problem)
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

    # ------------------------------------------------------------ costs

    def files(self) -> list[File]:
        """The files that will be read."""
        return files_of(self.targets)

    def costs(self, reader: Reader) -> Costs:
        """What the load will read and hold, with this reader. Settles who may be an alias."""
        aliases = reader.aliases and self.job.load_config.alias == "auto"
        allowed = {id(file): aliases and can_alias(file)[0] for file in self.files()}
        needed = read = aliased = staging = owned = 0
        shared: set[int] = set()
        storages: dict[int, int] = {}
        host = self.job.device.startswith("cpu")
        users = Counter(id(target.storage) for target in self.targets)
        for target in self.targets:
            target.may_alias = (
                target.may_alias
                and host
                and users[id(target.storage)] == 1
                and all(
                    allowed[id(expr.leaf.info.file)]
                    for _, expr in target.pieces
                    if isinstance(expr, Src) and isinstance(expr.leaf, FileLeaf)
                )
            )
            moves = moves_of(target, direct=host, alias=aliases)
            cost = read_cost(moves, type(reader), shared)
            needed += cost.needed
            read += cost.read
            aliased += cost.aliased
            staging = max(staging, cost.staging)
            for _, expr, _ in target.checks:
                check = expression_cost(expr, type(reader), shared)
                needed, read = needed + check.needed, read + check.read
                staging = max(staging, check.staging)
            if target.storage.real is None and moves.alias is None:
                storages[id(target.storage)] = target.storage.numel * target.storage.itemsize
        owned = sum(storages.values()) if host else 0
        opaque = sum(self.recorder.opaque_bytes.values())
        parameters = sum(t.nbytes for t in self.targets if t.is_parameter)
        return Costs(needed + opaque, read + opaque, aliased, parameters, owned + staging)


def is_repacked(module: nn.Module) -> bool:
    """Whether a module's weights are changed after loading: then they must be owned."""
    from loadkit.quantization_base import QuantizeMethodBase

    method = getattr(module, "quant_method", None)
    if method is None:
        return False
    own = getattr(type(method), "process_weights_after_loading", None)
    return own is not None and own is not QuantizeMethodBase.process_weights_after_loading


def _is_elsewhere(tensor: torch.Tensor, storage: Storage) -> bool:
    """Whether a parameter on meta was given memory that is not its own (``param.data = w``)."""
    if tensor.device.type != "meta":
        return False
    return storage.keep is None or storage.keep._cdata != tensor.untyped_storage()._cdata


def _leaves(expr: Expr) -> Iterator[tuple[str, str | None, Region | None]]:
    """(tensor, file, region) of everything an expression is made of."""
    for item in walk(expr):
        if isinstance(item, Src):
            file = item.leaf.info.file.name if isinstance(item.leaf, FileLeaf) else None
            yield item.leaf.name, file, Region(item.view.offset, item.view.size, item.view.stride)
        elif isinstance(item, Const) and item.source is not None:
            yield item.source, None, None


def _kind(expr: Expr) -> str:
    if isinstance(expr, Src):
        return "copy"
    if isinstance(expr, Call) and expr.func is torch.ops.aten._to_copy.default:
        inner = expr.args[0]
        return "cast" if isinstance(inner, Src) else _kind(inner) if _decodes(inner) else "compute"
    if _decodes(expr):
        return "decode"
    return "copy" if isinstance(expr, Const) else "compute"


def _decodes(expr: Expr) -> bool:
    return isinstance(expr, Call) and isinstance(expr.func, DecodeBlocks)


def _list(names: list[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
