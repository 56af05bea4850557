"""The options of the load format, in ``model_loader_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadkit.errors import OptionError
from loadkit.options import OptionSpec

__all__ = ["FILE_STRATEGIES", "OPTIONS", "check_strategies"]

P2P, SERVER, SOURCE = "p2p", "server", "source"
FILE_STRATEGIES = (SERVER, SOURCE)
PROVIDERS = ("hugging_face", "ngc", "gcs", "s3")

OPTIONS: Mapping[str, OptionSpec] = {
    spec.name: spec
    for spec in (
        OptionSpec("server", str, None, "host:port of the ModelExpress server"),
        OptionSpec("model_name", str, None, "the model's name on the server"),
        OptionSpec(
            "strategies", tuple, (SERVER,), "where weights come from, one after the other: "
            "p2p, server, source",
        ),
        OptionSpec(
            "provider", str, "hugging_face", "where the server has models from", choices=PROVIDERS
        ),
        OptionSpec(
            "shared_storage", bool, False, "the server's cache is the folder cache_dir names here"
        ),
        OptionSpec(
            "chunk_size", int, 1 << 20, "bytes of one message of a file", low=4096, high=64 << 20
        ),
        OptionSpec(
            "download_timeout", float, 3600.0, "seconds that the server may take to have a model",
            low=0.1, high=7 * 86_400,
        ),
        OptionSpec("selector", str, None, "how replicas are ranked; MX_P2P_SOURCE_SELECTOR's name"),
        OptionSpec(
            "transfer_timeout", float, 300.0, "seconds that one read from a replica may take",
            low=0.1, high=86_400,
        ),
        OptionSpec(
            "transfer_buffer", int, 64 << 20, "bytes registered for what arrives from a replica",
            low=1 << 16, high=1 << 34,
        ),
        OptionSpec(
            "nixl_port", int, 0, "port of this rank's NIXL agent; 0: any", low=0, high=65_535
        ),
    )
}  # fmt: skip


def check_strategies(given: Sequence[str]) -> tuple[str, ...]:
    """The chain, as it will be tried.

    Raises:
        OptionError: an unknown one, one twice, none at all, or p2p after files.
    """
    known = (P2P, *FILE_STRATEGIES)
    problem = ""
    if not given:
        problem = "is empty"
    elif unknown := [name for name in given if name not in known]:
        problem = f"has {unknown[0]!r}"
    elif len(set(given)) < len(given):
        problem = "names one twice"
    elif P2P in given[1:]:
        problem = "has 'p2p' after files: files that are there would always go before it"
    if problem:
        raise OptionError(
            f"strategies {list(given)} {problem}; accepted: some of {', '.join(known)}, p2p first",
            detail={"option": "strategies", "accepted": list(known)},
        )
    return tuple(given)
