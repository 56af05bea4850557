"""Whether a load format can be used here, found out without importing its loader or its library.

A distribution whose format needs a library or a device says so in a light module of its own,
``availability.py``, that holds a function ``state()`` and names the library::

    from loadkit.availability import library_state

    LIBRARY = "tensorizer"

    def state() -> str:
        return library_state(LIBRARY)

and an entry point of the group ``loadkit.availability`` with the load format's name. Where the
extra does not install the library, ``INSTALL`` is the line that does. A format
without one is ready as soon as its distribution is there.
"""

from __future__ import annotations

import importlib.metadata
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from loadkit.entry_index import Row, index
from loadkit.errors import PluginError
from loadkit.known_names import KNOWN, LIBRARIES
from loadkit.plugin_guard import guarded, import_value, load_row
from loadkit.text import printable

__all__ = [
    "GROUP",
    "NEEDS_CUDA",
    "NEEDS_EXTRA",
    "READY",
    "Availability",
    "ask",
    "availability_rows",
    "has_cuda",
    "installed_version",
    "library_of",
    "library_state",
]

GROUP = "loadkit.availability"
READY = "ready"
NEEDS_EXTRA = "needs pip extra"
NEEDS_CUDA = "needs CUDA"
_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_CUDA_BUILD = re.compile(r"^(?:cuda|hip)\b[^=\n]*=\s*['\"]", re.MULTILINE)


class Availability(NamedTuple):
    """What a distribution says of one of its formats."""

    state: str
    library: str | None = None  # the library's name as pip knows it
    install: str = ""  # the line that installs it, where the extra's does not


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None. Imports nothing of it."""
    try:
        return importlib.metadata.version(distribution)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def has_cuda() -> bool:
    """Whether this machine has a driver of an accelerator and torch was built for one.

    Torch is not imported: its ``version.py`` is read.
    """
    if not any(Path(path).exists() for path in _DRIVERS):
        return False
    try:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return False
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except (OSError, ValueError, ImportError, UnicodeError):
        return False
    return _CUDA_BUILD.search(text) is not None


def library_state(*libraries: str, cuda: bool = False) -> str:
    """``ready``, or what is missing.

    Args:
        libraries: distributions that must be installed, as pip names them.
        cuda: whether they run on an accelerator alone.
    """
    if any(installed_version(library) is None for library in libraries):
        return NEEDS_EXTRA
    return NEEDS_CUDA if cuda and not has_cuda() else READY


def availability_rows() -> dict[tuple[str, str], Row]:
    """The usable entry points of the group, by (load format, distribution)."""
    rows = index().of_group(GROUP)
    return {(row.name, row.distribution): row for row in rows if row.state == "ready"}


def library_of(load_format: str) -> str | None:
    """The library behind a format of this project, as pip names it; None where there is none."""
    return LIBRARIES.get(load_format)


def ask(row: Row) -> Availability:
    """What a distribution says of its format: its light module is imported, and no other.

    Raises:
        PluginError: it cannot be imported, or its answer is no text.
    """
    function = load_row(row)
    said = guarded(row, lambda: function(), "asking it for its state")
    if not isinstance(said, str) or not said:
        raise PluginError(
            f"{row.name!r} of {row.origin} answered {printable(repr(said), 80)} when it was asked "
            f"for its state; accepted: {READY!r}, {NEEDS_EXTRA!r}, {NEEDS_CUDA!r}"
        )
    module = guarded(row, lambda: import_value(row.value.partition(":")[0]), "importing it")
    library = getattr(module, "LIBRARY", None)
    if not isinstance(library, str) or not library:
        library = library_of(row.name)
    line = getattr(module, "INSTALL", "")
    install = printable(line, 200) if isinstance(line, str) else ""
    return Availability(_plain(said, row.name, library), library, install)


def _plain(said: str, load_format: str, library: str | None) -> str:
    """A state in the words of this module, where it means one of theirs."""
    known = KNOWN["loaders"].get(load_format)
    extras = {library, known.extra if known else None, "extra"}
    if said.removeprefix("needs ") in extras:
        return NEEDS_EXTRA
    return printable(said, 80)
