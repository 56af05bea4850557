"""What a load tells of itself once it is through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadkit.report import LoadReport

if TYPE_CHECKING:
    from loadkit.plan import Planned
    from loadkit.read import ReadResult
    from loadkit.report import PeakMeter, Stopwatch
    from loadkit.resolve import Job

__all__ = ["report_of"]


def report_of(
    job: Job, planned: Planned, done: ReadResult, watch: Stopwatch, meter: PeakMeter
) -> LoadReport:
    """The report of a load that is through: what its plan said, and what was done."""
    plan = planned.plan
    casts: dict[tuple[str, str], int] = {}
    for change in planned.casts():
        casts[change] = casts.get(change, 0) + 1
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
        casts=[{"from": a, "to": b, "tensors": n} for (a, b), n in casts.items()],
        skipped={r.tensor: r.reason or "" for r in plan.rows if r.kind == "skipped" and r.tensor},
        initialised=dict(planned.initialised),
        verified=planned.reader.verified(),
        warnings=warnings,
    )
