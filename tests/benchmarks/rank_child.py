"""One rank of a race over ranks: prepares, says so, waits for the start, measures, says figures.

``rank_child.py SPEC``: as ``loadkit.bench.child`` takes it, with ``rank``, ``world`` and, where the
ranks need a group, ``store``: the file they meet at.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    spec = json.loads(sys.argv[1])
    os.environ["LOCAL_WORLD_SIZE"] = str(spec["world"])
    import torch

    from loadkit.bench.measure import measure

    torch.set_num_threads(1)
    if spec.get("store"):
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{spec['store']}",
            rank=spec["rank"],
            world_size=spec["world"],
        )
    module, _, name = spec["call"].partition(":")
    go = getattr(import_module(f"benchmarks.{module}"), name)(**spec["args"], rank=spec["rank"])
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(measure(go, with_checksum=False)), flush=True)
    sys.stdin.readline()  # the others may still be measuring
    if spec.get("store"):
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
