"""The plan as a value: what will be read, where it lands, and everything that is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loadkit.errors import CheckpointError, PlanError, ReadError
from loadkit.parallel_config import ParallelConfig
from loadkit.report import amplification
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.execution import Target

__all__ = ["SHOWN", "LoadPlan", "Problem", "Region", "Row", "problem_line"]

SHOWN = 10  # problems in an error's text; all of them are in ``problems``


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, or (among ``notes``) worth knowing. ``offset`` in bytes of file."""

    code: str
    message: str
    tensor: str | None = None
    parameter: str | None = None
    file: str | None = None
    offset: int | None = None
    hint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values."""
        return asdict(self)


class Region(NamedTuple):
    """A strided region: ``offset`` and ``stride`` in elements, of a tensor or a parameter."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values."""
        return {"offset": self.offset, "size": list(self.size), "stride": list(self.stride)}


@dataclass(frozen=True, slots=True)
class Row:
    """Which elements of which tensor land in which elements of which parameter.

    ``exact`` is "exact" (only the region is read), "whole" (an operation needs all of a tensor) or
    "opaque" (the tensor came as real data). ``kind``: copy, cast, compute, fused, fill, tied,
    skipped, metadata (it says how others are stored, and was read for that while planning), ...
    ``reason`` says why a tensor has no target.
    """

    tensor: str | None
    file: str | None
    source: Region | None
    parameter: str | None
    target: Region | None
    exact: str
    kind: str
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values."""
        out: dict[str, Any] = {
            "tensor": self.tensor,
            "file": self.file,
            "source": self.source.to_dict() if self.source else None,
            "parameter": self.parameter,
            "target": self.target.to_dict() if self.target else None,
            "exact": self.exact,
            "kind": self.kind,
        }
        if self.reason is not None:
            out["reason"] = self.reason
        return out


@dataclass(frozen=True)
class LoadPlan:
    """One rank's load before it happens. All ``*bytes*`` in bytes.

    Attributes:
        ok: whether the load will work: there are no problems.
        problems: everything that stands against it.
        notes: what is allowed and worth knowing (casts, opaque loaders, data read while planning).
        rows: every tensor's region and where it lands; skipped tensors with their reason.
        bytes_needed: file bytes of the elements that the parameters are made of.
        bytes_to_read: what the reader will take from the files: those and any gaps it reads.
        parameter_bytes: what the parameters hold once loaded.
        predicted_peak_bytes: host memory of its own that the load will have taken at most.
        aliased_bytes: part of ``bytes_to_read`` that is mapped and not copied.
        requests: reads it will take, after neighbours were joined; a view takes none.
        distribute: how the ranks of a group share what they read; None: each reads for itself.
        group_bytes_to_read: where they share it, what all ranks together read: each byte that
            anybody needs, once. ``bytes_to_read`` is this rank's part of it then.
        bytes_fetched: bytes of headers and small files that came over a network to make it.
        data_read_bytes: payload bytes that loader code asked for while it was traced.
    """

    source: str
    architecture: str
    model_class: str
    distribution: str
    load_format: str
    load_format_why: str
    dtype: str
    reader: str
    reader_why: str
    parallel: ParallelConfig
    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...]
    rows: tuple[Row, ...]
    bytes_needed: int
    bytes_to_read: int
    parameter_bytes: int
    predicted_peak_bytes: int
    aliased_bytes: int
    data_read_bytes: int
    files: tuple[str, ...]
    skipped_files: tuple[tuple[str, str], ...] = ()
    requests: int = 0
    distribute: str | None = None
    group_bytes_to_read: int = 0
    bytes_fetched: int = 0
    targets: tuple[Target, ...] = field(default=(), repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether the load will work."""
        return not self.problems

    @property
    def read_amplification(self) -> float:
        """``bytes_to_read`` in parts of ``bytes_needed``: 1.0 if nothing else is read."""
        return amplification(self.bytes_to_read, self.bytes_needed)

    def raise_if_bad(self) -> None:
        """Raise one error that carries every problem.

        Raises:
            PlanError: with ``problems``; its text shows the first ten.
        """
        if self.ok:
            return
        first, alone = self.problems[0], len(self.problems) == 1
        shown = [replace(first, hint=None)] if alone else self.problems  # the error has the hint
        raise PlanError(
            problems_text(shown, self.source),
            problems=self.problems,
            tensor=first.tensor,
            parameter=first.parameter,
            file=first.file,
            offset=first.offset,
            hint=first.hint if alone else None,
            detail={"codes": sorted({p.code for p in self.problems})},
        )

    def to_dict(self, *, rows: bool = True) -> dict[str, Any]:
        """As JSON-able values (``LoadPlan.from_dict`` reads them back)."""
        out: dict[str, Any] = {"ok": self.ok}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("problems", "notes"):
                out[each.name] = [item.to_dict() for item in value]
            elif each.name == "rows":
                if rows:
                    out["rows"] = [item.to_dict() for item in value]
            elif each.name == "parallel":
                out["parallel"] = value.to_dict()
            elif each.name == "skipped_files":
                out["skipped_files"] = [{"file": name, "reason": why} for name, why in value]
            elif each.name == "files":
                out["files"] = list(value)
            elif each.name != "targets":
                out[each.name] = value
        return out | {"read_amplification": self.read_amplification}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LoadPlan:
        """The plan that ``to_dict`` wrote: to look at and compare, not to execute."""
        known = {each.name for each in fields(cls)} - {"targets"}
        given = {key: value for key, value in values.items() if key in known}
        given["problems"] = tuple(Problem(**item) for item in values["problems"])
        given["notes"] = tuple(Problem(**item) for item in values["notes"])
        given["rows"] = tuple(_row(item) for item in values.get("rows", ()))
        given["parallel"] = ParallelConfig.from_dict(values["parallel"])
        given["files"] = tuple(values["files"])
        given["skipped_files"] = tuple(
            (item["file"], item["reason"]) for item in values["skipped_files"]
        )
        return cls(**given)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), ensure_ascii=True))

    @classmethod
    def load(cls, path: str | Path) -> LoadPlan:
        """Read what ``save`` wrote.

        Raises:
            ReadError: the file cannot be read.
            CheckpointError: it is no saved plan.
        """
        shown = printable(path, ascii_only=False)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ReadError(
                f"the plan {shown} cannot be read: {error.strerror}",
                errno=error.errno,
                file=str(path),
            ) from error
        except ValueError as error:
            raise CheckpointError(f"{shown} is no saved plan: {error}", file=str(path)) from error
        try:
            return cls.from_dict(json.loads(text))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{shown} is no saved plan: {type(error).__name__}: {printable(error)}",
                file=str(path),
                hint="give a file that LoadPlan.save wrote",
            ) from error


def _row(values: dict[str, Any]) -> Row:
    def region(item: dict[str, Any] | None) -> Region | None:
        if item is None:
            return None
        return Region(item["offset"], tuple(item["size"]), tuple(item["stride"]))

    return Row(
        **{
            **values,
            "source": region(values["source"]),
            "target": region(values["target"]),
        }
    )


def problems_text(problems: Sequence[Problem], source: str) -> str:
    """The error's text: how many, and the first ten."""
    lines = [f"{len(problems)} problem(s) in the plan of {printable(source, ascii_only=False)}"]
    lines += [f"  {problem_line(problem.to_dict())}" for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        lines.append(f"  ... and {len(problems) - SHOWN} more")
    return "\n".join(lines)


def problem_line(problem: Mapping[str, Any]) -> str:
    """One line of ``Problem.to_dict()``: code, message, where (unless that says it), hint."""
    found = [(key, problem.get(key)) for key in ("tensor", "parameter", "file", "offset")]
    where = [
        f"{key} {printable(value)}"
        for key, value in found
        if value is not None and printable(value) not in problem["message"]
    ]
    text = f"{problem['code']}: {problem['message']}"
    text += f" [{', '.join(where)}]" if where else ""
    return text + (f" (hint: {problem['hint']})" if problem.get("hint") else "")
