"""``BaseModelLoader``: one per load format. A loader overrides a step, never the line."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from loadkit.errors import ModelError, UnknownNameError
from loadkit.module_walk import named_modules
from loadkit.name_hints import any_wrapped, strip_wrappers
from loadkit.options import OptionSpec, validate_extra_config
from loadkit.sources.shown import shown_source
from loadkit.tracing.observed import observed
from loadkit.tracing.recorder import active_recorder

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loadkit.config import LoadConfig, LoadkitConfig, ModelConfig
    from loadkit.integrity.digests import FileDigests
    from loadkit.load_plan import Problem
    from loadkit.multithread import Multithread
    from loadkit.parallel_config import ParallelConfig
    from loadkit.quantization_base import QuantizationConfig
    from loadkit.secondary_weights import WeightSource
    from loadkit.sources.base import File, Source
    from loadkit.tracing.given import Given
    from loadkit.tracing.lazy_tensor import Offered

__all__ = ["BaseModelLoader", "Checksum", "get_model", "get_model_loader"]

Checksum = tuple[int, int, "str | None"]
"""First byte, the byte after the last, and their CRC-32 in hex (None: it was not computed)."""


class BaseModelLoader(ABC):
    """Turns a source's files into named tensors and hands them to a model.

    Subclasses implement ``load_weights``, usually as
    ``model.load_weights(self.get_all_weights(model_config, model))``, and ``catalogue``, which
    yields lazy tensors from headers alone. A loader without a catalogue may still call
    ``model.load_weights`` with real tensors: placement is traced all the same, and the plan says
    ``OPAQUE_LOADER``.

    Attributes:
        options: the keys of ``LoadConfig.model_loader_extra_config`` that it accepts.
        load_options: fields of ``LoadConfig`` that not every load follows and this loader does
            (``ignore_patterns``, ``weights_key``, ...); others are refused where they are set.
        needs_source: False where it makes a model's weights and reads no checkpoint.
        source: the open source, set before any other call.
        parallel: which rank is loaded.
        device: where its parameters go, as torch spells it; known before ``download_model``.
        config, model_class: what is being loaded, known before ``load_weights``; the class
            before ``get_quant_config`` already.
        notes: what a user should know of the checkpoint; they are among the plan's notes.
        multithread: how ``iter_weights`` reads ahead with threads; None: it does not.
        files: names of the weight files it reads.
        skipped_files: files that were not used, with the reason.
        skipped_tensors: tensors of the files that are not offered to the model, with the reason.
        by_key: its tensors are the model's own parameters, as this rank holds them: they are
            placed by name, and nothing maps or cuts them.
        processed: they were post-processed before they were saved: that is not done again.
        whole_tensors: the checkpoint tensors behind them, where that is known.
        reads_checkpoint: False where its files hold parts of a model's parameters: then a plan's
            rows say nothing of a checkpoint's tensors.
    """

    options: ClassVar[Mapping[str, OptionSpec]] = {}
    load_options: ClassVar[frozenset[str]] = frozenset()
    needs_source: ClassVar[bool] = True
    reads_checkpoint: ClassVar[bool] = True
    by_key: bool = False
    processed: bool = False
    whole_tensors: Mapping[str, Given] | None = None

    source: Source
    parallel: ParallelConfig
    device: str = "cpu"
    config: LoadkitConfig
    model_class: type[nn.Module]

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config
        self.extra_config = validate_extra_config(
            self.options, load_config.model_loader_extra_config, load_config.load_format
        )
        self.multithread: Multithread | None = None
        self.files: list[str] = []
        self.skipped_files: dict[str, str] = {}
        self.skipped_tensors: dict[str, str] = {}
        self.notes: list[Problem] = []

    @classmethod
    def open_source(cls, source: str | os.PathLike[str], load_config: LoadConfig) -> Source:
        """The place a checkpoint lies in. Formats that get their files elsewhere override this.

        Raises:
            LoadkitError: as ``loadkit.sources.open_source``.
        """
        from loadkit.sources import open_source

        return open_source(source, load_config)

    @classmethod
    def read_model_config(
        cls, source: Source, load_config: LoadConfig, **options: Any
    ) -> ModelConfig:
        """What the checkpoint says it is. Formats that carry their config override this."""
        from loadkit.model_config import ModelConfig

        return ModelConfig.from_source(source, load_config=load_config, **options)

    def follows(self) -> frozenset[str]:
        """The fields of ``LoadConfig`` that this loader follows in this load."""
        return self.load_options

    def download_model(self, model_config: ModelConfig) -> None:  # noqa: B027
        """Make the checkpoint's files available; nothing to do where they already are."""

    def attach(self, sources: Sequence[WeightSource]) -> None:
        """Catalogue the tensors of other checkpoints too, under their prefixes; asked again, it
        changes nothing. A loader that makes weights, or whose files are the model's own
        parameters, needs none.

        Raises:
            ModelError: the load format reads no second checkpoint.
        """
        if self.by_key or not self.needs_source:
            return
        raise ModelError(
            f"the model takes weights of {len(sources)} more checkpoint(s) "
            f"({shown_source(sources[0].model_or_path)}), and load format "
            f"{self.load_config.load_format!r} reads one",
            code="SECONDARY_WEIGHTS",
            hint="load it from safetensors or from archives of torch.save",
        )

    def get_quant_config(self, model_config: ModelConfig) -> QuantizationConfig | None:
        """The checkpoint's quantisation. Formats whose files say more about it override this."""
        from loadkit.quantization import get_quant_config

        return get_quant_config(model_config, self.load_config, source=self.source)

    def checksums(self, name: str) -> Sequence[Checksum]:
        """What a weight file keeps of its own bytes, in order; compared by ``verify="digest"``
        where nobody else says what the file should hold.
        """
        return ()

    def own_digests(self, files: Sequence[File]) -> Sequence[FileDigests]:
        """What files say of their own bytes, for formats that compare it in every load, whatever
        ``verify`` is; a manifest and a hub go before it.

        Args:
            files: those that are read.
        """
        return ()

    @abstractmethod
    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Give the checkpoint's tensors to the model."""

    def catalogue(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the checkpoint as (name, LazyTensor), in file order. Reads headers only.

        Raises:
            NotImplementedError: this loader has none (its rows are opaque).
        """
        raise NotImplementedError(f"{type(self).__name__} has no catalogue")

    def offers(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor | Offered]]:
        """The catalogue, where a loader can as entries that no tensor is made of yet."""
        return self.catalogue(model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The catalogue as the model takes it: wrapper components removed, the plan looking on."""
        weights = list(self.offers(model_config))
        names, renamed = [name for name, _ in weights], dict[str, str]()
        if any_wrapped(names):
            parts = {part for _, module in named_modules(model) for part in module._modules}
            renamed = strip_wrappers(names, parts)
        named = ((renamed.get(name, name), tensor) for name, tensor in weights)
        recorder = active_recorder()
        return observed(named) if recorder is None else recorder.observe(named)

    def give(
        self,
        model: nn.Module,
        weights: Iterable[tuple[str, torch.Tensor | Offered]],
        renamed: Callable[[Iterator[tuple[str, Any]]], Iterator[tuple[str, Any]]],
    ) -> None:
        """Give a model weights under other names than the checkpoint's.

        Args:
            model: it places them by its own ``load_weights``.
            weights: as the catalogue has them; the plan knows them by these names.
            renamed: gives them new names, and numbers made of theirs. Names are ``ShardedName``s
                that are ``like`` the checkpoint's.
        """
        recorder = active_recorder()
        if recorder is None:
            changed = observed(renamed(iter(weights)))
        else:
            changed = recorder.observe(weights, then=renamed)
        model.load_weights(changed)  # type: ignore[operator]  # every model has it

    def load_model(self, config: LoadkitConfig, prefix: str = "") -> nn.Module:
        """The whole line for one model: build, plan, read, finish.

        Args:
            config: the bundle; its ``parallel_config`` says which rank.
            prefix: put before the module names that layers are told.

        Raises:
            OptionError: ``load_config`` has options of ranks that load together.
            LoadkitError: whatever else stands against the load.
        """
        from loadkit.load_group import load_group
        from loadkit.loader import run_line
        from loadkit.resolve import job_for_loader

        with load_group(None, config.parallel_config, self.load_config) as alone:
            return run_line(job_for_loader(self, config, prefix), ranks=alone).model


def get_model_loader(load_config: LoadConfig) -> BaseModelLoader:
    """The loader of ``load_config.load_format``.

    Raises:
        UnknownNameError: no such load format; names the nearest and what is installed.
        NotInstalledError: a known one whose distribution is missing; says the pip line.
        PluginError: its plugin failed to import.
    """
    from loadkit import tables

    if load_config.load_format == "auto":
        raise UnknownNameError(
            "load_format 'auto' is decided from the source's files: use loadkit.load, or name one "
            f"of {', '.join(tables.loaders.names())}"
        )
    loader_class: Any = tables.loaders.lookup(load_config.load_format)
    loader: BaseModelLoader = loader_class(load_config)
    return loader


def get_model(config: LoadkitConfig, prefix: str = "") -> nn.Module:
    """The model that a bundle describes, loaded: ``get_model_loader`` and ``load_model``.

    Raises:
        OptionError: ``load_config`` has options of ranks that load together.
        LoadkitError: whatever else stands against the load.
    """
    from loadkit.load_group import load_group
    from loadkit.loader import run_line
    from loadkit.resolve import resolve_config

    with load_group(None, config.parallel_config, config.load_config) as alone:
        return run_line(resolve_config(config, prefix), ranks=alone).model
