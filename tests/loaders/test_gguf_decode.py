"""Every ggml type, decoded: bit for bit what ggml's C code gives, however the bytes lie."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loadkit.errors import ModelError
from loadkit.readers.threads import default_threads
from loadkit_gguf import encoding
from loadkit_gguf.encoding import GGUFEncoding
from loadkit_gguf.encodings import ENCODINGS
from loadkit_gguf.ggml_types import GGML_TYPES

DATA = Path(__file__).resolve().parent.parent / "data"
ROWS, COLUMNS = 8, 1536
DECODED_BY_GGUF_PY = sorted(set(ENCODINGS) - {"Q1_0"})


@pytest.fixture(scope="module")
def oracle() -> Iterator[dict[str, np.ndarray]]:
    """``TYPE.bytes`` and ``TYPE.f32`` of 26 types."""
    with np.load(DATA / "quant_types_smollm2_ffn_down.npz") as found:
        yield dict(found)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


def random_blocks(kind: GGUFEncoding, *shape: int, seed: int = 0) -> torch.Tensor:
    """uint8 [*shape, in blocks along the last dim]; any bits, so scales may be NaN or inf."""
    size = (*shape[:-1], shape[-1] * kind.block_bytes)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


def test_every_type_of_the_oracle_is_known(oracle: dict[str, np.ndarray]) -> None:
    named = {key.partition(".")[0] for key in oracle if key.endswith(".bytes")}
    plain = {"F16", "BF16"}
    assert named - plain == set(ENCODINGS) and len(named) == 26


@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_a_real_tensor_has_the_bits_that_c_gives(name: str, oracle: dict[str, np.ndarray]) -> None:
    packed = torch.from_numpy(oracle[f"{name}.bytes"]).view(ROWS, -1)
    decoded = ENCODINGS[name].decode(packed)
    expected = torch.from_numpy(oracle[f"{name}.f32"])
    assert decoded.dtype == torch.float32 and decoded.shape == (ROWS, COLUMNS)
    assert torch.equal(bits(decoded), bits(expected))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_plain_types_are_torchs_own(name: str, oracle: dict[str, np.ndarray]) -> None:
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[name]
    values = torch.from_numpy(oracle[f"{name}.bytes"]).view(dtype).view(ROWS, COLUMNS).float()
    assert torch.equal(bits(values), bits(torch.from_numpy(oracle[f"{name}.f32"])))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # gguf-py, on NaN scales
@pytest.mark.parametrize("name", DECODED_BY_GGUF_PY)
def test_any_bits_decode_as_gguf_py_decodes_them(name: str) -> None:
    packed = random_blocks(ENCODINGS[name], 33, 5)
    kind = gguf.GGMLQuantizationType[name]
    expected = torch.from_numpy(gguf.quants.dequantize(packed.numpy(), kind))
    decoded = ENCODINGS[name].decode(packed)
    number = ~expected.isnan()
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert torch.equal(bits(decoded)[number], bits(expected)[number])


def test_G63_a_scale_that_is_no_number_gives_no_numbers() -> None:
    half_nan = b"\x00\x7e"
    packed = torch.frombuffer(bytearray(half_nan + b"\x9f" * 16), dtype=torch.uint8)
    assert ENCODINGS["Q4_0"].decode(packed).isnan().all()


def test_the_table_of_types_is_gguf_pys() -> None:
    stale = {"Q8_1"}  # gguf-py still counts its scales as float32
    for kind in gguf.GGMLQuantizationType:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        ours = GGML_TYPES[kind.value]
        assert ours.name == kind.name
        assert ours.name in stale or (ours.block, ours.block_bytes) == (block, size)
    assert set(GGML_TYPES) == {kind.value for kind in gguf.GGMLQuantizationType}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of few blocks, and threads for any size."""
    monkeypatch.setattr(encoding, "PIECE", 1024)
    monkeypatch.setattr(encoding, "_PARALLEL", 2048)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_pieces_threads_and_strides_change_nothing(name: str) -> None:
    kind = ENCODINGS[name]
    whole = random_blocks(kind, 3, 7, 11)
    expected = torch.stack([kind.decode(row) for row in whole.reshape(-1, whole.shape[-1])])
    expected = expected.view(3, 7, -1)
    odd = torch.empty(whole.numel() + 1, dtype=torch.uint8)[1:].view(whole.shape)
    odd.copy_(whole)
    columns = slice(2 * kind.block_bytes, 9 * kind.block_bytes)
    shown = slice(2 * kind.block, 9 * kind.block)
    for packed, right in (
        (whole, expected),
        (odd, expected),
        (whole[:, 1::2], expected[:, 1::2]),
        (whole.transpose(0, 1), expected.transpose(0, 1)),
        (whole[..., columns], expected[..., shown]),
        (whole[1, 2, columns], expected[1, 2, shown]),
        (whole[:0], expected[:0]),
    ):
        found = kind.decode(packed)
        assert found.shape == right.shape and torch.equal(bits(found), bits(right))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoding_into_memory_rounds_once(dtype: torch.dtype) -> None:
    kind = ENCODINGS["Q4_K"]
    packed = random_blocks(kind, 9, 6, seed=3)
    expected = kind.decode(packed).to(dtype)
    dense = torch.full(expected.shape, 7.0, dtype=dtype)
    kind.decode_into(packed, dense)
    wide = torch.full((9, 2 * expected.shape[1]), 7.0, dtype=dtype)
    kind.decode_into(packed, wide[:, ::2])
    kind.decode_into(packed[:, : kind.block_bytes], wide[:, 1 : 2 * kind.block : 2])
    assert torch.equal(dense.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(wide[:, ::2].nan_to_num(), expected.nan_to_num())
    first = expected[:, : kind.block]
    assert torch.equal(wide[:, 1 : 2 * kind.block : 2].nan_to_num(), first.nan_to_num())


@settings(max_examples=50)
@given(st.sampled_from(sorted(ENCODINGS)), st.integers(0, 3), st.data())
def test_blocks_decode_alone_as_they_do_together(name: str, seed: int, data: st.DataObject) -> None:
    kind = ENCODINGS[name]
    packed = random_blocks(kind, 4, 6, seed=seed)
    first = data.draw(st.integers(0, 5))
    last = data.draw(st.integers(first + 1, 6))
    part = kind.decode(packed[1:3, first * kind.block_bytes : last * kind.block_bytes])
    whole = kind.decode(packed)[1:3, first * kind.block : last * kind.block]
    assert torch.equal(bits(part), bits(whole))


def test_a_wrong_size_or_dtype_is_an_error() -> None:
    kind = ENCODINGS["Q4_0"]
    for packed in (
        torch.zeros(4, 19, dtype=torch.uint8),
        torch.zeros(4, 18),
        torch.zeros((), dtype=torch.uint8),
    ):
        with pytest.raises(ModelError, match="blocks of 18 bytes"):
            kind.decode(packed)
    packed = torch.zeros(4, 18, dtype=torch.uint8)
    for out in (torch.zeros(4, 31), torch.zeros(4, 32, dtype=torch.float64)):
        with pytest.raises(ModelError, match="decode to"):
            kind.decode_into(packed, out)


@pytest.mark.usefixtures("small_pieces")
def test_nothing_is_left_behind_by_threads() -> None:
    kind = ENCODINGS["Q8_0"]
    packed = random_blocks(kind, 64, 64)
    torch.set_num_threads(2)
    before = threading.active_count()
    expected = kind.decode(packed)
    found: list[torch.Tensor] = []
    callers = [threading.Thread(target=lambda: found.append(kind.decode(packed))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(torch.equal(bits(one), bits(expected)) for one in found) and len(found) == 4
    assert threading.active_count() == before
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("small_pieces")
def test_operations_do_not_wait_for_torchs_own_threads() -> None:
    seen: set[tuple[int, int]] = set()

    def note(blocks: torch.Tensor, out: torch.Tensor) -> None:
        seen.add((threading.get_ident(), torch.get_num_threads()))
        time.sleep(0.001)

    GGUFEncoding("noted", 32, 18, note).decode(torch.zeros(512, 18 * 32, dtype=torch.uint8))
    assert {threads for _, threads in seen} == {1}
    assert len({thread for thread, _ in seen}) > 1 or default_threads(0, 2) == 1
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("small_pieces")
def test_an_error_in_one_piece_ends_all_and_is_raised() -> None:
    def broken(blocks: torch.Tensor, out: torch.Tensor) -> None:
        raise RuntimeError("broken")

    kind = GGUFEncoding("broken", 32, 18, broken)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="broken"):
        kind.decode(torch.zeros(128, 18 * 32, dtype=torch.uint8))
    assert threading.active_count() == before
    assert torch.get_num_threads() == 2
