"""One line about a checkpoint's config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loadkit.cli.options import ModelRequest
from loadkit.cli.settings import read_settings

__all__ = ["config_summary"]

# key of the config -> how its value is shown
_SIZES = {
    "num_hidden_layers": "{} layers",
    "hidden_size": "hidden {}",
    "num_attention_heads": "{} heads",
    "num_key_value_heads": "{} kv heads",
    "intermediate_size": "ffn {}",
    "num_local_experts": "{} experts",
    "num_experts": "{} experts",
    "vocab_size": "vocab {}",
}


def config_summary(request: ModelRequest, load_format: str) -> str | None:
    """Family and sizes of the config that a load goes by, with the overrides.

    Args:
        request: what was asked for.
        load_format: the one that reads it: formats have their configs in different files.

    Raises:
        LoadkitError: the source or the config cannot be read.
    """
    from loadkit import tables
    from loadkit.resolve import open_for

    load_config, options, _ = read_settings(request.settings)
    if request.load_format != "auto":
        load_config = replace(load_config, load_format=request.load_format)
    loader: Any = tables.loaders.lookup(load_format)
    with open_for(request.source, load_config) as source:
        followed = replace(load_config, load_format=load_format)
        config = loader.read_model_config(
            source, followed, hf_overrides=options.get("hf_overrides", {})
        )
    text = config.hf_text_config
    found = [(shape, text.get(key)) for key, shape in _SIZES.items()]
    parts = [str(config.hf_config.get("model_type") or "no model_type")]
    parts += [shape.format(value) for shape, value in found if value is not None]
    tied = config.tie_word_embeddings
    parts += [] if tied is None else ["tied embeddings" if tied else "untied head"]
    quantised = config.quantization_config
    parts += [f"quantised by {quantised.get('quant_method')}"] if quantised else []
    return ", ".join(parts)
