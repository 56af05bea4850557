"""What ranks compare before they read: that all of them see the same checkpoint and mean the same.

Of each file: its name, its size, and a digest of its start and of samples spread over the rest. Two
versions of a checkpoint of one size differ there; a single flipped byte may not, which is what
``verify="digest"`` is for. Times and inodes differ between machines and are not compared.

Where each rank has files of its own, nobody else needs to see them: two that see one have to see
the same, and all have to see the same manifest, which has the digests of every rank's files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loadkit.errors import DistributedError
from loadkit.manifest import MANIFEST
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.load_group import LoadGroup
    from loadkit.resolve import Job
    from loadkit.sources.base import File

__all__ = ["compare", "fingerprint"]

_START = 64 << 10  # bytes of a file's start: most of its header
_SAMPLES = 32
_SAMPLE = 256  # bytes
_FILE = "file "
_RANK_FILE = "rank file "
# What may differ between ranks that load one model: how each reads, and which part it is.
_OWN = frozenset(
    {"device", "num_threads", "reader", "alias", "use_tqdm_on_load", "cache_dir", "download_dir"}
    | {"allowed_roots", "local_ranks", "staging_slots", "staging_slot_bytes", "digest_store"}
    | {"safetensors_load_strategy", "safetensors_prefetch_num_threads"}
    | {"safetensors_prefetch_block_size", "rank_timeout"}
    | {"network_timeout", "network_deadline"}
)


def compare(group: LoadGroup, job: Job, what: str = "fingerprint") -> None:
    """Hold what every rank is about to load against each other; ``what``: each time another word.

    Raises:
        DistributedError: E_RANK_MISMATCH, the ranks and the first thing that differs.
    """
    if group.board is None:
        return
    found = group.exchange(what, json.dumps(fingerprint(job)).encode())
    every = [json.loads(each) for each in found]
    error = mismatch(every, group.board.names)
    if error is not None:
        raise error


def fingerprint(job: Job) -> dict[str, str]:
    """What has to be equal on all ranks, by what it is."""
    from loadkit import __version__

    config = job.config
    parallel = config.parallel_config.to_dict()
    options = {
        name: value
        for name in config.load_config.options()
        if name not in _OWN and (value := getattr(config.load_config, name)) is not None
    }
    found = {
        "loadkit version": __version__,
        "architecture": f"{job.architecture} {job.model_class_name}",
        "load format": config.load_config.load_format,
        "dtype": config.model_config.dtype_name,
        "config": _digest(config.model_config.hf_config.to_dict()),
        "options": _digest([{name: repr(value) for name, value in options.items()}, job.strict]),
        "topology": " ".join(f"{k}={v}" for k, v in parallel.items() if k.endswith("_size")),
        "expert placement": _digest(parallel.get("expert_placement")),
    }
    kind = _RANK_FILE if job.loader.by_key else _FILE
    for name in sorted(job.loader.files):
        found[kind + name] = _of_file(job.source.open(name))
    if job.loader.by_key and any(info.name == MANIFEST for info in job.source.list()):
        found[_FILE + MANIFEST] = _of_file(job.source.open(MANIFEST))
    return found


def mismatch(every: Sequence[Mapping[str, str]], names: Sequence[str]) -> DistributedError | None:
    """The error about the first thing that some ranks see otherwise; None if all see the same."""
    for key in dict.fromkeys(key for each in every for key in each):
        seen: dict[str | None, list[int]] = {}
        for rank, each in enumerate(every):
            if key in each or not key.startswith(_RANK_FILE):
                seen.setdefault(each.get(key), []).append(rank)
        if len(seen) > 1:
            return _error(key, seen, names)
    return None


def _error(
    key: str, seen: Mapping[str | None, list[int]], names: Sequence[str]
) -> DistributedError:
    # the most ranks are taken to be right; of equally many, the one that rank 0 is among
    usual = max(seen, key=lambda value: (len(seen[value]), -seen[value][0]))
    odd = sorted(rank for value, ranks in seen.items() if value != usual for rank in ranks)
    file = next((key[len(k) :] for k in (_FILE, _RANK_FILE) if key.startswith(k)), None)
    what = f"another {printable(file or key, ascii_only=False)}"
    lacks = all(rank in seen.get(None, ()) for rank in odd)
    if lacks:
        what = f"no {printable(file or key, ascii_only=False)}"
    some = "; ".join(
        f"{_numbers(ranks)}: {printable(value, 120) if value is not None else 'none'}"
        for value, ranks in seen.items()
    )
    who = " and ".join(names[rank] for rank in odd[:4]) + (" and more" if len(odd) > 4 else "")
    verb = "sees" if len(odd) == 1 else "see"
    error = DistributedError(
        f"{who} {verb} {what} than {_numbers(seen[usual])} ({some})"
        if not lacks
        else f"{who} {verb} {what}, {_numbers(seen[usual])} {_have(seen[usual])} ({some})",
        code="E_RANK_MISMATCH",
        file=file,
        detail={"ranks": odd, "differs": key, "seen": {str(v): r for v, r in seen.items()}},
        hint="give every rank the same files" if file else "give every rank the same options",
    )
    error.rank = odd[0]
    return error


def _have(ranks: Sequence[int]) -> str:
    return "has it" if len(ranks) == 1 else "have it"


def _numbers(ranks: Sequence[int]) -> str:
    """``ranks 0, 1 and 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        return f"ranks {', '.join(shown)} and {len(ranks) - 8} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _of_file(file: File) -> str:
    """``1234 bytes, digest 0f3a...``."""
    digest = hashlib.sha256(file.read(0, min(_START, file.size)))
    if file.path is not None:  # of a remote file each sample would be a request
        step = max(_SAMPLE, (file.size - _START) // _SAMPLES)
        places = {*range(_START, max(_START, file.size - _SAMPLE), step), file.size - _SAMPLE}
        for offset in sorted(at for at in places if at >= _START):
            digest.update(file.read(offset, min(_SAMPLE, file.size - offset)))
    return f"{file.size} bytes, digest {digest.hexdigest()[:16]}"
