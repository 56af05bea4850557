"""What of a parameter is which checkpoint tensor: the layer it is in knows.

A layer with a method ``checkpoint_part(name, shard_id) -> Tensor | None`` is asked first, then its
``quant_method`` with ``checkpoint_part(layer, name, shard_id)``: they undo what loading did. Other
layers are read by what they say of themselves: ``output_shards`` (``id``, ``offset``, ``size`` in
rows) of a fused parameter with an ``output_dim``, and ``num_embeddings`` of
``num_embeddings_padded`` rows of a padded vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from loadkit.errors import ModelError, UsageError
from loadkit.turns import is_repacked

__all__ = ["check_whole", "part_of", "required_part", "unpadded"]


def check_whole(parameter: str, tensor: torch.Tensor) -> None:
    """Refuse a parameter of which this process holds a part.

    Raises:
        UsageError: PARTIAL_MODEL.
    """
    size = getattr(tensor, "tp_size", 1)
    if (isinstance(size, int) and size > 1) or hasattr(tensor, "to_local"):
        ranks = f"one of {size} ranks'" if isinstance(size, int) and size > 1 else "a shard"
        raise UsageError(
            f"{parameter} is {ranks} part of the weight; a checkpoint of Hugging Face's layout "
            "holds whole ones",
            code="PARTIAL_MODEL",
            parameter=parameter,
            detail={"tp_size": size, "tp_rank": getattr(tensor, "tp_rank", None)},
            hint="load the source at tp 1 (ParallelConfig()) and save that model",
        )


def part_of(
    layer: nn.Module, parameter: str, tensor: torch.Tensor, shard_id: Any
) -> torch.Tensor | None:
    """The checkpoint tensor that is part ``shard_id`` of a layer's parameter; None: it cannot say.

    Args:
        layer: the module the parameter is in.
        parameter: the parameter's dotted name in the model.
        tensor: the parameter.
        shard_id: what its weight loader was called with; None: all of it.

    Raises:
        ModelError: REPACKED, the layer's method changed its weights after loading and does not
            say how to undo that.
    """
    name = parameter.rpartition(".")[2]
    for owner, arguments in ((layer, ()), (getattr(layer, "quant_method", None), (layer,))):
        own = getattr(owner, "checkpoint_part", None)
        if callable(own) and (part := own(*arguments, name, shard_id)) is not None:
            found: torch.Tensor = part
            return found
    if is_repacked(layer) and tensor.device.type != "meta":  # on meta nothing has run yet
        method = type(getattr(layer, "quant_method", None)).__name__
        raise ModelError(
            f"{method} changed the weights of {type(layer).__name__} after they were loaded, and "
            "has no checkpoint_part to undo it",
            code="REPACKED",
            parameter=parameter,
            hint="load the checkpoint without this quantization, or save in another save_format",
        )
    data = tensor.detach()
    if shard_id is None:
        return unpadded(layer, tensor, data)
    return _shards(layer, tensor, data, shard_id)


def required_part(
    layer: nn.Module, parameter: str, tensor: torch.Tensor, shard_id: Any
) -> torch.Tensor:
    """``part_of``, where an answer was given before.

    Raises:
        ModelError: now there is none.
    """
    part = part_of(layer, parameter, tensor, shard_id)
    if part is None:
        raise ModelError(f"{parameter} has no part {shard_id!r} any more", parameter=parameter)
    return part


def unpadded(layer: nn.Module, param: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """``data`` without the rows that pad a vocabulary."""
    rows = getattr(layer, "num_embeddings", None)
    padded = getattr(layer, "num_embeddings_padded", None)
    dim = getattr(param, "output_dim", None)
    if not isinstance(rows, int) or not isinstance(padded, int) or not isinstance(dim, int):
        return data
    units = getattr(param, "output_units", int)
    if data.shape[dim] != units(padded) or rows == padded:
        return data
    return data.narrow(dim, 0, units(rows))


def _shards(
    layer: nn.Module, param: torch.Tensor, data: torch.Tensor, shard_id: Any
) -> torch.Tensor | None:
    """One shard, or several that lie side by side (a tuple of ids: fused on disk)."""
    by_id = {shard.id: shard for shard in getattr(layer, "output_shards", ())}
    wanted = shard_id if isinstance(shard_id, tuple) else (shard_id,)
    if not wanted or any(one not in by_id for one in wanted):
        return None
    shards = [by_id[one] for one in wanted]
    dim = getattr(param, "output_dim", None)
    if dim is None:  # one number per shard, or one for all of them
        return data.view(-1)[shards[0].index] if data.numel() == len(by_id) else None
    units = getattr(param, "output_units", int)
    start_of = getattr(param, "output_offset", lambda shard: units(shard.offset))
    start = end = start_of(shards[0])
    for shard in shards:
        if start_of(shard) != end:
            return None
        end += units(shard.size)
    return data.narrow(dim, start, end - start)
