"""Comparing two checkpoints, of whatever formats, a little at a time: ``loadkit.diff``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from loadkit.conversion.comparing import Difference, compare
from loadkit.conversion.drafts import contents_of
from loadkit.conversion.outputs import Output
from loadkit.errors import ArchitectureError, OptionError
from loadkit.resolve import job_for_module

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.conversion.contents import Contents

__all__ = ["DiffReport", "Side", "diff"]

# Load formats whose tensors have Hugging Face's names.
_HUB_NAMES = frozenset({"safetensors", "hf", "pt"})
NAMES = ("auto", "model", "checkpoint")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: what it was read as, how many tensors it has, and their bytes."""

    source: str
    load_format: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class DiffReport:
    """What is not the same.

    Attributes:
        equal: nothing is different.
        names: whose names were compared: "model" or "checkpoint", and why.
        a, b: the two.
        only_in_a, only_in_b: tensors that the other does not have.
        different: tensors that both have, in another shape or dtype, or with other numbers.
        compared: tensors whose elements were compared.
        bytes_compared: of a's tensors.
        tolerance: None: every bit counts.
        skipped: tensors of either that are no part of the model, with the reason.
        seconds: wall time.
    """

    equal: bool
    names: str
    names_why: str
    a: Side
    b: Side
    only_in_a: tuple[str, ...] = ()
    only_in_b: tuple[str, ...] = ()
    different: tuple[Difference, ...] = ()
    compared: int = 0
    bytes_compared: int = 0
    tolerance: float | None = None
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values."""
        return asdict(self)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    names: str = "auto",
    tolerance: float | None = None,
    load_formats: tuple[str, str] = ("auto", "auto"),
    load_config: LoadConfig | tuple[LoadConfig | None, LoadConfig | None] | None = None,
    **options: Any,
) -> DiffReport:
    """Compare the tensors of two checkpoints: which there are, shapes, dtypes, every element.

    Memory stays at a few MiB, or two tensors that cannot be cut.

    Args:
        a, b: folders, files or URIs, in any formats.
        names: "checkpoint", the names that are in the files; "model", those that Hugging Face
            gives the tensors of the model that either makes; "auto", the files' where both have
            one way of naming, else the model's.
        tolerance: elements may differ by this much times the larger of 1 and their size, and
            dtypes may differ; None: bits are compared.
        load_formats: of a and of b.
        load_config: how they are read; a pair: how a is, and how b is.
        **options: as of ``loadkit.load``, for both: ``dtype``, ``quantization``, ...

    Raises:
        PlanError: one of them cannot be loaded as a model.
        LoadkitError: one of them cannot be read.
    """
    started = time.perf_counter()
    if names not in NAMES:
        raise OptionError(f"names is {names!r}; accepted: {', '.join(NAMES)}")
    if tolerance is not None and not tolerance >= 0:
        raise OptionError(f"tolerance is {tolerance!r}; accepted: a number of at least 0")
    configs = load_config if isinstance(load_config, tuple) else (load_config, load_config)
    pairs = list(zip((a, b), load_formats, configs, strict=True))
    with ExitStack() as stack:
        formats = [_format_of(*each) for each in pairs]
        whose, why = _whose(names, formats)
        sides: list[Contents] = []
        for source, kind, config in pairs:
            try:
                _, contents, _ = contents_of(
                    stack, source, whose, config, {**options, "load_format": kind}
                )
            except ArchitectureError as error:
                own = "names='checkpoint' compares the files' own names"
                error.hint = own if error.hint is None else f"{error.hint}; {own}"
                raise
            sides.append(contents)
        found = _Comparison(sides[0], sides[1], tolerance)
        found.run()
        return DiffReport(
            equal=found.is_equal,
            names=whose,
            names_why=why,
            a=_side(a, formats[0], found.a),
            b=_side(b, formats[1], found.b),
            only_in_a=tuple(name for name in found.a if name not in found.b),
            only_in_b=tuple(name for name in found.b if name not in found.a),
            different=tuple(found.different),
            compared=found.compared,
            bytes_compared=found.nbytes,
            tolerance=tolerance,
            skipped={"a": sides[0].skipped, "b": sides[1].skipped},
            seconds=time.perf_counter() - started,
        )


def _format_of(
    source: str | os.PathLike[str], load_format: str, load_config: LoadConfig | None
) -> str:
    """What a source is read as; its headers are read."""
    from torch import nn

    job = job_for_module(nn.Module(), source, load_format=load_format, load_config=load_config)
    job.close()
    return job.load_config.load_format


def _whose(names: str, formats: list[str]) -> tuple[str, str]:
    if names != "auto":
        return names, f"names={names!r}"
    if _HUB_NAMES.issuperset(formats):
        return "checkpoint", "both have Hugging Face's names"
    if formats[0] == formats[1] and formats[0] != "sharded_state":
        return "checkpoint", f"both are {formats[0]}"
    return "model", f"{formats[0]} and {formats[1]} name their tensors in their own ways"


def _side(source: str | os.PathLike[str], load_format: str, found: Mapping[str, Output]) -> Side:
    nbytes = sum(output.nbytes for output in found.values())
    return Side(os.fspath(source), load_format, len(found), nbytes)


class _Comparison:
    def __init__(self, a: Contents, b: Contents, tolerance: float | None) -> None:
        self.sides = (a, b)
        self.a = {output.name: output for output in a.outputs()}
        self.b = {output.name: output for output in b.outputs()}
        self.tolerance = tolerance
        self.different: list[Difference] = []
        self.compared = self.nbytes = 0

    @property
    def is_equal(self) -> bool:
        return self.a.keys() == self.b.keys() and not self.different

    def run(self) -> None:
        """Compare what both have, in a's order."""
        readers = tuple(side.reader for side in self.sides)
        for first, second in self._common():
            found = compare(first, second, readers[0], readers[1], self.tolerance)
            if found is not None:
                self.different.append(found)
            if found is None or found.what != "shape":
                self.compared += 1
                self.nbytes += first.nbytes
        for side in self.sides:
            side.reader.end()
            for file in side.files:
                file.check_unchanged()

    def _common(self) -> Iterator[tuple[Output, Output]]:
        return ((one, self.b[name]) for name, one in self.a.items() if name in self.b)
