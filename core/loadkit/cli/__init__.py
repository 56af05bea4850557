"""The command line. ``main`` is the ``loadkit`` script; torch and rich come in only when used."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` without the program's name, or None for ``sys.argv``.

    Returns:
        The exit code: 0 good, 1 the checkpoint or model is at fault, 2 usage, 3 I/O or network,
        130 interrupted.
    """
    from loadkit.cli.app import run

    return run(argv)
