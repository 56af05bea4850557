"""What a load tells of itself once it is through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loadkit.report import LoadReport
from loadkit.tracing.expressions import Call, Src
from loadkit.tracing.program import walk
from loadkit.tracing.storage import FileLeaf

if TYPE_CHECKING:
    from loadkit.plan import Planned
    from loadkit.read import ReadResult
    from loadkit.report import PeakMeter, Stopwatch
    from loadkit.resolve import Job
    from loadkit.tracing.expressions import Expr

__all__ = ["casts_of", "report_of"]


def report_of(
    job: Job, planned: Planned, done: ReadResult, watch: Stopwatch, meter: PeakMeter
) -> LoadReport:
    """The report of a load that is through: what its plan said, and what was done."""
    plan = planned.plan
    warnings = [note.message for note in plan.notes]
    warnings += [f"{name}: some numbers became infinite in {plan.dtype}" for name in done.overflows]
    warnings += planned.reader.remarks
    return LoadReport(
        source=plan.source,
        architecture=plan.architecture,
        load_format=plan.load_format,
        reader=plan.reader,
        reader_why=plan.reader_why,
        parallel=plan.parallel,
        seconds=dict(watch.seconds),
        bytes_needed=plan.bytes_needed,
        bytes_read=done.bytes_read,
        aliased_bytes=done.aliased_bytes,
        requests=plan.requests,
        bytes_fetched=job.source.bytes_fetched,
        bytes_sent=planned.share.bytes_sent if planned.share else 0,
        bytes_received=planned.share.bytes_received if planned.share else 0,
        parameter_bytes=plan.parameter_bytes,
        peak=meter.peak(),
        casts=[
            {"from": a, "to": b, "tensors": len(names)}
            for (a, b), names in casts_of(planned).items()
        ],
        skipped={r.tensor: r.reason or "" for r in plan.rows if r.kind == "skipped" and r.tensor},
        initialised=dict(planned.initialised),
        verified=planned.reader.verified(),
        warnings=warnings,
    )


def casts_of(planned: Planned) -> dict[tuple[str, str], set[str]]:
    """Conversions: (from, to) dtype -> the checkpoint's tensors that are converted."""
    casts: dict[tuple[str, str], set[str]] = {}
    for target in planned.plan.targets:
        for _, expr in target.pieces:
            if isinstance(expr, Call) and expr.func is torch.ops.aten._to_copy.default:
                change = (
                    str(expr.args[0].dtype).removeprefix("torch."),
                    str(expr.dtype).removeprefix("torch."),
                )
                casts.setdefault(change, set()).update(_tensors_in(expr) or target.names[:1])
    return casts


def _tensors_in(expr: Expr) -> list[str]:
    """The checkpoint's tensors in an expression."""
    found = (item.leaf for item in walk(expr) if isinstance(item, Src))
    return [leaf.info.name for leaf in found if isinstance(leaf, FileLeaf)]
