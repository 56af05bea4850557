"""What a load format says of itself for the format matrix and for the table in the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from loadkit.availability import READY, ask, availability_rows
from loadkit.config import LoadConfig

__all__ = ["MatrixFormat"]

Weights = dict[str, torch.Tensor]


class MatrixFormat:
    """One row of the matrix. A module ``tests/contract/formats/<format>.py`` has ``FORMATS``, a
    list of instances; what the table says is checked by ``test_format_matrix.py``.

    Attributes:
        name: the row's name, where it is not the load format's.
        load_format: as ``loadkit.load`` takes it.
        distribution: who brings it.
        lossless: parameters are bit for bit those of the safetensors checkpoint.
        bound: where not: the largest difference, in parts of a parameter's largest number.
        tp_slices: a rank reads its own part only. Checked.
        zero_copy: parameters may be views of the file. Checked.
        digest: ``verify="digest"`` is followed. Checked.
        save: ``loadkit.save`` writes it, under the name ``save_format`` (the load format's where
            that is empty) with ``save_options``. Checked.
        streamed: a remote source is read straight into parameters, without a local copy.
        remote_plan: a plan of a remote source reads headers by ranges, never the weights.
        verified: other words for the column, where the format has digests of its own.
        load_options: fields of ``LoadConfig``; ``extra_config``: ``model_loader_extra_config``.
        load_arguments: more arguments of ``loadkit.load``.
        tp_sizes: what it is loaded at, of 1 and 3.
    """

    name: str = ""
    load_format: ClassVar[str]
    distribution: ClassVar[str]
    lossless: bool = True
    bound: float = 0.0
    tp_slices: bool = True
    zero_copy: bool = False
    digest: bool = True
    save: bool = False
    save_format: str = ""
    save_options: dict[str, Any] = {}
    streamed: bool = False
    remote_plan: bool = False
    verified: str = ""
    load_options: dict[str, Any] = {}
    extra_config: dict[str, Any] = {}
    load_arguments: dict[str, Any] = {}
    tp_sizes: tuple[int, ...] = (1, 3)

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self.name = self.name or self.load_format

    def __repr__(self) -> str:
        return self.name

    def write(self, folder: Path, weights: Weights, config: dict[str, Any], source: Path) -> None:
        """Write the model into ``folder``.

        Args:
            folder: empty, but for ``config.json``, which may be overwritten or removed.
            weights: tensors by their Hugging Face names, bfloat16; no ``lm_head`` (it is tied).
            config: the values of config.json; ``LlamaForCausalLM``.
            source: the same as a safetensors folder, for formats that a loaded model is saved in.
        """
        raise NotImplementedError

    def source(self, folder: Path) -> str | Path:
        """What is loaded."""
        return folder

    def parameters(self, model: torch.nn.Module) -> Weights:
        """What is compared, under the names of a plain load."""
        return {name: param.detach() for name, param in model.named_parameters()}

    def unavailable(self) -> str | None:
        """Why it cannot be loaded here; None: it can."""
        rows = [row for (name, _), row in availability_rows().items() if name == self.load_format]
        states = [ask(row).state for row in rows]
        return next((f"{self.load_format}: {one}" for one in states if one != READY), None)

    def load_config(self, **changes: Any) -> LoadConfig:
        """How it is read."""
        values = {
            "load_format": self.load_format,
            "use_tqdm_on_load": False,
            "model_loader_extra_config": self.extra_config,
            **self.load_options,
        }
        return LoadConfig(**{**values, **changes})
