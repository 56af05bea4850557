"""Two processes that NIXL moves parameters between: ``serve`` holds them, ``load`` takes them.

``python nixl_ranks.py serve ADDRESS FOLDER`` prints a line of JSON when all ranks are served, and
ends when its input ends. ``... load ADDRESS FOLDER`` prints one line for all loads.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import ExitStack
from typing import Any

import torch

import loadkit
from loadkit.config import LoadConfig, ParallelConfig

MODEL = "org/model"
RANKS = (ParallelConfig(), *(ParallelConfig(tp_size=2, tp_rank=rank) for rank in (0, 1)))


def digests(model: torch.nn.Module) -> dict[str, str]:
    """Every parameter's bytes."""
    return {
        name: hashlib.sha256(param.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, param in model.named_parameters()
    }


def serve(address: str, folder: str) -> None:
    from loadkit_modelexpress import serve_replica

    with ExitStack() as stack:
        for parallel in RANKS:
            model = loadkit.load_model(folder, parallel=parallel)
            stack.enter_context(
                serve_replica(model, server=address, model_name=MODEL, host="127.0.0.1")
            )
        say([parallel.to_dict() for parallel in RANKS])
        sys.stdin.read()


def load(address: str, folder: str) -> None:
    options = {"server": address, "strategies": ["p2p"], "model_name": MODEL}
    config = LoadConfig(
        load_format="modelexpress",
        model_loader_extra_config={**options, "transfer_buffer": 1 << 16},
    )
    found: list[dict[str, Any]] = []
    for parallel in RANKS:
        plan = loadkit.plan(folder, parallel=parallel, load_config=config)
        done = loadkit.load(folder, parallel=parallel, load_config=config)
        plain = loadkit.load_model(folder, parallel=parallel)
        found.append(
            {
                "digests": digests(done.model), "plain": digests(plain),
                "reader": done.report.reader, "bytes_read": done.report.bytes_read,
                "bytes_to_read": plan.bytes_to_read, "requests": done.report.requests,
                "parameter_bytes": done.report.parameter_bytes, "warnings": done.report.warnings,
                "exact": all(row.exact == "exact" for row in plan.rows if row.parameter),
            }
        )  # fmt: skip
    say(found)


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    {"serve": serve, "load": load}[sys.argv[1]](*sys.argv[2:])
