"""The public entry points, and the line itself: resolve, build, plan, read, finish."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loadkit import plugins
from loadkit.base_loader import BaseModelLoader
from loadkit.build import build
from loadkit.errors import LoadkitError, ModelError, OptionError
from loadkit.failed_load import let_go
from loadkit.finish import Finisher, check_ready, tell_loaded
from loadkit.load_group import ALONE, LoadGroup, load_group
from loadkit.load_plan import LoadPlan
from loadkit.local_memory import reshard
from loadkit.memory_errors import memory_errors, memory_given_back
from loadkit.meta_buffers import complete_buffers
from loadkit.origin import origin_of, remember, remember_load
from loadkit.plan import Planned, collector_paused, make_plan, plan_without_model
from loadkit.plan_together import needs_of_world, share, share_out
from loadkit.progress import Progress
from loadkit.rank_digest import compare
from loadkit.read import ReadResult, read_turns
from loadkit.report import LoadReport, PeakMeter, Stopwatch
from loadkit.report_of import report_of
from loadkit.resolve import Job, job_for_module, resolve
from loadkit.sources.joint import JointSource
from loadkit.turns import Turn

if TYPE_CHECKING:
    from loadkit.mapper import WeightsMapper
    from loadkit.parallel_config import ParallelConfig

__all__ = ["LoadResult", "load", "load_into", "load_model", "plan", "plan_ranks", "run_line"]


_UNUSABLE = "loadkit_unusable"  # attribute of a model whose load failed half-way: why


@dataclass(frozen=True)
class LoadResult:
    """A loaded model, what the load did, and the plan it followed."""

    model: nn.Module
    report: LoadReport
    plan: LoadPlan


def run_line(job: Job, watch: Stopwatch | None = None, ranks: LoadGroup = ALONE) -> LoadResult:
    """One load. The job's source is closed at the end, whatever happens.

    Of several ranks each step ends when all have done it.

    Raises:
        LoadkitError: typed; nothing half-written is handed out.
    """
    with memory_given_back():
        return _run_line(job, watch or Stopwatch(), ranks)


def _run_line(job: Job, watch: Stopwatch, ranks: LoadGroup) -> LoadResult:
    plan: LoadPlan | None = None
    before = sys.exception()
    try:
        with PeakMeter(device=job.device) as meter, memory_errors():
            with watch.step("build"), ranks.step("build"), collector_paused():
                built = build(job)
                if isinstance(job.source, JointSource):  # weights that the model asked for
                    compare(ranks, job, "joined")
            if any(not file.local for file in job.source.opened()):
                with watch.step("download"), ranks.step("download"):
                    _refuse_misfit(job)
                    job.source.make_local(job.loader.files)
            recorder = built.recorder
            try:
                with watch.step("plan"), ranks.step("plan"), collector_paused():
                    planned = make_plan(job, built)
                    plan, recorder = planned.plan, planned.recorder
                    if plan.ok:
                        share(ranks, job, planned)
                        plan = planned.plan
                    plugins.call("plan_ready", plan=plan)
                    plan.raise_if_bad()
                in_place = any(target.storage.real is not None for target in plan.targets)
                with watch.step("read"), _marked(planned.model, in_place), ranks.step("read"):
                    done, finisher = _read(job, planned, ranks)
            except BaseException:
                recorder.undo_rehoming()
                raise
            with watch.step("finish"), _marked(planned.model, True), ranks.step("finish"):
                _finish(job, planned, finisher)
        remember_load(
            planned.model,
            job.config,
            plan,
            planned.recorder.yielded,
            architecture=job.architecture if job.module is None else "",
            given=planned.recorder.given if not job.loader.by_key else job.loader.whole_tensors,
            indirect=not job.loader.reads_checkpoint,
        )
        report = report_of(job, planned, done, watch, meter)
        result = LoadResult(planned.model, report, plan)
        plugins.call("load_finished", result=result)
        return result
    except BaseException as error:
        if isinstance(error, LoadkitError):
            plugins.call("load_failed", error=error, plan=plan)
        let_go(error, before)
        raise
    finally:
        job.close()


def _refuse_misfit(job: Job) -> None:
    """A remote checkpoint that does not fit is refused before its files are fetched.

    Not where a loader would have to fetch the weights to be traced.

    Raises:
        PlanError: it does not fit.
    """
    if type(job.loader).catalogue is BaseModelLoader.catalogue:
        return
    with collector_paused():
        built = build(job)
        planned: Planned | None = None
        try:
            planned = make_plan(job, built)
            planned.plan.raise_if_bad()
        finally:
            recorder = built.recorder if planned is None else planned.recorder
            recorder.undo_rehoming()
            if planned is not None:
                planned.reader.close()


def _read(job: Job, planned: Planned, ranks: LoadGroup) -> tuple[ReadResult, Finisher]:
    """Step 4, and the memory handed to the model.

    A module with a turn of its own is finished as it completes, the rest is handed over at the end.
    """
    plan = planned.plan
    device = torch.device(job.device)
    finisher = Finisher(
        planned.model, job.config.model_config, device, processed=job.loader.processed
    )
    held: list[tuple[Turn, dict[int, torch.Tensor]]] = []

    def landed(nbytes: int) -> None:
        ranks.check()
        progress.landed(nbytes)

    def ready(turn: Turn, memory: dict[int, torch.Tensor]) -> None:
        if turn.module is None:
            held.append((turn, memory))
        else:
            finisher.take(turn, memory)

    alias = planned.reader.aliases and job.load_config.alias == "auto"
    try:
        with Progress(plan.bytes_to_read, shown=job.load_config.use_tqdm_on_load) as progress:
            done = read_turns(
                planned.turns,
                planned.reader,
                ready,
                device=device,
                alias=alias,
                landed=landed,
                share=planned.share,
            )
            done.bytes_read += planned.reader.end(progress.landed)
    except ModelError:
        planned.reader.end()  # wrong numbers from a damaged file: then that is the error
        raise
    finally:
        planned.reader.close()
    done.bytes_read += sum(planned.recorder.opaque_bytes.values())
    if done.overflows and job.config.model_config.dtype_from != "requested":
        name = done.overflows[0]
        raise ModelError(
            f"{len(done.overflows)} tensor(s) hold numbers that {plan.dtype} cannot: {name} "
            "became infinite",
            code="CAST_OVERFLOW",
            tensor=name,
            detail={"tensors": done.overflows},
            hint="give dtype='float32' or 'bfloat16', or force this one with dtype=",
        )
    for turn, memory in held:
        finisher.take(turn, memory)
    return done, finisher


@contextmanager
def _marked(model: nn.Module, written: bool) -> Iterator[None]:
    """Where memory of the model may be written to, an error inside says so on the model."""
    try:
        yield
    except BaseException as error:
        if written:
            model.__dict__[_UNUSABLE] = f"{type(error).__name__}: {error}"
            error.add_note("the module may be half-written: load it again")
        raise


def _finish(job: Job, planned: Planned, finisher: Finisher) -> None:
    model = planned.model
    finisher.finish()
    if job.device != "cpu":
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type == "cpu":
                    module._buffers[name] = buffer.to(job.device)
    complete_buffers(model, torch.device(job.device))
    check_ready(model)
    for file in job.source.opened():
        file.check_unchanged()
    model.__dict__.pop(_UNUSABLE, None)
    tell_loaded(model)
    if job.module is None:
        model.eval()


def load(
    source: str | os.PathLike[str], *, process_group: Any = None, **options: Any
) -> LoadResult:
    """Load a checkpoint into a ready model in ``eval`` mode.

    Args:
        source: a folder, a file or a URI.
        process_group: the ``torch.distributed`` group of the ranks that load together. All of
            them call; they fail together and by name, and may share what they read.
        **options: ``load_format``, ``dtype``, ``device``, ``parallel``, ``load_config``,
            ``quantization``, ``model_impl``, ``trust_remote_code``, ``strict``,
            ``hf_overrides``, ``architecture``: see ``loadkit.plan``.

    Raises:
        PlanError: the plan has problems; ``.problems`` holds all of them. Nothing was read.
        LoadkitError: any other typed failure.
    """
    watch = Stopwatch()
    with load_group(process_group, options.get("parallel"), options.get("load_config")) as ranks:
        with watch.step("resolve"):
            job = _resolved(ranks, lambda: resolve(source, **options))
        return run_line(job, watch, ranks)


def _resolved(ranks: LoadGroup, resolve_it: Callable[[], Job]) -> Job:
    """Step 1 on every rank; all of them see the same checkpoint, or none goes on."""
    job: Job | None = None
    try:
        with ranks.step("resolve"):
            job = resolve_it()
            compare(ranks, job)
        return job
    except BaseException:
        if job is not None:
            job.close()
        raise


def load_model(source: str | os.PathLike[str], **options: Any) -> nn.Module:
    """``load(source, ...)`` and its model alone."""
    return load(source, **options).model


def plan(source: str | os.PathLike[str], **options: Any) -> LoadPlan:
    """What ``load`` would do for one rank: the line stopped after the third step.

    Reads headers only; no weight byte, unless a model's own loader asks for numbers
    (``LoadPlan.data_read_bytes``). With ``distribute`` every rank of the layout is planned, since
    what one reads depends on what the others need.

    Args:
        source: a folder, a file or a URI.
        **options: load_format: "auto" or a name of ``loadkit formats``.
            dtype: "auto" (config's, else the checkpoint's), or a torch dtype or its name.
            device: where parameters go; default cpu.
            parallel: which rank of which topology (``ParallelConfig``); default all of it.
            load_config: a ``LoadConfig``, for everything else.
            quantization: a method's name; default what the checkpoint says.
            model_impl: "auto", "loadkit" or "transformers".
            trust_remote_code: whether a plugin may run the checkpoint's code.
            strict: False initialises parameters that nothing writes and skips unexpected tensors.
            hf_overrides: values in place of config.json's.
            architecture: in place of the config's.

    Raises:
        LoadkitError: the source, its config or a name cannot be resolved. What is wrong between
            checkpoint and model is in ``problems`` instead.
    """
    return _plan(source, options, [])


def plan_ranks(
    source: str | os.PathLike[str], ranks: Iterable[ParallelConfig], **options: Any
) -> Iterator[LoadPlan]:
    """``plan`` of several ranks of one layout, one after the other."""
    needs: list[bytes] = []
    for parallel in ranks:
        yield _plan(source, {**options, "parallel": parallel}, needs)


def _plan(source: str | os.PathLike[str], options: dict[str, Any], needs: list[bytes]) -> LoadPlan:
    """One rank's plan. ``needs``: what each rank needs, found out once where one has to know."""
    job = resolve(source, **options)
    try:
        try:
            with collector_paused():
                built = build(job)
                planned = make_plan(job, built)
                if job.load_config.distribute and planned.plan.ok:
                    needs += needs_of_world(source, options, job, planned) if not needs else ()
                    share_out(job, planned, needs)
        except ModelError as error:
            return plan_without_model(job, error)
        planned.reader.close()
        plugins.call("plan_ready", plan=planned.plan)
        return planned.plan
    finally:
        job.close()


def load_into(
    module: nn.Module,
    source: str | os.PathLike[str],
    *,
    mapper: WeightsMapper | None = None,
    load_format: str = "auto",
    load_config: Any = None,
    parallel: Any = None,
    strict: bool = True,
    process_group: Any = None,
) -> LoadResult:
    """Fill a module that the user built from a checkpoint, by names.

    Args:
        module: its own ``load_weights`` is used if it has one; parameters may be real (they are
            written in place) or on meta.
        source: a folder, a file or a URI; no config.json is needed.
        mapper: checkpoint names to the module's.
        process_group: as of ``load``.

    Raises:
        PlanError: names or shapes do not fit; the module is untouched.
        LoadkitError: anything else; a module that may be half-written has an attribute
            ``loadkit_unusable`` that says why.
    """
    from loadkit.module_loader import ModuleLoader

    if not isinstance(module, nn.Module):
        raise OptionError(f"module is {type(module).__name__}; accepted: a torch.nn.Module")
    reshard(module)
    with load_group(process_group, parallel, load_config) as ranks:
        job = _resolved(
            ranks,
            lambda: job_for_module(
                module,
                source,
                load_format=load_format,
                load_config=load_config,
                parallel=parallel,
                strict=strict,
            ),
        )
        job.loader.__dict__["load_weights"] = ModuleLoader(job.loader, mapper).load_weights
        result = run_line(job, ranks=ranks)
    if mapper is not None and (origin := origin_of(module)) is not None:
        remember(module, replace(origin, mapper=mapper))
    return result
