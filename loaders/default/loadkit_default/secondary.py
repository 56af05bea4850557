"""Opens the other checkpoints of a model, and puts their files and tensors beside the first one's.

Their files are seen in a folder ``secondary:PREFIX`` of the checkpoint, so no two have one name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from loadkit.errors import FormatError
from loadkit.file_checks import show
from loadkit.frozen import FrozenDict
from loadkit.secondary_weights import WeightSource
from loadkit.sources import Source, open_source
from loadkit.sources.joint import JointSource
from loadkit.sources.moved import MovedSource
from loadkit.unused_options import refuse_unused

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit_default.loader import DefaultModelLoader

__all__ = ["joined", "refuse_clashes", "secondary_of"]


def secondary_of(source: Source) -> list[MovedSource]:
    """The secondary checkpoints that were joined to a source, in order."""
    found: list[MovedSource] = []
    while isinstance(source, JointSource):
        if isinstance(source.second, MovedSource):
            found.append(source.second)
        source = source.first
    return found[::-1]


def joined(
    source: Source,
    stated: Sequence[WeightSource],
    load_config: LoadConfig,
    make: type[DefaultModelLoader],
) -> Source:
    """The source with other checkpoints joined to it, their headers read.

    Args:
        source: of the first checkpoint.
        stated: the others.
        load_config: of the load; what is about the first checkpoint alone is left out.
        make: the loader that reads their files.

    Raises:
        LoadkitError: one cannot be opened or read; those that were opened are closed.
    """
    opened: list[MovedSource] = []
    try:
        for number, one in enumerate(stated, 1):
            folder = f"secondary:{one.prefix.strip('.') or number}"
            taken = {each.folder for each in opened}
            opened.append(_opened(one, load_config, make, source.load_options))
            opened[-1].move(folder if folder not in taken else f"{folder}:{number}")
    except BaseException:
        for each in opened:
            each.close()
        raise
    for each in opened:
        source = JointSource(source, each, lambda name: True)
    return source


def _opened(
    stated: WeightSource,
    load_config: LoadConfig,
    make: type[DefaultModelLoader],
    of_first: frozenset[str],
) -> MovedSource:
    """A checkpoint, its headers read. Options ``of_first``, which the first one's source follows,
    need not mean anything to this one's.
    """
    patterns = stated.allow_patterns_overrides
    config = replace(
        load_config,
        load_format="pt" if load_config.load_format == "pt" else "hf",
        revision=stated.revision,
        subfolder=stated.subfolder,
        fall_back_to_pt=stated.fall_back_to_pt,
        allow_patterns_overrides=None if patterns is None else tuple(patterns),
        ignore_index=False,
        weights_key=None,
        model_loader_extra_config=FrozenDict(),
    )
    moved = MovedSource(open_source(stated.model_or_path, config))
    try:
        loader = make(config)
        idle = of_first - moved.inner.load_options - {"revision"}
        spec = config.options()
        own = replace(config, **{name: spec[name].default for name in idle})
        refuse_unused(own, loader, moved.inner)
        loader.source, moved.loader, moved.prefix = moved, loader, stated.prefix
        loader.infos()  # headers are held against the index by the files' own names
    except BaseException:
        moved.close()
        raise
    return moved


def refuse_clashes(primary: DefaultModelLoader, others: Sequence[MovedSource]) -> None:
    """No name may come from two checkpoints.

    Raises:
        FormatError: E_DUPLICATE, names the tensor and both files.
    """
    holders = {info.name: info.file.name for info in primary.infos()}
    for name, file in _places(others):
        first = holders.setdefault(name, file)
        if first != file:
            raise FormatError(
                f"tensor {show(name)} is in {show(first)} and in {show(file)}: two checkpoints of "
                "one model",
                code="E_DUPLICATE",
                file=file,
                tensor=name,
                detail={"files": [first, file]},
                hint="give the model's secondary_weights another prefix",
            )


def _places(others: Sequence[MovedSource]) -> Iterator[tuple[str, str]]:
    for moved in others:
        for info in moved.loader.infos():
            yield moved.prefix + info.name, info.file.name
