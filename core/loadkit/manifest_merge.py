"""One manifest of several ranks' manifests, if they are of one save of one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from loadkit.errors import ShardedError
from loadkit.file_checks import show
from loadkit.manifest import MANIFEST, Manifest, TensorEntry, WholeTensor

__all__ = ["merge_manifests"]

_ALIKE = ("layout", "topology", "dtype", "architecture", "quantization", "layout_versions")


def merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """The manifest of all ranks.

    Weights that several ranks hold whole (norms, replicated kv heads) must be the same numbers in
    all of them: ranks of different models, or of different moments of one, are told by that.

    Args:
        manifests: one of each rank.

    Raises:
        ShardedError: a rank is missing, or they are not of one save.
    """
    first = manifests[0]
    ordered = sorted(manifests, key=lambda one: one.ranks[0].rank)
    ranks = [entry for one in ordered for entry in one.ranks]
    if [entry.rank for entry in ranks] != list(range(first.topology.world_size)):
        raise ShardedError(
            f"ranks {', '.join(str(entry.rank) for entry in ranks)} do not make up a world of "
            f"{first.topology.world_size}",
            file=MANIFEST,
        )
    tensors: dict[str, WholeTensor] = {}
    for one in ordered:
        for field in _ALIKE:
            if getattr(one, field) != getattr(first, field):
                raise _differ(f"{field}: {getattr(one, field)} and {getattr(first, field)}")
        for name, whole in one.tensors.items():
            if tensors.setdefault(name, whole) != whole:
                raise _differ(f"the shape or dtype of {show(name)}", name)
    _check_copies(ordered)
    files = {name: entry for one in ordered for name, entry in one.files.items()}
    return replace(first, files=files, tensors=tensors, ranks=tuple(ranks))


def _check_copies(manifests: Sequence[Manifest]) -> None:
    """What several ranks hold of one tensor, in one parameter alone, has one digest."""
    seen: dict[tuple[object, ...], tuple[int, str]] = {}
    for one in manifests:
        rank = one.ranks[0]
        for name, entry in _entries(one):
            boxes = rank.boxes.get(name, ())
            if len(boxes) != 1 or entry.rows is not None or entry.sha256 is None:
                continue
            box = boxes[0]
            other, digest = seen.setdefault(
                (box.tensor, box.source, box.target, entry.shape), (rank.rank, entry.sha256)
            )
            if digest != entry.sha256:
                raise _differ(
                    f"the numbers of {show(box.tensor)} (ranks {other} and {rank.rank})", box.tensor
                )


def _entries(manifest: Manifest) -> Iterator[tuple[str, TensorEntry]]:
    for file in manifest.files.values():
        yield from file.tensors.items()


def _differ(what: str, tensor: str | None = None) -> ShardedError:
    return ShardedError(
        f"the ranks' files are not of one model: they differ in {what}",
        file=MANIFEST,
        tensor=tensor,
        hint="save all ranks of one model; what an earlier save left is removed by that",
    )
