"""``GGUFModelLoader``: one GGUF file, or a split one, is all a load needs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from loadkit.base_loader import BaseModelLoader
from loadkit.errors import LoadkitError, ModelError, WeightLoadError
from loadkit.file_checks import show
from loadkit.hf_config import MAX_CONFIG_BYTES, parse_config
from loadkit.model_config import ModelConfig
from loadkit.options import OptionSpec
from loadkit.sharded_name import ShardedName
from loadkit.tracing.encoded import encoded_lazy
from loadkit.tracing.lazy_tensor import lazy_from_info
from loadkit_gguf.architectures import find_architecture
from loadkit_gguf.config import architecture_of, read_config
from loadkit_gguf.encodings import ENCODINGS
from loadkit_gguf.header import GGUFHeader, read_gguf_header
from loadkit_gguf.names import GGUFMapper
from loadkit_gguf.splits import find_first_file, read_parts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loadkit.config import LoadConfig
    from loadkit.quantization import QuantizationConfig
    from loadkit.save import SaveReport
    from loadkit.sources.base import File, Source
    from loadkit.tokenization import Tokenizer
    from loadkit_gguf.tensor_entries import GGUFTensor

__all__ = ["GGUFModelLoader", "HeaderSummary"]

Named = tuple[str, "torch.Tensor"]

_SHOWN = 200  # characters of a long text, and elements up to which an array is shown


class HeaderSummary(NamedTuple):
    """A header as ``loadkit inspect`` shows it: arrays by their length."""

    tensors: tuple[GGUFTensor, ...]
    metadata: dict[str, Any]


class GGUFModelLoader(BaseModelLoader):
    """Config, tokenizer and tensors from GGUF files.

    Quantised blocks are decoded as they land, or stay packed with ``quantization="gguf"``.

    Names become Hugging Face's, and numbers what Hugging Face stores, by the model class's
    ``gguf_mapper`` or else by that of the file's architecture.
    """

    options: ClassVar[Mapping[str, OptionSpec]] = {}
    load_options: ClassVar[frozenset[str]] = frozenset(
        {"allow_patterns_overrides", "gguf_misaligned", "ignore_patterns"}
    )

    _parts: list[GGUFHeader] | None = None

    @classmethod
    def read_model_config(
        cls, source: Source, load_config: LoadConfig, **options: Any
    ) -> ModelConfig:
        """The config that the file's keys describe; a config.json beside the file goes before it.

        Raises:
            NoWeightsError: there is no GGUF file, or more than one model.
            FormatError: a header breaks a rule, or a part is missing (E_SPLIT).
            ConfigFileError: E_CONFIG, keys are missing (all are named) or cannot be.
            ArchitectureError: the architecture is unknown, and no class was named.
        """
        first, _ = find_first_file(source, load_config)
        parts = read_parts(source, first)
        overrides = options.get("hf_overrides") or {}
        stated, file = _config_beside(source), "config.json"
        if stated is None:
            own_rope = bool({"rope_scaling", "rope_parameters"} & {*overrides})
            named = options.get("architecture")
            stated = read_config(parts, named=named, own_rope=own_rope)
            file = first
        else:
            names = {tensor.name for part in parts for tensor in part.tensors}
            stated.setdefault("tie_word_embeddings", "output.weight" not in names)
        return ModelConfig.from_dict(
            stated, source=source.uri, load_config=load_config, config_file=file, **options
        )

    @classmethod
    def read_tokenizer(cls, source: Source, load_config: LoadConfig | None = None) -> Tokenizer:
        """The tokenizer of the file's own vocabulary.

        Raises:
            FormatError: E_TOKENIZER, it holds none, or a broken one.
        """
        from loadkit.tokenization import from_gguf

        first, _ = find_first_file(source, load_config or source.load_config)
        header = read_gguf_header(source.open(first))
        return from_gguf(header.metadata, file=first)

    @classmethod
    def read_header(cls, file: File) -> HeaderSummary:
        """One file's tensors and keys, for people."""
        header = read_gguf_header(file)
        return HeaderSummary(header.tensors, {k: _brief(v) for k, v in header.metadata.items()})

    def download_model(self, model_config: ModelConfig) -> None:
        """Choose the files and read their headers, so that what is missing is known first."""
        self._read_parts()

    def get_quant_config(self, model_config: ModelConfig) -> QuantizationConfig | None:
        """None, unless one was asked for: numbers are decoded, whatever a config.json says of them.

        Raises:
            OptionError: ``quantization="gguf"``, and the dtype is none that blocks decode to.
        """
        if model_config.quantization is None:
            return None
        if model_config.quantization != "gguf":
            return super().get_quant_config(model_config)
        from loadkit.quantization import check_act_dtype
        from loadkit_gguf.packed_table import PackedTable
        from loadkit_gguf.quantization import GGUFConfig

        check_act_dtype(GGUFConfig, model_config)
        tensors = [tensor for part in self._read_parts() for tensor in part.tensors]
        mapper = self._mapper(self.model_class)
        table = PackedTable.of(tensors, mapper, self.model_class, model_config.hf_text_config)
        return GGUFConfig(table, misaligned=self.load_config.gguf_misaligned)

    def catalogue(self, model_config: ModelConfig) -> Iterator[Named]:
        """Every tensor under its GGUF name, in file order; quantised ones are lazy float32.

        Raises:
            FormatError: a header breaks a rule, a part is missing (E_SPLIT), or nothing decodes a
                tensor's type (E_DTYPE).
        """
        yield from self._offered(frozenset())

    @staticmethod
    def save_model(model: nn.Module, path: str | os.PathLike[str], **options: Any) -> SaveReport:
        """Write a model as GGUF: see ``loadkit_gguf.export.save_gguf``."""
        from loadkit_gguf.export import save_gguf

        return save_gguf(model, path, **options)

    def _offered(self, packed: Collection[str]) -> Iterator[Named]:
        """The catalogue; those in ``packed`` are the bytes of their rows, as the file has them."""
        for part in self._read_parts():
            for tensor in part.tensors:
                yield tensor.name, _rows(tensor) if tensor.name in packed else _lazy(tensor)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Give the model every tensor under its Hugging Face name, with Hugging Face's numbers.

        Raises:
            ModelError: neither the model class nor loadkit has a mapper for the architecture.
        """
        mapper = self._mapper(type(model))
        offered: list[Named] = []
        for name, tensor in self._offered(self._packed(model, model_config)):
            if mapper.map_name(name) is None:
                self.skipped_tensors[name] = _reason(mapper, name)
            else:
                offered.append((name, tensor))
        hf_config = model_config.hf_text_config

        def as_hugging_face_has_it(weights: Iterable[Named]) -> Iterator[Named]:
            for name, tensor in weights:
                hf_name = mapper.map_name(name)
                if hf_name is not None:
                    changed = _transformed(mapper, name, hf_name, tensor, hf_config)
                    yield ShardedName(hf_name, like=name), changed

        self.give(model, offered, as_hugging_face_has_it)

    def _packed(self, model: nn.Module, model_config: ModelConfig) -> Collection[str]:
        """The tensors that the model takes as bytes."""
        if model_config.quantization != "gguf":
            return frozenset()
        from loadkit_gguf.quantization import packed_tensors, report_misaligned

        report_misaligned(model, model_config.hf_text_config)
        return packed_tensors(model)

    def _mapper(self, model_class: type[nn.Module]) -> GGUFMapper:
        """The model class's own mapper, or the architecture's."""
        own = getattr(model_class, "gguf_mapper", None)
        if own is not None:
            if not isinstance(own, GGUFMapper):
                raise ModelError(
                    f"{model_class.__qualname__}.gguf_mapper has no map_name and transform"
                )
            return own
        first = self._read_parts()[0]
        architecture = architecture_of(first)
        known = find_architecture(architecture, first.metadata)
        if known is None:
            raise ModelError(
                f"{model_class.__qualname__} has no gguf_mapper, and loadkit-gguf has none for the "
                f"GGUF architecture {show(architecture)}",
                file=first.file.name,
                hint="give the class an attribute gguf_mapper: loadkit_gguf.names.TableMapper(...)",
            )
        return known.mapper

    def _read_parts(self) -> list[GGUFHeader]:
        """Every file's header, once; all are checked before any tensor is offered."""
        if self._parts is None:
            first, skipped = find_first_file(self.source, self.load_config)
            parts = read_parts(self.source, first)
            self._parts = parts
            self.files = [part.file.name for part in parts]
            self.skipped_files.update(
                {name: reason for name, reason in skipped.items() if name not in self.files}
            )
        return self._parts


def _lazy(tensor: GGUFTensor) -> torch.Tensor:
    """A tensor's numbers, not read yet."""
    if tensor.kind.dtype is not None:
        return lazy_from_info(tensor.info())
    encoding = ENCODINGS.get(tensor.kind.name)
    if encoding is None:
        raise ModelError(
            f"tensor {show(tensor.name)} is {tensor.kind.name}, which only kernels use and "
            "nothing decodes",
            code="E_DTYPE",
            file=tensor.file.name,
            tensor=tensor.name,
            offset=tensor.offset,
        )
    return encoded_lazy(tensor.info(), encoding, tensor.shape)


def _rows(tensor: GGUFTensor) -> torch.Tensor:
    """A tensor's rows as bytes, not read yet: uint8 [..., bytes of a row]."""
    row = tensor.shape[-1] // tensor.kind.block * tensor.kind.block_bytes
    return lazy_from_info(replace(tensor.info(), dtype="U8", shape=(*tensor.shape[:-1], row)))


def _transformed(
    mapper: GGUFMapper, name: str, hf_name: str, tensor: torch.Tensor, hf_config: Any
) -> torch.Tensor:
    try:
        return mapper.transform(hf_name, tensor, hf_config)
    except LoadkitError:
        raise
    except Exception as error:
        raise WeightLoadError(
            f"the gguf_mapper failed on tensor {show(name)} {list(tensor.shape)}: "
            f"{type(error).__name__}: {error}",
            tensor=name,
            parameter=hf_name,
        ) from error


def _reason(mapper: GGUFMapper, name: str) -> str:
    say = getattr(mapper, "reason", None)
    found = say(name) if callable(say) else None
    return found if isinstance(found, str) and found else "left out by the model's gguf_mapper"


def _config_beside(source: Source) -> dict[str, Any] | None:
    """config.json, if there is one that names an architecture."""
    info = next((info for info in source.list() if info.name == "config.json"), None)
    if info is None:
        return None
    opened = source.open(info.name)
    values = parse_config(opened.read(0, min(opened.size, MAX_CONFIG_BYTES + 1)), file=info.name)
    return values if values.get("architectures") else None


def _brief(value: Any) -> Any:
    """A key's value for people: long texts cut, long arrays by their length."""
    if isinstance(value, str):
        return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}... ({len(value)} characters)"
    if isinstance(value, (bool, int, float)):
        return value
    if len(value) <= 8:
        return [_brief(item.item() if hasattr(item, "item") else item) for item in value]
    kind = "strings" if not hasattr(value, "dtype") else value.dtype.name
    return f"[{len(value)} {kind}]"
