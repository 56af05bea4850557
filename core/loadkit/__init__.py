"""loadkit: a checkpoint in any format, from any place, into a ready, sharded torch module.

Everything public is a lazy export: importing this package imports nothing else, and no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadkit.auto_weights_loader import AutoWeightsLoader as AutoWeightsLoader
    from loadkit.base_loader import BaseModelLoader as BaseModelLoader
    from loadkit.base_loader import get_model as get_model
    from loadkit.base_loader import get_model_loader as get_model_loader
    from loadkit.build import initialize_model as initialize_model
    from loadkit.build import set_default_torch_dtype as set_default_torch_dtype
    from loadkit.config import HFConfig as HFConfig
    from loadkit.config import LoadConfig as LoadConfig
    from loadkit.config import LoadkitConfig as LoadkitConfig
    from loadkit.config import ModelConfig as ModelConfig
    from loadkit.config import OptionSpec as OptionSpec
    from loadkit.config import ParallelConfig as ParallelConfig
    from loadkit.convert import ConvertReport as ConvertReport
    from loadkit.convert import convert as convert
    from loadkit.diff import DiffReport as DiffReport
    from loadkit.diff import diff as diff
    from loadkit.errors import ArchitectureError as ArchitectureError
    from loadkit.errors import ArchitectureImportError as ArchitectureImportError
    from loadkit.errors import ChangedError as ChangedError
    from loadkit.errors import CheckpointError as CheckpointError
    from loadkit.errors import ConfigFileError as ConfigFileError
    from loadkit.errors import ConflictError as ConflictError
    from loadkit.errors import CoverageError as CoverageError
    from loadkit.errors import DeviceError as DeviceError
    from loadkit.errors import DistributedError as DistributedError
    from loadkit.errors import FormatError as FormatError
    from loadkit.errors import IndexFileError as IndexFileError
    from loadkit.errors import LoadkitError as LoadkitError
    from loadkit.errors import ManifestError as ManifestError
    from loadkit.errors import ModelError as ModelError
    from loadkit.errors import NotInstalledError as NotInstalledError
    from loadkit.errors import NoWeightsError as NoWeightsError
    from loadkit.errors import OptionError as OptionError
    from loadkit.errors import PathError as PathError
    from loadkit.errors import PlanError as PlanError
    from loadkit.errors import PluginError as PluginError
    from loadkit.errors import ReadError as ReadError
    from loadkit.errors import ReadFailure as ReadFailure
    from loadkit.errors import ResourceError as ResourceError
    from loadkit.errors import ShardedError as ShardedError
    from loadkit.errors import TraceError as TraceError
    from loadkit.errors import TruncatedError as TruncatedError
    from loadkit.errors import UnknownNameError as UnknownNameError
    from loadkit.errors import UsageError as UsageError
    from loadkit.errors import WeightLoadError as WeightLoadError
    from loadkit.errors import WriteError as WriteError
    from loadkit.expert_placement import ExpertPlacement as ExpertPlacement
    from loadkit.finish import device_loading_context as device_loading_context
    from loadkit.finish import finalize_layerwise_processing as finalize_layerwise_processing
    from loadkit.finish import process_weights_after_loading as process_weights_after_loading
    from loadkit.generate import generate as generate
    from loadkit.hookspecs import hookimpl as hookimpl
    from loadkit.interfaces import SupportsLoRA as SupportsLoRA
    from loadkit.interfaces import SupportsMultiModal as SupportsMultiModal
    from loadkit.interfaces import SupportsPP as SupportsPP
    from loadkit.interfaces import SupportsScoring as SupportsScoring
    from loadkit.interfaces import SupportsTranscription as SupportsTranscription
    from loadkit.interfaces import is_pooling_model as is_pooling_model
    from loadkit.iteration import iter_weights as iter_weights
    from loadkit.load_plan import LoadPlan as LoadPlan
    from loadkit.loader import LoadResult as LoadResult
    from loadkit.loader import load as load
    from loadkit.loader import load_into as load_into
    from loadkit.loader import load_model as load_model
    from loadkit.loader import plan as plan
    from loadkit.mapper import WeightsMapper as WeightsMapper
    from loadkit.model_registry import ModelRegistry as ModelRegistry
    from loadkit.model_registry import is_supported as is_supported
    from loadkit.quantization import FusedMoEMethodBase as FusedMoEMethodBase
    from loadkit.quantization import LinearMethodBase as LinearMethodBase
    from loadkit.quantization import QuantizationConfig as QuantizationConfig
    from loadkit.quantization import QuantizeMethodBase as QuantizeMethodBase
    from loadkit.quantization import get_quant_config as get_quant_config
    from loadkit.quantization import register_quantization_config as register_quantization_config
    from loadkit.report import LoadReport as LoadReport
    from loadkit.save import SaveReport as SaveReport
    from loadkit.save import save as save
    from loadkit.secondary_weights import WeightSource as WeightSource
    from loadkit.tables import register_model_loader as register_model_loader
    from loadkit.tables import register_reader as register_reader
    from loadkit.tables import register_source as register_source
    from loadkit.verify import VerifyReport as VerifyReport
    from loadkit.verify import verify as verify
    from loadkit.weight_loaders import composed_weight_loader as composed_weight_loader
    from loadkit.weight_loaders import default_weight_loader as default_weight_loader
    from loadkit.weight_loaders import row_parallel_weight_loader as row_parallel_weight_loader
    from loadkit.weight_loaders import sharded_weight_loader as sharded_weight_loader

__all__ = [
    "ArchitectureError",
    "ArchitectureImportError",
    "AutoWeightsLoader",
    "BaseModelLoader",
    "ChangedError",
    "CheckpointError",
    "ConfigFileError",
    "ConflictError",
    "ConvertReport",
    "CoverageError",
    "DeviceError",
    "DiffReport",
    "DistributedError",
    "ExpertPlacement",
    "FormatError",
    "FusedMoEMethodBase",
    "HFConfig",
    "IndexFileError",
    "LinearMethodBase",
    "LoadConfig",
    "LoadPlan",
    "LoadReport",
    "LoadResult",
    "LoadkitConfig",
    "LoadkitError",
    "ManifestError",
    "ModelConfig",
    "ModelError",
    "ModelRegistry",
    "NoWeightsError",
    "NotInstalledError",
    "OptionError",
    "OptionSpec",
    "ParallelConfig",
    "PathError",
    "PlanError",
    "PluginError",
    "QuantizationConfig",
    "QuantizeMethodBase",
    "ReadError",
    "ReadFailure",
    "ResourceError",
    "SaveReport",
    "ShardedError",
    "SupportsLoRA",
    "SupportsMultiModal",
    "SupportsPP",
    "SupportsScoring",
    "SupportsTranscription",
    "TraceError",
    "TruncatedError",
    "UnknownNameError",
    "UsageError",
    "VerifyReport",
    "WeightLoadError",
    "WeightSource",
    "WeightsMapper",
    "WriteError",
    "composed_weight_loader",
    "convert",
    "default_weight_loader",
    "device_loading_context",
    "diff",
    "finalize_layerwise_processing",
    "generate",
    "get_model",
    "get_model_loader",
    "get_quant_config",
    "hookimpl",
    "initialize_model",
    "is_pooling_model",
    "is_supported",
    "iter_weights",
    "load",
    "load_into",
    "load_model",
    "plan",
    "process_weights_after_loading",
    "register_model_loader",
    "register_quantization_config",
    "register_reader",
    "register_source",
    "row_parallel_weight_loader",
    "save",
    "set_default_torch_dtype",
    "sharded_weight_loader",
    "verify",
]

# module -> what it exports here
_MODULES: dict[str, tuple[str, ...]] = {
    "auto_weights_loader": ("AutoWeightsLoader",),
    "base_loader": ("BaseModelLoader", "get_model", "get_model_loader"),
    "build": ("initialize_model", "set_default_torch_dtype"),
    "config": (
        "HFConfig",
        "LoadConfig",
        "LoadkitConfig",
        "ModelConfig",
        "OptionSpec",
        "ParallelConfig",
    ),
    "convert": ("ConvertReport", "convert"),
    "diff": ("DiffReport", "diff"),
    "errors": (
        "ArchitectureError",
        "ArchitectureImportError",
        "ChangedError",
        "CheckpointError",
        "ConfigFileError",
        "ConflictError",
        "CoverageError",
        "DeviceError",
        "DistributedError",
        "FormatError",
        "IndexFileError",
        "LoadkitError",
        "ManifestError",
        "ModelError",
        "NoWeightsError",
        "NotInstalledError",
        "OptionError",
        "PathError",
        "PlanError",
        "PluginError",
        "ReadError",
        "ReadFailure",
        "ResourceError",
        "ShardedError",
        "TraceError",
        "TruncatedError",
        "UnknownNameError",
        "UsageError",
        "WeightLoadError",
        "WriteError",
    ),
    "expert_placement": ("ExpertPlacement",),
    "finish": (
        "device_loading_context",
        "finalize_layerwise_processing",
        "process_weights_after_loading",
    ),
    "generate": ("generate",),
    "hookspecs": ("hookimpl",),
    "interfaces": (
        "SupportsLoRA",
        "SupportsMultiModal",
        "SupportsPP",
        "SupportsScoring",
        "SupportsTranscription",
        "is_pooling_model",
    ),
    "iteration": ("iter_weights",),
    "loader": (
        "LoadResult",
        "load",
        "load_into",
        "load_model",
        "plan",
    ),
    "mapper": ("WeightsMapper",),
    "model_registry": (
        "ModelRegistry",
        "is_supported",
    ),
    "load_plan": ("LoadPlan",),
    "quantization": (
        "FusedMoEMethodBase",
        "LinearMethodBase",
        "QuantizationConfig",
        "QuantizeMethodBase",
        "get_quant_config",
        "register_quantization_config",
    ),
    "report": ("LoadReport",),
    "save": ("SaveReport", "save"),
    "secondary_weights": ("WeightSource",),
    "tables": (
        "register_model_loader",
        "register_reader",
        "register_source",
    ),
    "verify": ("VerifyReport", "verify"),
    "weight_loaders": (
        "composed_weight_loader",
        "default_weight_loader",
        "row_parallel_weight_loader",
        "sharded_weight_loader",
    ),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from loadkit.entry_index import core_version

        return core_version() or "unknown"
    if name not in _EXPORTS:
        raise AttributeError(f"module 'loadkit' has no attribute {name!r}")
    return getattr(import_module(f"loadkit.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """``loadkit.plan`` is a function, though ``loadkit/plan.py`` is a module too.

    The import system sets a module as an attribute of its package; where that name is an export,
    the export stays. ``from loadkit.plan import LoadPlan`` works all the same.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _EXPORTS or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
