"""Which tensors of a file may stay packed, and which module of the model each is the weight of.

N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from loadkit.errors import ConfigFileError
from loadkit.file_checks import show
from loadkit.mapper import WeightsMapper
from loadkit_gguf.packed_rows import is_blocks, row_unit
from loadkit_layers.stored_shards import entries_of, of_shards

if TYPE_CHECKING:
    from torch import nn

    from loadkit_gguf.names import GGUFMapper
    from loadkit_gguf.tensor_entries import GGUFTensor
    from loadkit_layers.sharding import Shard

__all__ = ["PackedTable", "StoredTensor"]

_WEIGHT = ".weight"


class StoredTensor(NamedTuple):
    """A matrix of the file: its name there, its ggml type, its shape [N, K] in elements."""

    name: str
    kind: str
    shape: tuple[int, int]


class PackedTable:
    """Module -> shard id -> the tensor that is this shard of the module's weight.

    The shard id is None for a tensor that is the whole weight, a tuple for several shards that are
    one tensor in the file.
    """

    def __init__(self, modules: Mapping[str, Mapping[Any, StoredTensor]]) -> None:
        self._modules = modules

    @classmethod
    def of(
        cls,
        tensors: Iterable[GGUFTensor],
        mapper: GGUFMapper,
        model_class: type[nn.Module],
        hf_config: Any,
    ) -> PackedTable:
        """The table of a file for a model class.

        Left out are tensors that are no matrix, those of a type that is not kept packed, and those
        that ``mapper.transform`` does more to than change the order of their rows.
        """
        to_model = getattr(model_class, "hf_to_loadkit_mapper", None)
        modules: dict[str, dict[Any, StoredTensor]] = {}
        for tensor in tensors:
            if len(tensor.shape) != 2 or row_unit(tensor.dtype) is None:
                continue
            hf_name = mapper.map_name(tensor.name)
            if hf_name is None or not _moves_rows(mapper, hf_name, tensor.shape[0], hf_config):
                continue
            path, shard_id = hf_name, None
            if isinstance(to_model, WeightsMapper):
                mapped = to_model.map_name(hf_name)
                if mapped is None:
                    continue
                path, shard_id = mapped
            if path.endswith(_WEIGHT):
                shape = tensor.shape[0], tensor.shape[1]
                stored = StoredTensor(tensor.name, tensor.dtype, shape)
                modules.setdefault(path.removesuffix(_WEIGHT), {})[shard_id] = stored
        return cls(modules)

    def to_list(self) -> list[list[Any]]:
        """The table as JSON-able values: [module, shard id, name, ggml type, N, K]."""
        return [
            [module, list(shard) if isinstance(shard, tuple) else shard, *stored[:2], *stored.shape]
            for module, entries in self._modules.items()
            for shard, stored in entries.items()
        ]

    @classmethod
    def from_list(cls, rows: Any) -> PackedTable:
        """The table that ``to_list`` described.

        Raises:
            ConfigFileError: it is none.
        """
        modules: dict[str, dict[Any, StoredTensor]] = {}
        for row in rows if isinstance(rows, list) else [rows]:
            if not _is_row(row):
                raise ConfigFileError(
                    f"a table of packed tensors has a row {show(row)}, which is no [module, shard "
                    "id, name, ggml type, N, K]"
                )
            module, shard, name, kind, N, K = row
            shard = tuple(shard) if isinstance(shard, list) else shard
            modules.setdefault(module, {})[shard] = StoredTensor(name, kind, (N, K))
        return cls(modules)

    def shards(
        self, module: str, shards: Sequence[Shard], fusions: Mapping[str, Sequence[str]]
    ) -> list[StoredTensor] | None:
        """The tensor of every shard of a module's weight; None if not all can stay packed.

        Args:
            module: its dotted name.
            shards: of its weight, in order.
            fusions: fused module -> its parts, where the mapper does not say so itself.
        """
        found = of_shards(entries_of(self._modules, module, fusions), shards)
        return found if found and any(is_blocks(tensor.kind) for tensor in found) else None

    def whole(self, module: str) -> StoredTensor | None:
        """The one tensor of blocks that is a module's weight, or None."""
        tensor = self._modules.get(module, {}).get(None)
        return tensor if tensor is not None and is_blocks(tensor.kind) else None


def _is_row(row: Any) -> bool:
    """Whether values from a file are a row of ``to_list``."""
    if not isinstance(row, list) or len(row) != 6:
        return False
    module, shard, name, kind, *shape = row
    ids = shard if isinstance(shard, list) else [shard]
    return (
        all(isinstance(text, str) for text in (module, name, kind))
        and row_unit(kind) is not None
        and all(one is None or type(one) in (int, str) for one in ids)
        and all(type(n) is int and 0 < n < 1 << 48 for n in shape)
    )


def _moves_rows(mapper: GGUFMapper, hf_name: str, rows: int, hf_config: Any) -> bool:
    """Whether a mapper changes nothing of a matrix but the order of its rows.

    It is tried on numbered rows of two columns: they must all come out, whole, and only they.
    """
    probe = torch.arange(2 * rows, dtype=torch.float64, device="cpu").view(rows, 2)
    try:
        made: Any = mapper.transform(hf_name, probe, hf_config)
    except Exception:  # noqa: BLE001  # anybody's code; the load runs it again and tells
        return False
    if made is probe:
        return True
    if not isinstance(made, torch.Tensor) or made.shape != probe.shape:
        return False
    order = made[:, 0].sort().indices if made.dtype == probe.dtype else None
    return order is not None and torch.equal(made[order], probe)
