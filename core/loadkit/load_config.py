"""How a checkpoint is read: every option of a load that is not about the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from loadkit.errors import OptionError
from loadkit.frozen import FrozenDict
from loadkit.options import OptionSpec, json_value, option, unknown_option

__all__ = ["LoadConfig"]

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.+\-]{0,63}"
_DEVICE = r"[a-z][a-z0-9_]*(:[0-9]{1,4})?"
_UNGIVEN = "given by the caller without a reason"


@dataclass(frozen=True)
class LoadConfig:
    """How a checkpoint is read. Every field is checked when the value is made.

    Raises:
        OptionError: names the field, the value, what is accepted and the nearest of it.
    """

    load_format: str = option(str, "auto", "weight format; auto decides", pattern=_NAME)
    download_dir: str | None = option(Path, None, "folder that downloads go to")
    safetensors_load_strategy: str | None = option(
        str, None, "how safetensors are read", choices=("lazy", "eager", "prefetch", "torchao")
    )
    safetensors_prefetch_num_threads: int = option(
        int, 8, "threads that prefetch", low=1, high=1024
    )
    safetensors_prefetch_block_size: int = option(
        int, 16 << 20, "bytes of a prefetched block", low=4096, high=1 << 32
    )
    model_loader_extra_config: Mapping[str, Any] = option(
        dict, FrozenDict(), "options of the one loader; an object or its JSON text"
    )
    ignore_patterns: tuple[str, ...] = option(
        tuple, ("original/**/*",), "files that are not downloaded or read"
    )
    allow_patterns_overrides: tuple[str, ...] | None = option(
        tuple, None, "patterns of weight files, in place of the load format's own"
    )
    fall_back_to_pt: bool = option(bool, True, "read .bin files where there are no safetensors")
    use_tqdm_on_load: bool = option(bool, True, "show progress")
    device: str | None = option(str, None, "where the weights go: cpu, cuda:0", pattern=_DEVICE)
    reader: str = option(str, "auto", "what moves the bytes; auto decides", pattern=_NAME)
    reader_options: Mapping[str, Any] = option(
        dict, FrozenDict(), "options of the reader that is named; an object or its JSON text"
    )
    alias: str = option(
        str, "auto", "whether parameters may be views of the file", choices=("auto", "never")
    )
    verify: str = option(
        str, "size", "what is compared while reading", choices=("off", "size", "digest")
    )
    digest_store: str = option(
        str,
        "cache",
        "where a first load keeps digests for later ones",
        choices=("cache", "checkpoint", "none"),
    )
    distribute: str | None = option(
        str, None, "how ranks share what they read", choices=("broadcast",)
    )
    rank_timeout: float = option(
        float, 60.0, "seconds of silence after which a rank is given up", low=0.5, high=86_400
    )
    stream: bool = option(bool, False, "read remote ranges without a local copy")
    network_timeout: float = option(
        float,
        30.0,
        "seconds of a connection's silence before it is tried again",
        low=0.05,
        high=3600,
    )
    network_deadline: float = option(
        float, 300.0, "seconds that one transfer may take beside its bytes", low=0.1, high=86_400
    )
    num_threads: int = option(int, 0, "threads that read; 0 decides", low=0, high=1024)
    local_ranks: int = option(
        int,
        0,
        "ranks of this machine that load at once; 0: what the launcher says",
        low=0,
        high=4096,
    )
    staging_slots: int = option(
        int, 16, "pinned buffers between the files and an accelerator", low=2, high=256
    )
    staging_slot_bytes: int = option(
        int, 8 << 20, "bytes of such a buffer", low=64 << 10, high=1 << 30
    )
    revision: str | None = option(str, None, "branch, tag or commit of a hub repository")
    subfolder: str | None = option(str, None, "folder of the source that holds the checkpoint")
    cache_dir: str | None = option(
        Path, None, "folder that keeps what was fetched: the hub's cache, or ours"
    )
    allowed_roots: tuple[str, ...] = option(tuple, (), "more folders that links may lead to")
    missing_ok: Mapping[str, str] = option(
        (dict, tuple), FrozenDict(), "parameters that may stay unwritten: pattern -> reason"
    )
    weights_key: str | None = option(str, None, "key of the state dict inside a .pt or dcp file")
    pt_load_map_location: str | Mapping[str, str] = option(
        (str, dict), "cpu", "device map of .pt archives"
    )
    ignore_index: bool = option(bool, False, "read the shards that are there, not the index's")
    trust_remote_code: bool = option(bool, False, "allow a plugin to run code of the checkpoint")
    gguf_misaligned: str = option(
        str, "error", "a tp slice inside a quantised block", choices=("error", "decode")
    )

    def __post_init__(self) -> None:
        for name in ("model_loader_extra_config", "reader_options"):
            given: Any = getattr(self, name)
            if isinstance(given, str):
                object.__setattr__(self, name, json_value(given, name))
        device: Any = self.device
        if type(device).__name__ == "device":
            object.__setattr__(self, "device", str(device))  # a torch.device
        for name, spec in self.options().items():
            value = spec.check(getattr(self, name), owner="LoadConfig")
            object.__setattr__(self, name, value)
        roots = tuple(os.path.expanduser(root) for root in self.allowed_roots)  # noqa: PTH111
        object.__setattr__(self, "allowed_roots", roots)
        object.__setattr__(self, "missing_ok", _with_reasons(self.missing_ok))
        object.__setattr__(self, "subfolder", _inside(self.subfolder))

    @classmethod
    def options(cls) -> dict[str, OptionSpec]:
        """Every field as an option, by name."""
        return dict(_options())

    @classmethod
    def from_set(cls, settings: Mapping[str, str]) -> LoadConfig:
        """The value that ``--set key=value`` texts spell.

        Raises:
            OptionError: no such field (``ModelConfig``'s are read by ``parse_settings``), or text
                that is no value of its type.
        """
        specs = cls.options()
        given: dict[str, Any] = {}
        for name, text in settings.items():
            if name not in specs:
                raise unknown_option(name, specs, "LoadConfig")
            given[name] = specs[name].parse(text, owner="LoadConfig")
        return cls(**given)


@cache
def _options() -> dict[str, OptionSpec]:
    """The fields of ``LoadConfig`` as options that know their names."""
    each = fields(LoadConfig)
    return {field.name: replace(field.metadata["option"], name=field.name) for field in each}


def _with_reasons(given: Mapping[str, Any] | tuple[str, ...]) -> FrozenDict:
    """``missing_ok`` as pattern -> reason."""
    if not isinstance(given, Mapping):
        return FrozenDict(dict.fromkeys(given, _UNGIVEN))
    for pattern, reason in given.items():
        if not isinstance(reason, str) or not reason or not pattern:
            raise OptionError(
                f"LoadConfig.missing_ok[{pattern!r}] = {reason!r}; accepted: a pattern and, as a "
                "string, the reason why it may be missing"
            )
    return FrozenDict(given)


def _inside(folder: str | None) -> str | None:
    """A subfolder, checked to stay inside its source."""
    if folder is None:
        return None
    found = folder.rstrip("/")
    parts = found.split("/")
    if "\\" in found or "\0" in found or any(part in ("", ".", "..") for part in parts):
        raise OptionError(
            f"LoadConfig.subfolder = {folder!r}; accepted: a relative path with '/', without "
            "empty, '.' or '..' parts"
        )
    return found
