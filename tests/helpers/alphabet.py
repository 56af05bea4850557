"""A GGUF file whose model says the alphabet: every answer is known without computing one.

Its layers add zeros, and the head's row of token t + 1 is the embedding of token t, so after "a"
comes "b". A token is a byte. Matrices are Q8_0. Six heads: tp 1, 2, 3 and 6 are legal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from helpers.gguf_blocks import quantised
from helpers.gguf_files import ARCH, Tensor, f32, llama_tensors, write_gguf
from helpers.vocabularies import byte_bpe

__all__ = ["alphabet_gguf"]

HIDDEN, HEADS = 96, 6
SIZES = {
    "llama.block_count": 2,
    "llama.embedding_length": HIDDEN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": HEADS,
    "llama.feed_forward_length": HIDDEN,
}


def alphabet_gguf(path: Path) -> Path:
    """The file, with a tokenizer in it."""
    vocabulary = byte_bpe()
    vocab = len(vocabulary["tokenizer.ggml.tokens"])
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(vocab, HIDDEN, generator=generator)
    special = {"token_embd.weight": embeddings, "output.weight": embeddings.roll(1, 0)}

    def filled(tensor: Tensor) -> Tensor:
        shape = tuple(reversed(tensor.dims))
        fill = torch.ones if len(shape) == 1 else torch.zeros  # a norm, a matrix
        return f32(str(tensor.name), *shape, values=special.get(str(tensor.name), fill(shape)))

    sizes = {"hidden": HIDDEN, "heads": HEADS, "kv": HEADS, "ffn": HIDDEN, "vocab": vocab}
    tensors = [filled(tensor) for tensor in llama_tensors(**sizes, head=True)]
    keys = [ARCH, *SIZES.items(), *((key, _array(value)) for key, value in vocabulary.items())]
    return write_gguf(path, quantised(tensors, lambda name: "Q8_0"), keys)


def _array(value: Any) -> Any:
    numbers = isinstance(value, list) and isinstance(value[0], int)
    return np.array(value, dtype=np.int32) if numbers else value
