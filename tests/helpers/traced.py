"""Small models with a loader of the test's own, through the whole line or the recorder alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import loadkit
from helpers.checkpoints import write_cfg, write_st
from loadkit import tables
from loadkit.config import LoadConfig
from loadkit.load_plan import LoadPlan
from loadkit.loader import LoadResult
from loadkit.model_registry import ModelRegistry

Tensor = torch.Tensor
Weights = Iterable[tuple[str, Tensor]]
LoadWeights = Callable[[nn.Module, Weights], Any]
Init = Callable[[nn.Module], None]


def model_class(
    params: Mapping[str, Tensor], load: LoadWeights, init: Init | None = None
) -> type[nn.Module]:
    """A model with parameters like those tensors (and what ``init`` adds) and that loader."""

    class Tiny(nn.Module):
        def __init__(self, *, config: Any, prefix: str = "") -> None:
            super().__init__()
            for name, like in params.items():
                param = nn.Parameter(torch.empty(like.shape, dtype=like.dtype), requires_grad=False)
                self.register_parameter(name, param)
            if init is not None:
                init(self)

        def load_weights(self, weights: Weights) -> set[str]:
            load(self, weights)
            return set()

    return Tiny


class Checkpoint:
    """A folder with one file, and a model that loads it."""

    def __init__(
        self,
        folder: Path,
        weights: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        load: LoadWeights,
        init: Init | None = None,
    ) -> None:
        self.folder = folder
        self.model = model_class(params, load, init)
        self.architecture = f"Tiny{uuid.uuid4().hex[:8]}"
        write_cfg(folder, architectures=[self.architecture])
        write_st(folder / "model.safetensors", dict(weights))

    def plan(self, **options: Any) -> LoadPlan:
        with self.registered():
            return loadkit.plan(self.folder, **options)

    def load(self, reader: str = "pread", **options: Any) -> LoadResult:
        config = LoadConfig(reader=reader, use_tqdm_on_load=False)
        with self.registered():
            return loadkit.load(self.folder, load_config=config, **options)

    @contextmanager
    def registered(self) -> Iterator[None]:
        """The model has its name inside."""
        ModelRegistry.register_model(self.architecture, self.model)
        try:
            yield
        finally:
            del tables.models._local[self.architecture]


def each(place: Callable[[nn.Module, str, Tensor], Any]) -> LoadWeights:
    """A loader that gives every tensor to ``place(model, name, tensor)``."""

    def load(model: nn.Module, weights: Weights) -> None:
        for name, tensor in weights:
            place(model, name, tensor)

    return load


def codes(plan: LoadPlan) -> list[str]:
    return [problem.code for problem in plan.problems]


def words(plan: LoadPlan) -> dict[str, str]:
    """How exactly each tensor is read."""
    return {row.tensor: row.exact for row in plan.rows if row.tensor}


# ------------------------------------------------------------ loaders, run both ways


class Case(NamedTuple):
    """A loader, the parameters and tensors it is run with, and how exactly these are read."""

    load: LoadWeights
    params: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    exact: str = "exact"
    init: Init | None = None


class Cases(dict[str, Case]):
    """Loaders by name; by default one parameter ``p`` like the one tensor ``w``."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = w

    def model(self, **rest: Any) -> Callable[[LoadWeights], LoadWeights]:
        """Add a loader ``(model, weights)``."""

        def add(load: LoadWeights) -> LoadWeights:
            self[load.__name__] = self._case(load, rest)
            return load

        return add

    def one(self, **rest: Any) -> Callable[[Callable[[Any, Tensor], Any]], None]:
        """Add a loader ``(p, w)``."""

        def add(place: Callable[[Any, Tensor], Any]) -> None:
            load = each(lambda model, name, w: place(model.p, w))
            self[place.__name__] = self._case(load, rest)

        return add

    def _case(self, load: LoadWeights, rest: dict[str, Any]) -> Case:
        default = {"params": {"p": torch.zeros_like(self.w)}, "weights": {"w": self.w}}
        return Case(load, **(default | rest))


def native(case: Case) -> nn.Module:
    """The same loader on real tensors; parameters hold garbage before."""
    model = model_class(case.params, case.load, case.init)(config=None)
    with torch.no_grad():
        for param in model.parameters():
            param.data.copy_(torch.full(param.shape, 0.875).to(param.dtype))
        model.load_weights((n, w.clone()) for n, w in case.weights.items())  # type: ignore[operator]
    return model


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.numel():
        return True
    first, second = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(first, second)


def check_line(case: Case, folder: Path, reader: str) -> LoadResult:
    """The whole line gives what the same code gives on real tensors, and counts its bytes."""
    real = native(case)
    made = Checkpoint(folder, case.weights, case.params, case.load, case.init)
    result = made.load(reader)
    state = real.state_dict()
    assert list(result.model.state_dict()) == list(state)
    for key, value in result.model.state_dict().items():
        assert equal(value, state[key]), (key, value, state[key])
    read = {note.tensor: "exact" for note in result.plan.notes if note.code == "DATA_READ"}
    found = read | words(result.plan)
    assert {found[key] for key in case.weights} == {case.exact}
    assert result.report.bytes_read == result.plan.bytes_to_read
    assert result.report.bytes_needed == result.plan.bytes_needed
    return result
