"""Converting a checkpoint without a model in memory: ``loadkit.convert``.

It is the line with a writer at its end: the model is built on meta and its load is planned, and
what the plan says every tensor is made of is read and written, a little at a time. Nothing of the
target has its name before all of it is durable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.conversion.carry_out import carry_out
from loadkit.conversion.contents import Contents
from loadkit.conversion.draft import Draft
from loadkit.conversion.drafts import How, make_draft
from loadkit.conversion.writing import Written
from loadkit.errors import UsageError
from loadkit.file_checks import show_path
from loadkit.saved_files import MAX_SHARD_BYTES

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["ConvertReport", "convert"]


@dataclass(frozen=True)
class ConvertReport:
    """What was written. Sizes in bytes.

    Attributes:
        path: the folder.
        to: "safetensors" or "sharded_state".
        names: whose names the tensors have: "model", "checkpoint" or "parameter", and why.
        files: its weight files in order.
        tensors: how many tensors they hold.
        total_size: bytes of the weight files.
        bytes_read: of the source, in this run.
        bytes_written: of weight files, in this run.
        bytes_kept: of weight files, that a killed run had written.
        topology: tp, pp and ep of a sharded target.
        casts: conversions: from, to, how many tensors.
        skipped: tensors of the source that are not in the target, with the reason.
        ties: tensor -> the names that share it and were not written again.
        copied: files that came from the source.
        not_copied: files of the source that could not be had, with the reason.
        warnings: what was allowed although it is unusual.
        seconds: wall time.
    """

    path: Path
    to: str
    names: str
    names_why: str
    files: tuple[str, ...]
    tensors: int
    total_size: int
    bytes_read: int
    bytes_written: int
    bytes_kept: int
    topology: dict[str, int] = field(default_factory=dict)
    casts: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    ties: dict[str, list[str]] = field(default_factory=dict)
    copied: tuple[str, ...] = ()
    not_copied: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values."""
        return {**vars(self), "path": os.fspath(self.path), "files": list(self.files)}


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str = "safetensors",
    names: str = "auto",
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    resume: bool = False,
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
    load_config: LoadConfig | None = None,
    **options: Any,
) -> ConvertReport:
    """Write any checkpoint that can be loaded as another one.

    A model is planned (all problems are found before a byte is written) and never in memory: about
    64 MiB of tensors at a time are read, cast or decoded, and written. ``max_shard_bytes`` and the
    names of files are the program's; names of tensors never become paths.

    Args:
        source: a folder, a file or a URI, in any format.
        target: the folder to make.
        to: "safetensors", a Hugging Face checkpoint; "sharded_state", every rank's parameters
            as they lie in its memory.
        names: "model", the names that Hugging Face gives the model's tensors; "checkpoint", the
            source's own, tensor by tensor, no model needed; "auto", the model's where its class
            is known.
        tp, pp, ep: the ranks of a sharded target.
        max_shard_bytes: most bytes of tensors in one file, where no single tensor is larger.
        resume: go on with what a killed conversion of the same source to the same target left.
        overwrite: replace what is at ``target``, and what a killed conversion left.
        metadata: strings for ``__metadata__`` of each file.
        load_config: how the source is read.
        **options: as of ``loadkit.load``: ``dtype``, ``load_format``, ``quantization``, ...

    Raises:
        PlanError: the source could not be loaded like that; all problems of all ranks.
        UsageError: EXISTS, something is at ``target``; UNFINISHED, a killed conversion left its
            work; QUANTIZED; an option cannot be.
        ConflictError: BUSY, another process converts to ``target``.
        ChangedError: what is to be resumed was begun from another source, or with other options;
            or a file of the source changed.
        WriteError: E_IO with ``errno``: too little space, say. What was at ``target`` is there.
        ReadFailure: the source could not be read.
    """
    started = time.perf_counter()
    folder = Path(os.path.realpath(Path(target).expanduser()))
    _check_place(folder, overwrite=overwrite)
    with ExitStack() as stack:
        draft, how = make_draft(
            stack,
            source,
            to=to,
            names=names,
            sizes={"tp": tp, "pp": pp, "ep": ep},
            most=max_shard_bytes,
            metadata=metadata or {},
            load_config=load_config,
            options=options,
        )
        written = carry_out(draft, folder, source, how.shown, resume=resume, overwrite=overwrite)
        return _report(draft, how, folder, written, time.perf_counter() - started)


def _check_place(folder: Path, *, overwrite: bool) -> None:
    """Refuse to replace what nobody said may be replaced.

    Raises:
        UsageError: EXISTS, or it is a file.
    """
    if folder.is_dir() and not overwrite:
        found = sorted(entry.name for entry in os.scandir(folder) if not _is_ours(entry.name))
        if found:
            raise UsageError(
                f"{show_path(folder)} is there and holds {len(found)} file(s)",
                code="EXISTS",
                file=str(folder),
                detail={"files": found[:20]},
                hint="give another folder, or say that this one is to be replaced (--overwrite)",
            )


def _is_ours(name: str) -> bool:
    return name.startswith(".loadkit-")


def _report(
    draft: Draft, how: How, folder: Path, written: Written, seconds: float
) -> ConvertReport:
    casts: dict[tuple[str, str], set[str]] = {}
    skipped = _left_out(draft.contents)
    ties: dict[str, list[str]] = {}
    warnings = [*how.notes]
    warnings += [f"{name}: some numbers became infinite" for name in written.overflows]
    for contents in draft.contents:
        for change, names in contents.casts.items():
            casts.setdefault(change, set()).update(names)
        ties.update(contents.ties)
        notes = [note.message for note in contents.plan.notes] if contents.plan else []
        if contents.later:
            notes.append(f"weights of {len(contents.later)} modules are quantised by each load")
        warnings += [note for note in notes if note not in warnings]
    top = draft.topology
    return ConvertReport(
        path=folder,
        to=how.to,
        names=how.names,
        names_why=how.why,
        files=tuple(file.name for file in draft.files),
        tensors=sum(len(file.outputs) for file in draft.files),
        total_size=sum(file.size for file in draft.files),
        bytes_read=written.bytes_read,
        bytes_written=written.bytes_written,
        bytes_kept=written.bytes_kept,
        topology={"tp": top.tp, "pp": top.pp, "ep": top.ep},
        casts=[{"from": a, "to": b, "tensors": len(n)} for (a, b), n in casts.items()],
        skipped=skipped,
        ties=ties,
        copied=tuple(name for name, _ in draft.small.files),
        not_copied=draft.small.not_copied,
        warnings=warnings,
        seconds=seconds,
    )


def _left_out(every: Sequence[Contents]) -> dict[str, str]:
    """What no rank's files hold, with the reasons: each rank skips what others have."""
    names = [name for name in every[0].skipped if all(name in each.skipped for each in every)]
    return {
        name: "; ".join(dict.fromkeys(contents.skipped[name] for contents in every))
        for name in names
    }
