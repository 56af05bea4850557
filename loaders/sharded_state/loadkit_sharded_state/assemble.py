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
from loadkit.manifest import MANIFEST, Box, Manifest, WholeTensor
from loadkit.tensor_info import torch_dtype
from loadkit.tracing.lazy_tensor import LazyTensor
from loadkit.tracing.storage import Storage, Unwritten, Value, Write
from loadkit.tracing.view import DISJOINT, View, contiguous, relate
from loadkit_sharded_state.stored import Stored

if TYPE_CHECKING:
    import torch

    from loadkit_sharded_state.artefact import Artefact

__all__ = ["Assembly", "check_reshardable"]


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


class Assembly:
    """The checkpoint's tensors, as parts of ranks' parameters.

    Args:
        artefact: the rank files.
        manifest: theirs.
        own: this rank's number: where several ranks hold the same part, ranks read from different
            ones.

    Raises:
        ShardedError: parts overlap, leave a hole, or lie outside of what they are parts of; or a
            file is not what the manifest says.
        FormatError: a header breaks a rule.
    """

    def __init__(self, artefact: Artefact, manifest: Manifest, own: int) -> None:
        self._manifest = manifest
        self._parts: dict[str, list[_Part]] = {name: [] for name in manifest.tensors}
        for entry in manifest.ranks:
            tensors = artefact.tensors_of(entry.rank)
            for parameter, boxes in entry.boxes.items():
                for box in boxes:
                    stored = tensors.get(parameter)
                    if box.tensor not in self._parts or stored is None:
                        problem = f"has a part in {show(parameter)}, and one of them is missing"
                        raise _bad(box.tensor, entry.rank, problem)
                    self._parts[box.tensor].append(_Part(box, entry.rank, stored))
        for name, found in self._parts.items():
            self._parts[name] = _each_once(found, own)
            _check(name, manifest.tensors[name], self._parts[name])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor as (name, LazyTensor), in the manifest's order; new ones each time."""
        for name, parts in self._parts.items():
            yield name, _whole(name, self._manifest.tensors[name], parts)


def _whole(name: str, whole: WholeTensor, parts: list[_Part]) -> LazyTensor:
    dtype = torch_dtype(whole.dtype)
    view = contiguous(whole.shape, dtype.itemsize)
    storage = Storage(Unwritten(f"checkpoint tensor {name}"), view.numel, view.itemsize)
    for part in parts:
        source, target = part.box.source, part.box.target
        held = part.stored.storage(whole.stored or name)
        place = View(target.size, target.stride, target.offset, dtype.itemsize)
        region = View(source.size, source.stride, source.offset, dtype.itemsize)
        value = Value(held, len(held.writes), place, dtype)
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


def _check(name: str, whole: WholeTensor, parts: list[_Part]) -> None:
    """The parts fit into the whole and are all of it, each element once."""
    dtype, numel = torch_dtype(whole.dtype), prod(whole.shape)
    held = 0
    previous: View | None = None
    for part in parts:
        source, target = part.box.source, part.box.target
        region = View(source.size, source.stride, source.offset, 1)
        if part.stored.dtype != dtype:
            raise _bad(name, part.rank, f"is {dtype}, and its part is {part.stored.dtype}")
        inside = View(target.size, target.stride, target.offset, 1).span()[1]
        if region.span()[1] > numel or inside > prod(part.stored.shape):
            raise _bad(name, part.rank, "has a part that reaches out of its tensor")
        if previous is not None and relate(previous, region) is not DISJOINT:
            raise _bad(name, part.rank, "has parts that overlap")
        held += region.numel
        previous = region
    if held != numel:
        what = "leave a hole" if held < numel else "overlap"
        raise _bad(name, None, f"has {numel} elements, and its parts hold {held}: they {what}")


def _bad(name: str, rank: int | None, problem: str) -> ShardedError:
    whose = "" if rank is None else f" (rank {rank})"
    return ShardedError(
        f"{MANIFEST}: checkpoint tensor {show(name)} {problem}{whose}",
        file=MANIFEST,
        tensor=name,
        detail={"rank": rank},
        hint="the manifest is damaged; save the model again",
    )
