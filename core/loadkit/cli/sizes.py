"""Sizes as people write them: ``5GB``, ``500 MiB``, ``1048576``."""

from __future__ import annotations

import re

import click

__all__ = ["byte_size"]

_POWERS = " KMGT"
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*(?:([KMGT])(I?))?B?", re.IGNORECASE)


def byte_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """An option's text as bytes: powers of 1000 (GB), or of 1024 (GiB)."""
    found = _SIZE.fullmatch(value.strip())
    if found is not None:
        power = _POWERS.index((found[2] or " ").upper())
        factor = (1024 if found[3] else 1000) ** power
        size = int(float(found[1]) * factor) if "." in found[1] else int(found[1]) * factor
        if size:
            return size
    raise click.BadParameter(f"{value!r} is no size: give 5GB, 500MiB or a number of bytes")
