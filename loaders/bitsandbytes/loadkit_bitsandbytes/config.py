"""``BitsAndBytesConfig``: which layers are quantised, and by which method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from loadkit.errors import ConfigFileError, ModelError, OptionError
from loadkit.file_checks import show
from loadkit.quantization import QuantizationConfig, QuantizeMethodBase
from loadkit_bitsandbytes.eight_bit import OnlineEightBitMethod
from loadkit_bitsandbytes.experts import OnlineExpertsMethod, StoredExpertsMethod
from loadkit_bitsandbytes.library import require
from loadkit_bitsandbytes.online import OnlineFourBitMethod
from loadkit_bitsandbytes.options import QuantOptions
from loadkit_bitsandbytes.stored import StoredLinearMethod
from loadkit_bitsandbytes.table import MatrixTable
from loadkit_layers.fused_moe import FusedMoE
from loadkit_layers.linear import LinearBase
from loadkit_layers.vocab_parallel_embedding import ParallelLMHead

__all__ = ["BitsAndBytesConfig"]

# Load formats under which a config.json that names the method needs nobody to unpack tensors.
_MAKE_OR_KEEP = frozenset({"bitsandbytes", "dummy", "sharded_state", "runai_streamer_sharded"})
# Those of files that "auto" reads as bitsandbytes where config.json says so.
_FOUND_BY_AUTO = frozenset({"hf", "safetensors", "pt"})


class BitsAndBytesConfig(QuantizationConfig):
    """What is quantised, and how.

    Args:
        options: how weights are quantised and used.
        table: the matrices that are quantised in the checkpoint; None: there are none, and layers
            are quantised while they are loaded.
        misaligned: what becomes of a matrix that tp cuts inside a block: "error", "requantise" or
            "decode".
    """

    def __init__(
        self,
        options: QuantOptions | None = None,
        table: MatrixTable | None = None,
        *,
        misaligned: str = "error",
    ) -> None:
        super().__init__()
        self.options = options or QuantOptions()
        self.table, self.misaligned = table, misaligned

    @classmethod
    def get_name(cls) -> str:
        return "bitsandbytes"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> BitsAndBytesConfig:
        """The config that Hugging Face's ``quantization_config`` describes; ``{}``: nf4.

        Raises:
            ConfigFileError: a value that cannot be.
            NotInstalledError: bitsandbytes is missing.
        """
        require()
        try:
            return cls(QuantOptions.of(config))
        except OptionError as error:
            raise ConfigFileError(error.message, detail=error.detail) from error

    @classmethod
    def check_load_format(
        cls, config: Mapping[str, Any], load_format: str, *, file: str | None
    ) -> None:
        """Refuse to take a packed checkpoint's tensors for plain ones.

        Raises:
            ConfigFileError: config.json names the method, and another load format reads the files.
        """
        if "quant_method" in config and load_format not in _MAKE_OR_KEEP:
            brings = {"weights_from": load_format}
            raise ConfigFileError(
                f"{file} says quant_method 'bitsandbytes', and load format {show(load_format)} "
                "takes tensors as they are",
                file=file,
                detail={"quant_method": "bitsandbytes", "load_format": load_format},
                hint="leave load_format out"
                if load_format in _FOUND_BY_AUTO
                else f"load_format='bitsandbytes' with model_loader_extra_config={brings}",
            )

    def to_saved(self) -> dict[str, Any]:
        return {
            "options": self.options.to_dict(),
            "misaligned": self.misaligned,
            "matrices": None if self.table is None else self.table.to_list(),
        }

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> BitsAndBytesConfig:
        """The config that ``to_saved`` described.

        Raises:
            ConfigFileError: it is none.
            NotInstalledError: bitsandbytes is missing.
        """
        misaligned, options = values.get("misaligned"), values.get("options")
        if misaligned not in ("error", "requantise", "decode") or not isinstance(options, Mapping):
            raise ConfigFileError("the saved quantisation is none of bitsandbytes")
        rows = values.get("matrices")
        made = cls.from_config(options)
        made.table = None if rows is None else MatrixTable.from_list(rows)
        made.misaligned = misaligned
        return made

    def to_config(self) -> dict[str, Any]:
        """``quantization_config`` of a config.json, where the checkpoint had none."""
        options = self.options
        eight, kind = options.load_in_8bit, options.bnb_4bit_quant_type
        nested = options.bnb_4bit_use_double_quant
        matrix = None if self.table is None else self.table.first()
        if matrix is not None:
            eight = matrix.state is None
        if matrix is not None and matrix.state is not None:
            kind, nested = matrix.state.scheme.kind, bool(matrix.state.scheme.nested)
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": not eight,
            "load_in_8bit": eight,
            "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": nested,
            "bnb_4bit_compute_dtype": options.bnb_4bit_compute_dtype or "float32",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_threshold": options.llm_int8_threshold,
            "llm_int8_skip_modules": list(options.llm_int8_skip_modules),
        }

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a linear layer, a head or a mixture of experts.

        Raises:
            ModelError: SKIP_DISAGREES, a skip list leaves out some parts of a fused layer.
        """
        if isinstance(layer, FusedMoE):
            if self.table is not None:
                return StoredExpertsMethod(self, prefix)
            names = [f"{prefix}.0.{name}" for name in layer.disk_names]
            return None if self._skips(prefix, names) else OnlineExpertsMethod(self.options)
        if not isinstance(layer, (LinearBase, ParallelLMHead)):
            return None
        if self.table is not None:
            return StoredLinearMethod(self, prefix)
        if self._skips(prefix, self._parts(prefix)):
            return None
        eight = self.options.load_in_8bit
        return OnlineEightBitMethod(self.options) if eight else OnlineFourBitMethod(self.options)

    def _parts(self, prefix: str) -> list[str]:
        """The modules of a checkpoint that a layer is made of, by the model's names."""
        stem, _, last = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(last, [last])
        return [f"{stem}.{part}" if stem else part for part in parts]

    def _skips(self, prefix: str, names: Sequence[str]) -> bool:
        """Whether a layer is left out: as itself, or as all of its parts."""
        found = [self.options.skips(name) for name in names]
        if self.options.skips(prefix) or all(found):
            return True
        if any(found):
            out = [name for name, skipped in zip(names, found, strict=True) if skipped]
            raise ModelError(
                f"llm_int8_skip_modules leaves out {', '.join(out)}, and not the rest of layer "
                f"{prefix}, which holds all of {', '.join(names)} in one weight",
                code="SKIP_DISAGREES",
                parameter=f"{prefix}.weight",
                detail={"skipped": out, "parts": list(names)},
                hint="name all of them, or none",
            )
        return False
