"""``runai_streamer_sharded``: the same rank files, read by the Run:ai model streamer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from loadkit import tables
from loadkit.errors import NotInstalledError
from loadkit.known_names import pip_line
from loadkit.options import OptionSpec
from loadkit.reader_loader import read_by
from loadkit.streamer_options import STREAMER_OPTIONS, for_streamer
from loadkit_sharded_state.loader import ShardedStateLoader

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["StreamedShardedStateLoader"]

_READER = "runai"


class StreamedShardedStateLoader(ShardedStateLoader):
    """Rank files through the reader ``runai``, where that is installed and no other is named."""

    load_options: ClassVar[frozenset[str]] = frozenset()  # the streamer has a way of its own
    options: ClassVar[Mapping[str, OptionSpec]] = {**ShardedStateLoader.options, **STREAMER_OPTIONS}

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        asked = for_streamer(self.extra_config)
        given = sorted(name for name, value in asked.items() if value is not None)
        installed = _READER in tables.readers.names()
        if given and not installed:
            raise NotInstalledError(
                f"model_loader_extra_config has {', '.join(given)}, which is for the Run:ai model "
                f"streamer, and its reader {_READER!r} is not installed",
                detail={"options": given},
                hint=pip_line("runai-streamer"),
            )
        if given or (installed and load_config.reader == "auto"):
            self.load_config = read_by(_READER, load_config, asked)
