"""Which load format a folder holds, decided from its listing, with the reason.

The rules, in this order; the first that fits decides:

1. a single file that was named: its name, a variant's (``model.fp16.safetensors``) and one of
   training state too; an adapter is no model;
2. ``model-rank-R-part-P.safetensors``, or, without any of the others, what a save by several
   ranks left that was not finished: ``sharded_state`` (which says what is missing);
3. any other ``*.safetensors`` in Hugging Face's names: ``safetensors`` (also where ``.bin``,
   ``.gguf`` or ``consolidated*`` files lie beside it);
4. only ``consolidated*.safetensors``: ``mistral``;
5. ``*.bin``, ``*.pt``, ``*.pth`` besides training state: ``pt``;
6. ``*.gguf``: ``gguf``; 7. ``*.tensors``: ``tensorizer``; 8. ``*.distcp``, ``.metadata``: ``dcp``.

In a folder, variants, adapters and training state never decide. A ``quant_method`` of config.json
that is a load format of its own (``bitsandbytes``, ``gguf``) decides where its files are there, and
the method refuses where they are not (``loadkit.auto_choices``). Which of a format's files are read
is the business of its loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from loadkit.errors import NoWeightsError
from loadkit.file_checks import show

if TYPE_CHECKING:
    from loadkit.sources.base import FileInfo

__all__ = [
    "FORMAT_PATTERNS",
    "Detected",
    "detect_load_format",
    "formats_of",
    "kind_of",
    "matching_formats",
    "no_weights",
]

FORMAT_PATTERNS: dict[str, tuple[str, ...]] = {
    "sharded_state": ("model-rank-*-part-*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "safetensors": ("*.safetensors",),
    "pt": ("*.bin", "*.pt", "*.pth"),
    "gguf": ("*.gguf",),
    "tensorizer": ("*.tensors",),
    "dcp": ("*.distcp", ".metadata", "__[0-9]*.metadata"),
}
_TRAINING = re.compile(
    r"(optimizer|scheduler|scaler|training_args|trainer_state|rng_state|random_states|"
    r"optim_states|zero_pp_rank|mp_rank_\d+_model_states|events\.out)",
    re.IGNORECASE,
)
_VARIANT = re.compile(
    r"\.(?P<variant>fp16|bf16|fp32|fp8|int8|int4|ema|non_ema|[a-z]+_ema)"
    r"(?:-\d+-of-\d+)?\.(?:safetensors|bin|pt|pth)$"
)
_ADAPTER = re.compile(r"(adapter_model|adapters?)\b.*\.(safetensors|bin|pt)$")
_UNFINISHED = re.compile(r"loadkit-unfinished-[^/]*/")
_SHOWN = 20  # names in a message


class Detected(NamedTuple):
    """A load format, and the sentence that says why."""

    load_format: str
    why: str


def kind_of(name: str) -> str | None:
    """The load format that a root file's name belongs to, by the first pattern that fits.

    ``training``, ``variant`` and ``adapter`` are kinds too: no format takes them unasked. None is
    no weight file.
    """
    formats = formats_of(name)
    if not formats or "/" in name:
        return None
    if _TRAINING.match(name):
        return "training"
    if _VARIANT.search(name):
        return "variant"
    return "adapter" if _ADAPTER.match(name) else formats[0]


def formats_of(name: str) -> list[str]:
    """The load formats whose patterns a file's name fits, whatever it is beside that."""
    return [
        kind
        for kind, patterns in FORMAT_PATTERNS.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def matching_formats(names: Iterable[str]) -> dict[str, list[str]]:
    """``{load format: root files it would read}`` for a listing."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        kind = kind_of(name)
        if kind in FORMAT_PATTERNS:
            found.setdefault(kind, []).append(name)
    return found


def detect_load_format(listing: Sequence[FileInfo], *, single: str | None = None) -> Detected:
    """What ``load_format="auto"`` means for a source.

    Args:
        listing: what ``Source.list`` gave.
        single: the file of it that was named as the source; None: a folder was.

    Raises:
        NoWeightsError: nothing there that any format reads; it lists what was seen.
    """
    if single is not None:
        name = single.rpartition("/")[2]
        formats = formats_of(name)
        if not formats or kind_of(name) == "adapter":
            raise no_weights(listing, "auto", [p for g in FORMAT_PATTERNS.values() for p in g])
        return Detected(formats[0], f"{name} was named")
    found = matching_formats(info.name for info in listing)
    order = ("sharded_state", "safetensors", "mistral", "pt", "gguf", "tensorizer", "dcp")
    for load_format in order:
        names = found.get(load_format)
        if not names:
            continue
        others = [name for kind in order if kind != load_format for name in found.get(kind, ())]
        why = f"{names[0]} is there" if len(names) == 1 else f"{len(names)} files like {names[0]}"
        if others:
            why += f"; it goes before {', '.join(others[:3])}"
        return Detected(load_format, why)
    if any(_UNFINISHED.match(info.name) for info in listing):
        return Detected("sharded_state", "there is a save by several ranks that was not finished")
    raise no_weights(listing, "auto", [p for group in FORMAT_PATTERNS.values() for p in group])


def no_weights(
    listing: Sequence[FileInfo], load_format: str, patterns: Sequence[str]
) -> NoWeightsError:
    """The error for a source without weights: what was tried, what is there, what would do."""
    names = sorted(info.name for info in listing)
    root = [name for name in names if "/" not in name]
    would = matching_formats(root)
    variants = [name for name in root if kind_of(name) == "variant"]
    adapters = [name for name in root if kind_of(name) == "adapter"]
    folders = sorted({folder for folder in map(_weights_folder, names) if folder})
    lines = [
        f"no weights for load_format={load_format!r}: nothing matches {', '.join(patterns)}",
        f"files seen: {_some(root) if root else 'none'}",
    ]
    hints = [
        f"load_format={kind!r} would read {_some(files, 3)}"
        for kind, files in would.items()
        if kind != load_format
    ]
    if "mistral" in would and "safetensors" not in would and load_format != "mistral":
        lines.append("only consolidated files are here, whose tensors have Mistral's own names")
    if variants:
        lines.append(f"only variants are here: {_some(variants)}")
        hints.append("name the variant's file as the source")
    if adapters:
        lines.append(f"{_some(adapters)} is an adapter, not a model")
        hints.append("give the folder of its base model")
    if folders:
        lines.append(f"weights lie in sub-folders: {_some(folders)}")
        hints.append(f"give that folder, or subfolder={folders[0]!r}")
    return NoWeightsError(
        "; ".join(lines),
        detail={
            "load_format": load_format,
            "patterns": list(patterns),
            "files": root,
            "formats": would,
            "variants": variants,
            "subfolders": folders,
        },
        hint="; ".join(hints) or None,
    )


def _weights_folder(name: str) -> str | None:
    """The folder of a weight file that lies below the root."""
    folder, _, file = name.rpartition("/")
    return folder if folder and kind_of(file) in FORMAT_PATTERNS else None


def _some(names: Sequence[str], most: int = _SHOWN) -> str:
    shown = ", ".join(show(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
