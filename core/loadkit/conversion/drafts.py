"""From what a caller asks for to the draft of a target: whose names, which ranks, which dtype."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loadkit.config_lookup import find_quantization
from loadkit.conversion.contents import Contents, checkpoint_contents, model_contents
from loadkit.conversion.draft import Draft, checkpoint_draft, own_config
from loadkit.conversion.rank_drafts import sharded_draft
from loadkit.dtypes import dtype_name
from loadkit.errors import ArchitectureError, ConfigFileError, OptionError, UsageError
from loadkit.file_checks import show
from loadkit.hf_config import HFConfig
from loadkit.resolve import Job, job_for_module, resolve
from loadkit.safetensors_writer import check_metadata

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["How", "contents_of", "make_draft"]

TARGETS = ("safetensors", "sharded_state")
NAMES = ("auto", "model", "checkpoint")
# Options of a load that mean something without a model.
_PLAIN = {"load_format": "auto", "dtype": "auto", "trust_remote_code": False}


@dataclass(frozen=True, slots=True)
class How:
    """What was decided: the target's kind, whose names its tensors have, and why.

    ``shown``: whether the caller wants to see progress. ``notes``: what is worth knowing.
    """

    to: str
    names: str
    why: str
    shown: bool = False
    notes: tuple[str, ...] = ()


def make_draft(
    stack: ExitStack,
    source: str | os.PathLike[str],
    *,
    to: str,
    names: str,
    sizes: Mapping[str, int],
    most: int,
    metadata: Mapping[str, str],
    load_config: LoadConfig | None,
    options: Mapping[str, Any],
) -> tuple[Draft, How]:
    """Plan a whole target; nothing is written.

    Args:
        stack: closes the source and the readers at its end.
        source: what is converted.
        to, names, metadata, load_config: as of ``loadkit.convert``.
        sizes: tp, pp and ep.
        most: bytes of tensors in one file.
        options: as of ``loadkit.load``.

    Raises:
        LoadkitError: see ``loadkit.convert``.
    """
    _check(to, names, sizes, most)
    header = check_metadata(metadata)
    if to != "safetensors":
        job = resolve(source, load_config=load_config, **options)
        stack.callback(job.close)
        draft = stack.enter_context(
            sharded_draft(stack, job, sizes, load_format=to, metadata=header, most=most)
        )
        how = How(to, "parameter", "as the model calls them")
        return draft, _with_notes(how, job, draft)
    job, contents, how = contents_of(stack, source, names, load_config, options)
    _refuse_later(contents)
    draft = stack.enter_context(
        checkpoint_draft(
            job,
            contents,
            metadata=header,
            most=most,
            copies_config=how.names == "checkpoint",
        )
    )
    return draft, _with_notes(how, job, draft)


def _with_notes(how: How, job: Job, draft: Draft) -> How:
    """What a caller should know of a draft, and whether it wants to see progress."""
    inside = callable(getattr(job.loader, "read_tokenizer", None))
    beside = any(name.startswith(("tokenizer", "vocab")) for name, _ in draft.small.files)
    lost = f"the tokenizer inside of the {job.load_config.load_format} file is not written"
    return replace(
        how,
        shown=job.load_config.use_tqdm_on_load,
        notes=(lost,) if inside and not beside else (),
    )


def _refuse_later(contents: Contents) -> None:
    """A config that says weights are quantised would lie of those that are not yet."""
    if contents.later:
        raise UsageError(
            f"weights of {len(contents.later)} modules ({show(contents.later[0])}, ...) are "
            "quantised when a model is loaded, and a conversion would write them as they are",
            code="QUANTIZED",
            detail={"modules": contents.later},
            hint="load the model and save it; or leave the quantisation out (where config.json "
            "says it: names='checkpoint') and write them as they are",
        )


def _check(to: str, names: str, sizes: Mapping[str, int], most: Any) -> None:
    if to not in TARGETS:
        raise OptionError(f"to is {to!r}; accepted: {', '.join(TARGETS)}")
    if names not in NAMES:
        raise OptionError(f"names is {names!r}; accepted: {', '.join(NAMES)}")
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise OptionError(f"max_shard_bytes is {most!r}; accepted: a number of bytes, at least 1")
    if to != "safetensors" and names != "auto":
        raise OptionError(f"names is {names!r}; files of ranks hold the model's parameters")
    if to == "safetensors" and any(size != 1 for size in sizes.values()):
        asked = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1)
        raise OptionError(
            f"a Hugging Face checkpoint holds whole tensors, and {asked} was asked for",
            hint="to='sharded_state' writes the parts of ranks",
        )


def contents_of(
    stack: ExitStack,
    source: str | os.PathLike[str],
    names: str,
    load_config: LoadConfig | None,
    options: Mapping[str, Any],
) -> tuple[Job, Contents, How]:
    """A whole checkpoint's tensors, by the names that were asked for.

    Raises:
        LoadkitError: it cannot be read, or not be loaded as a model; with ``names="auto"`` an
            unknown class is no error.
    """
    why = f"names={names!r}"
    if names != "checkpoint":
        try:
            job = resolve(source, load_config=load_config, **options)
        except (ArchitectureError, ConfigFileError) as error:
            if names == "model" or not _means_no_model(error) or _for_models(options):
                raise
            why = error.message
        else:
            stack.callback(job.close)
            if names == "auto":
                why = f"the class of {job.architecture} is known"
            contents = model_contents(job)
            stack.callback(contents.reader.close)
            return job, contents, How("safetensors", "model", why)
    given = _for_models(options)
    if given:
        raise OptionError(
            f"{', '.join(given)} say(s) something about a model, and names='checkpoint' needs none"
        )
    job = job_for_module(
        nn.Module(),
        source,
        load_format=options.get("load_format", "auto"),
        load_config=load_config,
    )
    stack.callback(job.close)
    contents = checkpoint_contents(job, _dtype(job, options.get("dtype", "auto")))
    stack.callback(contents.reader.close)
    return job, contents, How("safetensors", "checkpoint", why)


def _means_no_model(error: ArchitectureError | ConfigFileError) -> bool:
    """Whether a source says nothing of a model, or of one that is not known."""
    return isinstance(error, ArchitectureError) or " has no config.json" in error.message


def _for_models(options: Mapping[str, Any]) -> list[str]:
    """The options that were set and mean something for models only."""
    defaults = {"quantization": None, "model_impl": "auto", "strict": True}
    return [
        name
        for name, value in options.items()
        if name not in _PLAIN and value is not None and value != defaults.get(name, {})
    ]


def _dtype(job: Job, dtype: Any) -> torch.dtype | None:
    """What floats become, tensor by tensor.

    Raises:
        OptionError: no such dtype.
        UsageError: QUANTIZED, they are the scales of blocks.
    """
    name = dtype_name(
        dtype if isinstance(dtype, str) else str(dtype), what="dtype", allow_auto=True
    )
    if name == "auto":
        return None
    config = own_config(job)
    quantised = config and find_quantization(HFConfig.from_dict(config), file="config.json")
    if quantised:
        raise UsageError(
            "dtype= would change the scales of a quantised checkpoint",
            code="QUANTIZED",
            hint="leave dtype out, or give names='model'",
        )
    found: torch.dtype = getattr(torch, name)
    return found
