"""Mistral's own files keep the contract, with params.json and with a config.json in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from helpers.mistral_files import write_mistral
from loadkit.testing import LoaderContract


class TestConfigJson(LoaderContract):
    """A model of the contract's own, which params.json could not name."""

    load_format = "mistral"

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        write_mistral(folder, weights, config)
        (folder / "params.json").unlink()


class TestParamsJson(LoaderContract):
    """The model that params.json describes, in shards."""

    load_format = "mistral"
    architecture = "MistralForCausalLM"
    follows_quantization = False  # a quantised checkpoint has scales, and is refused
    quantization_by_request = True

    def write(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        write_mistral(folder, weights, config, shards=3)
        (folder / "config.json").unlink()
