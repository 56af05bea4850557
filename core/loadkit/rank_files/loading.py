"""What every loader of saved rank files asks of their manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from loadkit.errors import ConfigFileError, ShardedError, UnknownNameError
from loadkit.file_checks import show
from loadkit.manifest import MANIFEST, Manifest
from loadkit.quantization import check_act_dtype, get_quantization_config
from loadkit.rank_files.by_key import state_of
from loadkit.rank_files.layouts import layout_versions
from loadkit.text import printable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loadkit.model_config import ModelConfig
    from loadkit.quantization import QuantizationConfig

__all__ = ["check_layout", "saved_quant_config", "without_doubles"]


def saved_quant_config(
    manifest: Manifest | None,
    model_config: ModelConfig,
    otherwise: Callable[[ModelConfig], QuantizationConfig | None],
) -> QuantizationConfig | None:
    """The quantisation that parameters were saved in.

    Args:
        manifest: what was written with them; None: nobody knows.
        model_config: of the load.
        otherwise: finds it where the manifest does not say all.

    Raises:
        ConfigFileError: another one was asked for, the method is unknown, or what the manifest
            says of it is wrong.
    """
    saved = None if manifest is None else manifest.quantization
    if saved is None:
        return otherwise(model_config)
    if model_config.quantization not in (None, saved.method):
        raise ConfigFileError(
            f"{MANIFEST} says quantization {show(saved.method)}, and "
            f"{show(model_config.quantization)} was asked for",
            file=MANIFEST,
            hint="leave quantization out",
        )
    if saved.config is None:
        return otherwise(replace(model_config, quantization=saved.method))
    try:
        cls = get_quantization_config(saved.method)
        check_act_dtype(cls, model_config)
        return cls.from_saved(saved.config)
    except (KeyError, TypeError, ValueError, UnknownNameError) as error:
        raise ConfigFileError(
            f"{MANIFEST}: quantization {show(saved.method)} cannot be made again: "
            f"{type(error).__name__}: {printable(error)}",
            file=MANIFEST,
        ) from error


def check_layout(model: nn.Module, manifest: Manifest | None) -> None:
    """The layouts that this loadkit makes are those that were saved.

    Raises:
        ShardedError: names those that differ.
    """
    saved = {} if manifest is None else dict(manifest.layout_versions)
    here = layout_versions(model)
    if saved == here:
        return
    names = sorted({name for name in saved | here if saved.get(name) != here.get(name)})
    said = "; ".join(
        f"{show(name)}: saved {saved.get(name, 'not')}, here {here.get(name, 'none')}"
        for name in names
    )
    raise ShardedError(
        "the weights are in a layout that post-processing made, and it is another one here: "
        f"{said}",
        file=MANIFEST,
        detail={"saved": saved, "here": here},
        hint="save the model again with this version",
    )


def without_doubles(
    model: nn.Module,
    weights: Iterator[tuple[str, torch.Tensor]],
    skipped: dict[str, str],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Of several names of one parameter, the first: others write the same dict of state.

    Args:
        model: whose parameters are meant.
        weights: names and tensors.
        skipped: gets the names that were left out, with the reason.
    """
    state, done = state_of(model), set[int]()
    for name, tensor in weights:
        target = state.get(name)
        if target is not None and id(target) in done:
            skipped[name] = "another name of a parameter that has its tensor"
            continue
        done.add(id(target))
        yield name, tensor
