"""``enable_multithread_load`` and ``num_threads`` in ``model_loader_extra_config`` (vLLM's names).

A load reads straight into parameters, by ``num_threads`` threads: it holds no tensors beside the
model. ``iter_weights`` makes tensors: so many threads make them ahead of the caller, as long as
those that were not taken yet stay within ``byte_budget``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadkit.errors import OptionError
from loadkit.options import OptionSpec

if TYPE_CHECKING:
    from loadkit.load_config import LoadConfig

__all__ = ["MULTITHREAD_OPTIONS", "Multithread", "multithread"]

THREADS = 8

MULTITHREAD_OPTIONS: Mapping[str, OptionSpec] = {
    "enable_multithread_load": OptionSpec(
        "enable_multithread_load", bool, False, "read with num_threads threads"
    ),
    "num_threads": OptionSpec(
        "num_threads", int, None, f"threads that read ({THREADS})", low=1, high=1024
    ),
    "byte_budget": OptionSpec(
        "byte_budget", int, None, "bytes that iter_weights makes ahead (256 MiB)", low=1
    ),
}
"""The keys of ``model_loader_extra_config``, for a loader's ``options``."""


@dataclass(frozen=True, slots=True)
class Multithread:
    """How many threads read, and how many bytes of tensors may wait to be taken."""

    threads: int = THREADS
    byte_budget: int = 256 << 20


def multithread(load_config: LoadConfig, extra: Mapping[str, Any]) -> Multithread | None:
    """What a loader's checked ``model_loader_extra_config`` asks for; None: nothing.

    Raises:
        OptionError: a key that does nothing without ``enable_multithread_load``, or two options
            that contradict each other.
    """
    given = {key: extra[key] for key in ("num_threads", "byte_budget") if extra[key] is not None}
    if not extra["enable_multithread_load"]:
        if given:
            raise OptionError(
                f"model_loader_extra_config has {', '.join(given)}, which does nothing without "
                "enable_multithread_load",
                detail={"options": list(given)},
                hint="add enable_multithread_load=true, or set LoadConfig.num_threads",
            )
        return None
    if load_config.safetensors_load_strategy == "eager" or load_config.reader == "eager":
        raise OptionError(
            "enable_multithread_load and the eager strategy do not go together: eager reads from "
            "front to back, on one thread",
            detail={"options": ["model_loader_extra_config", "safetensors_load_strategy"]},
            hint="leave one of them out",
        )
    default = Multithread()
    threads = given.get("num_threads", load_config.num_threads or default.threads)
    if load_config.num_threads not in (0, threads):
        raise OptionError(
            f"LoadConfig.num_threads is {load_config.num_threads}, and num_threads in "
            f"model_loader_extra_config is {threads}",
            detail={"options": ["num_threads", "model_loader_extra_config"]},
            hint="give one of them",
        )
    return Multithread(threads, given.get("byte_budget", default.byte_budget))
