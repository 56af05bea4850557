"""What a checkpoint says it is: config.json, read here and by nobody else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from loadkit.config_lookup import (
    find_architectures,
    find_dtype,
    find_quantization,
    find_tie,
    merge_overrides,
    text_config,
)
from loadkit.detect import matching_formats
from loadkit.dtypes import dtype_name
from loadkit.errors import ConfigFileError, ModelError
from loadkit.frozen import FrozenDict
from loadkit.hf_config import HFConfig, check_config, parse_config
from loadkit.load_config import LoadConfig
from loadkit.options import OptionSpec, unknown_option
from loadkit.text import printable

if TYPE_CHECKING:
    import torch

    from loadkit.sources.base import Source

__all__ = ["MODEL_OPTIONS", "ModelConfig"]

# What a caller may say about the model, by name.
MODEL_OPTIONS: dict[str, OptionSpec] = {
    spec.name: spec
    for spec in (
        OptionSpec("dtype", str, "auto", "dtype of the parameters; auto follows the checkpoint"),
        OptionSpec("hf_overrides", dict, FrozenDict(), "values in place of config.json's"),
        OptionSpec("architecture", str, None, "the architecture, in place of config.json's"),
        OptionSpec("quantization", str, None, "the quantisation method"),
        OptionSpec(
            "model_impl",
            str,
            "auto",
            "whose model code",
            choices=("auto", "loadkit", "transformers"),
        ),
        OptionSpec("trust_remote_code", bool, None, "allow a plugin to run the checkpoint's code"),
    )
}


@dataclass(frozen=True)
class ModelConfig:
    """What the checkpoint says it is, with the caller's overrides in it.

    Attributes:
        source: where the checkpoint lies, as the user wrote it.
        hf_config: config.json, ``hf_overrides`` applied.
        dtype_name: torch name of the parameters' dtype; "auto" until the checkpoint's own dtype
            is known (``with_dtype``).
        dtype_from: who decided it: "requested", "config", "checkpoint", or "default".
        hf_overrides: what was changed in ``hf_config``.
        revision: revision of the source, if one was asked for.
        architecture: the architecture the caller asked for, in place of the config's.
        quantization: the quantisation method the caller asked for.
        model_impl: "auto", "loadkit" or "transformers".
        trust_remote_code: whether a plugin may run the checkpoint's code; loadkit never does.
        config_file: name of the config file, for errors.
    """

    source: str
    hf_config: HFConfig
    dtype_name: str = "float32"
    dtype_from: str = "default"
    hf_overrides: Mapping[str, Any] = field(default_factory=FrozenDict)
    revision: str | None = None
    architecture: str | None = None
    quantization: str | None = None
    model_impl: str = "auto"
    trust_remote_code: bool = False
    config_file: str = "config.json"

    @classmethod
    def from_source(
        cls,
        source: Source,
        *,
        load_config: LoadConfig | None = None,
        config_file: str = "config.json",
        **options: Any,
    ) -> ModelConfig:
        """Read config.json from a source.

        Args:
            source: the open source.
            load_config: its ``revision`` and ``trust_remote_code`` are taken over.
            config_file: name of the file.
            options: ``MODEL_OPTIONS``: ``dtype``, ``hf_overrides``, ``architecture``, ...

        Raises:
            ConfigFileError: E_CONFIG, it is missing, no JSON, or holds impossible values.
            OptionError: an option is unknown or wrong.
        """
        names = [info.name for info in source.list()]
        if config_file not in names:
            seen = ", ".join(printable(name, 60) for name in names[:10]) or "no files at all"
            raise ConfigFileError(
                f"{printable(source.uri, ascii_only=False)} has no {config_file}; it has: {seen}",
                file=config_file,
                hint="load_format='mistral' goes by the params.json that is there"
                if "params.json" in names and "mistral" in matching_formats(names)
                else f"put the model's {config_file} beside the weights; load_into needs none",
            )
        opened = source.open(config_file)
        data = opened.read(0, opened.size)
        return cls.from_bytes(
            data, source=source.uri, load_config=load_config, config_file=config_file, **options
        )

    @classmethod
    def from_bytes(
        cls, data: bytes, *, source: str = "", config_file: str = "config.json", **options: Any
    ) -> ModelConfig:
        """The same from the file's bytes."""
        values = parse_config(data, file=config_file)
        return cls.from_dict(values, source=source, config_file=config_file, **options)

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, Any],
        *,
        source: str = "",
        load_config: LoadConfig | None = None,
        config_file: str = "config.json",
        **options: Any,
    ) -> ModelConfig:
        """The same from values that are already read (a GGUF header's, say)."""
        given = check_model_options(options)
        load_config = load_config or LoadConfig()
        overrides = given["hf_overrides"]
        merged = merge_overrides(values, overrides)
        check_config(merged, file=config_file)
        hf_config = HFConfig.from_dict(merged)
        asked = dtype_name(given["dtype"], what="dtype", allow_auto=True)
        found = find_dtype(hf_config, file=config_file) if asked == "auto" else None
        trust = given["trust_remote_code"]
        return cls(
            source=source,
            hf_config=hf_config,
            dtype_name=found or asked,
            dtype_from="config" if found else "default" if asked == "auto" else "requested",
            hf_overrides=overrides,
            revision=load_config.revision,
            architecture=given["architecture"],
            quantization=given["quantization"],
            model_impl=given["model_impl"],
            trust_remote_code=load_config.trust_remote_code if trust is None else trust,
            config_file=config_file,
        )

    def with_dtype(self, name: str, *, source: str = "checkpoint") -> ModelConfig:
        """The same with the dtype decided; ``source`` says by whom."""
        return replace(self, dtype_name=dtype_name(name, what="dtype"), dtype_from=source)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype.

        Raises:
            ModelError: it is still "auto": neither the config nor anyone else decided it.
        """
        import torch

        found = getattr(torch, self.dtype_name, None)
        if not isinstance(found, torch.dtype):
            raise ModelError(
                f"the model's dtype is not decided: it is {self.dtype_name!r}",
                hint="give dtype='bfloat16', or call with_dtype with the checkpoint's",
            )
        return found

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architectures to try, in order; never empty.

        Raises:
            ArchitectureError: the config names none; says what was found, and what would do.
        """
        return find_architectures(self.hf_config, self.architecture, file=self.config_file)

    @property
    def hf_text_config(self) -> HFConfig:
        """The config of the text model: the nested one where there is one."""
        return text_config(self.hf_config)

    @property
    def tie_word_embeddings(self) -> bool | None:
        """Whether head and embedding are one, as the (nested or outer) config says; None: unsaid.

        Raises:
            ConfigFileError: the value is no boolean.
        """
        return find_tie(self.hf_config, file=self.config_file)

    @property
    def quantization_config(self) -> FrozenDict | None:
        """The config's description of its quantisation, checked; None without one.

        Raises:
            ConfigFileError: it is no object, or its method, bits or group size cannot be.
        """
        return find_quantization(self.hf_config, file=self.config_file)


def check_model_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Every one of ``MODEL_OPTIONS``, given or default, checked."""
    for name in options:
        if name not in MODEL_OPTIONS:
            raise unknown_option(name, MODEL_OPTIONS, "ModelConfig")
    given = dict(options)
    if type(given.get("dtype")).__name__ == "dtype":
        given["dtype"] = str(given["dtype"])  # a torch.dtype: "torch.bfloat16"
    return {
        name: spec.check(given.get(name, spec.default), owner="ModelConfig")
        for name, spec in MODEL_OPTIONS.items()
    }
