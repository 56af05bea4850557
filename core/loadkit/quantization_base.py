"""What a quantisation method is: the interfaces that layers and plugins share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from loadkit.errors import ConfigFileError

if TYPE_CHECKING:
    import torch

__all__ = ["FusedMoEMethodBase", "LinearMethodBase", "QuantizationConfig", "QuantizeMethodBase"]


class QuantizeMethodBase(ABC):
    """What a layer does with its weights: makes them, uses them, finishes them.

    Attributes:
        uses_meta_device: the parameters are made on meta and given memory module by module, when
            their turn to be loaded comes: online quantisation, which peaks at the quantised model
            plus one module.
        layout_version: what a saved state of a layer is after ``process_weights_after_loading``:
            see ``loadkit.processed_layout``.
    """

    uses_meta_device: ClassVar[bool] = False
    layout_version: ClassVar[int | None] = None

    @abstractmethod
    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Register the layer's parameters, each with its ``weight_loader``."""

    @abstractmethod
    def apply(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The layer's forward, with the parameters ``create_weights`` made."""

    def embedding(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Rows of the weight for token ids, where the method can; vocabulary layers ask."""
        raise NotImplementedError(f"{type(self).__name__} has no embedding")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:  # noqa: B027
        """Repack or quantise the loaded parameters of one layer. Called once, when all are in."""

    def bytes_after_loading(self, layer: torch.nn.Module) -> int | None:
        """Bytes of a layer's parameters after its post-processing; None: as many as before.

        Asked while the parameters are on meta; a plan predicts a load's memory with it.
        """
        return None


class LinearMethodBase(QuantizeMethodBase):
    """The method of a linear layer y = x W^T + b, N outputs, K inputs."""

    @abstractmethod
    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the layer's parameters.

        Args:
            layer: the layer.
            input_size_per_partition: the rank's part of K.
            output_partition_sizes: the rank's part of N, for each layer fused into this one.
            input_size: K over all ranks.
            output_size: N over all ranks.
            params_dtype: the dtype of unquantised numbers.
            **extra_weight_attrs: for every parameter: ``weight_loader``, ``tp_rank``, ``tp_size``.
        """

    @abstractmethod
    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Inputs [..., K of the rank] -> outputs [..., N of the rank]."""


class FusedMoEMethodBase(QuantizeMethodBase):
    """The method of a mixture of experts: gate and up in w13, down in w2, for every slot."""

    @abstractmethod
    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the layer's parameters ``w13_...`` and ``w2_...``, dim 0 counting slots.

        Args:
            layer: the layer; ``w13_shards`` and ``w2_shards`` of it say how an expert's tensors
                lie in its parameters.
            num_experts: the rank's slots.
            hidden_size: D, width of inputs and outputs.
            intermediate_size_per_partition: the rank's part of an expert's inner width.
            params_dtype: the dtype of unquantised numbers.
            **extra_weight_attrs: for every parameter: ``weight_loader``, ``tp_rank``, ``tp_size``
                (of the ranks that cut an expert).
        """

    @abstractmethod
    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Inputs [T, D] to this rank's part of the sum over each token's experts, [T, D].

        Args:
            layer: the layer.
            x: the tokens.
            weights: [T, k], what each chosen expert's output is multiplied by.
            slots: [T, k], the rank's slot of each chosen expert; -1: another rank's.
        """


class QuantizationConfig(ABC):
    """How a checkpoint is quantised, read from its config; makes the layers' methods.

    Attributes:
        packed_modules_mapping: fused module name -> the names of its parts, from the model's
            class, so that a rule about ``q_proj`` reaches ``qkv_proj``.
    """

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @classmethod
    @abstractmethod
    def get_name(cls) -> str:
        """The method's name in the table."""

    def to_saved(self) -> Mapping[str, Any] | None:
        """What ``from_saved`` makes this config of again, as JSON-able values, for models that are
        saved as they run; None: config.json says all of it.
        """
        return None

    def to_config(self) -> Mapping[str, Any] | None:
        """What a config.json's ``quantization_config`` says of such weights; None: none can.

        Asked where the checkpoint's own config said nothing.
        """
        return None

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> QuantizationConfig:
        """The config that ``to_saved`` described.

        Raises:
            ConfigFileError: it is none.
        """
        return cls.from_config(values)

    @classmethod
    @abstractmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """The model dtypes it works with."""

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int:
        """The CUDA capability it needs, as major * 10 + minor; -1: it runs anywhere."""

    @classmethod
    @abstractmethod
    def get_config_filenames(cls) -> list[str]:
        """Files of the checkpoint that may hold its config when config.json does not."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """The config that a checkpoint's JSON describes.

        Raises:
            ConfigFileError: a key that is missing or has a bad value.
        """

    @classmethod  # noqa: B027 - most methods have no load format of their own
    def check_load_format(
        cls, config: Mapping[str, Any], load_format: str, *, file: str | None
    ) -> None:
        """Refuse a load format that cannot bring a checkpoint which says this of itself.

        Args:
            config: what ``file`` says of the quantisation.
            load_format: the one that is used.
            file: where it says so.

        Raises:
            ConfigFileError: it cannot; names both.
        """

    @abstractmethod
    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method for a layer, by its type and dotted name; None: it is not quantised."""

    @classmethod
    def override_quantization_method(
        cls, config: Mapping[str, Any], asked: str | None
    ) -> str | None:
        """This method's name, if it takes over a config written for another; else None."""
        return None

    @staticmethod
    def get_from_keys(config: Mapping[str, Any], keys: Sequence[str]) -> Any:
        """The value of the first of ``keys`` that the config has.

        Raises:
            ConfigFileError: it has none of them.
        """
        for key in keys:
            if key in config:
                return config[key]
        raise ConfigFileError(
            f"the quantisation config has none of the keys {list(keys)}; it has {sorted(config)}",
            detail={"keys": list(keys)},
        )

    @staticmethod
    def get_from_keys_or(config: Mapping[str, Any], keys: Sequence[str], default: Any) -> Any:
        """As ``get_from_keys``, with a default."""
        return next((config[key] for key in keys if key in config), default)
