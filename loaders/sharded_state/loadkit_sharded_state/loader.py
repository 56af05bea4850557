"""``ShardedStateLoader``: what a rank holds, from its own files; other topologies are cut anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from loadkit.base_loader import BaseModelLoader
from loadkit.load_strategy import SAFETENSORS_OPTIONS
from loadkit.manifest import Manifest, Topology
from loadkit.options import OptionSpec
from loadkit.rank_files.by_key import place_by_key
from loadkit.rank_files.contents import Contents, contents_of
from loadkit.rank_files.loading import check_layout, saved_quant_config, without_doubles
from loadkit.rank_files.unfinished import unfinished_problem
from loadkit.tensor_info import torch_dtype
from loadkit.tracing.given import Given
from loadkit_sharded_state.artefact import Artefact, open_artefact
from loadkit_sharded_state.assemble import Assembly, check_reshardable
from loadkit_sharded_state.pattern import DEFAULT_PATTERN, FilePattern

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loadkit.config import LoadConfig
    from loadkit.model_config import ModelConfig
    from loadkit.origin import Origin
    from loadkit.quantization import QuantizationConfig
    from loadkit.save import SaveReport
    from loadkit.sources.base import Source

__all__ = ["ShardedStateLoader"]


class ShardedStateLoader(BaseModelLoader):
    """Loads files of single ranks.

    At the topology that they were saved at, each rank takes its own files' tensors by key, which
    on a CPU are views of them. At another one the checkpoint's tensors are put together from all
    ranks' parts, and the model's own loading code cuts what this rank holds.
    """

    options: ClassVar[Mapping[str, OptionSpec]] = {
        "pattern": OptionSpec(
            "pattern",
            str,
            DEFAULT_PATTERN,
            "what the files are called where no manifest names them; {rank} and {part}",
        ),
    }

    load_options: ClassVar[frozenset[str]] = SAFETENSORS_OPTIONS

    save_options: ClassVar[Mapping[str, OptionSpec]] = {
        "save_id": OptionSpec(
            "save_id",
            str,
            "",
            "one word for the ranks of one save, where they are processes of no process group",
        ),
    }

    reads_checkpoint: ClassVar[bool] = False
    _artefact: Artefact | None = None
    _assembly: Assembly | None = None

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._pattern = FilePattern(str(self.extra_config["pattern"]))

    @classmethod
    def read_model_config(
        cls, source: Source, load_config: LoadConfig, **options: Any
    ) -> ModelConfig:
        """config.json; where a killed save left none, that is said.

        Raises:
            ShardedError: E_SHARDED, there is nothing but a save that was not finished.
        """
        listing = source.list()
        if all(info.name != "config.json" for info in listing):
            problem = unfinished_problem(source, listing)
            if problem is not None:
                raise problem
        return super().read_model_config(source, load_config, **options)

    # -- what is there -------------------------------------------------------------------------

    def download_model(self, model_config: ModelConfig) -> None:
        """Find the rank files, read their headers and decide how they are loaded.

        Raises:
            ShardedError: E_SHARDED, files or ranks are missing, a file is not what the manifest
                says, a tensor is not one whole, or they are of another topology and cannot be cut
                anew.
            FormatError: a header breaks a rule.
        """
        artefact, manifest = self.artefact, self.artefact.manifest
        asked = Topology.of(self.parallel)
        self.by_key = asked == artefact.topology
        self.processed = manifest is not None and manifest.layout == "runtime-processed"
        if self.by_key:
            artefact.tensors_of(self.rank)
            self.files = list(artefact.files[self.rank])
            if manifest is not None:
                self.whole_tensors = {
                    name: Given(one.shape, torch_dtype(one.dtype), one.stored or name)
                    for name, one in manifest.tensors.items()
                }
            return
        known = check_reshardable(manifest, str(asked), str(artefact.topology))
        self._assembly = Assembly(artefact, known, self.rank)
        self.files = [name for names in artefact.files.values() for name in names]

    @property
    def artefact(self) -> Artefact:
        """The rank files of the source."""
        if self._artefact is None:
            self._artefact = open_artefact(self.source, self._pattern)
        return self._artefact

    @property
    def manifest(self) -> Manifest | None:
        """Their manifest, if there is one."""
        return self.artefact.manifest

    @property
    def rank(self) -> int:
        """The number of this rank's files, at the topology that is loaded."""
        return Topology.of(self.parallel).rank_of(self.parallel)

    def get_quant_config(self, model_config: ModelConfig) -> QuantizationConfig | None:
        """The quantisation that the parameters were saved in.

        Raises:
            ConfigFileError: another one was asked for, the method is unknown, or what the manifest
                says of it is wrong.
        """
        return saved_quant_config(self.manifest, model_config, super().get_quant_config)

    # -- loading -------------------------------------------------------------------------------

    def catalogue(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's tensors by their parameters' names, or the checkpoint's, put together."""
        if self.by_key:
            for name, stored in self.artefact.tensors_of(self.rank).items():
                yield name, stored.lazy()
        elif self._assembly is not None:
            yield from self._assembly.tensors()

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Place this rank's tensors by key, or let the model cut the checkpoint's.

        Raises:
            ShardedError: the layout that post-processing makes here is another than was saved.
        """
        if not self.by_key:
            model.load_weights(  # type: ignore[operator]  # every model has it
                self.get_all_weights(model_config, model)
            )
            return
        entry = None if self.manifest is None else self.manifest.rank(self.rank)
        if self.processed:
            check_layout(model, self.manifest)
        weights = self.catalogue(model_config)
        if self.manifest is None:
            weights = without_doubles(model, weights, self.skipped_tensors)
        place_by_key(
            model,
            weights,
            tied={} if entry is None else entry.tied,
            processed=self.processed,
        )

    @classmethod
    def rank_contents(cls, model: nn.Module, origin: Origin | None, topology: Topology) -> Contents:
        """What the files of a planned rank hold: views of its parameters, and its manifest."""
        return contents_of(model, origin, topology, finished=False)

    @classmethod
    def rank_file(cls, rank: int, part: int) -> str:
        """The name of a rank's file number ``part``."""
        return FilePattern().name(rank, part)

    @classmethod
    def save_model(cls, model: nn.Module, path: Any, **options: Any) -> SaveReport:
        """See ``loadkit.save`` with ``save_format="sharded_state"``."""
        from loadkit_sharded_state.save import save_model

        return save_model(model, path, {**cls.options, **cls.save_options}, **options)
