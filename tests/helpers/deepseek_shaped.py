"""A model and a checkpoint with DeepSeek-V3's names, shapes and files, and without its numbers.

``write_deepseek_shaped`` makes a folder of true headers over holes: 61 layers, 256 experts, 91,991
tensors in 163 files, 689 GB that take no disk. ``register_deepseek_shaped`` makes the model
known: it loads and does not compute.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

import loadkit
from helpers.block_fp8 import NAME, register_block_fp8
from helpers.checkpoints import sparse_safetensors, write_index
from loadkit import ModelRegistry, tables
from loadkit.auto_weights_loader import AutoWeightsLoader
from loadkit.config import LoadkitConfig, ParallelConfig
from loadkit.ignored_weights import IgnoredWeight
from loadkit.mapper import WeightsMapper
from loadkit.tensor_info import DTYPES
from loadkit_layers import (
    ColumnParallelLinear,
    FusedMoE,
    MergedColumnParallelLinear,
    ParallelLMHead,
    ReplicatedLinear,
    RMSNorm,
    Router,
    RowParallelLinear,
    VocabParallelEmbedding,
)

__all__ = [
    "ARCHITECTURE",
    "deepseek_config",
    "deepseek_shaped",
    "deepseek_shapes",
    "plan_ranks",
    "register_deepseek_shaped",
    "write_deepseek_shaped",
]

ARCHITECTURE = "DeepseekShapedForCausalLM"
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def register_deepseek_shaped() -> None:
    """Make the architecture and its quantisation known in this process and those it starts."""
    path = f"{DeepseekShapedForCausalLM.__module__}:{ARCHITECTURE}"
    ModelRegistry.register_model(ARCHITECTURE, path, override=True)
    register_block_fp8()


@contextmanager
def deepseek_shaped() -> Iterator[None]:
    """``register_deepseek_shaped``, for the block."""
    both = (tables.models, tables.quantization)
    before = [dict(table._local) for table in both]
    register_deepseek_shaped()
    try:
        yield
    finally:
        for table, local in zip(both, before, strict=True):
            table._local = local


def deepseek_config(layers: int = 61, experts: int = 256, **changes: Any) -> dict[str, Any]:
    """The config.json, with DeepSeek-V3's values."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": NAME,
            "weight_block_size": [128, 128],
            "ignored_layers": ["gate"],
        },
        **changes,
    }


def deepseek_shapes(config: dict[str, Any]) -> Shapes:
    """Every tensor of the checkpoint in model order: name to (dtype, shape)."""
    D, V, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    found: Shapes = {"model.embed_tokens.weight": ("BF16", (V, D))}
    for index in range(layers):
        found |= _layer(config, index, moe=index >= config["first_k_dense_replace"])
    found["model.norm.weight"] = ("BF16", (D,))
    found["lm_head.weight"] = ("BF16", (V, D))
    for index in range(layers, layers + config["num_nextn_predict_layers"]):
        at = f"model.layers.{index}."
        found |= _layer(config, index, moe=True)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            found[f"{at}{name}.weight"] = ("BF16", (D,))
        found[f"{at}eh_proj.weight"] = ("BF16", (D, 2 * D))
        found[f"{at}embed_tokens.weight"] = ("BF16", (V, D))
        found[f"{at}shared_head.head.weight"] = ("BF16", (V, D))
    return found


def _layer(config: dict[str, Any], index: int, *, moe: bool) -> Shapes:
    D, H = config["hidden_size"], config["num_attention_heads"]
    nope, rope, v = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    at = f"model.layers.{index}."
    found: Shapes = {}
    for name, shape in (
        ("self_attn.q_a_proj", (q_rank, D)),
        ("self_attn.q_b_proj", (H * (nope + rope), q_rank)),
        ("self_attn.kv_a_proj_with_mqa", (kv_rank + rope, D)),
        ("self_attn.kv_b_proj", (H * (nope + v), kv_rank)),
        ("self_attn.o_proj", (D, H * v)),
    ):
        found |= _quantised(config, at + name, shape)
    norms = (("self_attn.q_a_layernorm", q_rank), ("self_attn.kv_a_layernorm", kv_rank))
    for name, width in (*norms, ("input_layernorm", D), ("post_attention_layernorm", D)):
        found[f"{at}{name}.weight"] = ("BF16", (width,))
    if not moe:
        return found | _mlp(config, f"{at}mlp.", config["intermediate_size"])
    inner, E = config["moe_intermediate_size"], config["n_routed_experts"]
    found[f"{at}mlp.gate.weight"] = ("BF16", (E, D))
    found[f"{at}mlp.gate.e_score_correction_bias"] = ("F32", (E,))
    for expert in range(E):
        found |= _mlp(config, f"{at}mlp.experts.{expert}.", inner)
    return found | _mlp(config, f"{at}mlp.shared_experts.", inner * config["n_shared_experts"])


def _mlp(config: dict[str, Any], at: str, inner: int) -> Shapes:
    D = config["hidden_size"]
    found = _quantised(config, f"{at}gate_proj", (inner, D))
    found |= _quantised(config, f"{at}up_proj", (inner, D))
    return found | _quantised(config, f"{at}down_proj", (D, inner))


def _quantised(config: dict[str, Any], name: str, shape: tuple[int, ...]) -> Shapes:
    block = config["quantization_config"]["weight_block_size"]
    scales = tuple(-(-size // b) for size, b in zip(shape, block, strict=True))
    return {f"{name}.weight": ("F8_E4M3", shape), f"{name}.weight_scale_inv": ("F32", scales)}


def write_deepseek_shaped(
    folder: str | Path, *, layers: int = 61, experts: int = 256, files: int = 163, **changes: Any
) -> Path:
    """The checkpoint: config.json, index and sparse files, filled in model order by bytes.

    ``changes`` are values of config.json (``hidden_size``, ...), for a smaller one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = deepseek_config(layers, experts, **changes)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = deepseek_shapes(config)
    sizes = {name: math.prod(s) * DTYPES[d][0] // 8 for name, (d, s) in shapes.items()}
    total, before = sum(sizes.values()), 0
    parts: list[Shapes] = [{} for _ in range(files)]
    for name, entry in shapes.items():
        parts[min(files - 1, before * files // total)][name] = entry
        before += sizes[name]
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{files:06d}.safetensors"
        sparse_safetensors(folder / file, dict(sorted(part.items())))
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map, total_size=total)
    return folder


def plan_ranks(folder: str | Path, ranks: int) -> list[dict[str, Any]]:
    """Plan every rank of tp and ep ``ranks``, one after the other; the numbers of each."""
    found = []
    for rank in range(ranks):
        parallel = ParallelConfig.for_rank(rank, tp_size=ranks, ep_size=ranks)
        plan = loadkit.plan(folder, parallel=parallel)
        skipped = [row for row in plan.rows if row.kind == "skipped"]
        placed = [row for row in plan.rows if row.kind not in ("skipped", "fill")]
        found.append(
            {
                "ok": plan.ok,
                "needed": plan.bytes_needed,
                "to_read": plan.bytes_to_read,
                "parameters": plan.parameter_bytes,
                "rows": len(placed),
                "skipped": len(skipped),
                "elsewhere": sum("ep rank" in (row.reason or "") for row in skipped),
                "tensors": len({row.tensor for row in placed}),
                "exact": all(row.exact == "exact" for row in placed),
            }
        )
    return found


# -- the model -----------------------------------------------------------------------------------


def _options(config: LoadkitConfig) -> dict[str, Any]:
    return {
        "parallel": config.parallel_config,
        "quant_config": config.quant_config,
        "params_dtype": config.model_config.dtype,
    }


class _Attention(nn.Module):
    def __init__(self, hf: Any, options: dict[str, Any], prefix: str) -> None:
        super().__init__()
        D, H = hf.hidden_size, hf.num_attention_heads
        q_head = hf.qk_nope_head_dim + hf.qk_rope_head_dim
        for name, make, (columns, rows) in (
            ("q_a_proj", ReplicatedLinear, (D, hf.q_lora_rank)),
            ("q_b_proj", ColumnParallelLinear, (hf.q_lora_rank, H * q_head)),
            (
                "kv_a_proj_with_mqa",
                ReplicatedLinear,
                (D, hf.kv_lora_rank + hf.qk_rope_head_dim),
            ),
            (
                "kv_b_proj",
                ColumnParallelLinear,
                (hf.kv_lora_rank, H * (hf.qk_nope_head_dim + hf.v_head_dim)),
            ),
            ("o_proj", RowParallelLinear, (H * hf.v_head_dim, D)),
        ):
            layer: Any = make
            self.add_module(name, layer(columns, rows, False, prefix=f"{prefix}.{name}", **options))
        self.q_a_layernorm = RMSNorm(hf.q_lora_rank, dtype=options["params_dtype"])
        self.kv_a_layernorm = RMSNorm(hf.kv_lora_rank, dtype=options["params_dtype"])


class _MLP(nn.Module):
    def __init__(self, hf: Any, inner: int, options: dict[str, Any], prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hf.hidden_size, [inner] * 2, False, prefix=f"{prefix}.gate_up_proj", **options
        )
        self.down_proj = RowParallelLinear(
            inner, hf.hidden_size, False, prefix=f"{prefix}.down_proj", **options
        )


class _MoE(nn.Module):
    def __init__(self, hf: Any, options: dict[str, Any], prefix: str) -> None:
        super().__init__()
        E, inner = hf.n_routed_experts, hf.moe_intermediate_size
        self.gate = ReplicatedLinear(hf.hidden_size, E, False, prefix=f"{prefix}.gate", **options)
        bias = nn.Parameter(torch.empty(E, dtype=torch.float32), requires_grad=False)
        self.gate.register_parameter("e_score_correction_bias", bias)
        router = Router(
            num_experts=E,
            top_k=hf.num_experts_per_tok,
            scoring=hf.scoring_func,
            renormalize=hf.norm_topk_prob,
            groups=hf.n_group,
            top_groups=hf.topk_group,
            scale=hf.routed_scaling_factor,
        )
        self.experts = FusedMoE(
            router, hf.hidden_size, inner, prefix=f"{prefix}.experts", **options
        )
        self.shared_experts = _MLP(
            hf, inner * hf.n_shared_experts, options, f"{prefix}.shared_experts"
        )


class _Layer(nn.Module):
    def __init__(self, hf: Any, index: int, options: dict[str, Any], prefix: str) -> None:
        super().__init__()
        self.self_attn = _Attention(hf, options, f"{prefix}.self_attn")
        self.mlp = (
            _MoE(hf, options, f"{prefix}.mlp")
            if index >= hf.first_k_dense_replace
            else _MLP(hf, hf.intermediate_size, options, f"{prefix}.mlp")
        )
        self.input_layernorm = RMSNorm(hf.hidden_size, dtype=options["params_dtype"])
        self.post_attention_layernorm = RMSNorm(hf.hidden_size, dtype=options["params_dtype"])


class _Model(nn.Module):
    def __init__(self, hf: Any, options: dict[str, Any], prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            hf.vocab_size, hf.hidden_size, prefix=f"{prefix}.embed_tokens", **options
        )
        self.layers = nn.ModuleList(
            _Layer(hf, index, options, f"{prefix}.layers.{index}")
            for index in range(hf.num_hidden_layers)
        )
        self.norm = RMSNorm(hf.hidden_size, dtype=options["params_dtype"])


class DeepseekShapedForCausalLM(nn.Module):
    """It loads as DeepSeek-V3 would, MTP layers left out; it has no forward."""

    hf_to_loadkit_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        orig_to_new_stacked={
            f"{parent}.{part}": (f"{parent}.gate_up_proj", index)
            for parent in ("mlp", "shared_experts")
            for index, part in enumerate(("gate_proj", "up_proj"))
        }
    )

    def __init__(self, *, config: LoadkitConfig, prefix: str = "") -> None:
        super().__init__()
        hf: Any = config.model_config.hf_config
        options = _options(config)
        at = f"{prefix}." if prefix else ""
        self.model = _Model(hf, options, f"{at}model")
        self.lm_head = ParallelLMHead(
            hf.vocab_size, hf.hidden_size, prefix=f"{at}lm_head", **options
        )
        first = hf.num_hidden_layers
        self.ignored_weights = [
            IgnoredWeight(f"model.layers.{index}.", "a layer that predicts further tokens")
            for index in range(first, first + hf.num_nextn_predict_layers)
        ]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Place checkpoint tensors."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_loadkit_mapper)
