"""A load in a process of its own: ``python -O -m loadkit.testing.child ARGUMENTS``, JSON both ways.

``python -O`` drops every ``assert``: what only an assert stands against goes wrong here.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["run_child"]

_SECONDS = 300


def run_child(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Load what ``arguments`` describe in a fresh ``python -O``.

    Args:
        arguments: ``source``, and ``load_config`` and ``options`` as keyword arguments of
            ``LoadConfig`` and ``loadkit.load``.

    Returns:
        ``digest`` of the parameters, ``parameter_bytes``, ``largest`` parameter in bytes, ``peak``
        of memory of its own; or ``error`` with its ``code``.

    Raises:
        RuntimeError: the process ended otherwise; its standard error is the text.
    """
    command = [sys.executable, "-O", "-m", "loadkit.testing.child", json.dumps(dict(arguments))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def parameters_digest(model: Any) -> str:
    """A digest of the parameters' names, dtypes and bytes."""
    import torch

    digest = hashlib.sha256()
    for name, param in sorted(model.named_parameters()):
        digest.update(f"{name} {param.dtype} {list(param.shape)}\n".encode())
        data = param.detach().contiguous().view(-1)
        digest.update(data.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _main(arguments: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    import loadkit
    from loadkit.testing.checkpoint import known_here

    torch.set_num_threads(1)
    config = loadkit.LoadConfig(**arguments["load_config"])
    options = dict(arguments["options"])
    with known_here():
        try:
            for source in (arguments.get("warm"), arguments["source"]):
                if source is not None:
                    result = loadkit.load(source, load_config=config, **options)
        except loadkit.LoadkitError as error:
            return {"error": type(error).__name__, "code": error.code}
    sizes = [param.nbytes for param in result.model.parameters()]
    return {
        "digest": parameters_digest(result.model),
        "parameter_bytes": sum(sizes),
        "largest": max(sizes),
        "peak": result.report.peak["host_anonymous_bytes"],
        "predicted": result.plan.predicted_peak_bytes,
        "asserts": bool(__debug__),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_main(json.loads(sys.argv[1]))) + "\n")
