"""GGUF: decoding every type, and reading a header, against gguf-py in the same run.

Both decoders get the same bytes and give a new float32 tensor, small enough that its memory is used
again: beyond 32 MiB the kernel's handing out of pages is most of either's time. Figures of a type
are millions of elements per second, the best of five; imports and tables are not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Variant

Go = Callable[[], Any]

TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
WIDTH = 2048  # elements of a row


def _bytes(name: str, rows: int) -> np.ndarray:
    """Rows of a type: the blocks of a real tensor, over and over."""
    from loadkit_gguf.encodings import ENCODINGS

    kind = ENCODINGS[name]
    with np.load(Path(__file__).parent.parent / "data/quant_types_smollm2_ffn_down.npz") as real:
        blocks = real[f"{name}.bytes"].reshape(-1, kind.block_bytes)
    need = rows * WIDTH // kind.block
    return np.tile(blocks, (-(-need // len(blocks)), 1))[:need].reshape(rows, -1)


def _race(decode: Callable[[str, np.ndarray], object], rows: int) -> Go:
    data = {name: _bytes(name, rows) for name in TYPES}
    for name in TYPES:
        decode(name, data[name][:8])

    def go() -> dict[str, float]:
        figures: dict[str, float] = {}
        for name in TYPES:
            best = min(_seconds(decode, name, data[name]) for _ in range(5))
            figures[name] = rows * WIDTH / best / 1e6
        figures["seconds"] = sum(rows * WIDTH / 1e6 / speed for speed in figures.values())
        return figures

    return go


def _seconds(decode: Callable[[str, np.ndarray], object], name: str, data: np.ndarray) -> float:
    begin = time.perf_counter()
    decode(name, data)
    return time.perf_counter() - begin


def gguf_py(rows: int) -> Go:
    """``gguf.quants.dequantize``."""
    import gguf

    kinds = {name: gguf.GGMLQuantizationType[name] for name in TYPES}
    return _race(lambda name, data: gguf.quants.dequantize(data, kinds[name]), rows)


def ours(rows: int) -> Go:
    """``GGUFEncoding.decode``."""
    from loadkit_gguf.encodings import ENCODINGS

    return _race(lambda name, data: ENCODINGS[name].decode(torch.from_numpy(data)), rows)


def ours_one_thread(rows: int) -> Go:
    """The same without threads."""
    from loadkit_gguf import encoding

    encoding._PARALLEL = 1 << 60
    return ours(rows)


def ours_into(rows: int) -> Go:
    """``GGUFEncoding.decode_into`` bfloat16 memory that is there already, as a load has it."""
    from loadkit_gguf.encodings import ENCODINGS

    out = torch.zeros(rows, WIDTH, dtype=torch.bfloat16)

    def decode(name: str, data: np.ndarray) -> None:
        ENCODINGS[name].decode_into(torch.from_numpy(data), out[: len(data)])

    return _race(decode, rows)


# -- headers ---------------------------------------------------------------------------------------


def write_header(path: Path, tokens: int) -> Path:
    """A GGUF file of small tensors with a vocabulary: tokens, their types, and as many merges."""
    from helpers.gguf_files import LLAMA_KEYS, f32, write_gguf

    words = [f"token{number}" for number in range(tokens)]
    keys = [
        *LLAMA_KEYS,
        ("tokenizer.ggml.tokens", words),
        ("tokenizer.ggml.token_type", np.ones(tokens, dtype=np.int32)),
        ("tokenizer.ggml.merges", [f"{word[:3]} {word[3:]}" for word in words]),
    ]
    tensors = [f32(f"blk.{number}.attn_norm.weight", 8) for number in range(290)]
    return write_gguf(path, tensors, keys)


def header_gguf_py(path: str) -> Go:
    """``gguf.GGUFReader``."""
    import gguf

    return lambda: {"tensors": len(gguf.GGUFReader(path).tensors)}


def header_ours(path: str) -> Go:
    """``read_gguf_header``, with the tokens as strings."""
    from loadkit.sources.local_file import LocalFile
    from loadkit_gguf.header import read_gguf_header

    def go() -> dict[str, int]:
        file = LocalFile(Path(path).name, path)
        header = read_gguf_header(file)
        tokens = header.metadata["tokenizer.ggml.tokens"].decoded()
        file.close()
        return {"tensors": len(header.tensors), "tokens": len(tokens)}

    return go


def decode_variants(elements: int) -> list[Variant]:
    """Every decoder, over as many elements of each type."""
    args = {"rows": elements // WIDTH}
    return [
        Variant("gguf-py", "gguf_decode:gguf_py", args),
        Variant("loadkit, one thread", "gguf_decode:ours_one_thread", args),
        Variant("loadkit", "gguf_decode:ours", args),
        Variant("loadkit, into bfloat16", "gguf_decode:ours_into", args),
    ]


def header_variants(path: Path) -> list[Variant]:
    """Both readers of one file's header."""
    args = {"path": str(path)}
    return [
        Variant("gguf-py", "gguf_decode:header_gguf_py", args),
        Variant("loadkit", "gguf_decode:header_ours", args),
    ]
