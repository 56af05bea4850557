"""Tensor descriptors: what a replica says of its memory, checked."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from loadkit.errors import DownloadError
from loadkit.file_checks import show
from loadkit.tensor_info import DTYPES

__all__ = ["Described", "described"]

MAX_TENSORS = 1 << 20
_NAMES = {attribute: name for name, (_, attribute) in DTYPES.items()}
_ENDPOINT = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}", re.ASCII)


class Described(NamedTuple):
    """A tensor in a replica's memory: ``nbytes`` bytes from ``address`` on of its device.

    ``start``: where it is counted from, as if all of them lay in one file. ``dtype``: as
    safetensors names it.
    """

    name: str
    address: int
    nbytes: int
    device: int
    dtype: str
    start: int


def described(manifest: Any, who: str) -> tuple[Described, ...]:
    """The tensors of a ``GetTensorManifestResponse``.

    Raises:
        DownloadError: it contradicts itself, or says what cannot be.
    """
    found: dict[str, Described] = {}
    problem, start = "", 0
    if not manifest.tensors or len(manifest.tensors) > MAX_TENSORS:
        problem = f"describes {len(manifest.tensors)} tensors"
    if not _ENDPOINT.fullmatch(manifest.metadata_endpoint) or not manifest.agent_name:
        problem = "does not say where its memory is served"
    for one in manifest.tensors:
        dtype = _NAMES.get(one.dtype.removeprefix("torch."))
        if dtype is None:
            problem = f"has tensor {show(one.name)} of dtype {show(one.dtype)}"
        elif one.name in found:
            problem = f"names tensor {show(one.name)} twice"
        elif not one.size or not one.addr or (one.size * 8) % DTYPES[dtype][0]:
            problem = f"has tensor {show(one.name)} of {one.size} bytes at address {one.addr}"
        if problem or dtype is None:
            break
        found[one.name] = Described(one.name, one.addr, one.size, one.device_id, dtype, start)
        start += one.size
    if problem:
        raise DownloadError(f"{who} {problem}", hint="the replica is at fault")
    return tuple(found.values())
