"""Mistral's tensor names as Hugging Face's, and its numbers in Hugging Face's order.

``wq`` and ``wk`` (weights and biases) have the rows that rotate together beside each other, so they
are taken apart head by head; everything else is as it is stored. The first files of Mixtral hold
the experts of a projection in one matrix ``[E * F, D]``, one below the other, w2 on its side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from loadkit.errors import FormatError, WeightLoadError
from loadkit.file_checks import show
from loadkit.mapper import WeightsMapper
from loadkit.rotary_rows import as_halves

__all__ = ["NAMES", "as_hugging_face", "is_quantised", "refuse_quantised"]

NAMES = WeightsMapper(
    orig_to_new_prefix={
        "tok_embeddings.": "model.embed_tokens.",
        "norm.": "model.norm.",
        "output.": "lm_head.",
        "layers.": "model.layers.",
    },
    orig_to_new_substr={
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.gate": "block_sparse_moe.gate",
        "feed_forward.experts": "block_sparse_moe.experts",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    },
)
_OURS = re.compile(r"(tok_embeddings|norm|output|layers\.\d+)\..+")
_ROTATED = re.compile(r"layers\.\d+\.attention\.w(?P<which>[qk])\.(weight|bias)")
_STACKED = re.compile(r"layers\.(?P<layer>\d+)\.block_sparse_moe\.(?P<which>w[123])")
_QUANTISED = re.compile(r"(.*\.)?(qscale_\w+|\w*fake_quantizer)(\..*)?")

Named = tuple[str, torch.Tensor]


def is_quantised(name: str) -> bool:
    """Whether a tensor belongs to Mistral's own quantisation (``qscale_weight``, ...)."""
    return _QUANTISED.fullmatch(name) is not None


def refuse_quantised(names: list[str]) -> None:
    """Refuse a checkpoint with scales: without them its numbers are not the model's.

    Raises:
        FormatError: E_QUANT.
    """
    found = [name for name in names if is_quantised(name)]
    if found:
        shown = ", ".join(map(show, found[:3])) + (" ..." if len(found) > 3 else "")
        raise FormatError(
            f"the checkpoint is quantised in Mistral's own way ({len(found)} scales: {shown}), "
            "which load format 'mistral' does not read",
            code="E_QUANT",
            tensor=found[0],
            detail={"tensors": found},
            hint="use the checkpoint in Hugging Face's layout, or one that is not quantised",
        )


def as_hugging_face(name: str, tensor: torch.Tensor, hf_config: Any) -> Iterator[Named]:
    """What a tensor of the file is for Hugging Face: one tensor, or one of each expert.

    A name that is not Mistral's stays, and so do its numbers: the model says that it knows none.

    Args:
        name: the file's.
        tensor: lazy, or with numbers.
        hf_config: the text model's config; heads and experts are counted by it.

    Raises:
        WeightLoadError: q or k do not have rows for the config's heads, or experts none for each.
    """
    stacked = _STACKED.fullmatch(name)
    if stacked:
        yield from _experts(name, stacked["layer"], stacked["which"], tensor, hf_config)
        return
    rotated = _ROTATED.fullmatch(name)
    if rotated:
        heads = int(hf_config.num_attention_heads)
        if rotated["which"] == "k":
            heads = int(getattr(hf_config, "num_key_value_heads", None) or heads)
        tensor = as_halves(name, tensor, heads)
    mapped = NAMES.map_name(name) if _OURS.fullmatch(name) else None
    yield (name if mapped is None else mapped.name), tensor


def _experts(
    name: str, layer: str, which: str, tensor: torch.Tensor, hf_config: Any
) -> Iterator[Named]:
    experts = int(getattr(hf_config, "num_local_experts", None) or 0)
    rows = tensor.shape[0] if tensor.dim() == 2 else 0
    if experts < 1 or rows < 1 or rows % experts:
        raise WeightLoadError(
            f"{show(name)} is {list(tensor.shape)}, which is no matrix of {experts} experts",
            tensor=name,
        )
    own = rows // experts
    for expert in range(experts):
        part = tensor.narrow(0, expert * own, own)
        hf_name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{which}.weight"
        yield hf_name, part.t() if which == "w2" else part
