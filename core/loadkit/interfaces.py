"""What a model can do: marks a class carries, and questions about them. No torch here.

A model class derives from the marks that hold for it (``class Llama(nn.Module, SupportsPP)``), or
sets the attribute itself; the questions read the attribute only, so both ways count.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

__all__ = [
    "HasInnerState",
    "IsAttentionFree",
    "IsHybrid",
    "PoolingModel",
    "SupportsLoRA",
    "SupportsMultiModal",
    "SupportsPP",
    "SupportsQuant",
    "SupportsScoring",
    "SupportsTranscription",
    "TextGenerationModel",
    "capabilities",
    "has_inner_state",
    "is_attention_free",
    "is_hybrid",
    "is_pooling_model",
    "is_text_generation_model",
    "supports_lora",
    "supports_multimodal",
    "supports_pp",
    "supports_quant",
    "supports_scoring",
    "supports_transcription",
]


class SupportsLoRA:
    """Its layers take low-rank adapters."""

    supports_lora: ClassVar[bool] = True
    packed_modules_mapping: ClassVar[Mapping[str, Sequence[str]]] = {}
    embedding_modules: ClassVar[Mapping[str, str]] = {}


class SupportsPP:
    """It can hold a part of its layers, as one stage of a pipeline.

    ``forward`` takes ``intermediate_tensors`` on all stages but the first, and gives them on all
    but the last. ``make_empty_intermediate_tensors(tokens, dtype, device)`` makes room for them.
    """

    supports_pp: ClassVar[bool] = True


class SupportsMultiModal:
    """It takes images, audio or video beside text."""

    supports_multimodal: ClassVar[bool] = True


class SupportsTranscription:
    """It turns speech into text."""

    supports_transcription: ClassVar[bool] = True


class SupportsScoring:
    """It gives one score for a pair of texts."""

    supports_scoring: ClassVar[bool] = True


class SupportsQuant:
    """It tells quantisation methods which of its modules are fused."""

    supports_quant: ClassVar[bool] = True
    packed_modules_mapping: ClassVar[Mapping[str, Sequence[str]]] = {}


class PoolingModel:
    """Its output is pooled into vectors, scores or classes; it has a ``pooler``."""

    is_pooling_model: ClassVar[bool] = True


class TextGenerationModel:
    """It has ``compute_logits``."""

    is_text_generation_model: ClassVar[bool] = True


class HasInnerState:
    """It keeps a state between tokens that is no KV cache."""

    has_inner_state: ClassVar[bool] = True


class IsAttentionFree:
    """It has no attention."""

    is_attention_free: ClassVar[bool] = True


class IsHybrid:
    """Some of its layers are attention, some are not."""

    is_hybrid: ClassVar[bool] = True


def _marked(model: object, mark: str) -> bool:
    return getattr(model, mark, False) is True


def supports_lora(model: object) -> bool:
    """Whether a model (class or instance) takes low-rank adapters."""
    return _marked(model, "supports_lora")


def supports_pp(model: object) -> bool:
    """Whether it can be split by layers: marked so, and ``forward`` takes the other part's."""
    return _marked(model, "supports_pp") and _takes(model, "forward", "intermediate_tensors")


def supports_multimodal(model: object) -> bool:
    """Whether it takes more than text."""
    return _marked(model, "supports_multimodal")


def supports_transcription(model: object) -> bool:
    """Whether it turns speech into text."""
    return _marked(model, "supports_transcription")


def supports_scoring(model: object) -> bool:
    """Whether it scores pairs of texts."""
    return _marked(model, "supports_scoring")


def supports_quant(model: object) -> bool:
    """Whether it tells what it fuses."""
    return _marked(model, "supports_quant")


def has_inner_state(model: object) -> bool:
    """Whether it keeps a state that is no KV cache."""
    return _marked(model, "has_inner_state")


def is_attention_free(model: object) -> bool:
    """Whether it has no attention."""
    return _marked(model, "is_attention_free")


def is_hybrid(model: object) -> bool:
    """Whether only some of its layers are attention."""
    return _marked(model, "is_hybrid")


def is_pooling_model(model: object) -> bool:
    """Whether its output is pooled."""
    return _marked(model, "is_pooling_model")


def is_text_generation_model(model: object) -> bool:
    """Whether it gives logits of a next token: marked so, or it has ``compute_logits``."""
    if _marked(model, "is_text_generation_model"):
        return True
    return callable(getattr(model, "compute_logits", None)) and not is_pooling_model(model)


def capabilities(model: object) -> dict[str, Any]:
    """Every answer, as JSON-able values."""
    packed = getattr(model, "packed_modules_mapping", None)
    found: dict[str, Any] = {question.__name__: question(model) for question in _QUESTIONS}
    found["packed_modules_mapping"] = (
        {str(key): [str(part) for part in value] for key, value in packed.items()}
        if isinstance(packed, Mapping)
        else {}
    )
    return found


_QUESTIONS = (
    has_inner_state,
    is_attention_free,
    is_hybrid,
    is_pooling_model,
    is_text_generation_model,
    supports_lora,
    supports_multimodal,
    supports_pp,
    supports_quant,
    supports_scoring,
    supports_transcription,
)


def _takes(model: object, method: str, argument: str) -> bool:
    """Whether a method has an argument of that name, or takes any."""
    try:
        parameters = inspect.signature(getattr(model, method)).parameters
    except (AttributeError, TypeError, ValueError):
        return False
    open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return argument in parameters or open_ended
