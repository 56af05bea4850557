"""``loadkit_manifest.json``: what a saved artefact is, which files it has, and what they hold.

It is written last, so a folder that has one is whole. Three layouts:

- ``checkpoint``: tensors under their checkpoint names, as Hugging Face has them;
- ``runtime``: parameters of the model as a rank holds them (fused, sharded, padded);
- ``runtime-processed``: the same after the model's methods changed them for their kernels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from loadkit.errors import OptionError
from loadkit.load_plan import Region
from loadkit.parallel_config import ParallelConfig
from loadkit.tensor_info import DTYPES

if TYPE_CHECKING:
    from loadkit.sources.base import Source

__all__ = [
    "LAYOUTS",
    "MANIFEST",
    "MAX_MANIFEST_BYTES",
    "SCHEMA",
    "Box",
    "FileEntry",
    "Layout",
    "Manifest",
    "Quantization",
    "RankEntry",
    "TensorEntry",
    "Topology",
    "WholeTensor",
    "is_manifest_name",
    "manifest_bytes",
    "parse_manifest",
    "read_manifest",
]

MANIFEST = "loadkit_manifest.json"
SCHEMA = "loadkit.manifest/1"
MAX_MANIFEST_BYTES = 100_000_000

Layout = Literal["checkpoint", "runtime", "runtime-processed"]
LAYOUTS: tuple[Layout, ...] = ("checkpoint", "runtime", "runtime-processed")


def is_manifest_name(name: str) -> bool:
    """Whether a file is a manifest: the whole one, or one rank's."""
    return name == MANIFEST or (
        name.startswith("loadkit_manifest.rank-") and name.endswith(".json")
    )


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        dtype: a name of ``DTYPES``.
        shape: in elements, as the file has it.
        offset: first byte, counted from the start of the file.
        sha256: of its bytes, in hex; None: not computed.
        row: of a parameter that is cut along its first dim, the first row that lies here.
        rows: how many rows that parameter has; None: it is here whole.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    sha256: str | None = None
    row: int = 0
    rows: int | None = None

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][0] // 8

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the parameter that it is, or is a part of."""
        return self.shape if self.rows is None else (self.rows, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One weight file: ``size`` in bytes, ``sha256`` in hex or None, ``rank`` who wrote it."""

    size: int
    sha256: str | None = None
    rank: int = 0
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A checkpoint tensor before it was sharded.

    Attributes:
        dtype: a name of ``DTYPES``: as the parameters hold it.
        shape: in elements.
        stored: what the file called it that the model was loaded from; None: the same.
    """

    dtype: str
    shape: tuple[int, ...]
    stored: str | None = None


@dataclass(frozen=True, slots=True)
class Box:
    """Which elements of a checkpoint tensor are which elements of a rank's parameter.

    Both regions have one size; ``source`` counts elements of the whole tensor, ``target`` of the
    parameter, both row-major.
    """

    tensor: str
    source: Region
    target: Region


@dataclass(frozen=True, slots=True)
class RankEntry:
    """What one rank holds.

    Attributes:
        rank: its place in the world.
        tied: parameter -> the parameter whose tensor it shares, which is written.
        boxes: parameter -> the parts of checkpoint tensors that it is made of.
        unboxed: parameter -> why that is not known; such a rank cannot be sharded anew.
    """

    rank: int
    tied: Mapping[str, str] = field(default_factory=dict)
    boxes: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    unboxed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Topology:
    """How many ranks there are along each axis; ``experts``: where each expert lives, or None."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    experts: tuple[int, ...] | None = None

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Topology:
        """The topology that a rank belongs to.

        Without expert parallelism all data-parallel ranks hold the same, so they count once.
        """
        placed = parallel.expert_placement
        experts = None if placed is None else placed.physical_to_logical
        if experts == tuple(range(len(experts or ()))):
            experts = None  # in order, which is what no placement means
        dp = parallel.dp_size if parallel.ep_size > 1 else 1
        return cls(parallel.tp_size, parallel.pp_size, parallel.ep_size, dp, experts)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.dp * self.pp * self.tp

    def rank_of(self, parallel: ParallelConfig) -> int:
        """The number of a rank's files."""
        return parallel.rank % self.world_size

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "dp": self.dp}
        shown = [f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "tp"]
        return ", ".join(shown) + (", placed experts" if self.experts is not None else "")


@dataclass(frozen=True, slots=True)
class Quantization:
    """The method that made the parameters, and what it said of itself (None: ask config.json)."""

    method: str
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Manifest:
    """A saved artefact.

    Attributes:
        layout: one of ``LAYOUTS``.
        files: weight file -> its entry. Names are relative to the manifest's folder.
        topology: of the ranks that wrote it.
        dtype: the model's, as torch spells it.
        architecture: as config.json spells it.
        quantization: None: the weights are plain numbers.
        layout_versions: class or method that processed weights -> the version of its layout.
        tensors: checkpoint tensors that the boxes are parts of.
        ranks: what each rank holds; empty for ``checkpoint``.
        source: what the model was loaded from.
        loadkit_version: who wrote it.
    """

    layout: Layout
    files: Mapping[str, FileEntry]
    topology: Topology = Topology()
    dtype: str = ""
    architecture: str = ""
    quantization: Quantization | None = None
    layout_versions: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, WholeTensor] = field(default_factory=dict)
    ranks: tuple[RankEntry, ...] = ()
    source: str = ""
    loadkit_version: str = ""

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise OptionError(f"layout is {self.layout!r}; accepted: {', '.join(LAYOUTS)}")

    def files_of(self, rank: int) -> dict[str, FileEntry]:
        """The files that a rank wrote."""
        return {name: entry for name, entry in self.files.items() if entry.rank == rank}

    def rank(self, number: int) -> RankEntry | None:
        """What a rank holds, if it is there."""
        return next((entry for entry in self.ranks if entry.rank == number), None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values (``parse_manifest`` reads them back)."""
        top = self.topology
        sizes = {"tp": top.tp, "pp": top.pp, "ep": top.ep, "dp": top.dp}
        quantization = self.quantization
        return {
            "schema": SCHEMA,
            "layout": self.layout,
            "topology": sizes | _given(experts=_listed(top.experts)),
            "dtype": self.dtype,
            "architecture": self.architecture,
            "quantization": None
            if quantization is None
            else {"method": quantization.method, "config": quantization.config},
            "layout_versions": dict(self.layout_versions),
            "source": self.source,
            "loadkit_version": self.loadkit_version,
            "files": {name: _file(entry) for name, entry in self.files.items()},
            "tensors": {
                name: {
                    "dtype": whole.dtype,
                    "shape": list(whole.shape),
                    **_given(stored=whole.stored),
                }
                for name, whole in self.tensors.items()
            },
            "ranks": [_rank(entry) for entry in self.ranks],
        }


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _listed(numbers: tuple[int, ...] | None) -> list[int] | None:
    return None if numbers is None else list(numbers)


def _file(entry: FileEntry) -> dict[str, Any]:
    tensors = {}
    for name, tensor in entry.tensors.items():
        tensors[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "offset": tensor.offset,
        }
        tensors[name] |= _given(sha256=tensor.sha256, rows=tensor.rows)
        if tensor.rows is not None:
            tensors[name]["row"] = tensor.row
    return {
        "size": entry.size,
        "rank": entry.rank,
        **_given(sha256=entry.sha256),
        "tensors": tensors,
    }


def _rank(entry: RankEntry) -> dict[str, Any]:
    return {
        "rank": entry.rank,
        "tied": dict(entry.tied),
        "boxes": {
            parameter: [
                [
                    box.tensor,
                    list(box.source.size),
                    [box.source.offset, *box.source.stride],
                    [box.target.offset, *box.target.stride],
                ]
                for box in boxes
            ]
            for parameter, boxes in entry.boxes.items()
        },
        "unboxed": dict(entry.unboxed),
    }


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file's content: one JSON object, one line, the same for the same manifest.

    Raises:
        OptionError: it is longer than anybody would read back.
    """
    data = (json.dumps(manifest.to_dict(), separators=(",", ":")) + "\n").encode()
    if len(data) > MAX_MANIFEST_BYTES:
        raise OptionError(
            f"the manifest would have {len(data)} bytes; the limit is {MAX_MANIFEST_BYTES}"
        )
    return data


def parse_manifest(data: bytes, *, file: str = MANIFEST) -> Manifest:
    """The manifest that bytes spell, every value checked.

    Raises:
        ManifestError: E_MANIFEST, it is no manifest, of another schema, or a value has a wrong
            type or is out of its range; says which.
    """
    from loadkit.manifest_parse import parse

    return parse(data, file)


def read_manifest(source: Source, name: str = MANIFEST) -> Manifest | None:
    """The manifest of an open source, or None if it has none.

    Raises:
        ManifestError: E_MANIFEST, as ``parse_manifest``.
        ReadFailure: it cannot be read.
    """
    if all(info.name != name for info in source.list()):
        return None
    file = source.open(name)
    return parse_manifest(file.read(0, min(file.size, MAX_MANIFEST_BYTES + 1)), file=name)
