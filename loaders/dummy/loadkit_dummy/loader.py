"""``DummyModelLoader``: fills a model without a checkpoint, the same numbers on every topology."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from loadkit.base_loader import BaseModelLoader
from loadkit.build import initialize_model, parameters_on_meta
from loadkit.config import OptionSpec, ParallelConfig
from loadkit.tracing.lazy_tensor import generated
from loadkit.tracing.recorder import active_recorder
from loadkit.tracing.storage import GeneratedLeaf
from loadkit.weight_loaders import default_weight_loader
from loadkit_dummy.numbers import numbers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loadkit.config import ModelConfig

__all__ = ["DummyModelLoader"]


class DummyModelLoader(BaseModelLoader):
    """Every parameter gets small reproducible numbers in [-1e-3, 1e-3]; no file is read.

    The checkpoint is the model itself at tp 1: element i of parameter n is a hash of the seed, n
    and i, in row-major order. A rank takes its part through the parameters' own weight loaders,
    as it would from a file, so the ranks of any topology join to the same model. Padding is zero,
    buffers keep what the model computed.
    """

    options: ClassVar[Mapping[str, OptionSpec]] = {
        "seed": OptionSpec("seed", int, 0, "another seed gives other numbers"),
    }
    needs_source: ClassVar[bool] = False

    def catalogue(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters of the whole model as (name, LazyTensor), tied ones once."""
        whole = self._whole()
        rows = {id(p): _padding_rows(m) for m in whole.modules() for p in m._parameters.values()}
        for name, param in whole.named_parameters():
            size = tuple(param.size())
            if rows[id(param)]:
                size = (size[0] - rows[id(param)], *size[1:])
            make = partial(
                numbers, seed=int(self.extra_config["seed"]), name=name, dtype=param.dtype
            )
            yield name, generated(GeneratedLeaf(name, size, param.dtype, make))

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Give each parameter its part of the parameter of that name at tp 1."""
        params = dict(model.named_parameters())
        for name, tensor in self.get_all_weights(model_config, model):
            param = params.get(name)
            if param is None:
                continue
            if self.parallel.world_size == 1 and param.size() == tensor.size():
                param.data.copy_(tensor)  # whole: no loader's word is needed on shards
                continue
            loader = getattr(param, "weight_loader", default_weight_loader)
            loader(param, tensor)

    def _whole(self) -> nn.Module:
        """The model at tp 1, on meta."""
        config = replace(self.config, parallel_config=ParallelConfig())
        recorder = active_recorder()
        with recorder.paused() if recorder else nullcontext(), parameters_on_meta():
            return initialize_model(config, self.model_class)


def _padding_rows(module: nn.Module) -> int:
    rows = getattr(module, "num_padding_rows", 0)
    return rows if isinstance(rows, int) else 0
