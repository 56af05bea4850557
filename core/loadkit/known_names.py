"""Names that exist but may not be installed: which distribution has them, and its extra.

A miss in a table looks here, so that the error can say what to install.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["FIRST_PARTY", "KNOWN", "LIBRARIES", "Known", "canonical", "pip_line"]


class Known(NamedTuple):
    """Where a known name comes from: the distribution, and the umbrella's extra that pulls it."""

    distribution: str
    extra: str


def pip_line(extra: str) -> str:
    """The line that installs an extra of the umbrella; "" is the umbrella alone."""
    return f'pip install "loadkit[{extra}]"' if extra else "pip install loadkit"


def canonical(name: str) -> str:
    """A distribution's name as it is compared: lower case, one ``-`` for each run of ``-_.``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _from(extra: str, *names: str) -> dict[str, Known]:
    return dict.fromkeys(names, Known(f"loadkit-{extra}", extra))


# table -> name -> where it comes from
KNOWN: dict[str, dict[str, Known]] = {
    "loaders": {
        **_from("default", "hf", "safetensors", "pt", "mistral", "npcache"),
        **_from("dummy", "dummy"),
        **_from("gguf", "gguf"),
        **_from("bitsandbytes", "bitsandbytes"),
        **_from("tensorizer", "tensorizer"),
        **_from("sharded-state", "sharded_state", "runai_streamer_sharded"),
        **_from("runai-streamer", "runai_streamer"),
        **_from("fastsafetensors", "fastsafetensors"),
        **_from("instanttensor", "instanttensor"),
        **_from("modelexpress", "modelexpress"),
        **_from("dcp", "dcp"),
    },
    "models": {
        **_from(
            "models",
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "MixtralForCausalLM",
            "Gemma3ForCausalLM",
            "BertModel",
        ),
        **_from("transformers", "TransformersForCausalLM", "TransformersModel"),
    },
    "quantization": {
        **_from("gguf", "gguf"),
        **_from("bitsandbytes", "bitsandbytes"),
    },
    "sources": {
        **_from("hub", "hf", "modelscope"),
        **_from("remote", "s3", "gs", "az", "http", "https"),
        **_from("modelexpress", "mx"),
    },
    "readers": {
        **_from("runai-streamer", "runai"),
        **_from("fastsafetensors", "fastsafetensors"),
        **_from("instanttensor", "instanttensor"),
        **_from("modelexpress", "nixl"),
    },
}

# load format -> the library that its loader calls, as pip names it; the others call none
LIBRARIES: dict[str, str] = {
    "npcache": "numpy",
    "bitsandbytes": "bitsandbytes",
    "tensorizer": "tensorizer",
    "runai_streamer": "runai-model-streamer",
    "runai_streamer_sharded": "runai-model-streamer",
    "fastsafetensors": "fastsafetensors",
    "instanttensor": "instanttensor",
    "modelexpress": "modelexpress",
    "dcp": "torch",
}

# The distributions of this project: LOADKIT_PLUGINS does not switch them off.
FIRST_PARTY: frozenset[str] = frozenset(
    {"loadkit", "loadkit-core", "loadkit-layers", "loadkit-report", "loadkit-ray"}
    | {known.distribution for table in KNOWN.values() for known in table.values()}
)
