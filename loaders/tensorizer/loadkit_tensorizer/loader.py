"""``TensorizerLoader``: tensorizer files of a whole model, or of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from loadkit.base_loader import BaseModelLoader
from loadkit.errors import OptionError
from loadkit.file_checks import show
from loadkit.manifest import Manifest, Topology
from loadkit.options import OptionSpec
from loadkit.rank_files.by_key import place_by_key
from loadkit.rank_files.loading import check_layout, saved_quant_config, without_doubles
from loadkit.tensor_info import TensorInfo
from loadkit.tracing.given import Given
from loadkit.tracing.lazy_tensor import Offered, generated
from loadkit.tracing.recorder import active_recorder
from loadkit.tracing.storage import GeneratedLeaf
from loadkit_tensorizer.decoded import check_key, decoded
from loadkit_tensorizer.digests import digests_of
from loadkit_tensorizer.entries import Entry, Index
from loadkit_tensorizer.found import Found, find
from loadkit_tensorizer.header import read_index
from loadkit_tensorizer.library import library
from loadkit_tensorizer.options import LOAD_OPTIONS, SAVE_OPTIONS
from loadkit_tensorizer.streams import StreamedFile, open_uri
from loadkit_tensorizer.tensor_header import TensorHeader, read_tensor_headers

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loadkit.config import LoadConfig
    from loadkit.integrity.digests import FileDigests
    from loadkit.model_config import ModelConfig
    from loadkit.quantization import QuantizationConfig
    from loadkit.save import SaveReport
    from loadkit.sources.base import File
    from loadkit.tracing.view import View

__all__ = ["HeaderSummary", "TensorizerLoader"]


class HeaderSummary(NamedTuple):
    """A file's head as ``loadkit inspect`` shows it."""

    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, Any]


class TensorizerLoader(BaseModelLoader):
    """Loads files that the tensorizer library writes.

    A plain file is read by loadkit: its tensors are catalogued with their places, a rank's parts
    are read straight into parameters, and every tensor of which any byte is used is compared with
    the hash in its header (``verify_hash``). What is encrypted, or lies behind a URI, comes
    through the library, as real data.

    A file without a rank's place in its name is of the whole model, under a checkpoint's names:
    the model's own loading code cuts it, at any topology. With one (``model-rank-%03d.tensors``)
    each rank's file holds what that rank holds, and is placed by name.
    """

    options: ClassVar[Mapping[str, OptionSpec]] = LOAD_OPTIONS
    load_options: ClassVar[frozenset[str]] = frozenset()

    _found: Found | None = None
    _index: Index | None = None
    _headers: Sequence[TensorHeader] = ()

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        readers = self.extra_config["num_readers"]
        if readers is not None:
            self.load_config = replace(load_config, num_threads=int(readers))

    @classmethod
    def read_header(cls, file: File) -> HeaderSummary:
        """One file's tensors, for people; nothing is compared."""
        index = read_index(file)
        tensors = tuple(_info(index, entry) for entry in index.entries)
        metadata = {"version": index.version, "encrypted": index.encrypted}
        return HeaderSummary(tensors, metadata)

    # -- what is there -------------------------------------------------------------------------

    def download_model(self, model_config: ModelConfig) -> None:
        """Find the file, and check everything that it says of itself.

        Raises:
            NoWeightsError: there is none.
            ShardedError: a rank's file is missing, or the files are of another topology.
            FormatError, TruncatedError, IntegrityError: the file breaks a rule.
            OptionError: options that do not fit the file.
        """
        self._open()

    def _open(self) -> Index:
        if self._index is not None:
            return self._index
        asked = Topology.of(self.parallel)
        rank = asked.rank_of(self.parallel)
        given = self.extra_config["tensorizer_uri"]
        found = find(self.source, self.load_config, given, asked, rank)
        self.source, self._found = found.source, found
        self._check_options(found)
        if found.names:
            file: File = self.source.open(found.names[0])
            self.files = list(found.names)
        else:
            file = open_uri(found.uri, _shown(found.uri), self.extra_config)
        try:
            index = read_index(file)
            check_key(index, self.extra_config["encryption_keyfile"])
            if found.names:  # of a URI they are checked as they pass
                self._headers = read_tensor_headers(index, verify=self._verifies)
            self._check_readers(index)
            if self._is_decoded(index):
                library()  # it is there
        except BaseException:
            if not found.names:
                file.close()
            raise
        self.skipped_files.update(found.skipped)
        self.by_key = found.per_rank
        manifest = found.manifest
        self.processed = manifest is not None and manifest.layout == "runtime-processed"
        if manifest is not None:
            self.whole_tensors = _whole_tensors(manifest)
        self._index = index
        return index

    def _check_options(self, found: Found) -> None:
        """Options of s3:// are set for nothing else."""
        given = [name for name in LOAD_OPTIONS if name.startswith("s3_")]
        given = [name for name in given if self.extra_config[name] is not None]
        if given and not found.uri.lower().startswith("s3://"):
            raise OptionError(
                f"{given[0]} is of s3:// URIs; what is read is "
                f"{show(_shown(found.uri) or found.names[0])}",
                detail={"option": given[0]},
                hint=f"leave {', '.join(given)} out",
            )

    def _check_readers(self, index: Index) -> None:
        """Several threads read plain files of a source."""
        if (self.extra_config["num_readers"] or 1) > 1 and self._is_decoded(index):
            raise OptionError(
                f"num_readers is of plain files; {show(index.file.name)} is read through the "
                "library, from begin to end",
                detail={"option": "num_readers"},
                hint="leave num_readers out",
            )

    def _is_decoded(self, index: Index) -> bool:
        """Whether the library gives its tensors."""
        return index.encrypted or not (self._found and self._found.names)

    @property
    def _verifies(self) -> bool:
        return bool(self.extra_config["verify_hash"])

    @property
    def reads_checkpoint(self) -> bool:  # type: ignore[override]
        """Whether its tensors are a checkpoint's, and not a rank's parameters."""
        return not self.by_key

    @property
    def manifest(self) -> Manifest | None:
        """Of rank files, if there is one."""
        self._open()
        return None if self._found is None else self._found.manifest

    def get_quant_config(self, model_config: ModelConfig) -> QuantizationConfig | None:
        """The quantisation that rank files were saved in; the checkpoint's for a whole model.

        Raises:
            ConfigFileError: what the manifest says of it is wrong, or another one was asked for.
        """
        return saved_quant_config(self.manifest, model_config, super().get_quant_config)

    def own_digests(self, files: Sequence[File]) -> Sequence[FileDigests]:
        """The hashes of the tensors' headers, of other ranks' files too."""
        own = self._open()
        if not self._verifies or self._is_decoded(own):
            return ()
        return [
            digests_of(
                file,
                self._headers
                if file is own.file
                else read_tensor_headers(read_index(file), verify=True),
            )
            for file in files
        ]

    # -- loading -------------------------------------------------------------------------------

    def catalogue(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the file, in file order; of a file that the library reads, as real data.

        Raises:
            LoadkitError: as ``download_model``; the library failed.
        """
        for name, offered in self.offers(model_config):
            yield name, offered.tensor() if isinstance(offered, Offered) else offered

    def offers(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor | Offered]]:
        index = self._open()
        if self._is_decoded(index):
            key = check_key(index, self.extra_config["encryption_keyfile"])
            try:
                yield from _unrecorded(decoded(index, key, verify=self._verifies))
            finally:
                if isinstance(index.file, StreamedFile):
                    index.file.release()
            return
        for entry in index.entries:
            yield entry.name, _zeros(entry) if entry.is_meta else Offered(_info(index, entry))

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Let the model place a checkpoint's tensors, or place a rank's by their names."""
        if not self.by_key:
            model.load_weights(  # type: ignore[operator]  # every model has it
                self.get_all_weights(model_config, model)
            )
            return
        manifest = self.manifest
        if self.processed:
            check_layout(model, manifest)
        weights = self.catalogue(model_config)
        tied: Mapping[str, str] = {}
        if manifest is None:
            weights = without_doubles(model, weights, self.skipped_tensors)
        else:
            entry = manifest.rank(Topology.of(self.parallel).rank_of(self.parallel))
            tied = {} if entry is None else entry.tied
        place_by_key(model, weights, tied=tied, processed=self.processed)

    @classmethod
    def save_model(cls, model: nn.Module, path: Any, **options: Any) -> SaveReport:
        """See ``loadkit.save`` with ``save_format="tensorizer"``."""
        from loadkit_tensorizer.save import save_model

        return save_model(model, path, SAVE_OPTIONS, **options)


def _unrecorded(
    tensors: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """What the library computes is no part of what a model's loading code does."""
    recorder = active_recorder()
    while True:
        with recorder.paused() if recorder is not None else nullcontext():
            found = next(tensors, None)
        if found is None:
            return
        yield found


def _info(index: Index, entry: Entry) -> TensorInfo:
    return TensorInfo(entry.name, index.file, entry.start, entry.nbytes, entry.shape, entry.dtype)


def _zeros(entry: Entry) -> torch.Tensor:
    """A tensor that is stored as a shape."""
    from loadkit.tensor_info import torch_dtype

    dtype = torch_dtype(entry.dtype)

    def make(view: View) -> torch.Tensor:
        import torch

        return torch.zeros(view.size, dtype=dtype)

    return generated(GeneratedLeaf(entry.name, entry.shape, dtype, make))


def _whole_tensors(manifest: Manifest) -> dict[str, Given]:
    from loadkit.tensor_info import torch_dtype

    return {
        name: Given(one.shape, torch_dtype(one.dtype), one.stored or name)
        for name, one in manifest.tensors.items()
    }


def _shown(uri: str) -> str:
    """A URI without what may be secret in it."""
    scheme, mark, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path.partition('?')[0]}"
