"""A save by several ranks before it is done: a folder inside of the one that it is for.

Each rank writes its files there, and last of all its own manifest. When all ranks' manifests are
there the contents take their place. What a killed save left is never loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loadkit.errors import LoadkitError, ShardedError
from loadkit.manifest import MAX_MANIFEST_BYTES, Manifest, parse_manifest

if TYPE_CHECKING:
    from loadkit.sources.base import FileInfo, Source

__all__ = ["UNFINISHED", "rank_manifest_name", "rank_of_manifest", "unfinished_problem"]

UNFINISHED = "loadkit-unfinished-"
_RANK = re.compile(r"loadkit_manifest\.rank-(0|[1-9]\d{0,6})\.json")


def rank_manifest_name(rank: int) -> str:
    """What one rank writes when its own files are done."""
    return f"loadkit_manifest.rank-{rank}.json"


def rank_of_manifest(name: str) -> int | None:
    """Whose manifest a file is, or None if it is none of one rank's."""
    found = _RANK.fullmatch(name)
    return None if found is None else int(found[1])


def unfinished_problem(source: Source, listing: Sequence[FileInfo]) -> ShardedError | None:
    """What to say of a folder that holds nothing but an unfinished save; None: it holds none."""
    folders: dict[str, list[str]] = {}
    for info in listing:
        folder, _, name = info.name.partition("/")
        if folder.startswith(UNFINISHED) and name and "/" not in name:
            folders.setdefault(folder, []).append(name)
    if not folders:
        return None
    folder, names = max(folders.items(), key=lambda item: (len(item[1]), item[0]))
    manifests: dict[int, Manifest] = {}
    for name in names:
        rank = rank_of_manifest(name)
        found = None if rank is None else _read(source, f"{folder}/{name}")
        if rank is not None and found is not None:
            manifests[rank] = found
    worlds = [found.topology.world_size for found in manifests.values()]
    missing = sorted(set(range(max(worlds, default=0))) - set(manifests))
    if worlds:
        said = ", ".join(map(str, missing)) if missing else "none"
        what = (
            f"of {max(worlds)} ranks {', '.join(map(str, sorted(manifests)))} are saved; missing: "
        )
        what += said
    else:
        what = "no rank is saved whole"
    return ShardedError(
        f"a save into this folder was not finished, so there is no manifest: {what}",
        file=folder,
        detail={"missing_ranks": missing, "saved_ranks": sorted(manifests)},
        hint="save the model again, with all ranks",
    )


def _read(source: Source, name: str) -> Manifest | None:
    try:
        file = source.open(name)
        return parse_manifest(file.read(0, min(file.size, MAX_MANIFEST_BYTES + 1)), file=name)
    except LoadkitError:  # half a file: this rank is not done either
        return None
