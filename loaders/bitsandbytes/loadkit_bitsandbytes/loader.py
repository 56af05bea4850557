"""``BitsAndBytesModelLoader``: quantised checkpoints as they are, others quantised as they load.

Another load format brings the tensors (``weights_from``; Hugging Face's files unless said
otherwise). This one finds the quantised matrices among them, gives the parts of each to the layer
that holds them packed, and decodes what no layer does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from loadkit import tables
from loadkit.base_loader import BaseModelLoader, Checksum
from loadkit.errors import ConfigFileError, OptionError, UsageError
from loadkit.multithread import MULTITHREAD_OPTIONS
from loadkit.name_hints import strip_wrappers
from loadkit.options import OptionSpec, validate_extra_config
from loadkit.origin import origin_of
from loadkit.sharded_name import ShardedName
from loadkit.tracing.lazy_tensor import LazyTensor, Offered, lazy_from_info
from loadkit.tracing.misfit import report_misfit
from loadkit.tracing.observed import observed
from loadkit.tracing.recorder import active_recorder
from loadkit_bitsandbytes.library import require
from loadkit_bitsandbytes.options import LOADER_OPTIONS
from loadkit_bitsandbytes.survey import Offer, StoredMatrix, Survey, info_of, survey

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loadkit.config import LoadConfig
    from loadkit.model_config import ModelConfig
    from loadkit.quantization import QuantizationConfig
    from loadkit.save import SaveReport

__all__ = ["BitsAndBytesModelLoader"]

Named = tuple[str, Offer]

_SAID = "read while planning: it says how the matrix is stored"
_UNUSED = {"state", "weight_format"}  # roles that no parameter takes


class BitsAndBytesModelLoader(BaseModelLoader):
    """Loads bitsandbytes checkpoints, and quantises plain ones module by module.

    Whether a checkpoint is quantised is what its tensors say. Keys of ``options`` that it
    contradicts are refused; other keys of ``model_loader_extra_config`` are those of the load
    format that brings the tensors.
    """

    options: ClassVar[Mapping[str, OptionSpec]] = {
        "weights_from": OptionSpec(
            "weights_from", str, "hf", "load format that brings the tensors"
        ),
        "misaligned": OptionSpec(
            "misaligned",
            str,
            "error",
            "what becomes of a matrix that tp cuts inside a block",
            choices=("error", "requantise", "decode"),
        ),
        **LOADER_OPTIONS,
        **MULTITHREAD_OPTIONS,  # those of the load format that brings the tensors, as a rule
    }

    _survey: Survey | None = None

    def __init__(self, load_config: LoadConfig) -> None:
        require()
        given = load_config.model_loader_extra_config
        name = self.options["weights_from"].check(
            given.get("weights_from", "hf"), owner="model_loader_extra_config"
        )
        inner_class: Any = tables.loaders.lookup(name)
        if inner_class is type(self):
            raise OptionError(
                "weights_from is the load format that brings the tensors, not this one"
            )
        every = {**inner_class.options, **self.options}
        extra = validate_extra_config(every, given, load_config.load_format)
        ours = self.options.keys() - MULTITHREAD_OPTIONS.keys()
        own = {key: given[key] for key in given if key in ours}
        super().__init__(replace(load_config, model_loader_extra_config=own))
        self.extra_config = extra
        rest = {key: given[key] for key in given if key not in ours}
        self._inner: BaseModelLoader = inner_class(
            replace(load_config, load_format=name, model_loader_extra_config=rest)
        )
        self.multithread = self._inner.multithread
        self.load_config = replace(
            self._inner.load_config,
            load_format=load_config.load_format,
            model_loader_extra_config=given,
        )
        self.__dict__["load_options"] = inner_class.load_options
        self.skipped_tensors = self._inner.skipped_tensors
        self.skipped_files = self._inner.skipped_files

    def download_model(self, model_config: ModelConfig) -> None:
        """Have the files chosen and their headers read, and find what is quantised.

        Raises:
            FormatError: E_QUANT, what the checkpoint says of a quantised matrix cannot be.
        """
        self._inner.source, self._inner.parallel = self.source, self.parallel
        self._inner.download_model(model_config)
        self.files = self._inner.files
        self._found(model_config)

    def _found(self, model_config: ModelConfig) -> Survey:
        """What is quantised, under the names without wrappers."""
        if self._survey is None:
            weights = list(self.offers(model_config))
            plain = strip_wrappers([name for name, _ in weights], ())
            self._survey = survey((plain.get(name, name), offer) for name, offer in weights)
        return self._survey

    def get_quant_config(self, model_config: ModelConfig) -> QuantizationConfig:
        """How the checkpoint is quantised, or how it will be.

        Raises:
            ConfigFileError: config.json says one thing, and the tensors or the caller another.
        """
        from loadkit_bitsandbytes.config import BitsAndBytesConfig
        from loadkit_bitsandbytes.table import MatrixTable

        config = super().get_quant_config(model_config)
        if not isinstance(config, BitsAndBytesConfig):
            found = "no quantisation" if config is None else config.get_name()
            raise ConfigFileError(
                f"{model_config.config_file} says {found!r}, and load format 'bitsandbytes' was "
                "asked for",
                file=model_config.config_file,
                hint="leave load_format out",
            )
        stated: Mapping[str, Any] = model_config.quantization_config or {}
        matrices = self._found(model_config).matrices
        given = {
            key: self.extra_config[key]
            for key in LOADER_OPTIONS
            if self.extra_config.get(key) is not None
        }
        if matrices:
            _check_agreed(matrices.values(), stated, model_config.config_file)
            _check_agreed(matrices.values(), given, "model_loader_extra_config")
            config.table = MatrixTable.of(matrices.values(), self.model_class)
        if given:
            config.options = type(config).from_config({**stated, **_other_off(given)}).options
        config.misaligned = str(self.extra_config["misaligned"])
        return config

    def checksums(self, name: str) -> Sequence[Checksum]:
        return self._inner.checksums(name)

    def catalogue(self, model_config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the checkpoint under its own name, as it is stored."""
        return self._inner.catalogue(model_config)

    def offers(self, model_config: ModelConfig) -> Iterator[Named]:
        return self._inner.offers(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Give the model the parts of packed matrices, and all other numbers."""
        from loadkit_bitsandbytes.misaligned import report_misaligned

        report_misaligned(model, model_config.hf_text_config)
        weights = self.get_all_weights(model_config, model)
        model.load_weights(weights)  # type: ignore[operator]  # every model has it

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as the model takes them: wrapper components removed, the plan looking on."""
        found = self._found(model_config)
        weights = list(self.offers(model_config))
        parts = {part for module in model.modules() for part in module._modules}
        renamed = strip_wrappers([name for name, _ in weights], parts)
        named = ((renamed.get(name, name), offer) for name, offer in weights)
        kept = _taken_packed(model)

        def as_the_model_takes_them(offers: Iterator[Named]) -> Iterator[Named]:
            return _placed(found, kept, offers)

        recorder = active_recorder()
        if recorder is None:
            return observed(as_the_model_takes_them(named))
        return recorder.observe(named, then=as_the_model_takes_them)

    @classmethod
    def save_model(cls, model: nn.Module, path: Any, **options: Any) -> SaveReport:
        """Write a quantised model as Hugging Face does: what ``save_format="safetensors"`` writes.

        Raises:
            UsageError: QUANTIZED, the model's weights are not quantised by bitsandbytes.
        """
        from loadkit.save import save
        from loadkit_bitsandbytes.config import BitsAndBytesConfig

        origin = origin_of(model)
        config = None if origin is None else origin.config.quant_config
        if not isinstance(config, BitsAndBytesConfig):
            raise UsageError(
                f"{type(model).__name__} is not quantised by bitsandbytes",
                code="QUANTIZED",
                hint="load it with quantization='bitsandbytes' first",
            )
        extra = options.pop("extra_config", None)
        if extra:
            raise OptionError("save_format 'bitsandbytes' has no model_loader_extra_config")
        return save(model, path, **options)


def _placed(found: Survey, kept: Collection[str], offers: Iterator[Named]) -> Iterator[Named]:
    """Tensors under the names of parameters; matrices that are not ``kept`` packed as numbers."""
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    wanted: dict[str, set[str]] = {}
    for name, (base, role) in found.roles.items():
        if role not in _UNUSED and name != base:
            wanted.setdefault(base, {"weight"}).add(role)
    for name, offer in offers:
        place = found.roles.get(name)
        if place is None:
            yield name, offer
            continue
        base, role = place
        matrix = found.matrices[base]
        own_code = matrix.state is not None and matrix.state.scheme.own_code
        if role in _UNUSED or (role == "quant_map" and base not in kept and not own_code):
            report_misfit("METADATA", name=name, message=_SAID)
            if role == "quant_map":
                wanted[base].discard(role)
        else:
            tensor = _as_stored(matrix, role, offer)
            if base in kept:
                yield ShardedName(_called(base, role), like=name), tensor
                continue
            waiting.setdefault(base, {})[role] = tensor
        if base not in kept and waiting.get(base, {}).keys() == wanted.get(base):
            yield ShardedName(base, like=base), _decoded(matrix, waiting.pop(base))


def _decoded(matrix: StoredMatrix, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A matrix's numbers; torch takes 0.3 s of CPU to register the operator behind them."""
    from loadkit_bitsandbytes.decode import decoded

    return decoded(matrix, parts)


def _called(base: str, role: str) -> str:
    """The name that a part of a packed matrix has in the model."""
    if role == "weight":
        return base
    return f"{base.removesuffix('weight')}SCB" if role == "SCB" else f"{base}_{role}"


def _as_stored(matrix: StoredMatrix, role: str, offer: Offer) -> torch.Tensor:
    """A part of a matrix; the codes of a 4-bit one as bytes, whatever they are stored as."""
    import torch

    if role == "weight" and matrix.state is not None:
        info = info_of(offer)
        if info is not None:
            return lazy_from_info(replace(info, dtype="U8", shape=(info.nbytes,)))
        tensor = offer.tensor() if isinstance(offer, Offered) else offer
        if isinstance(tensor, LazyTensor) and tensor.dtype == torch.uint8:
            return tensor.view(-1)
        return tensor.reshape(-1).view(torch.uint8)
    return offer.tensor() if isinstance(offer, Offered) else offer


def _taken_packed(model: nn.Module) -> set[str]:
    """The matrices that a model's layers hold packed."""
    found: set[str] = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        taken = getattr(method, "taken", None)
        if callable(taken):
            found.update(taken(module))
    return found


def _other_off(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the caller said, and that the other number of bits is not meant then."""
    if given.get("load_in_8bit"):
        return {"load_in_4bit": None, "_load_in_4bit": None, **given}
    if given.get("load_in_4bit"):
        return {"load_in_8bit": None, "_load_in_8bit": None, **given}
    return dict(given)


def _check_agreed(matrices: Iterable[StoredMatrix], stated: Mapping[str, Any], who: str) -> None:
    """What is said of a quantised checkpoint is what its tensors are.

    Raises:
        ConfigFileError: it is not; names a tensor.
    """
    for matrix in matrices:
        state = matrix.state
        eight = stated.get("load_in_8bit")
        four = stated.get("load_in_4bit")
        kind = stated.get("bnb_4bit_quant_type")
        size = stated.get("bnb_4bit_blocksize")
        said: str | None = None
        if state is None and four:
            said = "load_in_4bit, and it is int8"
        elif state is not None and eight:
            said = "load_in_8bit, and it is in 4 bits"
        elif state is not None and not eight and kind not in (None, state.scheme.kind):
            said = f"bnb_4bit_quant_type {kind!r}, and it is {state.scheme.kind}"
        elif state is not None and size not in (None, state.scheme.blocksize):
            said = f"bnb_4bit_blocksize {size}, and it has blocks of {state.scheme.blocksize}"
        if said is not None:
            raise ConfigFileError(
                f"{who} says {said}: tensor '{matrix.name}'",
                file=who if who.endswith(".json") else None,
                tensor=matrix.name,
                hint="the tensors of a quantised checkpoint are not quantised again",
            )
