"""``ModelExpressLoader``: the load format ``modelexpress``, a chain of places weights come from."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch

from loadkit.errors import DownloadError, LoadkitError, OptionError, PathError, UsageError
from loadkit.options import OptionSpec
from loadkit.processed_layout import is_processed_layout
from loadkit.quantization import get_quant_config
from loadkit.rank_files.by_key import place_by_key, state_of
from loadkit.reader_loader import FilesLoader
from loadkit.sources import open_source
from loadkit.tensor_info import TensorInfo, bits_of
from loadkit.tracing.lazy_tensor import Offered
from loadkit_modelexpress.address import SCHEME, is_repo, parse_address, server_of
from loadkit_modelexpress.options import OPTIONS, P2P, SERVER, check_strategies
from loadkit_modelexpress.p2p.finding import Wanted, find_replica
from loadkit_modelexpress.p2p.identity import build_identity, rank_of
from loadkit_modelexpress.p2p.replica_file import ReplicaFile, ReplicaSource
from loadkit_modelexpress.p2p.transfer import LinkOptions, accelerator_of, require_nixl
from loadkit_modelexpress.settings import extra_config
from loadkit_modelexpress.source import ModelExpressSource

if TYPE_CHECKING:
    from torch import nn

    from loadkit.config import LoadConfig
    from loadkit.model_config import ModelConfig
    from loadkit.sources.base import Source

__all__ = ["ModelExpressLoader"]

logger = logging.getLogger(__name__)


class ModelExpressLoader(FilesLoader):
    """Weights from a replica's memory, a server's cache, or the source itself, as ``strategies``
    says; each step that was left is a warning of the report.

    Files are safetensors and take the way of every safetensors load. A replica holds parameters
    as this rank has them: they are placed by name, and nothing maps or cuts them.
    """

    options: ClassVar[Mapping[str, OptionSpec]] = OPTIONS
    load_options: ClassVar[frozenset[str]] = FilesLoader.load_options | {
        "network_deadline",
        "network_timeout",
    }

    _replica: ReplicaFile | None = None

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self.strategies = check_strategies(self.extra_config["strategies"])

    # -- where files are ---------------------------------------------------------------------------

    @classmethod
    def open_source(cls, source: str | os.PathLike[str], load_config: LoadConfig) -> Source:
        """The first place of the chain that has files: config and tokenizer come from there too.

        Raises:
            LoadkitError: of the last place; what went wrong at the others is in its notes.
        """
        chain = check_strategies(extra_config(load_config)["strategies"])
        files = [one for one in chain if one != P2P]
        if not files:
            return open_source(source, load_config)
        left: list[str] = []
        for number, one in enumerate(files):
            try:
                opened = _opened(one, source, load_config)
            except (DownloadError, PathError) as error:
                if number + 1 == len(files):
                    for remark in left:
                        error.add_note(remark)
                    raise
                left.append(_left(one, error))
                continue
            opened.remarks += left
            return opened
        raise OptionError("strategies is empty")

    def download_model(self, model_config: ModelConfig) -> None:
        """Find a replica where the chain begins with one, else the files and their headers."""
        if self.strategies[0] == P2P and self._replica is None:
            try:
                self._find_replica(model_config)
            except (DownloadError, UsageError, PathError) as error:
                if len(self.strategies) == 1 or isinstance(error, OptionError):
                    raise
                self.source.remarks.append(_left(P2P, error))
        if self._replica is None:
            super().download_model(model_config)

    @property
    def reads_checkpoint(self) -> bool:  # type: ignore[override]
        """Whether its tensors are a checkpoint's, and not a rank's parameters."""
        return self._replica is None

    def _find_replica(self, model_config: ModelConfig) -> None:
        """A replica's memory joins the source.

        Raises:
            UsageError: this load is none that a replica can serve, or NIXL is missing.
            DownloadError: there is no replica.
        """
        device = torch.device(self.device)
        if self.load_config.distribute or self.load_config.verify == "digest":
            raise UsageError(
                "distribute and verify='digest' are about files, and a replica has none",
                hint="leave them out, or p2p",
            )
        if model_config.dtype_name == "auto":
            raise UsageError(
                f"{model_config.config_file} names no dtype, and a replica is found by its dtype",
                hint="give dtype='bfloat16' or another",
            )
        if get_quant_config(model_config, self.load_config, source=self.source) is not None:
            raise UsageError(
                "the checkpoint is quantised, and descriptors say nothing of the shapes that a "
                "method makes",
                hint="load from files: strategies=['server']",
            )
        require_nixl(device)
        options = self.extra_config
        wanted = Wanted(
            server_of(options["server"], _named_server(self.source)),
            build_identity(
                self._model_name(),
                getattr(self.source, "commit", None) or self.load_config.revision or "",
                self.parallel,
                model_config.dtype_name,
                ",".join(model_config.architectures),
            ),
            rank_of(self.parallel),
            accelerator_of(device).name,
            options["selector"],
        )
        replica = find_replica(wanted, self.load_config)
        link = LinkOptions(
            options["transfer_timeout"], options["transfer_buffer"], options["nixl_port"]
        )
        self._replica = ReplicaFile(replica, self.load_config, link)
        self.source.remarks += [f"p2p: {one}" for one in replica.remarks]
        self.source = ReplicaSource(self.source, self._replica)
        self.files = [self._replica.name]
        self.by_key = self.processed = True

    def _model_name(self) -> str:
        """The name under which replicas are known.

        Raises:
            OptionError: a path says none.
        """
        given = self.extra_config["model_name"]
        if given:
            return str(given)
        uri = self.source.uri
        if uri.startswith((SCHEME, "hf://")):
            return parse_address(uri).model
        raise OptionError(
            "a replica is found by its model's name, and a path says none",
            detail={"option": "model_name"},
            hint="name it: model_name='org/name'",
        )

    # -- weights -----------------------------------------------------------------------------------

    def offers(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor | Offered]]:
        if self._replica is None:
            yield from super().offers(model_config)
            return
        for info in self._infos({}):
            yield info.name, Offered(info)

    def catalogue(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the files; of a replica as flat ones: descriptors have no shapes."""
        if self._replica is None:
            yield from super().catalogue(model_config)
            return
        for info in self._infos({}):
            yield info.name, Offered(info).tensor()

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        if self._replica is None:
            super().load_weights(model, model_config)
            return
        odd = [name for name, module in model.named_modules() if is_processed_layout(module)]
        if odd:
            raise UsageError(
                f"module {odd[0]!r} has a layout that post-processing makes, whose shapes "
                "descriptors do not tell",
                parameter=odd[0],
                hint="load from files: strategies=['server']",
            )
        shapes = {name: tuple(tensor.size()) for name, tensor in state_of(model).items()}
        infos = self._infos(shapes)
        weights = ((info.name, Offered(info).tensor()) for info in infos)
        place_by_key(model, weights, tied={}, processed=True)

    def _infos(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[TensorInfo]:
        """The replica's tensors in the model's shapes, where the bytes fit; else flat."""
        file = self._replica
        if file is None:
            return
        for one in file.replica.tensors:
            count = one.nbytes * 8 // bits_of(one.dtype)
            shape = shapes.get(one.name, (count,))
            if torch.Size(shape).numel() != count:
                shape = (count,)
            yield TensorInfo(one.name, file, one.start, one.nbytes, shape, one.dtype)


def _opened(strategy: str, source: str | os.PathLike[str], load_config: LoadConfig) -> Source:
    """A source as one strategy opens it."""
    text = os.fspath(source)
    if strategy == SERVER:
        if text.lower().startswith(SCHEME) or is_repo(text):
            return ModelExpressSource(text, load_config)
        raise OptionError(
            "a ModelExpress server knows models by name, and the source is a path",
            detail={"option": "strategies"},
            hint=f"give org/name or {SCHEME}host:port/org/name as the source, or strategies="
            "['source'] to read the path",
        )
    if text.lower().startswith(SCHEME):
        address = parse_address(text)
        text = address.model + (f"@{address.revision}" if address.revision else "")
    return open_source(text, load_config)


def _named_server(source: Source) -> str:
    """The server of a source that is on one."""
    return parse_address(source.uri).server if source.uri.startswith(SCHEME) else ""


def _left(strategy: str, error: LoadkitError) -> str:
    """What the report says of a step that was left."""
    return f"{strategy} was left: {error.message}"
