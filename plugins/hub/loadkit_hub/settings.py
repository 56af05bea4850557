"""What the environment says of the hub: where it is, who asks, where its cache lies.

The variables are those of ``huggingface_hub``, read when a source is opened.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadkit.errors import DownloadError, NotInstalledError, OptionError
from loadkit.file_checks import show_path
from loadkit.known_names import pip_line

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["Settings", "cache_folder", "read_settings"]

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})


@dataclass(frozen=True)
class Settings:
    """Where the hub is and how it is asked.

    Attributes:
        endpoint: its address, without a slash at the end (``HF_ENDPOINT``).
        offline: whether nothing may be asked (``HF_HUB_OFFLINE``, ``TRANSFORMERS_OFFLINE``).
        cache: the folder of its cache (``HF_HUB_CACHE``, ``HF_HOME``, or a load's own).
        token: the user's, for that endpoint alone; never shown.
    """

    endpoint: str
    offline: bool
    cache: Path
    token: str | None

    def __repr__(self) -> str:
        known = "a token" if self.token else "no token"
        return f"Settings({self.endpoint!r}, offline={self.offline}, {self.cache}, {known})"


def read_settings(load_config: LoadConfig) -> Settings:
    """The settings of one load.

    Raises:
        NotInstalledError: ``huggingface_hub`` is missing.
        OptionError: ``cache_dir`` and ``download_dir`` are two folders.
        DownloadError: E_AUTH, a token that has to be exchanged could not be.
    """
    if find_spec("huggingface_hub") is None:
        raise NotInstalledError(
            "the hub's source needs the library 'huggingface_hub', which is not installed",
            detail={"library": "huggingface_hub", "extra": "hub"},
            hint=pip_line("hub"),
        )
    from huggingface_hub import constants

    hub: Any = constants
    said = [os.environ[name] for name in _OFFLINE if name in os.environ]
    offline = any(text.upper() in _TRUE for text in said) if said else hub.is_offline_mode()
    endpoint = (os.environ.get("HF_ENDPOINT") or hub.ENDPOINT).rstrip("/")
    cache = cache_folder(load_config) or _cache(hub)
    return Settings(endpoint, offline, cache, None if offline else _token(hub))


def cache_folder(load_config: LoadConfig) -> Path | None:
    """The folder that a load names for its downloads.

    Raises:
        OptionError: it names two.
    """
    given = sorted({found for found in (load_config.cache_dir, load_config.download_dir) if found})
    if len(given) > 1:
        raise OptionError(
            f"cache_dir is {show_path(load_config.cache_dir)} and download_dir "
            f"{show_path(load_config.download_dir)}; a hub's files go to one folder",
            hint="leave out one of the two",
        )
    return Path(given[0]).expanduser().absolute() if given else None


def _cache(hub: Any) -> Path:
    """The cache's folder, as the environment says now."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if found := os.environ.get(name):
            return Path(os.path.expandvars(found)).expanduser().absolute()
    if found := os.environ.get("HF_HOME"):
        return Path(os.path.expandvars(found)).expanduser().absolute() / "hub"
    return Path(hub.HF_HUB_CACHE).expanduser().absolute()


def _token(hub: Any) -> str | None:
    """The token of the user who is logged in, as ``huggingface_hub`` knows it.

    Its own ``build_hf_headers`` is not asked: that sends a request of its own.
    """
    if hub.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    from huggingface_hub import get_token

    try:
        return get_token() or None
    except Exception as error:  # noqa: BLE001  # a token that is exchanged over the network
        raise DownloadError(
            f"the hub's token cannot be had: {type(error).__name__}",
            code="E_AUTH",
            hint="log in again: hf auth login",
        ) from None
