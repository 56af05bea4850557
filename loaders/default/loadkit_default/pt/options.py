"""The options of a load that are about archives of ``torch.save``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from loadkit.errors import OptionError
from loadkit.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loadkit.config import LoadConfig

__all__ = ["check_map_location", "refuse_idle"]

_DEVICE = re.compile(r"[a-z][a-z0-9_]*(:[0-9]{1,4})?")
_OPTIONS = ("pt_load_map_location", "weights_key")


def check_map_location(load_config: LoadConfig) -> None:
    """Check ``pt_load_map_location``: a device, or ``{saved location: device}``.

    An archive says of each storage where it lived (``cuda:99``). Its bytes go from the file to the
    parameters all the same, so every location is mapped to where the load puts its weights, and the
    option may say so, or "cpu", and nothing else.

    Raises:
        OptionError: it names no device, or one that this load does not use.
    """
    given = load_config.pt_load_map_location
    pairs = given.items() if isinstance(given, Mapping) else [("", given)]
    for location, target in pairs:
        problem = ""
        if not _is_device(target) or (location and not _is_device(location)):
            problem = "no device"
        elif target != "cpu" and load_config.device and not _same(target, load_config.device):
            problem = f"another device than the load's, {load_config.device}"
        if problem:
            shown = printable(f"{location}: {target}" if location else target, 80)
            raise OptionError(
                f"LoadConfig.pt_load_map_location has {shown!r}, which is {problem}; accepted: "
                '"cpu", the load\'s own device, or a mapping of saved locations to one of them',
                detail={"options": ["pt_load_map_location"]},
                hint="choose the device of the weights with LoadConfig.device",
            )


def _is_device(name: str) -> bool:
    """Whether torch knows the kind of device; there need be none here."""
    try:
        return bool(_DEVICE.fullmatch(name)) and torch.device(name) is not None
    except RuntimeError:
        return False


def _same(first: str, second: str) -> bool:
    """Whether two spellings are one device: ``cuda`` is ``cuda:0``."""
    return first.removesuffix(":0") == second.removesuffix(":0")


def refuse_idle(load_config: LoadConfig, files: Iterable[str]) -> None:
    """Refuse options of archives where none is read.

    Raises:
        OptionError: names those that were set.
    """
    specs = load_config.options()
    given = [name for name in _OPTIONS if getattr(load_config, name) != specs[name].default]
    if given:
        raise OptionError(
            f"LoadConfig has {', '.join(given)}, and no .bin, .pt or .pth file is read: the "
            f"weights are {', '.join(files)}",
            detail={"options": given},
            hint="leave it out, or name the archive as the source",
        )
