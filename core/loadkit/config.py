"""The values a load is described by. All frozen; none reads global state; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from loadkit.errors import OptionError
from loadkit.hf_config import HFConfig
from loadkit.load_config import LoadConfig
from loadkit.model_config import MODEL_OPTIONS, ModelConfig
from loadkit.options import OptionSpec, json_value, unknown_option, validate_extra_config
from loadkit.parallel_config import ParallelConfig

if TYPE_CHECKING:
    from loadkit.quantization import QuantizationConfig

__all__ = [
    "HFConfig",
    "LoadConfig",
    "LoadkitConfig",
    "ModelConfig",
    "OptionSpec",
    "ParallelConfig",
    "parse_settings",
    "validate_extra_config",
]


@dataclass(frozen=True)
class LoadkitConfig:
    """The bundle a model's constructor gets: ``__init__(self, *, config, prefix="")``."""

    model_config: ModelConfig
    load_config: LoadConfig = field(default_factory=LoadConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    quant_config: QuantizationConfig | None = None

    def with_hf_config(self, hf_config: HFConfig) -> LoadkitConfig:
        """The bundle for an inner model, built from its own nested config."""
        return replace(self, model_config=replace(self.model_config, hf_config=hf_config))


def parse_settings(settings: Mapping[str, str]) -> tuple[LoadConfig, dict[str, Any]]:
    """What ``--set key=value`` texts say: the ``LoadConfig``, and options of ``ModelConfig``.

    A key is a field of either, or ``hf_overrides.a.b`` (its text is JSON, or else a plain string).

    Raises:
        OptionError: no such field, or text that is no value of its type.
    """
    load: dict[str, str] = {}
    model: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    load_fields = LoadConfig.options()
    for name, text in settings.items():
        if name in load_fields:
            load[name] = text
        elif name == "hf_overrides":
            overrides.update(MODEL_OPTIONS[name].parse(text, owner="ModelConfig"))
        elif name.startswith("hf_overrides."):
            overrides[name.partition(".")[2]] = _json_or_text(text)
        elif name in MODEL_OPTIONS:
            model[name] = MODEL_OPTIONS[name].parse(text, owner="ModelConfig")
        else:
            raise unknown_option(name, {*load_fields, *MODEL_OPTIONS}, "a load")
    if overrides:
        model["hf_overrides"] = overrides
    return LoadConfig.from_set(load), model


def _json_or_text(text: str) -> Any:
    try:
        return json_value(text, "hf_overrides")
    except OptionError:
        if text[:1] in ("{", "[", '"'):
            raise
        return text
