"""What a process does that downloads a checkpoint and loads it. Prints what it saw as JSON."""

from __future__ import annotations

import hashlib
import json
import sys

import loadkit
from loadkit.config import LoadConfig


def main(uri: str, cache: str) -> None:
    """Load it, and say which weights and how many bytes came."""
    result = loadkit.load(uri, load_config=LoadConfig(cache_dir=cache, use_tqdm_on_load=False))
    digest = hashlib.sha256()
    for _, parameter in sorted(result.model.named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    print(json.dumps({"digest": digest.hexdigest(), "fetched": result.report.bytes_fetched}))


if __name__ == "__main__":
    main(*sys.argv[1:])
