"""Every type of blocks that can be decoded, by its ggml name."""

from __future__ import annotations

from loadkit_gguf import decode_basic, decode_iq, decode_k, decode_small_floats
from loadkit_gguf.encoding import GGUFEncoding, Kernel
from loadkit_gguf.ggml_types import GGML_TYPES

__all__ = ["ENCODINGS"]

_KERNELS: dict[str, Kernel] = {
    "Q4_0": decode_basic.q4_0,
    "Q4_1": decode_basic.q4_1,
    "Q5_0": decode_basic.q5_0,
    "Q5_1": decode_basic.q5_1,
    "Q8_0": decode_basic.q8_0,
    "Q1_0": decode_basic.q1_0,
    "Q2_K": decode_k.q2_k,
    "Q3_K": decode_k.q3_k,
    "Q4_K": decode_k.q4_k,
    "Q5_K": decode_k.q5_k,
    "Q6_K": decode_k.q6_k,
    "IQ1_S": decode_iq.iq1_s,
    "IQ1_M": decode_iq.iq1_m,
    "IQ2_XXS": decode_iq.iq2_xxs,
    "IQ2_XS": decode_iq.iq2_xs,
    "IQ2_S": decode_iq.iq2_s,
    "IQ3_XXS": decode_iq.iq3_xxs,
    "IQ3_S": decode_iq.iq3_s,
    "IQ4_NL": decode_iq.iq4_nl,
    "IQ4_XS": decode_iq.iq4_xs,
    "MXFP4": decode_small_floats.mxfp4,
    "NVFP4": decode_small_floats.nvfp4,
    "TQ1_0": decode_small_floats.tq1_0,
    "TQ2_0": decode_k.tq2_0,
}

ENCODINGS: dict[str, GGUFEncoding] = {
    kind.name: GGUFEncoding(kind.name, kind.block, kind.block_bytes, _KERNELS[kind.name])
    for kind in GGML_TYPES.values()
    if kind.name in _KERNELS
}
