"""Text to token ids and back, for ``generate``: from tokenizer.json or from a GGUF's vocabulary.

Importing this package imports neither torch nor any tokenizer library.
"""

from __future__ import annotations

from loadkit.tokenization.base import Tokenizer
from loadkit.tokenization.gguf import from_gguf
from loadkit.tokenization.tokenizer_json import from_source, from_tokenizer_json

__all__ = ["Tokenizer", "from_gguf", "from_source", "from_tokenizer_json"]
