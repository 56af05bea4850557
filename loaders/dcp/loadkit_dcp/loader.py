"""``DcpLoader``: folders of ``torch.distributed.checkpoint``, of any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from loadkit.base_loader import BaseModelLoader, Checksum
from loadkit.errors import ConfigFileError
from loadkit.file_checks import show_path
from loadkit.options import OptionSpec, validate_extra_config
from loadkit.tracing.lazy_tensor import Offered
from loadkit_dcp.checkpoint import Checkpoint, is_metadata, open_checkpoint
from loadkit_dcp.summary import HeaderSummary, summary_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loadkit.config import LoadConfig
    from loadkit.model_config import ModelConfig
    from loadkit.save import SaveReport
    from loadkit.sources.base import File, Source

__all__ = ["DcpLoader"]


class DcpLoader(BaseModelLoader):
    """Loads what trainers save by ``torch.distributed.checkpoint.save``.

    A tensor is a set of boxes, each an item in a file of the rank that wrote it. It is put together
    lazily, the model's own loading code cuts what a rank holds, and of every box only that is read.
    What belongs to an optimizer is never looked at, and nothing is unpickled.
    """

    options: ClassVar[Mapping[str, OptionSpec]] = {
        "config_source": OptionSpec(
            "config_source",
            str,
            None,
            "folder or URI that has the model's config.json, where none lies beside the weights",
        ),
    }
    save_options: ClassVar[Mapping[str, OptionSpec]] = {
        "weights_key": OptionSpec(
            "weights_key", str, None, "write the tensors as a dict under this key, as trainers do"
        ),
    }
    load_options: ClassVar[frozenset[str]] = frozenset({"weights_key"})

    _checkpoint: Checkpoint | None = None

    @classmethod
    def read_header(cls, file: File, weights_key: str | None = None) -> HeaderSummary | None:
        """What a ``.metadata`` says, for people; a data file alone says nothing."""
        if not is_metadata(file.name.rpartition("/")[2]):
            return None
        return summary_of(file, weights_key)

    @classmethod
    def read_model_config(
        cls, source: Source, load_config: LoadConfig, **options: Any
    ) -> ModelConfig:
        """config.json beside the weights, or that of ``config_source``.

        Raises:
            ConfigFileError: there is none.
        """
        given = validate_extra_config(cls.options, load_config.model_loader_extra_config, "dcp")
        elsewhere = given["config_source"]
        if elsewhere is not None:
            from loadkit.sources import open_source

            with open_source(elsewhere, load_config) as other:
                return super().read_model_config(other, load_config, **options)
        if all(info.name != "config.json" for info in source.list()):
            raise ConfigFileError(
                f"{show_path(source.uri)} has no config.json: a checkpoint of "
                "torch.distributed.checkpoint holds weights and does not say of what model",
                file="config.json",
                hint="put the model's config.json into the folder, or name the folder or "
                'repository that has it: model_loader_extra_config={"config_source": "..."}',
            )
        return super().read_model_config(source, load_config, **options)

    def download_model(self, model_config: ModelConfig) -> None:
        """Read the metadata and what every item says of itself.

        Raises:
            LoadkitError: see ``open_checkpoint``.
        """
        self._open()

    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            found = open_checkpoint(self.source, self.load_config.weights_key)
            self._checkpoint = found
            self.files = list(found.files)
            self.skipped_tensors.update(found.skipped)
        return self._checkpoint

    def checksums(self, name: str) -> Sequence[Checksum]:
        """The CRC-32 that the items' archives keep."""
        return self._open().checksums(name)

    def catalogue(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the model, in file order, put together from its boxes.

        Raises:
            LoadkitError: see ``open_checkpoint``.
        """
        for name, offered in self.offers(model_config):
            yield name, offered.tensor() if isinstance(offered, Offered) else offered

    def offers(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor | Offered]]:
        yield from self._open().offers()

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Give the model every tensor, through its own ``load_weights``."""
        model.load_weights(  # type: ignore[operator]  # every model has it
            self.get_all_weights(model_config, model)
        )

    @classmethod
    def save_model(cls, model: nn.Module, path: Any, **options: Any) -> SaveReport:
        """See ``loadkit.save`` with ``save_format="dcp"``."""
        from loadkit_dcp.save import save_model

        return save_model(model, path, cls.save_options, **options)
