"""The plan of a rank whose group shares its reading: what the others need decides what it reads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from loadkit.distribute import Distribution
from loadkit.execution import moves_of
from loadkit.integrity.reader import VerifyingReader
from loadkit.load_group import ALONE, LoadGroup
from loadkit.parallel_config import ParallelConfig
from loadkit.plan_costs import Bill
from loadkit.rank_needs import Arrivals, decode, encode
from loadkit.rank_shares import Needs, Shares

if TYPE_CHECKING:
    from loadkit.plan import Planned
    from loadkit.resolve import Job
    from loadkit.sources.base import File

__all__ = ["needs_of_world", "share", "share_out"]


def share(group: LoadGroup, job: Job, planned: Planned) -> None:
    """Tell the group's ranks what this one needs, hear what they need, and share it out.

    Nothing happens unless ``distribute`` is set.
    """
    if job.load_config.distribute is None:
        return
    arrivals = Arrivals(planned.plan.targets, torch.device(job.device))
    mine = arrivals.needs
    found = group.exchange("needs", encode(mine))
    needs = [
        mine if rank == group.rank else decode(each, job.source.open)
        for rank, each in enumerate(found)
    ]
    _settle(planned, arrivals, needs, group, group.rank)


def share_out(job: Job, planned: Planned, found: Sequence[bytes]) -> None:
    """The same for a plan by which nobody loads yet; ``found`` is what ``needs_of_world`` gave."""
    arrivals = Arrivals(planned.plan.targets, torch.device(job.device))
    mine = job.config.parallel_config.rank
    needs = [
        arrivals.needs if rank == mine else decode(each, job.source.open)
        for rank, each in enumerate(found)
    ]
    _settle(planned, arrivals, needs, ALONE, mine)


def needs_of_world(
    source: str | os.PathLike[str], options: Mapping[str, Any], job: Job, planned: Planned
) -> list[bytes]:
    """What each rank of a layout needs, encoded: every rank but one's own is planned for that."""
    from loadkit.build import build
    from loadkit.plan import make_plan
    from loadkit.resolve import resolve

    parallel = job.config.parallel_config
    found = []
    for rank, place in enumerate(_world_of(parallel)):
        if rank == parallel.rank:
            mine = Arrivals(planned.plan.targets, torch.device(job.device))
            found.append(encode(mine.needs))
            continue
        other = resolve(source, **{**options, "parallel": place})
        try:
            made = make_plan(other, build(other))
            made.reader.close()
            needs = Arrivals(made.plan.targets, torch.device(other.device)).needs
            found.append(encode(needs))
        finally:
            other.close()
    return found


def _settle(
    planned: Planned, arrivals: Arrivals, needs: Sequence[Needs], group: LoadGroup, rank: int
) -> None:
    share = Distribution(group, rank, arrivals, needs, Shares(needs))
    together = share.shares.nbytes
    check, known = planned.verification, len(planned.verification.warnings)
    for each in needs:  # of files that only others need this rank reads parts too
        check.add(_files_of(each))
    planned.reader.remarks += check.warnings[known:]
    if isinstance(planned.reader, VerifyingReader):  # ranks read again what they have parts of
        together = sum(
            replace(share, rank=each).survey(planned.reader).nbytes
            + planned.reader.survey_end(check.apart(_files_of(needs[each]))).nbytes
            for each in range(len(needs))
        )
    alone = Bill(planned.reader)  # last: what a reader brings ahead is of its last plan
    for target in arrivals.alone:
        alone.add(moves_of(target, alias=False))
        for _, expr, _ in target.checks:
            alone.evaluated(expr)
    alone.close()
    mine = share.survey(planned.reader)
    rest = planned.reader.survey_end()
    opaque = sum(planned.recorder.opaque_bytes.values())
    plan = planned.plan
    planned.share = share
    planned.plan = replace(
        plan,
        distribute="broadcast",
        bytes_to_read=mine.nbytes + alone.read + rest.nbytes + opaque,
        requests=mine.requests + alone.requests + rest.requests,
        group_bytes_to_read=together,
        predicted_peak_bytes=plan.predicted_peak_bytes + share.staging_bytes,
        reader_why=f"each of {len(needs)} ranks reads a part of what all need and sends the others "
        f"theirs, so no parameter is a view of a file; {plan.reader_why}",
    )


def _files_of(needs: Needs) -> list[File]:
    """The files that a rank needs anything of, by name."""
    found = {place.file.name: place.file for place in (*needs.first, *needs.late)}
    return [found[name] for name in sorted(found)]


def _world_of(parallel: ParallelConfig) -> list[ParallelConfig]:
    """Every rank's place in the layout that ``parallel`` is a place of; its own as it is."""
    sizes = {f"{axis}_size": getattr(parallel, f"{axis}_size") for axis in ("tp", "pp", "ep", "dp")}
    world = [
        replace(ParallelConfig.for_rank(rank, **sizes), expert_placement=parallel.expert_placement)
        for rank in range(parallel.world_size)
    ]
    world[parallel.rank] = parallel
    return world
