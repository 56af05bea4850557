"""Step 1: names become classes, files and quantisation. The only step that imports plugins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from loadkit import tables
from loadkit.adapters import adapter_error
from loadkit.auto_choices import device_of, format_of, with_dtype
from loadkit.base_loader import BaseModelLoader
from loadkit.config import LoadConfig, LoadkitConfig, ModelConfig, ParallelConfig
from loadkit.errors import ConfigFileError, NoWeightsError, OptionError
from loadkit.local_memory import mesh_device
from loadkit.quantization import configure_quant_config
from loadkit.sources import Source, open_source
from loadkit.unused_options import refuse_unused

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "Job", "job_for_loader", "job_for_module", "job_for_rank", "open_for", "resolve",
    "resolve_config",
]  # fmt: skip

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Job:
    """One load, every name resolved. A context manager: leaving it closes the source."""

    config: LoadkitConfig
    source_name: str
    loader: BaseModelLoader
    load_format_why: str
    model_class: type[nn.Module]
    model_class_name: str
    architecture: str
    distribution: str
    device: str
    strict: bool
    prefix: str = ""
    module: nn.Module | None = None

    @property
    def source(self) -> Source:
        """Where its files are; the loader may have joined others to what was opened."""
        return self.loader.source

    @property
    def load_config(self) -> LoadConfig:
        """How it is read."""
        return self.config.load_config

    def close(self) -> None:
        """Close the source's files; mappings that parameters use stay."""
        self.source.close()


def resolve(
    source: str | os.PathLike[str],
    *,
    load_format: str = "auto",
    dtype: Any = "auto",
    device: Any = None,
    parallel: ParallelConfig | None = None,
    load_config: LoadConfig | None = None,
    quantization: str | None = None,
    model_impl: str = "auto",
    trust_remote_code: bool = False,
    strict: bool = True,
    hf_overrides: Mapping[str, Any] | None = None,
    architecture: str | None = None,
) -> Job:
    """Find out what a source is and who loads it. Arguments as of ``loadkit.load``.

    Raises:
        LoadkitError: the first thing that cannot be resolved.
    """
    parallel = _of_type(ParallelConfig, parallel, "parallel")
    load_config = _of_type(LoadConfig, load_config, "load_config")
    strict = _of_type(bool, strict, "strict")
    load_config = _merged(load_config, load_format, trust_remote_code)
    opened = open_for(source, load_config)
    try:
        loader, why = _loader_for(opened, load_config, parallel)
        options = {
            "dtype": dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch."),
            "hf_overrides": {} if hf_overrides is None else hf_overrides,
            "architecture": architecture,
            "quantization": quantization,
            "model_impl": model_impl,
            "trust_remote_code": trust_remote_code,
        }
        model_config = loader.read_model_config(opened, loader.load_config, **options)
        return _job(opened, loader, why, model_config, parallel, device, strict)
    except (NoWeightsError, ConfigFileError) as error:
        with closing(opened):
            adapter = adapter_error(opened)
        if adapter is not None:
            raise adapter from error
        raise
    except BaseException:
        opened.close()
        raise


def resolve_config(config: LoadkitConfig, prefix: str = "") -> Job:
    """The job that a ready bundle describes (``get_model``)."""
    opened = open_for(config.model_config.source, config.load_config)
    try:
        loader, why = _loader_for(opened, config.load_config, config.parallel_config)
        job = _job(opened, loader, why, config.model_config, config.parallel_config, None, True)
    except BaseException:
        opened.close()
        raise
    return replace(job, prefix=prefix)


def job_for_loader(loader: BaseModelLoader, config: LoadkitConfig, prefix: str) -> Job:
    """The job of a loader that the caller made (``BaseModelLoader.load_model``)."""
    source = getattr(loader, "source", None) or loader.open_source(
        config.model_config.source, config.load_config
    )
    model_config, parallel = config.model_config, config.parallel_config
    loader.source, loader.parallel = source, parallel
    try:
        refuse_unused(loader.load_config, loader, source)
        job = _job(source, loader, "the caller's loader", model_config, parallel, None, True)
    except BaseException:
        source.close()
        raise
    return replace(job, prefix=prefix)


def job_for_rank(job: Job, parallel: ParallelConfig) -> Job:
    """The same load for another rank; they share the source, which only the first job closes.

    Raises:
        LoadkitError: that rank's files cannot be had.
    """
    loader = type(job.loader)(job.load_config)
    loader.source, loader.parallel = job.source, parallel
    config, why = job.config.model_config, job.load_format_why
    made = _job(job.source, loader, why, config, parallel, job.device, job.strict)
    return replace(made, prefix=job.prefix)


def job_for_module(
    module: nn.Module,
    source: str | os.PathLike[str],
    *,
    load_format: str = "auto",
    load_config: LoadConfig | None = None,
    parallel: ParallelConfig | None = None,
    strict: bool = True,
) -> Job:
    """The job of filling a module that the user built: no config.json is needed.

    Raises:
        OptionError: the load format reads no checkpoint, it makes whole models.
    """
    parallel = _of_type(ParallelConfig, parallel, "parallel")
    load_config = _merged(_of_type(LoadConfig, load_config, "load_config"), load_format, False)
    opened = open_for(source, load_config)
    try:
        loader, why = _loader_for(opened, load_config, parallel)
        if not loader.needs_source:
            raise OptionError(
                f"load format {loader.load_config.load_format!r} makes whole models; it reads no "
                "tensors by name",
                hint="use loadkit.load with it",
            )
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        model_config = ModelConfig.from_dict({}, source=opened.uri, load_config=loader.load_config)
        model_config = model_config.with_dtype(
            str(dtype).removeprefix("torch."), source="requested"
        )
        loader.download_model(model_config)
        config = LoadkitConfig(model_config, loader.load_config, parallel)
    except BaseException:
        opened.close()
        raise
    cls = type(module)
    return Job(
        config,
        opened.uri,
        loader,
        why,
        cls,
        f"{cls.__module__}:{cls.__qualname__}",
        cls.__name__,
        "",
        mesh_device(module) or "cpu",
        strict,
        module=module,
    )


def _of_type(kind: type[Value], given: Value | None, name: str) -> Value:
    """An argument of a load, or its default."""
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise OptionError(f"{name} is {type(given).__name__}; accepted: {kind.__name__}")
    return given


def _merged(load_config: LoadConfig, load_format: str, trust_remote_code: bool) -> LoadConfig:
    """The config with the plain arguments in it; saying two different things is an error."""
    if load_format != "auto" and load_config.load_format not in ("auto", load_format):
        raise OptionError(
            f"load_format={load_format!r}, but load_config.load_format is "
            f"{load_config.load_format!r}"
        )
    if load_format != "auto":
        load_config = replace(load_config, load_format=load_format)
    if trust_remote_code:
        load_config = replace(load_config, trust_remote_code=True)
    if load_config.distribute:  # what another rank read is no view of a file here
        load_config = replace(load_config, alias="never")
    return load_config


def open_for(source: str | os.PathLike[str], load_config: LoadConfig) -> Source:
    """The source, as the load format that is named opens it.

    Raises:
        LoadkitError: there is no such format, or the source cannot be opened.
    """
    if load_config.load_format == "auto":
        return open_source(source, load_config)
    loader: Any = tables.loaders.lookup(load_config.load_format)
    if isinstance(loader, type) and issubclass(loader, BaseModelLoader):
        return loader.open_source(source, load_config)
    return open_source(source, load_config)


def _loader_for(
    source: Source, load_config: LoadConfig, parallel: ParallelConfig
) -> tuple[BaseModelLoader, str]:
    """The loader of the format that was named, or that the files are in."""
    why = "asked for by name"
    if load_config.load_format == "auto":
        name, why = format_of(source)
        load_config = replace(load_config, load_format=name)
    loader_class: Any = tables.loaders.lookup(load_config.load_format)
    loader: BaseModelLoader = loader_class(load_config)
    loader.source, loader.parallel = source, parallel
    refuse_unused(load_config, loader, source)
    return loader, why


def _job(
    source: Source,
    loader: BaseModelLoader,
    why: str,
    model_config: ModelConfig,
    parallel: ParallelConfig,
    device: Any,
    strict: bool,
) -> Job:
    from loadkit.model_registry import ModelRegistry

    load_config = loader.load_config
    model_class, architecture = ModelRegistry.resolve_model_cls(
        list(model_config.architectures), model_config
    )
    loader.device = device_of(device, load_config)
    loader.download_model(model_config)
    model_config = with_dtype(model_config, loader)
    loader.model_class = model_class
    quant_config = loader.get_quant_config(model_config)
    config = LoadkitConfig(model_config, load_config, parallel, quant_config)
    if quant_config is not None:
        configure_quant_config(quant_config, model_class)
    loader.config = config
    return Job(
        config=config,
        source_name=source.uri,
        loader=loader,
        load_format_why=why,
        model_class=model_class,
        model_class_name=f"{model_class.__module__}:{model_class.__qualname__}",
        architecture=architecture,
        distribution=_distribution(architecture),
        device=loader.device,
        strict=strict,
    )


def _distribution(architecture: str) -> str:
    """Which distribution an architecture comes from, or that this process has registered it."""
    entries = tables.models.entries(architecture)
    return entries[0].distribution if entries else ""
