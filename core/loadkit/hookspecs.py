"""What loadkit says to plugins, and asks them.

A hook plugin is a module named by an entry point of the group ``loadkit``; its functions marked
with ``hookimpl`` answer. It holds strings and functions only and does not import torch. There is
no hook inside the loop over tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from loadkit.config import HFConfig, ModelConfig
    from loadkit.plugins import Registry
    from loadkit.sources.base import FileInfo

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("loadkit")
hookimpl = pluggy.HookimplMarker("loadkit")


@hookspec(historic=True)
def loadkit_register(registry: Registry) -> None:
    """Register names in any of the five tables. Called once for each plugin.

    What a plugin registered is taken back if it then fails.
    """


@hookspec(firstresult=True)
def loadkit_detect_load_format(
    source: str, files: Sequence[FileInfo], model_config: ModelConfig | None
) -> str | None:
    """The load format of a checkpoint that the core does not know, or None."""


@hookspec(firstresult=True)
def loadkit_resolve_architecture(architecture: str, model_config: ModelConfig | None) -> str | None:
    """``module:Class`` for an architecture that no table has, or None."""


@hookspec(firstresult=True)
def loadkit_detect_quantization(
    hf_config: HFConfig, model_config: ModelConfig | None
) -> str | None:
    """The name of the quantisation method that a config describes in its own way, or None."""


@hookspec
def loadkit_plan_ready(plan: Any) -> None:
    """A plan was made; nothing has been read yet."""


@hookspec
def loadkit_load_finished(result: Any) -> None:
    """A model is loaded; ``result`` is the ``LoadResult``."""


@hookspec
def loadkit_load_failed(error: BaseException, plan: Any) -> None:
    """A load failed; ``plan`` is None where it failed before there was one."""


@hookspec
def loadkit_register_commands() -> Mapping[str, str]:  # type: ignore[empty-body]
    """More commands of the command line: name -> ``module:attribute`` of a click command."""
