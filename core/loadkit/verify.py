"""Checking a checkpoint's files: ``loadkit.verify``.

What there has to be is there, every file holds the bytes that somebody vouched for, every header is
what the manifest or the index says; on demand every number is finite, or equal to another
checkpoint's.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from loadkit.config import LoadConfig, ParallelConfig
from loadkit.conversion.contents import checkpoint_contents
from loadkit.conversion.findings import Check, Findings
from loadkit.diff import DiffReport, diff
from loadkit.errors import ShardedError
from loadkit.load_plan import Problem
from loadkit.manifest import Manifest, read_manifest
from loadkit.resolve import job_for_module
from loadkit.sources import open_source

if TYPE_CHECKING:
    from loadkit.base_loader import BaseModelLoader
    from loadkit.conversion.contents import Contents

__all__ = ["Check", "VerifyReport", "verify"]


@dataclass(frozen=True)
class VerifyReport:
    """What was checked, and everything that is wrong.

    Attributes:
        ok: there are no problems.
        source: what was checked.
        layout: as its manifest calls it; "" without one.
        checks: files, headers, digests, and finite or against where that was asked for.
        problems: all of them.
        files: weight files by name: "size", "sha256" (None: not computed), "vouched" (who says
            what it should hold; None: nobody).
        tensors: how many there are.
        against: the comparison with another checkpoint.
        seconds: wall time.
    """

    ok: bool
    source: str
    layout: str
    checks: tuple[Check, ...]
    problems: tuple[Problem, ...]
    files: dict[str, dict[str, Any]]
    tensors: int = 0
    against: DiffReport | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values."""
        return asdict(self)


def verify(
    source: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    finite: bool = False,
    tolerance: float | None = None,
    load_format: str = "auto",
    load_config: LoadConfig | None = None,
    **options: Any,
) -> VerifyReport:
    """Check the files of a checkpoint; no model is built, unless it is compared with another.

    Args:
        source: a folder, a file or a URI.
        against: a checkpoint that it has to be equal to (``loadkit.diff``).
        finite: look for NaN and infinity in every tensor of floats.
        tolerance: of the comparison.
        load_format: "auto" or a name of ``loadkit formats``.
        load_config: how it is read.
        **options: of the comparison.

    Raises:
        ReadFailure: a file that is there could not be read. What is wrong with the checkpoint is
            in ``problems`` instead.
    """
    started = time.perf_counter()
    found = Findings()
    with ExitStack() as stack:
        opened = stack.enter_context(open_source(source, load_config or LoadConfig()))
        manifest = found.tried("manifest", lambda: read_manifest(opened))
        broken = bool(found.problems)  # whoever reads the manifest again would raise
        if manifest is not None:
            found.list_files(opened, manifest)
        looked = found.tried(
            "headers", lambda: _looked(stack, source, load_format, load_config, manifest)
        )
        contents, loader = ([], None) if looked is None else looked
        names = [file for each in contents for file in each.files]
        if contents and manifest is not None:
            found.list_tensors(manifest, names)
        if not broken:
            listed = {*found.files, *(file.name for file in names)}
            found.digests(opened, listed, manifest, loader)
        if finite and contents:
            found.finite(contents)
        report = None
        if against is not None and contents:
            formats = (load_format, "auto")
            report = diff(
                source,
                against,
                tolerance=tolerance,
                load_formats=formats,
                load_config=load_config,
                **options,
            )
            found.compared(report)
    return VerifyReport(
        ok=not found.problems,
        source=os.fspath(source),
        layout=manifest.layout if manifest is not None else "",
        checks=tuple(found.checks),
        problems=tuple(found.problems),
        files=found.files,
        tensors=sum(len(group) for each in contents for group in each.groups),
        against=report,
        seconds=time.perf_counter() - started,
    )


def _looked(
    stack: ExitStack,
    source: str | os.PathLike[str],
    load_format: str,
    load_config: LoadConfig | None,
    manifest: Manifest | None,
) -> tuple[list[Contents], BaseModelLoader]:
    """What the headers say, and a loader that read them.

    Files of ranks that nothing puts together are looked at as each rank would.
    """

    def look(parallel: ParallelConfig | None = None) -> tuple[Contents, BaseModelLoader]:
        job = job_for_module(
            nn.Module(),
            source,
            load_format=load_format,
            load_config=load_config,
            parallel=parallel,
        )
        stack.callback(job.close)
        contents = checkpoint_contents(job)
        stack.callback(contents.reader.close)
        return contents, job.loader

    try:
        whole, loader = look()
        return [whole], loader
    except ShardedError:
        ranks = _ranks_of(manifest)
        if not ranks:
            raise
    every = [look(parallel) for parallel in ranks]
    return [contents for contents, _ in every], every[0][1]


def _ranks_of(manifest: Manifest | None) -> list[ParallelConfig]:
    """The places that the files of several ranks were saved at, where they can be told."""
    top = None if manifest is None else manifest.topology
    if top is None or top.world_size == 1 or top.experts is not None:
        return []
    return [
        ParallelConfig.for_rank(
            rank, tp_size=top.tp, pp_size=top.pp, ep_size=top.ep, dp_size=top.dp
        )
        for rank in range(top.world_size)
    ]
