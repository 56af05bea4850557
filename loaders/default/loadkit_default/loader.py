"""``DefaultModelLoader``: safetensors as Hugging Face saves them, single, indexed or sharded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from loadkit.base_loader import BaseModelLoader
from loadkit.errors import FormatError
from loadkit.file_checks import show
from loadkit.load_strategy import SAFETENSORS_OPTIONS
from loadkit.multithread import MULTITHREAD_OPTIONS, multithread
from loadkit.options import OptionSpec
from loadkit.safetensors_format import SafetensorsHeader, read_header
from loadkit.tensor_info import DTYPES, TensorInfo
from loadkit.tracing.lazy_tensor import Offered
from loadkit_default.weight_files import WeightFiles, check_against_index, find_weight_files

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loadkit.config import LoadConfig
    from loadkit.model_config import ModelConfig

__all__ = ["DefaultModelLoader"]

logger = logging.getLogger(__name__)


class DefaultModelLoader(BaseModelLoader):
    """Reads the headers of a source's safetensors files and offers every tensor once.

    Attributes:
        weight_files: the files that were chosen and why, once ``catalogue`` has run.
    """

    options: ClassVar[Mapping[str, OptionSpec]] = MULTITHREAD_OPTIONS
    load_options: ClassVar[frozenset[str]] = SAFETENSORS_OPTIONS | {
        "allow_patterns_overrides",
        "ignore_index",
        "ignore_patterns",
    }

    weight_files: WeightFiles | None = None
    _headers: list[SafetensorsHeader] | None = None

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self.multithread = multithread(load_config, self.extra_config)
        if self.multithread is not None:
            self.load_config = replace(load_config, num_threads=self.multithread.threads)

    def download_model(self, model_config: ModelConfig) -> None:
        """Choose the files and read their headers, so that what is missing is known first."""
        self._read_headers()

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Give the model every tensor of the files, through its own ``load_weights``."""
        weights = self.get_all_weights(model_config, model)
        model.load_weights(weights)  # type: ignore[operator]  # every model has it

    def catalogue(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the chosen files, file by file, in the order they lie in.

        Raises:
            NoWeightsError: no file of the load format.
            IndexFileError: the index and the files disagree; all disagreements are listed.
            FormatError: a header breaks a rule; a name is in two files and no index says which
                counts (E_DUPLICATE); torch lacks a dtype (E_DTYPE).
        """
        return ((name, offer.tensor()) for name, offer in self.offers(model_config))

    def offers(self, model_config: ModelConfig) -> Iterator[tuple[str, Offered]]:
        return ((info.name, Offered(_as_torch_counts(info))) for info in self.infos())

    def infos(self) -> list[TensorInfo]:
        """The header entries behind ``catalogue``, same order, same errors."""
        headers = self._read_headers()
        index = self.weight_files.index if self.weight_files else None
        found: dict[str, TensorInfo] = {}
        for header in headers:
            for info in header.tensors:
                if index is not None and index[info.name] != info.file.name:
                    kept = index[info.name]
                    self.skipped_tensors[f"{info.name} in {info.file.name}"] = (
                        f"the index names {kept} for it"
                    )
                    continue
                other = found.setdefault(info.name, info)
                if other is not info:
                    raise _in_two_files(other, info)
        return list(found.values())

    def _read_headers(self) -> list[SafetensorsHeader]:
        """Every chosen file's header, once; all are checked before any tensor is offered."""
        if self._headers is None:
            chosen = find_weight_files(self.source, self.load_config, self.load_config.load_format)
            headers = [read_header(self.source.open(name)) for name in chosen.files]
            check_against_index(headers, chosen)
            self.weight_files, self._headers = chosen, headers
            self.files = list(chosen.files)
            self.skipped_files.update(chosen.skipped)
        return self._headers


def _as_torch_counts(info: TensorInfo) -> TensorInfo:
    """The entry; two packed 4-bit elements are one element in torch."""
    if DTYPES[info.dtype][0] != 4:
        return info
    return replace(info, shape=(*info.shape[:-1], info.shape[-1] // 2))


def _in_two_files(first: TensorInfo, second: TensorInfo) -> FormatError:
    return FormatError(
        f"tensor {show(first.name)} is in {show(first.file.name)} and in "
        f"{show(second.file.name)}, and no index says which counts",
        code="E_DUPLICATE",
        file=second.file.name,
        tensor=first.name,
        offset=second.offset,
        detail={"files": [first.file.name, second.file.name]},
        hint="name the right files in allow_patterns_overrides",
    )
