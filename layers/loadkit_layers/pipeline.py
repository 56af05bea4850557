"""A model over pipeline stages: which layers a stage holds, and what it hands to the next one.

# T tokens, D model width

Stages hold consecutive layers. The embedding is on the first stage, the last norm and the head on
the last. A layer of another stage is a ``PPMissingLayer``, which says for itself that no tensor is
wanted below it, so no model has to skip names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from loadkit.config import ParallelConfig
from loadkit.errors import ModelError

__all__ = [
    "IntermediateTensors",
    "PPMissingLayer",
    "get_pp_indices",
    "is_pp_missing_parameter",
    "make_layers",
    "require_stages",
]


class LayerFn(Protocol):
    """Makes one layer; the last component of ``prefix`` is its number."""

    def __call__(self, *, prefix: str) -> nn.Module:
        """The layer named ``prefix``."""


@dataclass(frozen=True, slots=True)
class IntermediateTensors:
    """What a stage hands to the next: tensors by name, ``hidden_states [T, D]`` among them."""

    tensors: dict[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def __len__(self) -> int:
        return len(self.tensors)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor), in the order they were given."""
        return iter(self.tensors.items())


class PPMissingLayer(nn.Identity):
    """Stands where another pipeline stage has a layer: no parameters, and its input passes through.

    Args:
        reason: why this rank holds nothing of it; plans list its tensors with it.
    """

    is_missing_layer = True

    def __init__(self, reason: str = "layer of another pipeline stage") -> None:
        super().__init__()
        self.reason = reason

    def skip_weight(self, name: str) -> str:
        """Why no tensor below this module is wanted here, whatever its name."""
        return self.reason

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first argument."""
        return args[0] if args else next(iter(kwargs.values()))

    def extra_repr(self) -> str:
        return self.reason


def get_pp_indices(num_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """The layers ``[start, end)`` of a stage.

    Where they do not come out even, stages differ by one layer, and the last stage gets no more
    than any other, nor the first while another can: those two hold head and embedding too.

    Raises:
        ModelError: ``PP_INDIVISIBLE``, more stages than layers; ``detail["legal"]`` lists the sizes
            that would do.
    """
    require_stages(num_layers, pp_size)
    each, over = divmod(num_layers, pp_size)
    last = pp_size - 1
    sizes = [each + (last - over <= stage < last) for stage in range(pp_size)]
    start = sum(sizes[:pp_rank])
    return start, start + sizes[pp_rank]


def require_stages(num_layers: int, pp_size: int, prefix: str = "") -> None:
    """Refuse more pipeline stages than layers.

    Raises:
        ModelError: ``PP_INDIVISIBLE``; ``detail["legal"]`` lists the pp sizes that would do.
    """
    if pp_size <= num_layers:
        return
    raise ModelError(
        f"{prefix or 'the model'} has {num_layers} layer(s), which cannot be split over {pp_size} "
        "pipeline stages",
        code="PP_INDIVISIBLE",
        detail={
            "legal": list(range(1, num_layers + 1)),
            "num_layers": num_layers,
            "pp_size": pp_size,
        },
        hint=f"pp sizes that fit: 1 to {num_layers}",
    )


def make_layers(
    num_layers: int, layer_fn: LayerFn, prefix: str, parallel: ParallelConfig
) -> tuple[int, int, nn.ModuleList]:
    """A stage's layers under the numbers they have in the whole model.

    Args:
        num_layers: of the whole model.
        layer_fn: called as ``layer_fn(prefix="model.layers.3")`` for each layer of this stage.
        prefix: the list's dotted name.
        parallel: this rank's place.

    Returns:
        ``start``, ``end`` and a list of ``num_layers`` modules: ``[start, end)`` are layers, the
        others ``PPMissingLayer``.

    Raises:
        ModelError: ``PP_INDIVISIBLE``, more stages than layers.
    """
    require_stages(num_layers, parallel.pp_size, prefix)
    layers: list[nn.Module] = []
    for stage in range(parallel.pp_size):
        for index in range(*get_pp_indices(num_layers, stage, parallel.pp_size)):
            if stage == parallel.pp_rank:
                layers.append(layer_fn(prefix=f"{prefix}.{index}"))
            else:
                layers.append(PPMissingLayer(f"layer of pipeline stage {stage}"))
    start, end = get_pp_indices(num_layers, parallel.pp_rank, parallel.pp_size)
    return start, end, nn.ModuleList(layers)


def is_pp_missing_parameter(name: str, model: nn.Module) -> bool:
    """Whether a parameter's name leads to a module that is on another stage.

    ``AutoWeightsLoader`` asks the modules itself; this is for a ``load_weights`` that loops over
    names on its own.
    """
    module: nn.Module | None = model
    for part in name.split("."):
        module = module._modules.get(part) if module is not None else None
        if isinstance(module, PPMissingLayer):
            return True
    return False
