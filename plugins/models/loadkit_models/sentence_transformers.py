"""How a sentence-transformers folder wants tokens pooled: ``modules.json`` and what it names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loadkit.config import LoadConfig
from loadkit.errors import ConfigFileError
from loadkit.json_safe import parse_json
from loadkit.sources.base import Source
from loadkit.sources.local import LocalSource
from loadkit.sources.paths import expand_path

__all__ = ["PoolingSettings", "read_pooling"]

MAX_JSON = 1 << 20  # bytes; the real ones have a few hundred

_KINDS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """``kind`` is a name of ``PoolingType``; ``unsupported`` names what is asked for beyond it."""

    kind: str = "mean"
    normalize: bool = False
    unsupported: tuple[str, ...] = ()


def read_pooling(source: str, load_config: LoadConfig) -> PoolingSettings:
    """The folder's pooling; where nothing says, the plain mean that sentence-transformers takes.

    Raises:
        ConfigFileError: E_CONFIG, ``modules.json`` or a file it names is not what it should be.
        PathError: ``modules.json`` names a file outside the folder.
    """
    if not source or not expand_path(source).is_dir():
        return PoolingSettings()
    with LocalSource(source, load_config) as folder:
        names = {info.name for info in folder.list()}
        if "modules.json" not in names:
            return PoolingSettings()
        modules = _read(folder, "modules.json")
        if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
            raise ConfigFileError("modules.json is no list of objects", file="modules.json")
        kind, normalize, unsupported = "mean", False, []
        for module in modules:
            name = str(module.get("type", "")).rpartition(".")[2]
            if name == "Pooling":
                kind, more = _kind(_read(folder, f"{module.get('path')}/config.json"))
                unsupported += more
            elif name == "Normalize":
                normalize = True
            elif name != "Transformer":
                unsupported.append(name)
    return PoolingSettings(kind, normalize, tuple(unsupported))


def _kind(config: Any) -> tuple[str, list[str]]:
    """The pooling type of a Pooling module's config, and modes there is none for."""
    if not isinstance(config, dict):
        raise ConfigFileError("the Pooling module's config.json is no object")
    named = config.get("pooling_mode")
    if isinstance(named, str):
        known = named in _KINDS.values()
        return (named, []) if known else ("mean", [f"pooling mode {named}"])
    modes = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    if len(modes) == 1 and modes[0] in _KINDS:
        return _KINDS[modes[0]], []
    return "mean", [f"pooling modes {', '.join(sorted(modes)) or 'none'}"]


def _read(folder: Source, name: str) -> Any:
    """A small JSON file of the folder."""
    file = folder.open(name)
    data = file.read(0, min(file.size, MAX_JSON + 1))
    return parse_json(data, file=name, max_bytes=MAX_JSON, error=ConfigFileError)
