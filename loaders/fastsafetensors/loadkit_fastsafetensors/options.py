"""The options of the reader, which the load format takes too."""

from __future__ import annotations

from collections.abc import Mapping

from loadkit.options import OptionSpec

__all__ = ["OPTIONS"]

OPTIONS: Mapping[str, OptionSpec] = {
    "max_threads": OptionSpec("max_threads", int, None, "threads that read (16)", low=1, high=1024),
    "bbuf_size_kb": OptionSpec(
        "bbuf_size_kb",
        int,
        None,
        "KiB that a thread reads at once; pinned memory where it goes to an accelerator (16384)",
        low=64,
        high=1 << 20,
    ),
    "nogds": OptionSpec(
        "nogds", bool, None, "false: GPU direct storage, which needs an accelerator (true)"
    ),
}
"""Names are the library's; None is the default that the help tells."""
