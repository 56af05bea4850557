"""The draft of a target whose files are those of ranks: every rank planned, none in memory.

What the files of a rank hold is known to the loader of the target's format. Its class has
``rank_contents(model, origin, topology)``, which gives ``tensors`` (views of the planned model's
parameters, by name) and ``manifest`` (without files), and ``rank_file(rank, part)``, a file's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from loadkit import tables
from loadkit.config import ParallelConfig
from loadkit.conversion.contents import (
    Contents,
    check_ties,
    output_of,
    planned_load,
    quantised_later,
    raise_problems,
    reader_for,
    skipped_of,
)
from loadkit.conversion.draft import Draft, Small, file_entries
from loadkit.conversion.files import PlannedFile, planned_files
from loadkit.conversion.journal import Done
from loadkit.conversion.outputs import Output
from loadkit.errors import UsageError
from loadkit.manifest import MANIFEST, Manifest, Topology, manifest_bytes
from loadkit.manifest_merge import merge_manifests
from loadkit.origin import origin_of
from loadkit.report_of import casts_of
from loadkit.resolve import Job, job_for_rank
from loadkit.save_config import config_bytes, config_of, side_files

if TYPE_CHECKING:
    from contextlib import ExitStack

    from loadkit.load_plan import LoadPlan
    from loadkit.tracing.recorder import Recorder

__all__ = ["sharded_draft"]


@contextmanager
def sharded_draft(
    stack: ExitStack,
    job: Job,
    sizes: Mapping[str, int],
    *,
    load_format: str,
    metadata: Mapping[str, str],
    most: int,
) -> Iterator[Draft]:
    """Every rank's files, the manifest of all of them, config.json and the tokenizer's files.

    Args:
        stack: closes the readers.
        job: of the first rank.
        sizes: tp, pp and ep.
        load_format: the target's.
        metadata: of each file.
        most: bytes of tensors in one file; a larger parameter is cut into rows.

    Raises:
        PlanError: all problems of all ranks.
        UsageError: the format's files are not those of ranks.
    """
    loader: Any = tables.loaders.lookup(load_format)
    if not hasattr(loader, "rank_contents"):
        raise UsageError(f"load format {load_format!r} has no files of ranks to write")
    ranks = [_rank(stack, job, parallel, loader) for parallel in _ranks(sizes)]
    raise_problems([plan for plan, _, _ in ranks])
    planned = [(contents, manifest) for _, contents, manifest in ranks if contents and manifest]
    files: list[PlannedFile] = []
    for contents, manifest in planned:
        number = manifest.ranks[0].rank

        def name_of(part: int, count: int, rank: int = number) -> str:
            return str(loader.rank_file(rank, part))

        groups = [list(_cuts(output, most)) for output in contents.outputs()]
        single = [[output] for group in groups for output in group]
        files += planned_files(single, name_of, metadata, most, rank=number)
    first, manifest = planned[0]
    with side_files(first.origin) as (copied, refused):
        small = Small(list(copied), {}, dict(refused))
        if first.config is not None:
            dtype = manifest.dtype or None
            small.made["config.json"] = config_bytes(first.config, dtype=dtype, tied=False)

        def last(done: Mapping[str, Done]) -> dict[str, bytes]:
            whole = [
                replace(one, files=file_entries(_of_rank(files, one), done)) for _, one in planned
            ]
            return {MANIFEST: manifest_bytes(merge_manifests(whole))}

        yield Draft(
            files,
            {manifest.ranks[0].rank: contents.reader for contents, manifest in planned},
            [contents for contents, _ in planned],
            small,
            last,
            manifest.layout,
            manifest.topology,
        )


def _ranks(sizes: Mapping[str, int]) -> list[ParallelConfig]:
    """Every rank of the world, in order.

    Raises:
        OptionError: the sizes do not fit.
    """
    tp, pp, ep = (sizes[axis] for axis in ("tp", "pp", "ep"))
    world = ParallelConfig(tp_size=tp, pp_size=pp, ep_size=ep).world_size
    return [
        ParallelConfig.for_rank(rank, tp_size=tp, pp_size=pp, ep_size=ep) for rank in range(world)
    ]


def _rank(
    stack: ExitStack, job: Job, parallel: ParallelConfig, loader: Any
) -> tuple[LoadPlan, Contents | None, Manifest | None]:
    """One rank's plan and, if that is good, what goes into its files."""
    mine = job_for_rank(job, parallel)
    with planned_load(mine) as planned:
        plan = planned.plan
        if not plan.ok:
            return plan, None, None
        origin = origin_of(planned.model)
        found = loader.rank_contents(planned.model, origin, Topology.of(parallel))
        outputs = _outputs(found.tensors, planned.recorder)
        files = [mine.source.open(name) for name in plan.files]
        reader = reader_for(mine, files)
        stack.callback(reader.close)
        check_ties(planned, reader)
        contents = Contents(
            [[output] for output in outputs],
            files,
            reader,
            origin,
            config_of(planned.model, None, origin),
            plan,
            casts_of(planned),
            skipped_of(plan),
            found.tied,
            quantised_later(planned.model),
        )
        return plan, contents, found.manifest


def _outputs(tensors: Mapping[str, torch.Tensor], recorder: Recorder) -> list[Output]:
    with recorder:
        return [output_of(name, tensor, recorder) for name, tensor in tensors.items()]


def _cuts(output: Output, most: int) -> Iterator[Output]:
    """An output, or its rows where it is larger than a file may be."""
    view = output.value.view
    if output.nbytes <= most or not view.size or view.size[0] < 2:
        yield output
        return
    rows = view.size[0]
    step = max(1, most * rows // output.nbytes)
    for start in range(0, rows, step):
        part = view.narrow(0, start, min(step, rows - start))
        value = replace(output.value, view=part)
        yield replace(output, value=value, row=start, rows=rows)


def _of_rank(files: Sequence[PlannedFile], manifest: Manifest) -> list[PlannedFile]:
    return [file for file in files if file.rank == manifest.ranks[0].rank]
