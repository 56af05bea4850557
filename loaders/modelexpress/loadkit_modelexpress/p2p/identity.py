"""Which replicas hold the same: the same model, at the same topology, in the same layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loadkit.availability import installed_version
from loadkit.manifest import Topology
from loadkit_modelexpress.availability import LIBRARY
from loadkit_modelexpress.library import library

if TYPE_CHECKING:
    from loadkit.parallel_config import ParallelConfig

__all__ = ["LAYOUT", "build_identity", "rank_of"]

LAYOUT = "1"  # of the parameters that loadkit's layers make


def build_identity(
    model_name: str,
    revision: str,
    parallel: ParallelConfig,
    dtype: str,
    architecture: str,
) -> Any:
    """A ``SourceIdentity``. Replicas of other engines have another: their layouts differ.

    Args:
        model_name: the model.
        revision: the commit; "" where nobody knows it.
        parallel: the topology; which rank does not count.
        dtype: of the model, as torch spells it without ``torch.``.
        architecture: of the model.
    """
    messages = library("p2p_pb2")
    topology = Topology.of(parallel)
    extra = {"engine": "loadkit", "layout": LAYOUT, "architecture": architecture}
    if topology.dp > 1:
        extra["dp"] = str(topology.dp)
    if topology.experts is not None:
        extra["experts"] = ",".join(map(str, topology.experts))
    return messages.SourceIdentity(
        mx_version=installed_version(LIBRARY) or "",
        mx_source_type=messages.MX_SOURCE_TYPE_WEIGHTS,
        model_name=model_name,
        backend_framework=messages.BACKEND_FRAMEWORK_UNKNOWN,
        tensor_parallel_size=topology.tp,
        pipeline_parallel_size=topology.pp,
        expert_parallel_size=topology.ep,
        dtype=dtype,
        quantization="",
        extra_parameters=extra,
        revision=revision,
    )


def rank_of(parallel: ParallelConfig) -> int:
    """Which part of the model: the same number on the replica."""
    return Topology.of(parallel).rank_of(parallel)
