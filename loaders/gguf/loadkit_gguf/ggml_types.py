"""The table of ggml tensor types: number, name, and how many bytes a block of elements takes.

Source: ``ggml.h`` and ``ggml-common.h`` of llama.cpp (b6000 and later).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GGML_TYPES", "REMOVED_TYPES", "GGMLType"]


class GGMLType(NamedTuple):
    """One type.

    Attributes:
        number: as files state it.
        name: as ggml calls it.
        block: elements of one block; 1 where elements are stored by themselves.
        block_bytes: bytes of one block.
        dtype: the name in ``loadkit.tensor_info.DTYPES`` of a plain type, None for blocks.
    """

    number: int
    name: str
    block: int
    block_bytes: int
    dtype: str | None = None


_PLAIN = (
    (0, "F32", 4),
    (1, "F16", 2),
    (24, "I8", 1),
    (25, "I16", 2),
    (26, "I32", 4),
    (27, "I64", 8),
    (28, "F64", 8),
    (30, "BF16", 2),
)
# Q8_1 and Q8_K are what kernels make of activations; files hold none, and nothing decodes them.
_BLOCKS = (
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (29, "IQ1_M", 256, 56),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
)

GGML_TYPES: dict[int, GGMLType] = {
    **{number: GGMLType(number, name, 1, size, name) for number, name, size in _PLAIN},
    **{number: GGMLType(number, name, block, size) for number, name, block, size in _BLOCKS},
}

# Numbers that files once had and no ggml reads any more.
REMOVED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
