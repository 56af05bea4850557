"""Keys and values of the tokens a sequence has seen, for one attention layer."""

from __future__ import annotations

import torch

__all__ = ["KVCache"]

_FIRST_CAPACITY = 64  # tokens


class KVCache:
    """A plain, growing cache: bind one to each ``Attention.kv_cache``, one sequence per cache.

    # T new tokens, S tokens so far, K kv heads, D head size, Dv value head size

    Storage doubles when it is full, so that appending n tokens copies O(n) elements altogether.

    Args:
        capacity: tokens to make room for at once, where the length is known.
    """

    def __init__(self, capacity: int = _FIRST_CAPACITY) -> None:
        self._capacity = max(capacity, 1)
        self._key: torch.Tensor | None = None
        self._value: torch.Tensor | None = None
        self.length = 0

    def append(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``key [T, K, D]`` and ``value [T, K, Dv]``; give all ``[S, K, D]``, ``[S, K, Dv]``.

        What it gives are views of the cache, valid until ``clear``.
        """
        start, self.length = self.length, self.length + key.shape[0]
        while self._capacity < self.length:
            self._capacity *= 2
        self._key = self._with(self._key, key, start)
        self._value = self._with(self._value, value, start)
        return self._key[: self.length], self._value[: self.length]

    def _with(self, stored: torch.Tensor | None, new: torch.Tensor, start: int) -> torch.Tensor:
        """``stored`` with ``new`` at ``start``, in a larger storage if it has to be."""
        if stored is None or stored.shape[0] < self._capacity:
            larger = new.new_empty(self._capacity, *new.shape[1:])
            if stored is not None:
                larger[:start] = stored[:start]
            stored = larger
        stored[start : start + new.shape[0]] = new
        return stored

    def clear(self) -> None:
        """Forget the sequence; the memory is given back."""
        self._key = self._value = None
        self.length = 0

    def __len__(self) -> int:
        return self.length
