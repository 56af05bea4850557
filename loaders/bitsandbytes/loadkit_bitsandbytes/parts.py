"""Long work in short parts, one thread each.

An operator over a whole matrix needs many times its memory, and threads that share each of its many
small steps wait for one another. Parts fit into a core's cache and wait for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["in_parts"]

_ON_DEVICE = 1 << 25  # elements of a part on an accelerator


def in_parts(
    numel: int, step: int, unit: int, device: torch.device, work: Callable[[int, int], None]
) -> None:
    """Call ``work(start, end)`` for parts of ``numel`` elements, in any order.

    Args:
        numel: how many elements there are.
        step: about how many a part has, on a CPU.
        unit: parts begin at multiples of it.
        device: where the work is done.
        work: does one part; it writes to no other's place.
    """
    step = step if device.type == "cpu" else _ON_DEVICE
    step = max(1, step // unit) * unit
    starts = range(0, numel, step)
    threads = torch.get_num_threads()
    if len(starts) < 2 or device.type != "cpu":
        for start in starts:
            work(start, min(start + step, numel))
        return
    torch.set_num_threads(1)  # also of the threads that are started here
    try:
        with ThreadPoolExecutor(threads) as pool:
            ends = [min(start + step, numel) for start in starts]
            for _ in pool.map(work, starts, ends):
                pass
    finally:
        torch.set_num_threads(threads)
