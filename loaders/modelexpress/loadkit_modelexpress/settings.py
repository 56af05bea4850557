"""What one load asks of ModelExpress, gathered once: its options, the package's variables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.errors import OptionError
from loadkit.file_checks import show_path
from loadkit.options import validate_extra_config
from loadkit_modelexpress.address import Address, server_of
from loadkit_modelexpress.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loadkit.config import LoadConfig

__all__ = ["Settings", "cache_folder", "extra_config", "read_settings"]


@dataclass(frozen=True)
class Settings:
    """How a server is asked.

    Attributes:
        server: ``host:port``.
        model: the model's name there.
        provider: where the server has it from.
        cache: the folder that files go to, in the hub's layout; the server's own where
            ``shared_storage``.
        shared_storage: files are in that folder already; none is streamed.
        chunk_size: bytes of one message.
        download_timeout: seconds that the server may take to have the model.
    """

    server: str
    model: str
    provider: str
    cache: Path
    shared_storage: bool
    chunk_size: int
    download_timeout: float


def extra_config(load_config: LoadConfig) -> Mapping[str, Any]:
    """The options: as given with this load format, else (an ``mx://`` address) the defaults."""
    given = load_config.model_loader_extra_config
    if load_config.load_format != "modelexpress":
        given = {}
    return validate_extra_config(OPTIONS, given, "modelexpress")


def read_settings(address: Address, load_config: LoadConfig) -> Settings:
    """The settings of one load.

    Raises:
        OptionError: the server is named twice or is none; so is the cache's folder.
    """
    options = extra_config(load_config)
    return Settings(
        server_of(options["server"], address.server),
        options["model_name"] or address.model,
        options["provider"],
        cache_folder(load_config),
        options["shared_storage"],
        options["chunk_size"],
        options["download_timeout"],
    )


def cache_folder(load_config: LoadConfig) -> Path:
    """The folder that files go to: as the load says, else as the package and the hub do.

    Raises:
        OptionError: the load names two.
    """
    given = sorted({found for found in (load_config.cache_dir, load_config.download_dir) if found})
    if len(given) > 1:
        raise OptionError(
            f"cache_dir is {show_path(load_config.cache_dir)} and download_dir "
            f"{show_path(load_config.download_dir)}; files of a server go to one folder",
            hint="leave out one of the two",
        )
    for name, below in _VARIABLES:
        if not given and (found := os.environ.get(name)):
            given = [str(Path(os.path.expandvars(found)) / below)]
    return Path(given[0] if given else "~/.cache/huggingface/hub").expanduser().absolute()


_VARIABLES = (
    ("MODEL_EXPRESS_CACHE_DIRECTORY", ""),
    ("HF_HUB_CACHE", ""),
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
)
