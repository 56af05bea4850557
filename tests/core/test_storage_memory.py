"""Memory that storages are given side by side: each a tensor of its own, in blocks that end."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
import torch

from loadkit import storage_memory
from loadkit.execution import Target
from loadkit.storage_memory import StorageMemory
from loadkit.tracing.coverage import PARAMETER
from loadkit.tracing.storage import Storage, Unwritten
from loadkit.tracing.view import contiguous

CPU = torch.device("cpu")


def target(numel: int, dtype: torch.dtype = torch.bfloat16) -> Target:
    storage = Storage(Unwritten(PARAMETER), numel, dtype.itemsize)
    return Target(("w",), storage, contiguous((numel,), dtype.itemsize), dtype, True, [])


def laid(targets: Sequence[Target]) -> list[torch.Tensor]:
    """Their memory, after they were laid side by side and asked for."""
    memory = StorageMemory(CPU)
    memory.side_by_side(targets)
    return [memory.of(each.storage, each.dtype) for each in targets]


def test_storages_lie_one_after_the_other_and_none_has_anothers_bytes() -> None:
    first, second, third = laid([target(64), target(33), target(32, torch.float32)])
    assert second.data_ptr() - first.data_ptr() == 128
    assert third.data_ptr() - second.data_ptr() == 128, "the next multiple of 64 bytes"
    assert [each.dtype for each in (first, second, third)] == [torch.bfloat16] * 2 + [torch.float32]
    for each in (first, second, third):
        assert each.untyped_storage().nbytes() == each.nbytes
        each.fill_(1)
    second.fill_(2)
    assert first.eq(1).all()
    assert third.eq(1).all()
    saved = io.BytesIO()
    torch.save(second, saved)
    assert second.nbytes < saved.tell() < second.nbytes + 2048


def test_memory_lives_as_long_as_any_of_it() -> None:
    *_, last = laid([target(1 << 20), target(1 << 20)])
    last.fill_(3)
    torch.empty(4 << 20, dtype=torch.uint8).fill_(7)
    assert last.eq(3).all()


def test_large_storages_and_full_blocks_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_memory, "_SMALL", 1024)
    monkeypatch.setattr(storage_memory, "_BLOCK", 2048)
    made: list[int] = []
    empty = torch.empty

    def counted(numel: int, **kind: torch.dtype) -> torch.Tensor:
        made.append(numel * kind["dtype"].itemsize)
        return empty(numel, **kind)

    monkeypatch.setattr(storage_memory.torch, "empty", counted)
    laid([target(512), target(512), target(513), target(512), target(0)])
    assert made == [2048, 1026, 1024, 0], "a block of two; too large; alone; nothing"


def test_what_has_memory_keeps_it_and_a_storage_is_laid_once() -> None:
    memory = StorageMemory(CPU)
    known, live, new, other = target(8), target(8), target(8), target(8)
    before = memory.of(known.storage, known.dtype)
    live.storage.real = torch.ones(8, dtype=torch.bfloat16)
    memory.side_by_side([known, live, new, new, other])
    assert memory.of(known.storage, known.dtype) is before
    assert memory.of(live.storage, live.dtype) is live.storage.real
    distance = memory.of(other.storage, other.dtype).data_ptr()
    distance -= memory.of(new.storage, new.dtype).data_ptr()
    assert distance == 64


def test_no_memory_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from loadkit.errors import ResourceError

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(storage_memory.torch, "empty", refuse)
    with pytest.raises(ResourceError, match="no memory for 128 bytes on cpu"):
        StorageMemory(CPU).side_by_side([target(8), target(8)])
