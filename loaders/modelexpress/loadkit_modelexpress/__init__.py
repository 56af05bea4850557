"""ModelExpress: the load format of that name, ``mx://`` addresses, and replicas.

``server`` asks a ModelExpress server for files, ``source`` and ``cache`` are where they lie.
``p2p`` takes parameters from the memory of another process that serves the same model, which
``serve_replica`` makes of a loaded model. The package modelexpress is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadkit_modelexpress.p2p.serving import ServedReplica, serve_replica

__all__ = ["ServedReplica", "serve_replica"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from loadkit_modelexpress.p2p import serving

        return getattr(serving, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
