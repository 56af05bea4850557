"""What the options of reading add up to: the reader of a load, and the layers around it.

``safetensors_load_strategy`` (vLLM's names):

- ``lazy``: files are mapped and read where they are touched; parameters are views where they may;
- ``eager``: each file once, from front to back, in large reads (the reader ``eager``);
- ``prefetch``: threads warm the page cache ahead of whatever reads;
- ``torchao``: checkpoints of torchao's tensor classes; comes with that quantisation method;
- not given: ``reader`` decides, with prefetching where the files lie on a network file system, are
  not in the page cache, and fit in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from loadkit.errors import OptionError
from loadkit.readers import ReaderChoice, Surroundings, choose_reader
from loadkit.readers.file_systems import LOCAL_FILE_SYSTEMS
from loadkit.readers.page_cache import WARM
from loadkit.readers.prefetch import PrefetchingReader

if TYPE_CHECKING:
    from loadkit.config import LoadConfig
    from loadkit.sources.base import File

__all__ = ["SAFETENSORS_OPTIONS", "Surroundings", "check_strategy", "reader_for"]

SAFETENSORS_OPTIONS = frozenset(
    {
        "safetensors_load_strategy",
        "safetensors_prefetch_block_size",
        "safetensors_prefetch_num_threads",
    }
)
"""Fields of ``LoadConfig`` that a loader of safetensors follows: its ``load_options``."""


def check_strategy(load_config: LoadConfig) -> None:
    """Refuse options of reading that contradict each other, or that would do nothing.

    Raises:
        OptionError: names them, and what to do.
    """
    strategy, reader = load_config.safetensors_load_strategy, load_config.reader
    if load_config.reader_options and reader == "auto":
        hint = "name the reader that they are for"
        given = dict(load_config.reader_options)
        raise _against("reader_options", given, "reader", reader, hint)
    if strategy == "torchao":
        raise OptionError(
            "LoadConfig.safetensors_load_strategy = 'torchao' is for checkpoints of torchao's "
            "tensor classes, which come with that quantisation method; this loadkit has none",
            detail={"options": ["safetensors_load_strategy"]},
            hint="leave it out for plain safetensors",
        )
    means = {"lazy": "mmap", "eager": "eager"}.get(strategy or "")
    if means and reader not in ("auto", means):
        raise _against("safetensors_load_strategy", strategy, "reader", reader, "give one of them")
    if strategy == "prefetch" and reader == "direct":
        hint = "direct reads pass the page cache by; name another reader"
        raise _against("safetensors_load_strategy", strategy, "reader", reader, hint)
    one_thread = strategy == "eager" or reader == "eager"
    if one_thread and load_config.num_threads > 1:
        hint = "eager reads from front to back, on one thread; leave num_threads out"
        raise _against("reader", "eager", "num_threads", load_config.num_threads, hint)
    if strategy in ("lazy", "eager"):
        _refuse_idle_prefetch(load_config, f"safetensors_load_strategy is {strategy!r}")
    if load_config.digest_store != "cache" and load_config.verify != "digest":
        raise _against(
            "verify", load_config.verify, "digest_store", load_config.digest_store,
            "digests are kept where verify is 'digest'",
        )  # fmt: skip


def _refuse_idle_prefetch(load_config: LoadConfig, why: str) -> None:
    """Options of prefetching where nothing is prefetched would do nothing."""
    given = {
        name: getattr(load_config, name)
        for name in sorted(SAFETENSORS_OPTIONS - {"safetensors_load_strategy"})
        if getattr(load_config, name) != load_config.options()[name].default
    }
    if given:
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        raise OptionError(
            f"LoadConfig has {said}, and this load prefetches nothing: {why}",
            detail={"options": list(given)},
            hint="leave it out, or set safetensors_load_strategy to 'prefetch'",
        )


def _against(first: str, value: object, second: str, other: object, hint: str) -> OptionError:
    return OptionError(
        f"LoadConfig.{first} = {value!r} and LoadConfig.{second} = {other!r} do not go together",
        detail={"options": [first, second]},
        hint=hint,
    )


def reader_for(
    load_config: LoadConfig,
    files: Sequence[File],
    device: str,
    around: Surroundings | None = None,
    *,
    ranks: int = 1,
) -> ReaderChoice:
    """The reader of a load as its strategy has it, and why.

    Args:
        load_config: the options of reading.
        files: the open files that will be read.
        device: where the parameters will live, as torch spells it.
        around: what to look at; the machine.
        ranks: how many load these files, this one among them.

    Raises:
        OptionError: options contradict each other.
        UsageError: no such reader.
    """
    check_strategy(load_config)
    if any(not file.local for file in files):
        return _of_remote(load_config, files, device)
    around = around or Surroundings()
    strategy = load_config.safetensors_load_strategy
    if strategy == "eager":
        choice = choose_reader(replace(load_config, reader="eager"), files, device)
        return ReaderChoice(choice.reader, "safetensors_load_strategy is 'eager'")
    if strategy == "lazy":
        return _lazy(load_config, files, device, around)
    choice = choose_reader(load_config, files, device, ranks=ranks, around=around)
    why = "" if strategy is None else "safetensors_load_strategy is 'prefetch'"
    if strategy is None and load_config.reader == "auto" and choice.reader.name != "direct":
        why = _worth_warming(files, around)
    if not why:
        _refuse_idle_prefetch(load_config, "auto found no need to")
        return choice
    return ReaderChoice(
        PrefetchingReader(choice.reader), f"{choice.why}; prefetched into the page cache: {why}"
    )


def _of_remote(load_config: LoadConfig, files: Sequence[File], device: str) -> ReaderChoice:
    """Ranges. What strategies do is done to local files."""
    options = load_config.options()
    given = [
        name
        for name in sorted(SAFETENSORS_OPTIONS)
        if getattr(load_config, name) != options[name].default
    ]
    if given and load_config.stream:
        first = given[0]
        hint = "ranges of remote files are read as they are wanted; leave one of them out"
        raise _against(first, getattr(load_config, first), "stream", True, hint)
    return choose_reader(load_config, files, device)


def _lazy(
    load_config: LoadConfig, files: Sequence[File], device: str, around: Surroundings
) -> ReaderChoice:
    """The map, but where a fault in it may hang: there ranges are read when they are wanted."""
    asked = "safetensors_load_strategy is 'lazy'"
    for file in files:
        kind = around.kind(file)
        if kind not in LOCAL_FILE_SYSTEMS:
            choice = choose_reader(replace(load_config, reader="pread"), files, device)
            place = kind or "of unknown type"
            why = f"{asked}, but a file system ({place}) that may block is not mapped"
            return ReaderChoice(choice.reader, why)
    choice = choose_reader(replace(load_config, reader="mmap"), files, device)
    return ReaderChoice(choice.reader, asked)


def _worth_warming(files: Sequence[File], around: Surroundings) -> str:
    """Why prefetching pays, or nothing: a network, cold files, and memory for them."""
    local = [file for file in files if file.path is not None]
    kinds = {kind for file in local if (kind := around.kind(file)) not in LOCAL_FILE_SYSTEMS}
    if not kinds - {""}:
        return ""
    share = around.cached(local)
    size, memory = sum(file.size for file in local), around.memory()
    if share is None or share > WARM or memory is None or size > memory:
        return ""
    return (
        f"{', '.join(sorted(kinds - {''}))} is a network file system, {share:.0%} of the files are "
        f"cached, and their {size:,} bytes fit in memory"
    )
