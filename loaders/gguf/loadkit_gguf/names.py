"""GGUF's tensor names as Hugging Face's, and what converters did to numbers, undone.

A model class may bring its own ``gguf_mapper``: any object with ``map_name`` and ``transform``.
Where it has none, the one of the file's architecture is taken (``architectures.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from loadkit.mapper import WeightsMapper
from loadkit.reverse_mapper import ReverseMapper
from loadkit.rotary_rows import as_halves, as_neighbours

__all__ = [
    "BERT_NAMES",
    "DECODER_NAMES",
    "GGUFMapper",
    "TableMapper",
    "Transform",
    "expert_of",
    "minus_one",
    "unpermute_keys",
    "unpermute_queries",
    "with_experts",
]

Transform = Callable[[str, torch.Tensor, Any], torch.Tensor]
"""``transform(hf_name, tensor, hf_config)``: the tensor as Hugging Face has it."""


@runtime_checkable
class GGUFMapper(Protocol):
    """What ``gguf_mapper`` of a model class is.

    It may also have ``reason(name)``: why ``map_name`` leaves a tensor out.
    """

    def map_name(self, name: str) -> str | None:
        """The Hugging Face name of a tensor of the file; None leaves it out."""

    def transform(self, hf_name: str, tensor: torch.Tensor, hf_config: Any) -> torch.Tensor:
        """The tensor [its torch shape] as Hugging Face has it, by plain torch operations.

        It is called while loading is traced: the tensor is lazy, and no number of it is known.
        ``hf_config`` is the text model's config.
        """


class TableMapper:
    """A ``GGUFMapper`` made of tables.

    Args:
        names: rules from GGUF's names to Hugging Face's; a name no rule matches stays.
        skipped: names' first or layer's own component -> why such tensors are left out.
        transforms: whole trailing components of a Hugging Face name -> what is done to it.
        unsaved: Hugging Face names that files do not hold -> why.
    """

    def __init__(
        self,
        names: WeightsMapper,
        skipped: Mapping[str, str] | None = None,
        transforms: Mapping[str, Transform] | None = None,
        unsaved: Mapping[str, str] | None = None,
    ) -> None:
        self.names = names
        self.skipped = dict(skipped or {})
        self.transforms = dict(transforms or {})
        self.unsaved = dict(unsaved or {})

    def map_name(self, name: str) -> str | None:
        """The Hugging Face name, or None for a tensor that is left out."""
        if self.reason(name) is not None:
            return None
        mapped = self.names.map_name(name)
        return None if mapped is None else mapped.name

    def gguf_name(self, hf_name: str) -> str | None:
        """The file's name of a Hugging Face tensor; None: no rule leads back to one."""
        number = next((part for part in hf_name.split(".") if part.isdecimal()), "0")
        own = {
            f"blk.{number}.{stored}.{kind}"
            for stored in self.names.orig_to_new_substr
            for kind in ("weight", "bias")
        }
        return ReverseMapper(self.names, own).map_name(hf_name)

    def undo(self, hf_name: str, tensor: torch.Tensor, hf_config: Any) -> torch.Tensor:
        """The tensor as converters store it: what ``transform`` takes back."""
        for ending, change in self.transforms.items():
            if hf_name == ending or hf_name.endswith(f".{ending}"):
                return _BACK[change](hf_name, tensor, hf_config)
        return tensor

    def reason(self, name: str) -> str | None:
        """Why a tensor is left out; None for one that is not."""
        parts = name.split(".")
        own = parts[2] if parts[0] == "blk" and len(parts) > 2 else parts[0]
        return self.skipped.get(own)

    def transform(self, hf_name: str, tensor: torch.Tensor, hf_config: Any) -> torch.Tensor:
        """The tensor with what the converter did undone."""
        for ending, change in self.transforms.items():
            if hf_name == ending or hf_name.endswith(f".{ending}"):
                return change(hf_name, tensor, hf_config)
        return tensor


# Every decoder of Llama's shape; the norms between are the family's own.
DECODER_NAMES = WeightsMapper(
    orig_to_new_prefix={
        "token_embd.": "model.embed_tokens.",
        "output_norm.": "model.norm.",
        "output.": "lm_head.",
        "blk.": "model.layers.",
    },
    orig_to_new_substr={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
)


def with_experts(block: str, projections: tuple[str, str, str]) -> WeightsMapper:
    """Rules for experts: what Hugging Face calls their module, and their gate, up and down.

    In a file all experts of a projection are one tensor, dim 0 counting them.
    """
    stored = dict(zip(("gate", "up", "down"), projections, strict=True))
    return WeightsMapper(
        orig_to_new_substr={
            "ffn_gate_inp": f"{block}.gate",
            **{f"ffn_{part}_exps": f"{block}.experts.{name}" for part, name in stored.items()},
        }
    )


BERT_NAMES = WeightsMapper(
    orig_to_new_prefix={
        "token_embd.": "embeddings.word_embeddings.",
        "position_embd.": "embeddings.position_embeddings.",
        "token_types.": "embeddings.token_type_embeddings.",
        "token_embd_norm.": "embeddings.LayerNorm.",
        "blk.": "encoder.layer.",
    },
    orig_to_new_substr={
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
)

_EXPERT = re.compile(r"(?P<stem>.+\.experts)\.(?P<number>\d{1,6})\.(?P<rest>\w+\.weight)")


def expert_of(hf_name: str) -> tuple[str, int] | None:
    """The name of all experts' tensor, and which of them a name is; None: it is no expert's."""
    found = _EXPERT.fullmatch(hf_name)
    return (f"{found['stem']}.{found['rest']}", int(found["number"])) if found else None


def unpermute_queries(hf_name: str, tensor: torch.Tensor, hf_config: Any) -> torch.Tensor:
    """Rows of q [heads * size, ...]: GGUF pairs neighbours for rotation, Hugging Face halves."""
    return as_halves(hf_name, tensor, _query_heads(hf_config))


def unpermute_keys(hf_name: str, tensor: torch.Tensor, hf_config: Any) -> torch.Tensor:
    """The same of k, by its own number of heads."""
    return as_halves(hf_name, tensor, _key_heads(hf_config))


def _query_heads(hf_config: Any) -> int:
    return int(hf_config.num_attention_heads)


def _key_heads(hf_config: Any) -> int:
    return int(getattr(hf_config, "num_key_value_heads", None) or hf_config.num_attention_heads)


def minus_one(hf_name: str, tensor: torch.Tensor, hf_config: Any) -> torch.Tensor:
    """A norm's weight: GGUF stores one more than Hugging Face."""
    return tensor - 1


# transform -> what undoes it
_BACK: dict[Transform, Transform] = {
    unpermute_queries: lambda name, tensor, config: as_neighbours(
        name, tensor, _query_heads(config)
    ),
    unpermute_keys: lambda name, tensor, config: as_neighbours(name, tensor, _key_heads(config)),
    minus_one: lambda name, tensor, config: tensor + 1,
}
