"""``MistralModelLoader``: the checkpoint that Mistral publishes, as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from loadkit.base_loader import BaseModelLoader
from loadkit.errors import ConfigFileError
from loadkit.file_checks import show
from loadkit.hf_config import parse_config
from loadkit.load_plan import Problem
from loadkit.model_config import ModelConfig
from loadkit.sharded_name import ShardedName
from loadkit.tracing.lazy_tensor import Offered
from loadkit_default.loader import DefaultModelLoader
from loadkit_default.mistral.names import as_hugging_face, refuse_quantised
from loadkit_default.mistral.params import PARAMS, config_of, unknown_keys

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loadkit.config import LoadConfig
    from loadkit.quantization import QuantizationConfig
    from loadkit.sources.base import Source

__all__ = ["MistralModelLoader"]


class MistralModelLoader(DefaultModelLoader):
    """``consolidated*.safetensors`` and ``params.json``; no config.json is needed.

    The catalogue has the file's own names and numbers. A model gets Hugging Face's.
    """

    archive_options = frozenset()
    attach = BaseModelLoader.attach  # names and numbers of another checkpoint are not Mistral's

    @classmethod
    def read_model_config(
        cls, source: Source, load_config: LoadConfig, **options: Any
    ) -> ModelConfig:
        """What params.json says; where there is none, what config.json says.

        Raises:
            ConfigFileError: E_CONFIG, neither is there, or what it says cannot be.
        """
        params = _read_params(source)
        if params is not None:
            return ModelConfig.from_dict(
                config_of(params),
                source=source.uri,
                load_config=load_config,
                config_file=PARAMS,
                **options,
            )
        if any(info.name == "config.json" for info in source.list()):
            return super().read_model_config(source, load_config, **options)
        raise ConfigFileError(
            f"{show(source.uri)} has neither {PARAMS} nor config.json",
            file=PARAMS,
            hint=f"load format 'mistral' needs the {PARAMS} that lies beside the weights",
        )

    def download_model(self, model_config: ModelConfig) -> None:
        """Choose the files and read their headers; note what of params.json is not followed."""
        super().download_model(model_config)
        params = _read_params(self.source) or {}
        self.notes = [
            Problem(
                "UNKNOWN_SETTING",
                f"{PARAMS}: nothing here follows {show(key)}",
                file=PARAMS,
                hint="if it changes what the model computes, its answers will be wrong",
            )
            for key in unknown_keys(params)
        ]

    def get_quant_config(self, model_config: ModelConfig) -> QuantizationConfig | None:
        """What the caller asked for: a checkpoint that is quantised itself is not read.

        Raises:
            FormatError: E_QUANT, it has Mistral's own scales.
        """
        refuse_quantised([info.name for info in self.infos()])
        return super().get_quant_config(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Give the model every tensor under its Hugging Face name, in Hugging Face's order.

        Raises:
            WeightLoadError: a tensor does not fit the config's heads or experts.
        """
        offered = list(self.offers(model_config))
        hf_config = model_config.hf_text_config

        def renamed(
            weights: Iterator[tuple[str, torch.Tensor | Offered]],
        ) -> Iterator[tuple[str, torch.Tensor]]:
            for name, offer in weights:
                tensor = offer.tensor() if isinstance(offer, Offered) else offer
                for hf_name, changed in as_hugging_face(name, tensor, hf_config):
                    yield ShardedName(hf_name, like=name), changed

        self.give(model, offered, renamed)


def _read_params(source: Source) -> dict[str, Any] | None:
    """params.json, if it is there."""
    if all(info.name != PARAMS for info in source.list()):
        return None
    opened = source.open(PARAMS)
    return parse_config(opened.read(0, opened.size), file=PARAMS)
