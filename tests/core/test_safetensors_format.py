"""The header parser: every way a header can lie, by row, and what is legal but unusual."""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from helpers.bad_safetensors import ROWS, entry, observe, write_row
from helpers.checkpoints import raw_st, sparse_safetensors, write_st
from loadkit.config import LoadConfig
from loadkit.errors import FormatError, LoadkitError
from loadkit.safetensors_format import MAX_HEADER_BYTES, SafetensorsHeader, read_header
from loadkit.sources.local import LocalSource
from loadkit.tensor_info import DTYPES, torch_dtype

MIB = 1 << 20


def header_of(path: Path) -> SafetensorsHeader:
    with LocalSource(path, LoadConfig()) as source:
        return read_header(source.open(path.name))


def values_of(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor, through our header: shape, dtype and bytes."""
    found: dict[str, torch.Tensor] = {}
    with LocalSource(path, LoadConfig()) as source:
        for info in read_header(source.open(path.name)).tensors:
            data = bytearray(info.file.read(info.offset, info.nbytes))
            flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.zeros(0).byte()
            dtype = torch_dtype(info.dtype)
            shape = info.shape
            if DTYPES[info.dtype][0] == 4:  # torch packs two elements into one
                shape = (*shape[:-1], shape[-1] // 2)
            found[info.name] = flat.view(dtype).reshape(shape)
    return found


def error_of(path: Path) -> FormatError:
    with pytest.raises(FormatError) as caught:
        header_of(path)
    return caught.value


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.fixture
def no_descriptor_left() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


@pytest.mark.usefixtures("no_descriptor_left")
@pytest.mark.parametrize("row", ROWS)
def test_a_lying_header_gets_the_code_of_its_rule_in_bounds(row: str, tmp_path: Path) -> None:
    path = write_row(row, tmp_path / "model.safetensors")
    header_bytes = max(0, path.stat().st_size - 8)
    tracemalloc.start()
    began = time.process_time()
    try:
        found = observe(path)
    finally:
        seconds = time.process_time() - began
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert found in (ROWS[row].codes or ("ok",))
    assert seconds < 2
    assert peak < 64 * MIB + 8 * header_bytes


def test_every_row_gets_the_same_code_under_python_O(tmp_path: Path) -> None:
    for row in ROWS:
        write_row(row, tmp_path / f"{row}.safetensors")
    code = (
        "import json, pathlib, sys\n"
        "from helpers.bad_safetensors import ROWS, observe\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "found = {row: observe(folder / f'{row}.safetensors') for row in ROWS}\n"
        "print(json.dumps([__debug__, found]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-O", "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    debug, found = json.loads(run.stdout)
    assert debug is False
    assert {
        row: code for row, code in found.items() if code not in (ROWS[row].codes or ("ok",))
    } == {}


def test_S07_the_byte_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    assert error_of(write_row("S07", tmp_path / "m.safetensors")).offset == 8 + 2


@pytest.mark.parametrize(
    ("row", "tensor", "expected", "actual"),
    [
        pytest.param("S12", "b", 16, 0, id="S12"),
        pytest.param("S13", "b", 4, 8, id="S13"),
        pytest.param("S15", "w", 16, 14, id="S15"),
    ],
)
def test_a_layout_error_names_tensor_offset_expected_and_actual(
    row: str, tensor: str, expected: int, actual: int, tmp_path: Path
) -> None:
    path = write_row(row, tmp_path / "m.safetensors")
    base = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    error = error_of(path)
    assert (error.file, error.tensor) == ("m.safetensors", tensor)
    assert error.detail == {"expected": base + expected, "actual": base + actual}
    assert error.offset == base + min(expected, actual)
    assert str(base + expected) in str(error) and str(base + actual) in str(error)


def test_S01_to_S05_say_where(tmp_path: Path) -> None:
    for row in ("S01", "S03", "S04", "S05"):
        offset = error_of(write_row(row, tmp_path / f"{row}.safetensors")).offset
        assert offset is not None and 0 <= offset <= 8


def test_S39_misaligned_values_are_right(tmp_path: Path) -> None:
    found = values_of(write_row("S39", tmp_path / "m.safetensors"))
    assert found["a"].tolist() == [7]
    with LocalSource(tmp_path / "m.safetensors", LoadConfig()) as source:
        info = read_header(source.open("m.safetensors")).tensors[1]
        assert struct.unpack("<d", info.file.read(info.offset, info.nbytes)) == (1.5,)


@pytest.mark.parametrize("row", ["S44", "S47", "S48", "S49-long", "S51", "S50-bytes-not-letters"])
def test_a_refused_name_is_escaped_and_cut_in_the_message(row: str, tmp_path: Path) -> None:
    text = str(error_of(write_row(row, tmp_path / "m.safetensors")))
    assert text.isprintable() and len(text) < 600


def test_S53_names_that_look_the_same_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "loadkit"):
        header_of(write_row("S53", tmp_path / "m.safetensors"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "\\u0301" in caplog.text


def test_S55_empty_tensors_keep_their_places(tmp_path: Path) -> None:
    header = header_of(write_row("S55", tmp_path / "m.safetensors"))
    assert [(info.name, info.nbytes) for info in header.tensors] == [
        ("a", 4), ("none", 0), ("b", 4), ("nor", 0),
    ]  # fmt: skip


def test_S60_the_reverse_a_safetensors_named_bin_is_refused(tmp_path: Path) -> None:
    from loadkit.file_checks import check_content

    write_st(tmp_path / "pytorch_model.bin", {"w": torch.zeros(2)})
    with LocalSource(tmp_path, LoadConfig()) as source:
        with pytest.raises(FormatError, match="safetensors") as caught:
            check_content(source.open("pytorch_model.bin"), "torch")
    assert caught.value.code == "E_FORMAT"


@pytest.mark.parametrize("content", ["safetensors", "torch", "gguf"])
def test_ST_01_a_pointer_and_a_page_get_one_error_in_every_format(
    content: Any, tmp_path: Path
) -> None:
    from helpers.checkpoints import LFS_POINTER
    from loadkit.file_checks import check_content

    (tmp_path / "pointer").write_text(LFS_POINTER)
    (tmp_path / "page").write_text("<!DOCTYPE html><html>401</html>")
    (tmp_path / "empty").write_bytes(b"")
    with LocalSource(tmp_path, LoadConfig()) as source:
        for name, words in (
            ("pointer", ["pointer", "Git LFS", "4976698672", "git lfs pull"]),
            ("page", ["page", "HTML"]),
            ("empty", ["empty"]),
        ):
            with pytest.raises(FormatError) as caught:
                check_content(source.open(name), content, short_code="E_FORMAT")
            assert caught.value.code == "E_FORMAT" and caught.value.file == name
            assert all(word in str(caught.value) for word in words)


def test_a_header_whose_length_spells_a_magic_number_is_still_a_header(tmp_path: Path) -> None:
    for length in (0x3C, 0x0280, 0x8B1F):  # "<", a pickle's start, gzip
        body = json.dumps({"w": entry("U8", [1], [0, 1])}).encode()
        if len(body) <= length:
            raw_st(tmp_path / "m.safetensors", body + b" " * (length - len(body)), b"\0")
            assert len(header_of(tmp_path / "m.safetensors").tensors) == 1


def test_ST_03_a_header_of_100000_bytes_is_legal(tmp_path: Path) -> None:
    body = json.dumps({"w": entry("F32", [1], [0, 4])}).encode()
    path = raw_st(tmp_path / "m.safetensors", body + b" " * (100_000 - len(body)), b"\0" * 4)
    header = header_of(path)
    assert header.header_bytes == 100_000
    assert header.tensors[0].offset == 100_008


def test_ST_03_the_largest_legal_header_is_read_within_bounds(tmp_path: Path) -> None:
    path = raw_st(tmp_path / "m.safetensors", b"{}" + b" " * (MAX_HEADER_BYTES - 2))
    assert header_of(path).header_bytes == MAX_HEADER_BYTES


def test_ST_04_unusual_dtypes_and_shapes_come_back_bit_exact(tmp_path: Path) -> None:
    tensors = {
        "empty": torch.zeros(0),
        "e2": torch.zeros(2, 0, 3),
        "s": torch.tensor(0.5),
        "i": torch.tensor(7),
        "b": torch.ones(3, dtype=torch.bool),
        "u16": torch.ones(2, dtype=torch.uint16),
        "u32": torch.ones(2, dtype=torch.uint32),
        "u64": torch.ones(2, dtype=torch.uint64),
        "f8": torch.ones(4).to(torch.float8_e4m3fn),
        "e8": torch.ones(4).to(torch.float8_e8m0fnu),
        "c64": torch.ones(2, dtype=torch.complex64),
        "f4": torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2),
    }
    found = values_of(write_st(tmp_path / "model.safetensors", tensors))
    assert found.keys() == tensors.keys()
    for name, want in tensors.items():
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape), name
        assert (
            found[name].numpy(force=True).tobytes() == want.numpy(force=True).tobytes()
            if (want.dtype in (torch.float32, torch.int64))
            else torch.equal(found[name].view(torch.uint8), want.view(torch.uint8))
        ), name


@pytest.mark.parametrize("metadata", [None, {"format": "mlx"}, {"format": "pt", "x": "\u00e9"}])
def test_ST_05_metadata_may_be_absent_or_another_frameworks(
    metadata: dict[str, str] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        header = header_of(write_st(tmp_path / "m.safetensors", {"w": torch.zeros(1)}, metadata))
    assert header.metadata == (metadata or {})
    assert len(header.tensors) == 1
    assert not caplog.records


def test_fields_may_come_in_any_order_spelling_and_spacing(tmp_path: Path) -> None:
    text = (
        '{ "b" :\n{"data_offsets": [ 4 , 8 ], "shape":[ ],\t"dtype": "F32"},'
        '"\\u0061\\/x":{"\\u0064type":"F32","shape":[1,1],"data_offsets":[0,4]}}  \n'
    )
    header = header_of(raw_st(tmp_path / "m.safetensors", text.encode(), b"\0" * 8))
    assert [(info.name, info.shape) for info in header.tensors] == [("a/x", (1, 1)), ("b", ())]


def test_20000_tensors_cost_a_tenth_of_a_second(tmp_path: Path) -> None:
    names = (f"model.layers.{i // 100}.mlp.experts.{i % 100}.up_proj.weight" for i in range(20_000))
    path = sparse_safetensors(tmp_path / "m.safetensors", dict.fromkeys(names, ("BF16", (64, 64))))
    best = 9.0
    for _ in range(3):
        began = time.process_time()
        header = header_of(path)
        best = min(best, time.process_time() - began)
    assert len(header.tensors) == 20_000
    assert best < 0.5  # about 0.08 s where nothing else runs


# -- fuzzing: a valid file, and one to three things wrong with it --------------------------------

_SHAPES = st.lists(st.integers(0, 3), max_size=3)
_DTYPES = st.sampled_from(["F32", "BF16", "U8", "I64", "F8_E4M3", "BOOL", "C64"])


@st.composite
def valid(draw: st.DrawFn) -> tuple[list[tuple[str, Any]], bytes]:
    """An honest header as pairs, and its data."""
    pairs: list[tuple[str, Any]] = []
    if draw(st.booleans()):
        pairs.append(("__metadata__", {"format": "pt"}))
    end = 0
    for number in range(draw(st.integers(0, 4))):
        dtype, shape = draw(_DTYPES), draw(_SHAPES)
        size = DTYPES[dtype][0] // 8
        for dim in shape:
            size *= dim
        pairs.append((f"t{number}", entry(dtype, shape, [end, end + size])))
        end += size
    return pairs, draw(st.binary(min_size=end, max_size=end))


_VALUES = st.one_of(
    st.integers(-2, 70), st.sampled_from([2**31, 2**48 + 1, 2**63, 2**64 - 1]), st.booleans(),
    st.none(), st.text(max_size=3), st.floats(), st.lists(st.integers(-1, 9), max_size=4),
    st.dictionaries(st.text(max_size=2), st.integers(0, 3), max_size=2), _DTYPES,
)  # fmt: skip


def edit_pairs(draw: st.DrawFn, pairs: list[tuple[str, Any]]) -> None:
    """One structured edit of the header."""
    where = draw(st.integers(0, len(pairs) - 1))
    name, value = pairs[where]
    match draw(st.sampled_from(["double", "drop", "rename", "swap", "value", "field", "number"])):
        case "double":
            pairs.insert(draw(st.integers(0, len(pairs))), (name, value))
        case "drop":
            pairs.pop(where)
        case "rename":
            pairs[where] = (draw(st.one_of(st.text(max_size=4), st.just("__metadata__"))), value)
        case "swap":
            pairs.append(pairs.pop(where))
        case "value":
            pairs[where] = (name, draw(_VALUES))
        case "field" if isinstance(value, dict):
            keys = st.sampled_from(["dtype", "shape", "data_offsets", "format", "more"])
            pairs[where] = (name, {**value, draw(keys): draw(_VALUES)})
        case "number" if isinstance(value, dict):
            field = value.get(draw(st.sampled_from(["shape", "data_offsets"])))
            if isinstance(field, list) and field:
                field = list(field)
                field[draw(st.integers(0, len(field) - 1))] = draw(st.integers(-1, 40))


def edit_bytes(draw: st.DrawFn, data: bytearray) -> None:
    """One edit of the file's bytes."""
    where = draw(st.integers(0, len(data) - 1)) if data else 0
    match draw(st.sampled_from(["flip", "cut", "insert", "more", "length"])):
        case "flip" if data:
            data[where] ^= 1 << draw(st.integers(0, 7))
        case "cut":
            del data[where:]
        case "insert":
            data[where:where] = draw(st.sampled_from([b" ", b"{", b"[", b'"', b",", b"\0", b"9"]))
        case "more":
            data += draw(st.binary(max_size=4))
        case "length" if len(data) >= 8:
            old = int.from_bytes(data[:8], "little")
            data[:8] = max(0, old + draw(st.integers(-9, 9))).to_bytes(8, "little")


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    pairs, payload = draw(valid())
    edits = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    for of_header in edits:
        if of_header and pairs:
            edit_pairs(draw, pairs)
    body = ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in pairs)
    header = f"{{{body}}}".encode()
    data = bytearray(struct.pack("<Q", len(header)) + header + payload)
    for of_header in edits:
        if not of_header:
            edit_bytes(draw, data)
    return bytes(data)


@settings(max_examples=400)
@given(damaged())
def test_a_damaged_file_is_a_typed_error_or_what_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(data)
    refused: LoadkitError | None = None
    try:
        found = values_of(path)
    except LoadkitError as error:
        refused = error
    if refused is not None:
        assert refused.code.startswith("E_") and refused.file == path.name
        assert str(refused).isprintable()
        return
    try:
        with safe_open(str(path), "pt") as library:
            wanted = {name: library.get_tensor(name) for name in library.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise AssertionError(f"read what the library refuses: {error}") from error
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape)
        assert bytes(found[name].flatten().view(torch.uint8)) == bytes(
            want.flatten().view(torch.uint8)
        )
