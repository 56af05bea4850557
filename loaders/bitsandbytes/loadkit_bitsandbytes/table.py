"""Which module of a model each quantised matrix is the weight of. N rows, K columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from loadkit.errors import ConfigFileError
from loadkit.file_checks import show
from loadkit.mapper import WeightsMapper
from loadkit_bitsandbytes.quant_state import QuantState
from loadkit_bitsandbytes.scheme import BLOCKSIZES, CODES, DTYPES, Scheme
from loadkit_bitsandbytes.survey import StoredMatrix
from loadkit_layers.fused_moe.names import find_place
from loadkit_layers.stored_shards import entries_of, of_shards

if TYPE_CHECKING:
    from torch import nn

    from loadkit_layers.sharding import Shard

__all__ = ["MatrixTable"]

_WEIGHT = ".weight"


class MatrixTable:
    """Module -> shard id -> the matrix that is this shard of the module's weight.

    The shard id is None for a matrix that is the whole weight, a tuple for several shards that are
    one matrix in the checkpoint.
    """

    def __init__(self, modules: Mapping[str, Mapping[Any, StoredMatrix]]) -> None:
        self._modules = modules

    @classmethod
    def of(cls, matrices: Iterable[StoredMatrix], model_class: type[nn.Module]) -> MatrixTable:
        """The table of a checkpoint for a model class."""
        to_model = getattr(model_class, "hf_to_loadkit_mapper", None)
        modules: dict[str, dict[Any, StoredMatrix]] = {}
        for matrix in matrices:
            path, shard_id = matrix.name, None
            if isinstance(to_model, WeightsMapper):
                mapped = to_model.map_name(matrix.name)
                if mapped is None:
                    continue
                path, shard_id = mapped
            if path.endswith(_WEIGHT):
                modules.setdefault(path.removesuffix(_WEIGHT), {})[shard_id] = matrix
        return cls(modules)

    def first(self) -> StoredMatrix | None:
        """One of the matrices; None where there are none."""
        return next((one for own in self._modules.values() for one in own.values()), None)

    def to_list(self) -> list[dict[str, Any]]:
        """The table as JSON-able values."""
        return [
            {
                "module": module,
                "shard": list(shard) if isinstance(shard, tuple) else shard,
                "name": matrix.name,
                "shape": list(matrix.shape),
                "scheme": None if matrix.state is None else matrix.state.scheme.to_dict(),
                "offset": 0.0 if matrix.state is None else matrix.state.offset,
            }
            for module, entries in self._modules.items()
            for shard, matrix in entries.items()
        ]

    @classmethod
    def from_list(cls, rows: Any) -> MatrixTable:
        """The table that ``to_list`` described.

        Raises:
            ConfigFileError: it is none.
        """
        modules: dict[str, dict[Any, StoredMatrix]] = {}
        for row in rows if isinstance(rows, list) else [rows]:
            if not _is_row(row):
                raise ConfigFileError(f"a table of quantised matrices has a row {show(row)}")
            shard = tuple(row["shard"]) if isinstance(row["shard"], list) else row["shard"]
            shape = row["shape"][0], row["shape"][1]
            state = None
            if row["scheme"] is not None:
                state = QuantState(Scheme(**row["scheme"]), shape, float(row["offset"]))
            found = StoredMatrix(row["name"], shape, state)
            modules.setdefault(row["module"], {})[shard] = found
        return cls(modules)

    def shards(
        self, module: str, shards: Sequence[Shard], fusions: Mapping[str, Sequence[str]]
    ) -> list[StoredMatrix] | None:
        """The matrix of every shard of a module's weight; None if one has none.

        Args:
            module: its dotted name.
            shards: of its weight, in order.
            fusions: fused module -> its parts, where the mapper does not say so itself.
        """
        return of_shards(entries_of(self._modules, module, fusions), shards)

    def experts(
        self, module: str, experts: Iterable[int], shards: Sequence[Shard]
    ) -> dict[int, list[StoredMatrix]] | None:
        """The matrices of every shard of these experts of a mixture; None if one has none."""
        start = f"{module}."
        entries: dict[int, dict[Any, StoredMatrix]] = {}
        for path, by_shard in self._modules.items():
            if not path.startswith(start):
                continue
            for shard_id, matrix in by_shard.items():
                place = find_place(path.removeprefix(start) + _WEIGHT, shard_id)
                expert = None if place is None else place[1].expert
                if place is not None and expert is not None:
                    entries.setdefault(expert, {})[place[0], place[1].id] = matrix
        stem = "w2_weight" if [shard.id for shard in shards] == ["w2"] else "w13_weight"
        found: dict[int, list[StoredMatrix]] = {}
        for expert in experts:
            own = {key: m for (name, key), m in entries.get(expert, {}).items() if name == stem}
            matrices = of_shards(own, shards)
            if matrices is None:
                return None
            found[expert] = matrices
        return found


def _is_row(row: Any) -> bool:
    """Whether values from a file are a row of ``to_list``."""
    keys = {"module", "shard", "name", "shape", "scheme", "offset"}
    if not isinstance(row, dict) or row.keys() != keys:
        return False
    ids = row["shard"] if isinstance(row["shard"], list) else [row["shard"]]
    shape, scheme = row["shape"], row["scheme"]
    return (
        isinstance(row["module"], str)
        and isinstance(row["name"], str)
        and all(one is None or type(one) in (int, str) for one in ids)
        and isinstance(shape, list)
        and len(shape) == 2
        and all(type(n) is int and 0 < n < 1 << 40 for n in shape)
        and type(row["offset"]) in (int, float)
        and (scheme is None or _is_scheme(scheme))
    )


def _is_scheme(values: Any) -> bool:
    return (
        isinstance(values, dict)
        and values.keys() == {one.name for one in fields(Scheme)}
        and values["kind"] in CODES
        and values["blocksize"] in BLOCKSIZES
        and type(values["nested"]) is int
        and 0 <= values["nested"] <= 1 << 16
        and values["dtype"] in DTYPES
        and isinstance(values["own_code"], bool)
    )
