"""What pipeline stages say to each other: hidden states onwards, the new token back to all.

# T tokens in the call

Stages of one dp and tp rank are a chain. A message goes from one rank to another, so no process
group is made for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from loadkit.errors import ModelError
from loadkit.origin import origin_of
from loadkit.parallel_config import ParallelConfig
from loadkit.parallel_groups import check_world

__all__ = ["StageLinks"]


class StageLinks:
    """A stage's links to its neighbours. With one stage nothing is sent.

    Args:
        model: this rank's part.
        parallel: this rank's place.
        device: where the part's parameters are.

    Raises:
        DistributedError: torch.distributed is not initialised, or disagrees with ``parallel``.
        ModelError: the model has no ``make_empty_intermediate_tensors``.
    """

    def __init__(self, model: nn.Module, parallel: ParallelConfig, device: torch.device) -> None:
        self._parallel = parallel
        self._device = device
        self._dtype = _dtype_of(model)
        self._make: Any = getattr(model, "make_empty_intermediate_tensors", None)
        self.is_first = parallel.pp_rank == 0
        self.is_last = parallel.pp_rank == parallel.pp_size - 1
        if parallel.pp_size == 1:
            return
        check_world(parallel)
        if not callable(self._make):
            raise ModelError(
                f"{type(model).__name__} cannot run in {parallel.pp_size} pipeline stages: it has "
                "no make_empty_intermediate_tensors(tokens, dtype, device)"
            )

    def receive(self, tokens: int) -> Any:
        """What the stage before computed for ``tokens`` tokens; None on the first stage."""
        if self.is_first:
            return None
        import torch.distributed as dist

        before = self._rank_of(self._parallel.pp_rank - 1)
        room = self._make(tokens, self._dtype, self._device)
        for name in sorted(room.tensors):
            dist.recv(room.tensors[name], src=before)
        return room

    def send(self, made: Any, tokens: int) -> None:
        """Hand what this stage computed to the next one.

        Raises:
            ModelError: it is not what the next stage makes room for.
        """
        import torch.distributed as dist

        expected = self._make(tokens, self._dtype, torch.device("meta")).tensors
        found = getattr(made, "tensors", None)
        if not isinstance(found, dict) or _shapes(found) != _shapes(expected):
            shown = _shapes(found) if isinstance(found, dict) else type(made).__name__
            raise ModelError(
                f"pipeline stage {self._parallel.pp_rank} computed {shown}; the next stage takes "
                f"{_shapes(expected)}"
            )
        after = self._rank_of(self._parallel.pp_rank + 1)
        for name in sorted(found):
            dist.send(found[name].contiguous(), dst=after)

    def share(self, token: int | None) -> int:
        """The token that the last stage chose, on every stage. Others give None."""
        if self._parallel.pp_size == 1 and token is not None:
            return token
        import torch.distributed as dist

        last = self._parallel.pp_size - 1
        value = torch.tensor([-1 if token is None else token], device=self._device)
        if self.is_last:
            for stage in range(last):
                dist.send(value, dst=self._rank_of(stage))
        else:
            dist.recv(value, src=self._rank_of(last))
        return int(value)

    def _rank_of(self, stage: int) -> int:
        """The number in the world of the rank that is ``stage`` of this chain."""
        place = self._parallel
        return (place.dp_rank * place.pp_size + stage) * place.tp_size + place.tp_rank


def _dtype_of(model: nn.Module) -> torch.dtype:
    """What hidden states are in: the config's dtype, else that of the parameters."""
    origin = origin_of(model)
    if origin is not None and origin.architecture:
        return origin.config.model_config.dtype
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(floats, torch.get_default_dtype())


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[list[int], str]]:
    return {
        name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in sorted(tensors.items())
    }
