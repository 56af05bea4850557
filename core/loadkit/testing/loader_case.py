"""What a subclass of ``LoaderContract`` says about its load format, and the loads made with it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
import torch
from torch import nn

import loadkit
from loadkit.availability import READY, ask, availability_rows
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.loader import LoadResult
from loadkit.testing.checkpoint import (
    contract_config,
    contract_weights,
    known_here,
    write_checkpoint,
)

__all__ = ["LoaderCase", "bits", "fail", "relative_gap", "weight_files", "write_config"]

Weights = dict[str, torch.Tensor]


def fail(message: str) -> NoReturn:
    """End a test; also under ``python -O``."""
    raise AssertionError(message)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, so that two NaN are the same."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class LoaderCase:
    """One load format, as a contract class sees it. Override what is not so for yours.

    Attributes:
        load_format: its name.
        lossless: it gives back the numbers that were written.
        bound: where it does not: the largest difference of a number that is allowed, in parts of
            the largest number of its parameter.
        has_catalogue: it reads exactly the bytes that a rank needs, and the plan knows them.
        free_form: any set of named tensors can be written in it; else only a whole model.
        reads_files: what it gives comes from files.
        follows_quantization: it builds models with the checkpoint's ``quantization_config``.
        quantization_by_request: it follows ``quantization=``; said where it does not follow the
            checkpoint's.
        read_ahead: bytes of a file that may be read at once when its header is.
        tp_sizes: tensor-parallel sizes that are tried, of 1, 2 and 4.
        dtype: of the checkpoint and of the model.
        architecture: the class that is loaded; None: a model of the contract's own.
        load_options: fields of ``LoadConfig``.
        extra_config: ``model_loader_extra_config``.
        load_arguments: more arguments of ``loadkit.load``.
        damage_names: what the error about a damaged file has to name.
        peak_slack: bytes that a load may hold beside its parameters and one tensor.
    """

    load_format: ClassVar[str] = ""
    lossless: ClassVar[bool] = True
    bound: ClassVar[float] = 0.0
    has_catalogue: ClassVar[bool] = True
    free_form: ClassVar[bool] = True
    reads_files: ClassVar[bool] = True
    follows_quantization: ClassVar[bool] = True
    quantization_by_request: ClassVar[bool] = False
    read_ahead: ClassVar[int] = 0
    tp_sizes: ClassVar[tuple[int, ...]] = (1, 2, 4)
    dtype: ClassVar[torch.dtype] = torch.float32
    architecture: ClassVar[str | None] = None
    load_options: ClassVar[Mapping[str, Any]] = {}
    extra_config: ClassVar[Mapping[str, Any]] = {}
    load_arguments: ClassVar[Mapping[str, Any]] = {}
    damage_names: ClassVar[tuple[str, ...]] = ("file", "tensor", "offset", "hint")
    peak_slack: ClassVar[int] = 40 << 20

    # -- what a subclass says ----------------------------------------------------------------------

    def write(self, folder: Path, weights: Weights, config: dict[str, Any]) -> None:
        """Write a checkpoint of this format into an empty folder.

        Args:
            folder: where to.
            weights: tensors by their Hugging Face names.
            config: the values of config.json, which is there already; overwrite it, or leave it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to write its format")

    def write_for_ranks(
        self, folder: Path, weights: Weights, config: dict[str, Any], tp: int
    ) -> None:
        """The same for a load at ``tp`` ranks, where the format's files depend on that."""
        self.write(folder, weights, config)

    def source(self, folder: Path) -> str | Path:
        """What is loaded: the folder, or a URI that leads to it."""
        return folder

    def damage(self, folder: Path) -> None:
        """Spoil a written checkpoint: by default a third of its largest file is cut off."""
        path = max(weight_files(folder), key=lambda file: file.stat().st_size)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size * 2 // 3)

    def parameters(self, model: nn.Module) -> Weights:
        """What is compared with the default loader's parameters, under the same names.

        A format that keeps its weights packed gives here the numbers they stand for.
        """
        return {name: param.detach() for name, param in model.named_parameters()}

    def unavailable(self) -> str | None:
        """Why the format cannot be used here; None: it can."""
        rows = [row for (name, _), row in availability_rows().items() if name == self.load_format]
        states = [ask(row).state for row in rows]
        return next((f"{self.load_format}: {one}" for one in states if one != READY), None)

    # -- loads -------------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _contract(self, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        reason = self.unavailable()
        if reason is not None:
            pytest.skip(reason)
        self.folder = tmp_path
        self._factory = tmp_path_factory
        with known_here():
            yield

    def load_config(self, **changes: Any) -> LoadConfig:
        """How this format is read."""
        values = {
            "load_format": self.load_format,
            "use_tqdm_on_load": False,
            "model_loader_extra_config": dict(self.extra_config),
            **self.load_options,
        }
        return LoadConfig(**{**values, **changes})

    def load(
        self, folder: Path, *, tp: int = 1, rank: int = 0, config: LoadConfig | None = None,
        **options: Any,
    ) -> LoadResult:  # fmt: skip
        """Load a written checkpoint."""
        return loadkit.load(
            self.source(folder), **self._options(tp, rank, options),
            load_config=config or self.load_config(),
        )  # fmt: skip

    def plan(
        self, folder: Path, *, tp: int = 1, rank: int = 0, config: LoadConfig | None = None,
        **options: Any,
    ) -> loadkit.LoadPlan:  # fmt: skip
        """Plan the same."""
        return loadkit.plan(
            self.source(folder), **self._options(tp, rank, options),
            load_config=config or self.load_config(),
        )  # fmt: skip

    def _options(self, tp: int, rank: int, options: Mapping[str, Any]) -> dict[str, Any]:
        dtype = str(self.dtype).removeprefix("torch.")
        parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
        return {"dtype": dtype, "parallel": parallel, **self.load_arguments, **options}

    def weights(self, **sizes: Any) -> Weights:
        """The contract's checkpoint."""
        return contract_weights(**{"dtype": self.dtype, **sizes})

    def config(self, weights: Weights) -> dict[str, Any]:
        """Its config.json."""
        named = {"architecture": self.architecture} if self.architecture else {}
        return contract_config(weights, **named)

    def written(self, name: str, weights: Weights, *, tp: int = 1, **config: Any) -> Path:
        """Some weights in this format, in a folder of that name of the test's own."""
        folder = self.folder / name
        self._write(folder, weights, {**self.config(weights), **config}, tp)
        return folder

    def checkpoint(self, tp: int = 1) -> Path:
        """The contract's checkpoint in this format, written once for all tests of the class."""
        kept = self._kept()
        if ("own", tp) not in kept:
            folder = self._factory.mktemp(f"{self.load_format}-tp{tp}")
            weights = self.weights()
            self._write(folder, weights, self.config(weights), tp)
            kept["own", tp] = folder
        found: Path = kept["own", tp]
        return found

    def copied(self, name: str, tp: int = 1) -> Path:
        """A copy of ``checkpoint`` that a test may spoil."""
        return Path(shutil.copytree(self.checkpoint(tp), self.folder / name))

    def default_checkpoint(self) -> Path:
        """The same weights as the default loader reads them."""
        kept = self._kept()
        if "default" not in kept:
            weights = self.weights()
            kept["default"] = write_checkpoint(
                self._factory.mktemp("default"), weights, self.config(weights)
            )
        found: Path = kept["default"]
        return found

    def default_parameters(self, tp: int = 1, rank: int = 0, **options: Any) -> Weights:
        """The default loader's parameters."""
        model = loadkit.load_model(
            self.default_checkpoint(), **self._options(tp, rank, options),
            load_config=LoadConfig(load_format="safetensors", use_tqdm_on_load=False),
        )  # fmt: skip
        return {name: param.detach() for name, param in model.named_parameters()}

    def check_same(self, found: Weights, expected: Weights, what: str = "") -> None:
        """Names, dtypes, shapes and numbers: bit for bit, or within ``bound``."""
        if found.keys() != expected.keys():
            fail(f"{what}: other parameters: {sorted(found.keys() ^ expected.keys())}")
        for name, wanted in expected.items():
            have = found[name]
            if (have.dtype, have.shape) != (wanted.dtype, wanted.shape):
                fail(
                    f"{what}: {name} is {have.dtype} {list(have.shape)}; the default loader gives "
                    f"{wanted.dtype} {list(wanted.shape)}"
                )
            if self.lossless:
                if not torch.equal(bits(have), bits(wanted)):
                    fail(f"{what}: {name} has other numbers, by up to {_gap(have, wanted):g}")
            elif not (gap := relative_gap(have, wanted)) <= self.bound:
                fail(f"{what}: {name} is {gap:g} of its largest off; allowed are {self.bound:g}")

    def _kept(self) -> dict[Any, Any]:
        """What is made once for the class."""
        cls: Any = type(self)
        if "_kept_folders" not in cls.__dict__:
            cls._kept_folders = {}
        found: dict[Any, Any] = cls._kept_folders
        return found

    def _write(self, folder: Path, weights: Weights, config: dict[str, Any], tp: int) -> None:
        if not self.reads_files:
            write_checkpoint(folder, {}, config)
            return
        write_config(folder, config)
        self.write_for_ranks(folder, dict(weights), dict(config), tp)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """config.json alone."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder that are no texts beside the weights."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if path.suffix not in (".json", ".txt", ".jinja", ".md")]


def relative_gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference in parts of the largest number of ``other``; NaN where one is."""
    largest = float(other.double().abs().max()) if other.numel() else 0.0
    return _gap(one, other) / (largest or 1.0)


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference; NaN where one is there."""
    if not one.numel():
        return 0.0
    return float((one.double() - other.double()).abs().max())
