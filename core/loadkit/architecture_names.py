"""What an architecture's name tells: its family, its task, and the table it is listed in."""

from __future__ import annotations

import re

__all__ = ["ALIASES", "ONCE_SUPPORTED", "TABLE_NAMES", "family_of", "split_task", "table_of"]

TABLE_NAMES = (
    "text_generation",
    "embedding",
    "multimodal",
    "speculative_decoding",
    "transformers_backend",
)

# Other spellings that checkpoints bear -> the name in the table.
ALIASES: dict[str, str] = {
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "LLaMaForCausalLM": "LlamaForCausalLM",
}

# Architectures that were taken out: name -> the last version that had it.
ONCE_SUPPORTED: dict[str, str] = {}

_SPECULATIVE = re.compile(r"(MTP|Eagle|Medusa|Speculator|DFlash)", re.IGNORECASE)
_TASKS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForRewardModel",
    "ForMaskedLM",
    "EmbeddingModel",
    "EncoderModel",
    "Model",
)
_GENERATES = ("ForCausalLM", "LMHeadModel")
_POOLS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForRewardModel",
    "ForMaskedLM",
    "EmbeddingModel",
    "EncoderModel",
    "Model",
)
# Text models whose task is named like a multimodal one.
_TEXT_TO_TEXT = ("T5", "MT5", "Bart", "MBart", "Pegasus", "Marian")


def split_task(architecture: str) -> tuple[str, str]:
    """The family and the task: ``("Llama", "ForCausalLM")``; the task is "" where none is known."""
    for task in _TASKS:
        if architecture.endswith(task) and len(architecture) > len(task):
            return architecture[: -len(task)], task
    return architecture, ""


def family_of(architecture: str) -> str:
    """The family as it is compared with a ``model_type``: lower case, letters and digits."""
    return re.sub(r"[^a-z0-9]", "", split_task(architecture)[0].lower())


def table_of(architecture: str) -> str:
    """The table of ``TABLE_NAMES`` that lists an architecture."""
    family, task = split_task(architecture)
    if architecture.startswith("Transformers"):
        return "transformers_backend"
    if _SPECULATIVE.search(architecture):
        return "speculative_decoding"
    if task in _GENERATES or (task == "ForConditionalGeneration" and family in _TEXT_TO_TEXT):
        return "text_generation"
    return "embedding" if task in _POOLS else "multimodal"
