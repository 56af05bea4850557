"""Options that a load would ignore are refused: nothing is accepted in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadkit.errors import OptionError
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.base_loader import BaseModelLoader
    from loadkit.config import LoadConfig
    from loadkit.sources.base import Source

__all__ = ["refuse_unused"]

# Fields of LoadConfig that the line itself or its readers follow, whatever the load format.
_EVERY_LOAD = frozenset(
    {
        *("alias", "device", "load_format", "missing_ok", "model_loader_extra_config"),
        *("num_threads", "reader", "trust_remote_code", "use_tqdm_on_load"),
        *("allowed_roots", "subfolder"),  # every source
        # True of a load that needs none of it: nothing is downloaded, no .bin is read.
        *("cache_dir", "download_dir", "fall_back_to_pt"),
    }
)


def refuse_unused(load_config: LoadConfig, loader: BaseModelLoader, source: Source) -> None:
    """Refuse fields of a ``LoadConfig`` that were set and that nobody in this load follows.

    Raises:
        OptionError: names all of them; ``load_options`` of the loader and of the source say what
            those two follow.
    """
    followed = _EVERY_LOAD | loader.load_options | source.load_options
    unused = [
        f"{name}={printable(repr(getattr(load_config, name)), 60)}"
        for name, spec in load_config.options().items()
        if name not in followed and getattr(load_config, name) != spec.default
    ]
    if not unused:
        return
    raise OptionError(
        f"LoadConfig has {', '.join(unused)}: in this version neither load format "
        f"'{printable(load_config.load_format, 64)}' nor the source ({type(source).__name__}) "
        "does anything with that",
        detail={"options": [item.partition("=")[0] for item in unused]},
        hint="leave it out",
    )
