"""Options that a load would ignore are refused: nothing is accepted in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadkit.errors import OptionError
from loadkit.load_strategy import check_strategy
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.base_loader import BaseModelLoader
    from loadkit.config import LoadConfig
    from loadkit.sources.base import Source

__all__ = ["refuse_idle_ring", "refuse_unused"]

_RING = ("staging_slots", "staging_slot_bytes")

# Fields of LoadConfig that the line itself or its readers follow, whatever the load format.
_EVERY_LOAD = frozenset(
    {
        *("alias", "device", "load_format", "missing_ok", "model_loader_extra_config"),
        *("num_threads", "reader", "reader_options", "trust_remote_code", "use_tqdm_on_load"),
        *("digest_store", "local_ranks", "verify"),
        *("allowed_roots", "subfolder"),  # every source
        *("distribute", "rank_timeout"),  # see ``load_group``: they need a process group
        *_RING,  # see ``refuse_idle_ring``
        # True of a load that needs none of it: nothing is downloaded, no .bin is read.
        *("cache_dir", "download_dir", "fall_back_to_pt"),
    }
)


def refuse_unused(load_config: LoadConfig, loader: BaseModelLoader, source: Source) -> None:
    """Refuse fields of a ``LoadConfig`` that were set and that nobody in this load follows.

    Raises:
        OptionError: names all of them; ``follows`` of the loader and ``load_options`` of the
            source say what those two do.
    """
    followed = _EVERY_LOAD | loader.follows() | source.load_options
    unused = [
        f"{name}={printable(repr(getattr(load_config, name)), 60)}"
        for name, spec in load_config.options().items()
        if name not in followed and getattr(load_config, name) != spec.default
    ]
    if not unused:
        check_strategy(load_config)
        return
    raise OptionError(
        f"LoadConfig has {', '.join(unused)}: in this version neither load format "
        f"'{printable(load_config.load_format, 64)}' nor the source ({type(source).__name__}) "
        "does anything with that",
        detail={"options": [item.partition("=")[0] for item in unused]},
        hint="leave it out",
    )


def refuse_idle_ring(load_config: LoadConfig) -> None:
    """Refuse options of the staging ring where nothing goes through it.

    Raises:
        OptionError: names those that were set.
    """
    options = load_config.options()
    given = [name for name in _RING if getattr(load_config, name) != options[name].default]
    if given:
        said = ", ".join(f"{name}={getattr(load_config, name)}" for name in given)
        raise OptionError(
            f"LoadConfig has {said}, and no weight of this load goes to an accelerator",
            detail={"options": given},
            hint="leave it out",
        )
