"""A loader that breaks the contract fails it, each promise by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from helpers.plugin_world import plugin_world
from loadkit import tables
from loadkit.base_loader import BaseModelLoader
from loadkit.testing import LoaderContract, write_checkpoint
from loadkit.testing.checkpoint import known_here
from loadkit.tracing.lazy_tensor import lazy_from_info
from loadkit_default.loader import DefaultModelLoader

EXACT = "test_a_rank_reads_its_own_bytes_and_the_plan_knows_them"
SAME = "test_every_rank_has_the_parameters_of_the_default_loader"


class Plain(DefaultModelLoader):
    """The default loader under another name, and no clever offers."""

    def infos(self) -> Any:
        self.load_config = replace(self.load_config, load_format="safetensors")
        return super().infos()

    def download_model(self, model_config: Any) -> None:
        self.infos()

    def offers(self, model_config: Any) -> Any:
        return self.catalogue(model_config)

    def catalogue(self, model_config: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for info in self.infos():
            yield info.name, lazy_from_info(info)


class Scaled(Plain):
    def catalogue(self, model_config: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().catalogue(model_config):
            yield name, tensor * 1.0001 if "down_proj" in name else tensor


class Forgetful(Plain):
    """It leaves out what the model does not have."""

    def catalogue(self, model_config: Any) -> Iterator[tuple[str, torch.Tensor]]:
        kept = (n for n in super().catalogue(model_config) if "mystery" not in n[0])
        yield from kept


class Filling(Plain):
    """It makes up what is missing."""

    def catalogue(self, model_config: Any) -> Iterator[tuple[str, torch.Tensor]]:
        names = set()
        for name, tensor in super().catalogue(model_config):
            names.add(name)
            yield name, tensor
        missing = "model.layers.1.mlp.down_proj.weight"
        if missing not in names:
            yield missing, torch.zeros(128, 512)


class Greedy(Plain):
    """It reads whole files and calls that a catalogue."""

    def download_model(self, model_config: Any) -> None:
        file = Path(self.source.root) / "model.safetensors"  # type: ignore[attr-defined]
        self.all = load(file.read_bytes())

    def catalogue(self, model_config: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.all.items()


class Deaf(Plain):
    """It takes any option."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, model_loader_extra_config={}))


class Unquantised(Plain):
    def get_quant_config(self, model_config: Any) -> None:
        return None


class Leaking(Plain):
    """It keeps a thread and a file."""

    kept: list[Any] = []

    def load_weights(self, model: Any, model_config: Any) -> None:
        super().load_weights(model, model_config)
        self.kept.append((Path(self.source.root) / "config.json").open())  # type: ignore[attr-defined]
        threading.Thread(target=time.sleep, args=(8,), daemon=True).start()


class Rude(Plain):
    """Its errors are nobody's."""

    def infos(self) -> Any:
        try:
            return super().infos()
        except Exception as error:
            raise ValueError("something is wrong") from error


BROKEN: list[tuple[type[BaseModelLoader], str, tuple[Any, ...]]] = [
    (Scaled, SAME, (1,)),
    (Scaled, "test_the_ranks_join_to_the_checkpoint", (2,)),
    (Forgetful, "test_a_tensor_without_a_place_is_a_problem", ()),
    (Filling, "test_a_tensor_that_is_missing_is_a_problem", ()),
    (Filling, "test_all_problems_are_told_at_once", ()),
    (Greedy, EXACT, (2,)),
    (Greedy, "test_a_plan_reads_no_payload", ()),
    (Deaf, "test_CFG_06_an_option_that_is_unknown_names_the_nearest", ()),
    (Deaf, "test_CFG_06_an_option_of_another_type_is_refused", ()),
    (Unquantised, "test_Q_05_the_checkpoints_quantisation_is_used", ()),
    (Leaking, "test_a_load_leaves_no_file_open_and_no_thread", ()),
    (Rude, "test_a_damaged_file_is_an_error_of_the_one_shape", ()),
    (Rude, "test_a_folder_without_weights_is_refused", ()),
]


@pytest.fixture
def case(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[type[BaseModelLoader]], LoaderContract]]:
    def make(loader: type[BaseModelLoader]) -> LoaderContract:
        class Case(LoaderContract):
            load_format = "broken"

            def write(self, folder: Path, weights: Any, config: Any) -> None:
                write_checkpoint(folder, weights)

        tables.loaders.register("broken", loader)
        made = Case()
        made.folder, made._factory = tmp_path_factory.mktemp("own"), tmp_path_factory
        return made

    (tmp_path / "site").mkdir()
    with plugin_world(tmp_path / "site"), known_here():
        yield make


@pytest.mark.parametrize(
    ("loader", "test", "arguments"), BROKEN, ids=[f"{c.__name__}-{t[5:40]}" for c, t, _ in BROKEN]
)
def test_a_broken_promise_is_found(
    loader: type[BaseModelLoader], test: str, arguments: tuple[Any, ...], case: Any
) -> None:
    getattr(case(Plain), test)(*arguments)  # it is the break that fails
    tables.loaders._local.pop("broken")
    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError)):
        getattr(case(loader), test)(*arguments)
