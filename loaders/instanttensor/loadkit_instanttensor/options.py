"""The options of the reader, which the load format takes too."""

from __future__ import annotations

from collections.abc import Mapping

from loadkit.options import OptionSpec

__all__ = ["BACKENDS", "OPTIONS"]

BACKENDS = ("AIO", "AIO_BUFFERED", "URING", "URING_BUFFERED", "CUFILE", "MMAP", "BUFFERED")

OPTIONS: Mapping[str, OptionSpec] = {
    "buffer_size": OptionSpec(
        "buffer_size", int, None, "bytes of its buffer on the device; it decides", low=1 << 20
    ),
    "chunk_size": OptionSpec(
        "chunk_size", int, None, "bytes of one read; it decides", low=4096, high=1 << 30
    ),
    "io_depth": OptionSpec(
        "io_depth", int, None, "reads under way; it decides", low=1, high=65_536
    ),
    "backend": OptionSpec("backend", str, None, "how it reads; it decides", choices=BACKENDS),
}
"""Names and values are the library's."""
