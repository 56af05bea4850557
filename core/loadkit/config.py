"""The values a load is described by. All frozen; none reads global state; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from loadkit.errors import OptionError

if TYPE_CHECKING:
    import torch

    from loadkit.quantization import QuantizationConfig

__all__ = ["HFConfig", "LoadConfig", "LoadkitConfig", "ModelConfig", "ParallelConfig"]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Which part of the model this rank holds. world = dp x pp x tp; ep divides dp x tp."""

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "ep", "dp"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            if size < 1 or not 0 <= rank < size:
                raise OptionError(f"{axis}_rank {rank} is not in 0..{axis}_size - 1 ({size=})")
        if (self.dp_size * self.tp_size) % self.ep_size:
            raise OptionError(
                f"ep_size {self.ep_size} does not divide dp_size x tp_size "
                f"({self.dp_size} x {self.tp_size})"
            )


class HFConfig(SimpleNamespace):
    """config.json as attributes, nested objects too (``hf_config.text_config.hidden_size``)."""

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)


@dataclass(frozen=True)
class LoadConfig:
    load_format: str = "auto"
    download_dir: str | None = None
    safetensors_load_strategy: str | None = None
    safetensors_prefetch_num_threads: int = 8
    safetensors_prefetch_block_size: int = 16 << 20
    model_loader_extra_config: Mapping[str, Any] = field(default_factory=dict)
    ignore_patterns: tuple[str, ...] = ()
    use_tqdm_on_load: bool = True
    device: str | None = None
    reader: str = "auto"
    alias: str = "auto"
    num_threads: int = 0
    allowed_roots: tuple[str, ...] = ()
    missing_ok: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """What the checkpoint says it is."""

    source: str
    hf_config: HFConfig
    dtype_name: str = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype, resolved."""
        import torch

        found = getattr(torch, self.dtype_name)
        assert isinstance(found, torch.dtype)
        return found


@dataclass(frozen=True)
class LoadkitConfig:
    """The bundle a model's constructor gets: ``__init__(self, *, config, prefix="")``."""

    model_config: ModelConfig
    load_config: LoadConfig = field(default_factory=LoadConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    quant_config: QuantizationConfig | None = None
