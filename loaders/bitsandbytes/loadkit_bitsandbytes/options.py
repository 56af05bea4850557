"""How weights are quantised while they load, and how quantised ones are computed with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from loadkit.errors import ConfigFileError
from loadkit.file_checks import show
from loadkit.options import OptionSpec
from loadkit_bitsandbytes.scheme import BLOCKSIZES, DTYPES, NESTED_BLOCKSIZE, Scheme

__all__ = ["LOADER_OPTIONS", "QuantOptions"]

DEFAULT_SKIP = ("lm_head",)
_LARGEST = BLOCKSIZES[-1]

# The keys of model_loader_extra_config; the first seven are Hugging Face's. None: not said.
LOADER_OPTIONS: dict[str, OptionSpec] = {
    spec.name: spec
    for spec in (
        OptionSpec("load_in_4bit", bool, None, "quantise to 4 bits (the default)"),
        OptionSpec("load_in_8bit", bool, None, "quantise to int8"),
        OptionSpec("bnb_4bit_quant_type", str, None, "4-bit code", choices=("nf4", "fp4")),
        OptionSpec("bnb_4bit_use_double_quant", bool, None, "quantise the scales too"),
        OptionSpec("bnb_4bit_compute_dtype", str, None, "dtype of products", choices=(*DTYPES,)),
        OptionSpec("llm_int8_threshold", float, None, "inputs above it stay floats", low=0.0),
        OptionSpec("llm_int8_skip_modules", tuple, None, "modules that are not quantised"),
        OptionSpec("bnb_4bit_blocksize", int, None, "elements of a block", low=32, high=_LARGEST),
    )
}


@dataclass(frozen=True, slots=True)
class QuantOptions:
    """What Hugging Face's ``BitsAndBytesConfig`` says, as far as weights and products go.

    Attributes:
        load_in_8bit: int8; else 4 bits.
        bnb_4bit_quant_type: "nf4" or "fp4".
        bnb_4bit_use_double_quant: the scales are quantised too.
        bnb_4bit_compute_dtype: what inputs are cast to; None: they stay as they are.
        bnb_4bit_blocksize: elements of a block.
        llm_int8_threshold: columns with inputs above it are computed in floats; 0: none.
        llm_int8_skip_modules: names of modules, in whole components, that stay as they are.
    """

    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | None = None
    bnb_4bit_blocksize: int = 64
    llm_int8_threshold: float = 6.0
    llm_int8_skip_modules: tuple[str, ...] = DEFAULT_SKIP

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> QuantOptions:
        """The options that a config's values say.

        Raises:
            ConfigFileError: a value that cannot be.
        """
        found: dict[str, Any] = {}
        given = dict(values)
        for key in ("load_in_4bit", "load_in_8bit"):
            given.setdefault(key, given.get(f"_{key}"))
        for name, spec in LOADER_OPTIONS.items():
            value = given.get(name)
            if isinstance(value, str) and name == "bnb_4bit_compute_dtype":
                value = value.removeprefix("torch.")
            if value is not None:
                found[name] = spec.check(value, owner="quantization_config")
        four, eight = found.pop("load_in_4bit", None), found.get("load_in_8bit")
        if four and eight:
            raise ConfigFileError("load_in_4bit and load_in_8bit are both true; one of them is")
        if four is False and eight is False:
            raise ConfigFileError(
                "load_in_4bit and load_in_8bit are both false; one of them is true"
            )
        if four is False:
            found["load_in_8bit"] = True
        size = found.get("bnb_4bit_blocksize", 64)
        if size not in BLOCKSIZES:
            accepted = ", ".join(map(str, BLOCKSIZES))
            raise ConfigFileError(f"bnb_4bit_blocksize is {show(size)}; accepted: {accepted}")
        return cls(**found)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What inputs of 4-bit layers are cast to."""
        name = self.bnb_4bit_compute_dtype
        return None if name is None else DTYPES[name]

    def scheme(self, dtype: torch.dtype) -> Scheme:
        """How weights of a dtype are quantised to 4 bits."""
        nested = NESTED_BLOCKSIZE if self.bnb_4bit_use_double_quant else 0
        name = str(dtype).removeprefix("torch.")
        return Scheme(self.bnb_4bit_quant_type, self.bnb_4bit_blocksize, nested, name)

    def skips(self, name: str) -> bool:
        """Whether a module of that dotted name is left out: an entry is a run of components."""
        return any(
            _is_run(entry.split("."), name.split(".")) for entry in self.llm_int8_skip_modules
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values."""
        return asdict(self) | {"llm_int8_skip_modules": list(self.llm_int8_skip_modules)}


def _is_run(run: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether ``run`` stands in ``parts``, without gaps."""
    parts, n = list(parts), len(run)
    return any(parts[i : i + n] == list(run) for i in range(len(parts) - n + 1))
