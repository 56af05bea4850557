"""``dcp``: folders of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from contract.formats.base import MatrixFormat


class Dcp(MatrixFormat):
    load_format = "dcp"
    distribution = "loadkit-dcp"
    verified = "the items' CRC-32"
    streamed = True
    remote_plan = True
    zero_copy = True  # of items that lie aligned in their file
    save = True

    def write(
        self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], source: Path
    ) -> None:
        from helpers.dcp_files import write_dcp

        write_dcp(folder, weights)


FORMATS = [Dcp()]
