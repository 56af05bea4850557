"""The manifest's JSON, read as untrusted data: bounded, typed, linear."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from loadkit.errors import ManifestError, PathError
from loadkit.file_checks import show
from loadkit.json_safe import parse_json
from loadkit.load_plan import Region
from loadkit.manifest import (
    LAYOUTS,
    MAX_MANIFEST_BYTES,
    SCHEMA,
    Box,
    FileEntry,
    Manifest,
    Quantization,
    RankEntry,
    TensorEntry,
    Topology,
    WholeTensor,
)
from loadkit.parallel_config import MAX_WORLD_SIZE
from loadkit.safetensors_format import MAX_BYTES, MAX_DIM, MAX_DIMS, MAX_NAME_BYTES
from loadkit.sources.paths import check_name
from loadkit.tensor_info import DTYPES

__all__ = ["parse"]

MAX_TEXT = 4_096  # characters of a free text
_DIGEST = re.compile(r"[0-9a-f]{64}")

Value = TypeVar("Value")


def parse(data: bytes, file: str) -> Manifest:
    """See ``loadkit.manifest.parse_manifest``."""
    content = parse_json(data, file=file, max_bytes=MAX_MANIFEST_BYTES, error=ManifestError)
    return _Parser(file).manifest(content)


class _Parser:
    """Each method takes a value and where it stands, and gives it back checked."""

    def __init__(self, file: str) -> None:
        self.file = file

    def fail(self, where: str, problem: str, **detail: Any) -> NoReturn:
        raise ManifestError(
            f"{show(self.file)}: {where} {problem}",
            file=self.file,
            detail={"where": where, **detail},
            hint="the file is damaged or was not written by loadkit; save the model again",
        )

    # -- the pieces ----------------------------------------------------------------------------

    def manifest(self, value: Any) -> Manifest:
        top = self.object(value, "the file")
        if top.get("schema") != SCHEMA:
            problem = f"is {show(top.get('schema'))}; this loadkit reads {SCHEMA}"
            self.fail("schema", problem, found=str(top.get("schema"))[:100])
        layout = top.get("layout")
        if layout not in LAYOUTS:
            self.fail("layout", f"is {show(layout)}; known: {', '.join(LAYOUTS)}")
        topology = self.topology(top.get("topology"))
        found = Manifest(
            layout=layout,
            files=self.mapping(top.get("files"), "files", self.file_entry, self.file_name),
            topology=topology,
            dtype=self.text(top.get("dtype", ""), "dtype"),
            architecture=self.text(top.get("architecture", ""), "architecture"),
            quantization=self.quantization(top.get("quantization")),
            layout_versions=self.mapping(
                top.get("layout_versions", {}), "layout_versions", self.text
            ),
            tensors=self.mapping(top.get("tensors", {}), "tensors", self.whole),
            ranks=tuple(
                self.rank(item, f"ranks[{at}]")
                for at, item in enumerate(self.array(top.get("ranks", []), "ranks"))
            ),
            source=self.text(top.get("source", ""), "source"),
            loadkit_version=self.text(top.get("loadkit_version", ""), "loadkit_version"),
        )
        numbers = [entry.rank for entry in found.ranks]
        if len(set(numbers)) < len(numbers):
            self.fail("ranks", "names a rank twice")
        return found

    def topology(self, value: Any) -> Topology:
        sizes = self.object(value, "topology")
        axes = {
            axis: self.count(sizes.get(axis, 1), f"topology.{axis}", 1, MAX_WORLD_SIZE)
            for axis in ("tp", "pp", "ep", "dp")
        }
        world = axes["tp"] * axes["pp"] * axes["dp"]
        if world > MAX_WORLD_SIZE:
            self.fail("topology", f"has {world} ranks; at most {MAX_WORLD_SIZE}")
        if axes["tp"] * axes["dp"] % axes["ep"]:
            self.fail("topology.ep", f"= {axes['ep']} does not divide tp x dp")
        experts = sizes.get("experts")
        if experts is not None:
            experts = self.numbers(experts, "topology.experts", 1 << 20)
        return Topology(**axes, experts=experts)

    def quantization(self, value: Any) -> Quantization | None:
        if value is None:
            return None
        found = self.object(value, "quantization")
        config = found.get("config")
        if config is not None:
            config = self.object(config, "quantization.config")
        return Quantization(self.text(found.get("method"), "quantization.method"), config)

    def file_entry(self, value: Any, where: str) -> FileEntry:
        found = self.object(value, where)
        size = self.count(found.get("size"), f"{where}.size", 0, MAX_BYTES)
        tensors = self.mapping(found.get("tensors", {}), f"{where}.tensors", self.tensor)
        for name, tensor in tensors.items():
            if tensor.offset + tensor.nbytes > size:
                problem = f"ends at byte {tensor.offset + tensor.nbytes} of a file of {size}"
                self.fail(f"{where}.tensors[{show(name)}]", problem)
        return FileEntry(
            size,
            self.digest(found.get("sha256"), f"{where}.sha256"),
            self.count(found.get("rank", 0), f"{where}.rank", 0, MAX_WORLD_SIZE - 1),
            tensors,
        )

    def tensor(self, value: Any, where: str) -> TensorEntry:
        found = self.object(value, where)
        whole = self.whole(found, where)
        rows = found.get("rows")
        row = self.count(found.get("row", 0), f"{where}.row", 0, MAX_DIM)
        if rows is not None:
            rows = self.count(rows, f"{where}.rows", 0, MAX_DIM)
            if not whole.shape or row + whole.shape[0] > rows:
                self.fail(where, f"has rows past the {rows} of its parameter")
        elif row:
            self.fail(where, "has a row and no rows")
        return TensorEntry(
            whole.dtype,
            whole.shape,
            self.count(found.get("offset"), f"{where}.offset", 0, MAX_BYTES),
            self.digest(found.get("sha256"), f"{where}.sha256"),
            row,
            rows,
        )

    def whole(self, value: Any, where: str) -> WholeTensor:
        found = self.object(value, where)
        dtype = found.get("dtype")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self.fail(f"{where}.dtype", f"is {show(dtype)}, which is no dtype")
        shape = self.numbers(found.get("shape"), f"{where}.shape", MAX_DIMS, MAX_DIM)
        if math.prod(shape) * DTYPES[dtype][0] // 8 > MAX_BYTES:
            self.fail(f"{where}.shape", f"= {list(shape)} is too large")
        stored = found.get("stored")
        return WholeTensor(
            dtype, shape, None if stored is None else self.name(stored, f"{where}.stored")
        )

    def rank(self, value: Any, where: str) -> RankEntry:
        found = self.object(value, where)
        return RankEntry(
            self.count(found.get("rank"), f"{where}.rank", 0, MAX_WORLD_SIZE - 1),
            self.mapping(found.get("tied", {}), f"{where}.tied", self.name),
            self.mapping(found.get("boxes", {}), f"{where}.boxes", self.boxes),
            self.mapping(found.get("unboxed", {}), f"{where}.unboxed", self.text),
        )

    def boxes(self, value: Any, where: str) -> tuple[Box, ...]:
        return tuple(self.box(item, where) for item in self.array(value, where))

    def box(self, value: Any, where: str) -> Box:
        if not isinstance(value, list) or len(value) != 4:
            self.fail(where, "holds no [tensor, size, source, target]")
        name, size, source, target = value
        name = self.name(name, where)
        size = self.numbers(size, where, MAX_DIMS * 4, MAX_DIM)
        places = []
        for numbers in (source, target):
            place = self.numbers(numbers, where, len(size) + 1, MAX_BYTES)
            if len(place) != len(size) + 1:
                self.fail(where, "has a region whose strides do not fit its size")
            places.append(Region(place[0], size, place[1:]))
        return Box(name, *places)

    # -- the values ----------------------------------------------------------------------------

    def object(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(where, "is no object")
        return value

    def array(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            self.fail(where, "is no array")
        return value

    def mapping(
        self,
        value: Any,
        where: str,
        of: Callable[[Any, str], Value],
        named: Callable[[Any, str], str] | None = None,
    ) -> Mapping[str, Value]:
        check = named or self.name
        return {
            check(key, where): of(item, f"{where}[{show(key)}]")
            for key, item in self.object(value, where).items()
        }

    def name(self, value: Any, where: str) -> str:
        text = self.text(value, where)
        if not text or len(text.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
            self.fail(where, f"has a name that is empty or longer than {MAX_NAME_BYTES} bytes")
        return text

    def file_name(self, value: Any, where: str) -> str:
        try:
            return check_name(value)
        except PathError as error:
            self.fail(where, f"names {error.message}")

    def text(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            self.fail(where, f"is no text of at most {MAX_TEXT} characters")
        return value

    def count(self, value: Any, where: str, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            self.fail(where, f"is {show(value)}, no integer in {low}..{high}")
        return int(value)

    def numbers(self, value: Any, where: str, most: int, high: int = MAX_DIM) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > most:
            self.fail(where, f"is no array of at most {most} integers")
        for item in value:
            if type(item) is not int or not 0 <= item <= high:
                self.fail(where, f"holds {show(item)}, no integer in 0..{high}")
        return tuple(value)

    def digest(self, value: Any, where: str) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str) or not _DIGEST.fullmatch(value):
            self.fail(where, "is no SHA-256 in hex")
        return value
