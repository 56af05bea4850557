"""The weight loaders a parameter gets when it brings none, and the ones to build others from.

A weight loader is called as ``loader(param, loaded_weight)``, or with a shard id after these. It
may use views and ``copy_`` of ``param.data`` and ``loaded_weight`` only: the same code runs on
real tensors and on lazy ones that have no data yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from loadkit.errors import WeightLoadError
from loadkit.local_memory import local_regions
from loadkit.tracing.regions import copies_regions, copy_region

__all__ = [
    "WeightLoader",
    "composed_weight_loader",
    "default_weight_loader",
    "row_parallel_weight_loader",
    "set_weight_attrs",
    "sharded_weight_loader",
]

WeightLoader = Callable[..., None]


@copies_regions
def default_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy a tensor into a parameter of the same shape; the dtype is cast.

    Of a DTensor, whose shape is that of all ranks together, this rank's part is copied.

    Tensors of one element fit each other whatever their number of dims. Nothing is broadcast.

    Raises:
        WeightLoadError: another shape; a complex tensor for a real parameter, or numbers with a
            fraction for an integer one.
    """
    _check_kinds(param, loaded_weight)
    if param.numel() == 1 and loaded_weight.numel() == 1:
        loaded_weight = loaded_weight.reshape(param.shape)
    elif param.shape != loaded_weight.shape:
        raise _misfit(param, loaded_weight, list(param.shape))
    for memory, cuts in local_regions(param):
        copy_region(memory, loaded_weight, cuts)


default_weight_loader.loader_looks_at = ()  # type: ignore[attr-defined]  # tracing.known_copies


def row_parallel_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy this rank's rows (dim 0) of a tensor; rank and size are the parameter's own.

    A 1-d parameter takes a tensor of its own length whole: that is a replicated bias.

    Raises:
        TypeError: the parameter has no ``tp_rank`` or ``tp_size``.
        WeightLoadError: the tensor is not ``tp_size`` times as long.
    """
    if param.dim() == 1 and param.shape == loaded_weight.shape:
        _rank_of(param)
        default_weight_loader(param, loaded_weight)
        return
    _load_shard(param, loaded_weight, 0)


def sharded_weight_loader(shard_axis: int) -> WeightLoader:
    """A loader that takes this rank's part along ``shard_axis`` (negative: from the end).

    The rank and size are the parameter's ``tp_rank`` and ``tp_size``; a missing one is a
    TypeError, never rank 0.
    """

    def loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        _load_shard(param, loaded_weight, shard_axis)

    return loader


def composed_weight_loader(
    loader: WeightLoader, fn: Callable[[torch.Tensor], torch.Tensor]
) -> WeightLoader:
    """A loader that runs ``loader`` and then puts ``fn`` of the parameter in the parameter.

    ``fn`` sees the rank's own part. It must keep the shape.
    """

    def composed(param: torch.Tensor, loaded_weight: torch.Tensor, *shard: Any) -> None:
        loader(param, loaded_weight, *shard)
        default_weight_loader(param, fn(param.data))

    return composed


def set_weight_attrs(weight: torch.Tensor, attrs: Mapping[str, Any] | None) -> None:
    """Set attributes (``weight_loader``, ``output_dim``, ...) on a parameter.

    Raises:
        WeightLoadError: one of them is there already: it would be lost in silence.
    """
    for key, value in (attrs or {}).items():
        if hasattr(weight, key):
            raise WeightLoadError(f"the parameter has an attribute {key!r} already")
        setattr(weight, key, value)


def _load_shard(param: torch.Tensor, loaded_weight: torch.Tensor, axis: int) -> None:
    """Copy the parameter's part of a tensor that is ``tp_size`` times as long along ``axis``."""
    rank, size = _rank_of(param)
    if param.numel() == 1 and loaded_weight.numel() == 1:
        default_weight_loader(param, loaded_weight)
        return
    if not -param.dim() <= axis < param.dim():
        raise _misfit(param, loaded_weight, f"a tensor with an axis {axis}")
    axis %= param.dim()
    expected = list(param.shape)
    expected[axis] *= size
    if list(loaded_weight.shape) != expected:
        raise _misfit(param, loaded_weight, expected)
    length = param.shape[axis]
    default_weight_loader(param, loaded_weight.narrow(axis, rank * length, length))


def _rank_of(param: torch.Tensor) -> tuple[int, int]:
    """The rank and the number of ranks that a parameter was made for."""
    rank, size = getattr(param, "tp_rank", None), getattr(param, "tp_size", None)
    if not isinstance(rank, int) or not isinstance(size, int):
        raise TypeError(
            "a sharded weight loader needs the parameter's own tp_rank and tp_size; it has "
            f"tp_rank={rank!r}, tp_size={size!r}"
        )
    if not 0 <= rank < size:
        raise TypeError(f"the parameter's tp_rank {rank} is not in 0..{size - 1}")
    return rank, size


def _check_kinds(param: torch.Tensor, loaded: torch.Tensor) -> None:
    """Refuse a cast that loses the kind of number, not only precision."""
    if loaded.is_complex() and not param.is_complex():
        lost = "its imaginary part"
    elif _fractional(loaded) and not _fractional(param):
        lost = "its fractions"
    else:
        return
    raise WeightLoadError(
        f"the checkpoint tensor is {loaded.dtype} and the parameter {param.dtype}: "
        f"the cast would lose {lost}",
        detail=_facts(param, loaded, None),
        hint="a quantised checkpoint needs its quantization_config",
    )


def _fractional(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _misfit(
    param: torch.Tensor, loaded: torch.Tensor, expected: list[int] | str
) -> WeightLoadError:
    """The error of a tensor whose shape is not what the parameter takes."""
    rank, size = getattr(param, "tp_rank", 0), getattr(param, "tp_size", 1)
    where = f" at tp rank {rank} of {size}" if size > 1 else ""
    return WeightLoadError(
        f"the checkpoint tensor is {list(loaded.shape)}; the parameter is {list(param.shape)}"
        f"{where} and takes {expected}",
        detail=_facts(param, loaded, expected if isinstance(expected, list) else None),
    )


def _facts(param: torch.Tensor, loaded: torch.Tensor, expected: list[int] | None) -> dict[str, Any]:
    """Shapes and dtypes for programs."""
    return {
        "checkpoint_shape": list(loaded.shape),
        "checkpoint_dtype": str(loaded.dtype).removeprefix("torch."),
        "parameter_shape": list(param.shape),
        "parameter_dtype": str(param.dtype).removeprefix("torch."),
        "expected_shape": expected,
    }
