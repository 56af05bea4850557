"""Step 3: weight loaders run on lazy tensors; what they did becomes a plan. Headers only."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loadkit.base_loader import BaseModelLoader
from loadkit.build import Built, build
from loadkit.distribute import Distribution
from loadkit.errors import IntegrityError, LoadkitError, ModelError, ReadFailure, TraceError
from loadkit.integrity import Verification
from loadkit.load_plan import LoadPlan, Problem
from loadkit.load_strategy import reader_for
from loadkit.local_memory import local_of
from loadkit.meta_buffers import buffers_without_memory
from loadkit.module_walk import Modules, named_modules
from loadkit.plan_targets import TargetFinder
from loadkit.readers import can_alias
from loadkit.readers.base import Reader
from loadkit.readers.mmap import MmapReader
from loadkit.stage_ownership import of_this_stage
from loadkit.text import printable
from loadkit.tracing.given import noted
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.leaks import Held, adopt, held_tensors, leaked_names, settle, stale
from loadkit.tracing.observed import observed, offers_of
from loadkit.tracing.reading import read_now
from loadkit.tracing.recorder import Recorder
from loadkit.tracing.storage import FileLeaf
from loadkit.turns import Turn

if TYPE_CHECKING:
    from loadkit.resolve import Job
    from loadkit.sources.base import File

__all__ = ["Planned", "collector_paused", "make_plan", "plan_without_model"]

log = logging.getLogger("loadkit")

_PLAIN = {int, float, bool, str, bytes, type(None), torch.dtype, torch.device}
_MANY_OBJECTS = 100_000  # that one collection of young objects should not look through
MAX_ATTEMPTS = 16  # times a model is traced; each later one knows more of what is wrong


@dataclass(eq=False)
class Planned:
    """A traced model, its plan, and the reader that the plan counted with.

    ``turns``: in what turns it is filled. ``verification``: what the reader compares. ``share``:
    how ranks read for each other, where ``distribute`` says that they do.
    """

    model: nn.Module
    recorder: Recorder
    plan: LoadPlan
    reader: Reader
    initialised: dict[str, str]
    turns: list[Turn]
    verification: Verification
    share: Distribution | None = None


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside: a plan makes a million small objects that all live on.

    Afterwards they count as old ones: looking through them at once would find nothing.
    Measured: a quarter of the CPU time of a plan of 10,000 tensors. A few are left to the next
    collection, since asking how many objects are frozen counts each of them (0.1 s of a million).
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            many = gc.get_count()[0] > _MANY_OBJECTS  # and frozen ones are let be
            if many and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def make_plan(job: Job, built: Built) -> Planned:
    """Trace the loader over the model and say what the load will do.

    An operation that cannot be traced, or a lazy tensor that loader code kept, makes the tensors
    concerned *opaque*: the model is built and traced again with those real. A tensor whose loader
    failed is a problem, and is left out of the next trace, so that all problems are found.
    """
    opaque: set[str] = set()
    failed: dict[str, Problem] = {}
    general: list[Problem] = []
    real_scratch = False
    for attempt in range(MAX_ATTEMPTS):
        if attempt:
            built.recorder.undo_rehoming()
            built = build(job)
        built.recorder.opaque = frozenset(opaque)
        built.recorder.refused = frozenset(failed)
        built.recorder.real_of = partial(_real_data, alias=job.load_config.alias == "auto")
        built.recorder.real_scratch = real_scratch
        try:
            _trace(job, built)
        except TraceError as error:
            names = _tensors_of(error)
            names = names or ({built.recorder.current} if built.recorder.current else set())
            if not names - opaque and not real_scratch:
                real_scratch = True  # buffers that loader code makes may be what is in the way
                continue
            if not names - opaque:
                general.append(_problem(error, built.recorder.current))
                break
            log.info("traced again with real data: %s", "; ".join(map(printable, sorted(names))))
            opaque |= names
        except (IntegrityError, ReadFailure):
            raise  # of what a loader reads while it is traced: no tensor is out of place
        except Exception as error:  # noqa: BLE001  # anybody's loader code; it becomes a problem
            current = built.recorder.current
            if current is not None and current not in opaque and _needs_real_data(error):
                opaque.add(current)
                continue
            problem = _problem(error, current)
            name = problem.tensor
            if name is None or name in failed:
                general.append(problem)
                break
            failed[name] = problem
        else:
            modules = named_modules(built.model)
            adopt(modules, built.recorder)
            sweep = list(held_tensors(modules))
            leaked = leaked_names(sweep)
            if not leaked - opaque:
                problems = [*failed.values(), *general, *_left_behind(built, modules, sweep)]
                try:
                    return _assemble(job, built, problems, opaque, modules, sweep)
                except TraceError as error:  # a program that regions cannot be read by
                    opaque |= _tensors_of(error)
            opaque |= leaked
    else:
        general.append(Problem("TOO_MANY_PROBLEMS", f"gave up looking after {MAX_ATTEMPTS} traces"))
    modules = named_modules(built.model)
    sweep = list(held_tensors(modules))
    return _assemble(job, built, [*failed.values(), *general], opaque, modules, sweep)


def _tensors_of(error: TraceError) -> set[str]:
    """The checkpoint tensors that an error of the recorder is about."""
    detail = error.detail if isinstance(error.detail, dict) else {}
    return set(detail.get("tensors", ()))


def _needs_real_data(error: Exception) -> bool:
    """Whether an error of loader code may come from a tensor that is not in memory."""
    words = ("meta", "not allocated", "storage", "wrapper subclass")
    text = str(error)
    return isinstance(error, NotImplementedError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )


def _trace(job: Job, built: Built) -> None:
    recorder = built.recorder
    recorder.makes_real_data = type(job.loader).catalogue is BaseModelLoader.catalogue
    with recorder, _observed_model(built.model, recorder):
        recorder.begin_load()
        if job.module is not None:
            parts = (*built.model.parameters(), *built.model.buffers())
            recorder.track_live(local_of(part) for part in parts)
        with torch.no_grad(), warnings.catch_warnings():
            # load_state_dict says that copies to meta do nothing; here they are recorded
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            job.loader.load_weights(built.model, job.config.model_config)
            recorder.drain()


@contextmanager
def _observed_model(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Let the recorder see the weights that any loader gives to ``model.load_weights``."""
    own = getattr(model, "load_weights", None)
    if not callable(own):
        yield
        return

    def load_weights(weights: Any, *args: Any, **kwargs: Any) -> Any:
        seen = noted(offers_of(recorder.observe(weights)), recorder.given)
        return own(observed(of_this_stage(model, seen)), *args, **kwargs)

    model.__dict__["load_weights"] = load_weights
    try:
        yield
    finally:
        del model.__dict__["load_weights"]


def _problem(error: Exception, tensor: str | None) -> Problem:
    """An error of loader code, as a problem of one tensor."""
    if isinstance(error, LoadkitError):
        return Problem(
            error.code.removeprefix("E_"),
            error.message,
            error.tensor or tensor,
            error.parameter,
            error.file,
            error.offset,
            error.hint,
        )
    what = f"loading tensor {printable(tensor)}" if tensor else "load_weights"
    return Problem(
        "LOADER_FAILED", f"{what} failed: {type(error).__name__}: {printable(error)}", tensor
    )


def _real_data(lazy: LazyTensor, *, alias: bool) -> torch.Tensor:
    """A lazy tensor's real elements, from a mapping where that may be."""
    leaf = lazy.lazy_storage.base
    if not isinstance(leaf, FileLeaf) or lazy.lazy_storage.writes or not lazy.numel():
        return read_now(lazy.lazy_value(), None)
    info = leaf.info
    if not alias or info.offset % leaf.dtype.itemsize or not can_alias(info.file)[0]:
        flat = torch.frombuffer(
            bytearray(info.file.read(info.offset, info.nbytes)), dtype=torch.uint8
        )
    else:
        from loadkit.load_config import LoadConfig

        flat = MmapReader(LoadConfig()).view(info.file, info.offset, info.nbytes)
    return flat.view(leaf.dtype).view(leaf.size)


def _left_behind(built: Built, modules: Modules, sweep: list[Held]) -> list[Problem]:
    """Problems of what loader code did where the recorder could not follow."""
    problems: list[Problem] = []
    try:
        settle(sweep, built.recorder)
    except TraceError as error:
        problems.append(_problem(error, None))
    for name in sorted(leaked_names(sweep)):
        text = f"loader code kept {printable(name)} in a way that it cannot be given its numbers"
        problems.append(Problem("LEAKED_TENSOR", text, name))
    for where, parameter in stale(sweep, built.recorder):
        what = f"a view of parameter {parameter}" if parameter else "a tensor without memory"
        problems.append(
            Problem(
                "STALE_TENSOR",
                f"attribute {where} is {what}: it would stay empty",
                parameter=where,
                hint="register it as a parameter, or make it after loading",
            )
        )
    problems += [
        Problem(
            "BUFFER_ON_META",
            f"buffer {name} has no memory, the checkpoint does not hold it, and the module cannot "
            "make it again",
            parameter=name,
            hint="make the module under loadkit.build.parameters_on_meta() in place of "
            "torch.device('meta'): buffers stay real there",
        )
        for name in buffers_without_memory(built.model, modules, built.recorder)
    ]
    if built.recorder.foreign_writes:
        problems.append(
            Problem(
                "FOREIGN_THREAD",
                f"{built.recorder.foreign_writes} write(s) came from threads that were running "
                "before the load began: what else they did was not seen",
                hint="start threads inside load_weights, or use a ThreadPoolExecutor",
            )
        )
    return problems


def _assemble(
    job: Job,
    built: Built,
    problems: list[Problem],
    opaque: set[str],
    modules: Modules,
    sweep: list[Held],
) -> Planned:
    """Everything that was recorded, as a plan."""
    finder = TargetFinder(job, built, problems, opaque, modules, sweep)
    finder.find()
    files = finder.files
    ranks = job.config.parallel_config.world_size
    choice = reader_for(job.load_config, files, job.device, ranks=ranks)
    check = Verification(job.loader, job.load_config, job.config.model_config, files)
    seen = {read.tensor for read in built.recorder.data_reads} | opaque
    reader = check.around(choice.reader, also=seen)
    reader.remarks += check.warnings
    costs = finder.costs(reader)
    plan = LoadPlan(
        source=job.source_name,
        architecture=job.architecture,
        model_class=job.model_class_name,
        distribution=job.distribution,
        load_format=job.load_config.load_format,
        load_format_why=job.load_format_why,
        dtype=job.config.model_config.dtype_name,
        reader=reader.name,
        reader_why=choice.why,
        parallel=job.config.parallel_config,
        problems=tuple(finder.problems),
        notes=(
            *job.loader.notes,
            *(Problem("SOURCE", remark) for remark in job.source.remarks),
            *finder.notes,
            *_downloads(files, job),
        ),
        rows=tuple(finder.rows),
        bytes_needed=costs.needed,
        bytes_to_read=costs.read,
        parameter_bytes=costs.parameters,
        predicted_peak_bytes=costs.peak,
        aliased_bytes=costs.aliased,
        data_read_bytes=sum(read.nbytes for read in built.recorder.data_reads),
        files=tuple(file.name for file in files),
        skipped_files=tuple(job.loader.skipped_files.items()),
        requests=costs.requests,
        bytes_fetched=job.source.bytes_fetched,
        targets=tuple(finder.targets),
    )
    return Planned(
        built.model, built.recorder, plan, reader, finder.initialised, finder.turns, check
    )


def _downloads(files: Sequence[File], job: Job) -> list[Problem]:
    """What a plan of remote files says of the load: that it fetches whole files first."""
    remote = [file for file in files if not file.local and not file.reader]
    if not remote or job.load_config.stream:
        return []
    size = sum(file.size for file in remote)
    return [
        Problem(
            "DOWNLOAD",
            f"a load fetches {len(remote)} whole file(s) first, {size:,} bytes, and then reads "
            "them from the disk; this plan counts what ranges would take",
            hint="stream=true reads those ranges and keeps no copy"
            if "stream" in job.source.load_options
            else None,
        )
    ]


def plan_without_model(job: Job, error: ModelError) -> LoadPlan:
    """The plan of a model that cannot even be constructed: its one problem."""
    return LoadPlan(
        source=job.source_name,
        architecture=job.architecture,
        model_class=job.model_class_name,
        distribution=job.distribution,
        load_format=job.load_config.load_format,
        load_format_why=job.load_format_why,
        dtype=job.config.model_config.dtype_name,
        reader="",
        reader_why="",
        parallel=job.config.parallel_config,
        problems=(_problem(error, None),),
        notes=(),
        rows=(),
        bytes_needed=0,
        bytes_to_read=0,
        parameter_bytes=0,
        predicted_peak_bytes=0,
        aliased_bytes=0,
        data_read_bytes=0,
        files=(),
        skipped_files=tuple(job.loader.skipped_files.items()),
        bytes_fetched=job.source.bytes_fetched,
    )
