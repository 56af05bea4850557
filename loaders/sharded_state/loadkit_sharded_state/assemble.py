"""Checkpoint tensors put together from the parts that ranks hold: sharding anew.

Each part is a write of a region of a rank's file into a whole tensor that does not exist. The
model's own loading code then cuts what it wants from that whole, and the plan follows each element
back to the file that has it: only those bytes are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from loadkit.errors import ShardedError
from loadkit.file_checks import show
from loadkit.manifest import MANIFEST, Box, Manifest
from loadkit.tensor_info import torch_dtype
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.storage import Storage, Unwritten, Value, Write
from loadkit.tracing.view import DISJOINT, View, contiguous, relate
from loadkit_sharded_state.stored import Stored

if TYPE_CHECKING:
    import torch

    from loadkit_sharded_state.artefact import Artefact

__all__ = ["assembled", "check_reshardable"]


@dataclass(frozen=True, slots=True)
class _Part:
    box: Box
    rank: int
    stored: Stored


def check_reshardable(manifest: Manifest | None, asked: str, world: str) -> Manifest:
    """Refuse rank files that only their own topology can load.

    Args:
        manifest: theirs, if there is one.
        asked: the topology that is loaded.
        world: the one that they were saved at.

    Raises:
        ShardedError: there is no manifest, the weights are in a layout of kernels, or what a
            parameter was made of is not known.
    """
    start = f"these rank files are of {world}, and {asked} was asked for"
    hint = f"load at {world}, or save the model at {asked} from its checkpoint"
    detail = {"saved": world, "asked": asked}
    if manifest is None:
        raise ShardedError(
            f"{start}: without {MANIFEST} nobody knows which part of a weight a rank holds",
            detail=detail,
            hint=hint,
        )
    if manifest.layout != "runtime":
        methods = ", ".join(show(name) for name in manifest.layout_versions) or "a method"
        raise ShardedError(
            f"{start}: {methods} changed the weights after loading, and such a layout cannot be "
            "cut anew",
            file=MANIFEST,
            detail=detail,
            hint=hint,
        )
    for entry in manifest.ranks:
        for parameter, why in entry.unboxed.items():
            raise ShardedError(
                f"{start}: which part of a checkpoint tensor {show(parameter)} is, is not known: "
                f"{why}",
                file=MANIFEST,
                parameter=parameter,
                detail=detail,
                hint=hint,
            )
    return manifest


def assembled(
    artefact: Artefact, manifest: Manifest, own: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every checkpoint tensor as (name, LazyTensor), in the manifest's order.

    Args:
        artefact: the rank files.
        manifest: theirs.
        own: this rank's number: where several ranks hold the same part, ranks read from different
            ones.

    Raises:
        ShardedError: parts overlap, leave a hole, or lie outside of what they are parts of.
    """
    parts: dict[str, list[_Part]] = {name: [] for name in manifest.tensors}
    for entry in manifest.ranks:
        tensors = artefact.tensors_of(entry.rank)
        for parameter, boxes in entry.boxes.items():
            for box in boxes:
                stored = tensors.get(parameter)
                if box.tensor not in parts or stored is None:
                    raise _bad(box.tensor, entry.rank, f"has a part in {show(parameter)}, and the "
                               "manifest or the files lack one of them")  # fmt: skip
                parts[box.tensor].append(_Part(box, entry.rank, stored))
    for name, found in parts.items():
        whole = manifest.tensors[name]
        stored_name = whole.stored or name
        yield name, _whole(name, stored_name, torch_dtype(whole.dtype), whole.shape, found, own)


def _whole(
    name: str,
    stored_name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    parts: list[_Part],
    own: int,
) -> LazyTensor:
    view = contiguous(shape, dtype.itemsize)
    chosen = _each_once(parts, own)
    _check(name, view, dtype, chosen)
    storage = Storage(Unwritten(f"checkpoint tensor {name}"), view.numel, view.itemsize)
    for part in chosen:
        source, target = part.box.source, part.box.target
        held = part.stored.storage(stored_name)
        value = Value(
            held,
            len(held.writes),
            View(target.size, target.stride, target.offset, dtype.itemsize),
            dtype,
        )
        region = View(source.size, source.stride, source.offset, dtype.itemsize)
        storage.writes.append(Write(region, dtype, value))
    return LazyTensor(storage, view, dtype)


def _each_once(parts: list[_Part], own: int) -> list[_Part]:
    """Of parts that are the same region, one; which one depends on who asks."""
    same: dict[View, list[_Part]] = {}
    for part in parts:
        source = part.box.source
        same.setdefault(View(source.size, source.stride, source.offset, 1), []).append(part)
    chosen = [copies[own % len(copies)] for copies in same.values()]
    return sorted(chosen, key=lambda part: part.box.source.offset)


def _check(name: str, whole: View, dtype: torch.dtype, parts: list[_Part]) -> None:
    """The parts fit into the whole and are all of it, each element once."""
    held = 0
    previous: View | None = None
    for part in parts:
        source, target = part.box.source, part.box.target
        region = View(source.size, source.stride, source.offset, 1)
        if part.stored.dtype != dtype:
            raise _bad(name, part.rank, f"is {dtype}, and its part is {part.stored.dtype}")
        inside = View(target.size, target.stride, target.offset, 1).span()[1]
        if region.span()[1] > whole.numel or inside > prod(part.stored.shape):
            raise _bad(name, part.rank, "has a part that reaches out of its tensor")
        if previous is not None and relate(previous, region) is not DISJOINT:
            raise _bad(name, part.rank, "has parts that overlap")
        held += region.numel
        previous = region
    if held != whole.numel:
        what = "leave a hole" if held < whole.numel else "overlap"
        raise _bad(name, None, f"has {whole.numel} elements, and its parts hold {held}: they "
                   f"{what}")  # fmt: skip


def _bad(name: str, rank: int | None, problem: str) -> ShardedError:
    whose = "" if rank is None else f" (rank {rank})"
    return ShardedError(
        f"{MANIFEST}: checkpoint tensor {show(name)} {problem}{whose}",
        file=MANIFEST,
        tensor=name,
        detail={"rank": rank},
        hint="the manifest is damaged; save the model again",
    )
