"""What of a source is to be written: its tensors as they are, or as a model's class names them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from loadkit import plugins
from loadkit.build import build
from loadkit.conversion.outputs import Output
from loadkit.errors import OptionError, UsageError
from loadkit.integrity import Verification
from loadkit.integrity.layer import tensors_of
from loadkit.load_strategy import reader_for as strategy_reader
from loadkit.module_walk import named_modules
from loadkit.origin import Origin, origin_of, remember_load
from loadkit.plan import Planned, collector_paused, make_plan
from loadkit.read import read_targets
from loadkit.readers.base import Place
from loadkit.readers.prefetch import PrefetchingReader
from loadkit.report_of import casts_of
from loadkit.retrace import checkpoint_origin
from loadkit.save_config import check_unquantised, config_of, stated_tie
from loadkit.save_layout import lay_out
from loadkit.tracing.lazies import as_lazy, view_of
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.storage import Value
from loadkit.unused_options import refuse_idle_ring

if TYPE_CHECKING:
    from loadkit.load_plan import LoadPlan, Problem
    from loadkit.readers.base import Reader
    from loadkit.resolve import Job
    from loadkit.sources.base import File
    from loadkit.tracing.recorder import Recorder

__all__ = [
    "Contents",
    "check_ties",
    "checkpoint_contents",
    "model_contents",
    "output_of",
    "planned_load",
    "raise_problems",
    "reader_for",
    "skipped_of",
]


@dataclass(frozen=True, eq=False)
class Contents:
    """Outputs in groups that stay side by side, and what is known beside them.

    Attributes:
        groups: what there is to write.
        files: the source's files that it is read from.
        reader: what reads them.
        origin: what a model loaded from the source would remember; None without a model.
        config: the values of config.json, if they are known.
        plan: of the load, with a model.
        casts: conversions: from, to, which tensors.
        skipped: tensors of the source that are not written, with the reason.
        ties: tensor -> names that share it and are not written again.
        later: modules whose weights a load quantises, and that are written as they are before.
    """

    groups: list[list[Output]]
    files: list[File]
    reader: Reader
    origin: Origin | None = None
    config: dict[str, Any] | None = None
    plan: LoadPlan | None = None
    casts: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    ties: dict[str, list[str]] = field(default_factory=dict)
    later: list[str] = field(default_factory=list)

    def outputs(self) -> Iterator[Output]:
        """Every one, in order."""
        return (output for group in self.groups for output in group)


def reader_for(job: Job, files: Sequence[File]) -> Reader:
    """What reads for a conversion, verifying where that is asked for.

    It reads into memory of its own, always. Its ``end`` has to be called when all is read.

    Raises:
        OptionError: options that mean something for models in memory only.
        IntegrityError: E_SIZE, the manifest knows files of other sizes.
    """
    _refuse_idle(job)
    config, model_config = replace(job.load_config, alias="never"), job.config.model_config
    check = Verification(job.loader, config, model_config, files)
    reader = strategy_reader(config, files, "cpu").reader
    if isinstance(reader, PrefetchingReader):
        for file, start, end, name in tensors_of(job.loader.catalogue(model_config)):
            reader.survey([Place(file, start, end - start, 1, end - start, name)])
    return check.around(reader)


def _refuse_idle(job: Job) -> None:
    """Refuse options that would do nothing where no model is made.

    Raises:
        OptionError: names those that were set.
    """
    refuse_idle_ring(job.load_config)
    options = job.load_config.options()
    given = [
        f"{name}={getattr(job.load_config, name)!r}"
        for name in ("distribute", "rank_timeout")
        if getattr(job.load_config, name) != options[name].default
    ]
    device = job.load_config.device or job.device
    given += [f"device={device!r}"] if device != "cpu" else []
    if given:
        raise OptionError(
            f"{', '.join(given)}: no model is made here, and one process reads",
            hint="leave it out",
        )


def checkpoint_contents(job: Job, dtype: torch.dtype | None = None) -> Contents:
    """Every tensor of a checkpoint under its own name.

    Args:
        job: of a load without a model (``job_for_module``).
        dtype: what floats of 16 bits and more become; None: they stay.

    Raises:
        UsageError: OPAQUE_LOADER, the load format does not say where its tensors are.
    """
    groups: list[list[Output]] = []
    casts: dict[tuple[str, str], set[str]] = {}
    try:
        for name, tensor in job.loader.catalogue(job.config.model_config):
            value = as_lazy(tensor, None).lazy_value()
            kind = _cast_to(value.dtype, dtype)
            if kind != value.dtype:
                change = str(value.dtype).removeprefix("torch."), str(kind).removeprefix("torch.")
                casts.setdefault(change, set()).add(name)
            groups.append([Output(name, value, kind)])
    except NotImplementedError as error:
        raise UsageError(
            f"load format {job.load_config.load_format!r} has no catalogue of its tensors",
            code="OPAQUE_LOADER",
            hint="load it and save the model",
        ) from error
    files = [job.source.open(name) for name in job.loader.files]
    skipped = dict(job.loader.skipped_tensors)
    return Contents(groups, files, reader_for(job, files), casts=casts, skipped=skipped)


def _cast_to(found: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    plain = found.is_floating_point and found.itemsize > 1
    return wanted if wanted is not None and plain else found


@contextmanager
def planned_load(job: Job) -> Iterator[Planned]:
    """The line's second and third step: a model on meta, its program and its plan.

    Raises:
        LoadkitError: the model cannot be constructed. Problems of the plan are in it.
    """
    with collector_paused():
        built = build(job)
        planned = make_plan(job, built)
    try:
        plugins.call("plan_ready", plan=planned.plan)
        if planned.plan.ok:
            remember_load(
                planned.model,
                job.config,
                planned.plan,
                planned.recorder.yielded,
                architecture=job.architecture,
                given=job.loader.whole_tensors if job.loader.by_key else planned.recorder.given,
                indirect=not job.loader.reads_checkpoint,
            )
        yield planned
    finally:
        planned.reader.close()


def raise_problems(plans: Sequence[LoadPlan]) -> None:
    """One error for the problems of all ranks, each once.

    Raises:
        PlanError: there are any.
    """
    problems: dict[Problem, None] = {}
    for plan in plans:
        problems.update(dict.fromkeys(plan.problems))
    if plans:
        replace(plans[0], problems=tuple(problems)).raise_if_bad()


def model_contents(job: Job) -> Contents:
    """Every tensor of a model under its checkpoint name, as ``loadkit.save`` would write it.

    The model is planned at tp 1 and never in memory.

    Raises:
        PlanError: it could not be loaded; all problems.
        ModelError, UsageError: it could not be saved: see ``loadkit.save``.
    """
    with planned_load(job) as planned:
        raise_problems([planned.plan])
        origin = checkpoint_origin(planned.model, origin_of(planned.model))
        config = config_of(planned.model, None, origin)
        check_unquantised(config, origin)
        recorder = planned.recorder
        with recorder:
            layout = lay_out(planned.model, origin, None, tied=stated_tie(config) is not False)
            groups = [
                [
                    output_of(
                        part.name, part.tensor if part.make is None else part.make(), recorder
                    )
                    for part in group
                ]
                for group in layout.groups
            ]
        files = [job.source.open(name) for name in planned.plan.files]
        reader = reader_for(job, files)
        check_ties(planned, reader)
        casts, later = casts_of(planned), quantised_later(planned.model)
    return Contents(
        groups,
        files,
        reader,
        origin,
        config,
        planned.plan,
        casts,
        skipped_of(planned.plan),
        layout.ties,
        later,
    )


def quantised_later(model: torch.nn.Module) -> list[str]:
    """Modules whose weights a load quantises once it has read them."""
    named = ((name, getattr(module, "quant_method", None)) for name, module in named_modules(model))
    return [name for name, method in named if getattr(method, "uses_meta_device", False)]


def output_of(name: str, tensor: torch.Tensor, recorder: Recorder) -> Output:
    """A planned parameter, a view of one, or something computed from them, to write."""
    if isinstance(tensor, LazyTensor):
        return Output(name, tensor.lazy_value(), tensor.dtype)
    storage = recorder.track(tensor)
    value = Value(storage, len(storage.writes), view_of(tensor), tensor.dtype)
    return Output(name, value, tensor.dtype)


def skipped_of(plan: LoadPlan) -> dict[str, str]:
    """Tensors that a plan makes no use of, with the reason."""
    return {r.tensor: r.reason or "" for r in plan.rows if r.kind == "skipped" and r.tensor}


def check_ties(planned: Planned, reader: Reader) -> None:
    """Compare tensors that the model ties and the checkpoint holds twice.

    Raises:
        ModelError: TIED_DIFFER.
    """
    for target in planned.plan.targets:
        if target.checks:
            read_targets([target], reader, device=torch.device("cpu"), alias=False)
