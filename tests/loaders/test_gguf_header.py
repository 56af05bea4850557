"""The GGUF header parser: every way a header can lie, by row, and what is legal but unusual."""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.bad_gguf import ROWS, observe, write_row
from helpers.gguf_files import (
    ARCH,
    LLAMA_KEYS,
    Tensor,
    array,
    f32,
    gguf_bytes,
    llama_tensors,
    string,
    write_gguf,
)
from loadkit.config import LoadConfig
from loadkit.errors import FormatError
from loadkit.sources.base import File
from loadkit.sources.local import LocalSource
from loadkit_gguf import window
from loadkit_gguf.header import GGUFHeader, read_gguf_header

MIB = 1 << 20


def header_of(path: Path) -> GGUFHeader:
    with LocalSource(path, LoadConfig()) as source:
        return read_gguf_header(source.open(path.name))


def error_of(path: Path) -> FormatError:
    with pytest.raises(FormatError) as caught:
        header_of(path)
    return caught.value


class Memory(File):
    """A file without a path or a descriptor, as a remote one is; notes what was read."""

    def __init__(self, data: bytes, name: str = "m.gguf") -> None:
        self.name, self.data, self.size = name, data, len(data)
        self.reads: list[tuple[int, int]] = []

    def read(self, offset: int, nbytes: int) -> bytes:
        self.reads.append((offset, nbytes))
        return self.data[offset : offset + nbytes]

    def check_unchanged(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize("row", ROWS)
def test_a_lying_header_gets_the_code_of_its_rule_in_bounds(row: str, tmp_path: Path) -> None:
    path = write_row(row, tmp_path / "m.gguf")
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
    assert peak < 64 * MIB + 8 * path.stat().st_size


def test_every_row_gets_the_same_code_under_python_O(tmp_path: Path) -> None:
    for row in ROWS:
        write_row(row, tmp_path / f"{row}.gguf")
    code = (
        "import json, pathlib, sys\n"
        "from helpers.bad_gguf import ROWS, observe\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "found = {row: observe(folder / f'{row}.gguf') for row in ROWS}\n"
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


@pytest.mark.parametrize("row", ["G16", "G17", "G19"])
def test_an_array_past_the_end_is_refused_at_once(row: str, tmp_path: Path) -> None:
    path = write_row(row, tmp_path / "m.gguf")
    observe(path)
    began = time.process_time()
    assert observe(path) == "E_ARRAY"
    assert time.process_time() - began < 0.01


@pytest.mark.parametrize("row", ["G20", "G21"])
def test_a_great_array_costs_a_few_times_its_bytes(row: str, tmp_path: Path) -> None:
    path = write_row(row, tmp_path / "m.gguf")
    began = time.process_time()
    values = header_of(path).metadata["a"]
    assert time.process_time() - began < 0.2
    assert np.array_equal(values, np.arange(len(values)).astype(values.dtype))
    tracemalloc.start()
    kept = header_of(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < max(4 * kept.metadata["a"].nbytes, 2 * MIB)


def test_a_header_is_read_once_of_an_open_file() -> None:
    file = Memory(gguf_bytes([f32("output_norm.weight", 8)], [ARCH]))
    first = read_gguf_header(file)
    asked = len(file.reads)
    assert read_gguf_header(file) is first
    assert len(file.reads) == asked > 0


def test_headers_at_the_limits_take_linear_time() -> None:
    count = 50_000
    tensors = [Tensor(f"t{number}", [0], 0, b"") for number in range(count)]
    keys = [(f"k{number}", 1) for number in range(count)]
    words = struct.pack("<Q", 0) * 20 * count
    file = Memory(gguf_bytes(tensors, [*keys, ("words", array(8, words, 20 * count))]))
    began = time.process_time()
    header = read_gguf_header(file)
    assert time.process_time() - began < 2
    assert len(header.tensors) == count and len(header.metadata) == count + 1


def test_GG_02_G07_a_big_endian_file_is_called_so(tmp_path: Path) -> None:
    error = error_of(write_row("G07", tmp_path / "m.gguf"))
    assert "big-endian GGUF" in str(error) and "version 3" in str(error)
    assert error.detail == {"byte_order": "big", "version": 3}


@pytest.mark.parametrize(("row", "offset"), [("G12", 24), ("G13", 24), ("G15", 37)])
def test_a_string_past_the_end_is_named_by_its_offset(
    row: str, offset: int, tmp_path: Path
) -> None:
    assert error_of(write_row(row, tmp_path / "m.gguf")).offset == offset


@pytest.mark.parametrize("row", ["G46-data-cut", "G47", "G51", "G52", "G53", "G59"])
def test_a_layout_error_names_tensor_end_and_size(row: str, tmp_path: Path) -> None:
    path = write_row(row, tmp_path / "m.gguf")
    error = error_of(path)
    assert error.file == "m.gguf" and error.tensor in ("a", "b", "w")
    expected, actual = error.detail["expected"], error.detail["actual"]
    assert str(expected) in str(error) and str(actual) in str(error)
    if row in ("G46-data-cut", "G59"):
        assert actual == path.stat().st_size


def test_GG_02_version_2_is_read_and_1_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "v2.gguf", [f32("output_norm.weight", 8)], [ARCH], version=2)
    assert (header_of(path).version, len(header_of(path).tensors)) == (2, 1)
    assert "GGUF version 1" in str(error_of(write_row("G05", tmp_path / "v1.gguf")))


def test_GG_03_an_unknown_type_names_tensor_number_and_the_way_out(tmp_path: Path) -> None:
    tensors = [Tensor("blk.0.ffn_down.weight", [32, 2], 250, b"\0" * 64)]
    error = error_of(write_gguf(tmp_path / "new.gguf", tensors, [ARCH]))
    assert (error.code, error.tensor) == ("E_DTYPE", "blk.0.ffn_down.weight")
    assert "250" in str(error) and "loadkit-gguf 0.1.0" in str(error)
    assert "upgrade gguf" in str(error)


def test_GG_03_plain_types_have_their_own_shape_and_bytes(tmp_path: Path) -> None:
    kinds = {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2}
    tensors = [
        Tensor(f"t{kind}", [8, 3], kind, bytes(range(24)) * size) for kind, size in kinds.items()
    ]
    for tensor in header_of(write_gguf(tmp_path / "plain.gguf", tensors, [ARCH])).tensors:
        info = tensor.info()
        assert (info.shape, info.nbytes) == ((3, 8), 24 * kinds[tensor.kind.number])
        assert info.dtype == tensor.dtype


@pytest.mark.parametrize(
    ("tensor", "cut", "found"),
    [
        (Tensor("w", [8], 0, b"\0" * 32), 16, "E_LAYOUT"),
        (Tensor("w", [8], 0, b"\0" * 32, 1 << 40), 0, "E_LAYOUT"),
        (Tensor("w", [8], 0, b"\0" * 32, 2**64 - 64), 0, "E_LAYOUT"),
        (Tensor("w", [2**62, 4], 0, b"\0" * 32), 0, "E_SHAPE"),
    ],
    ids=["truncated", "far", "wrapping", "dims"],
)
def test_GG_04_bounds_hold_without_overflow(
    tensor: Tensor, cut: int, found: str, tmp_path: Path
) -> None:
    error = error_of(write_gguf(tmp_path / "m.gguf", [tensor], [ARCH], cut=cut))
    assert (error.code, error.tensor) == (found, "w")


def test_G60_a_long_name_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "loadkit"):
        header_of(write_row("G60", tmp_path / "m.gguf"))
    assert "has 65 bytes" in caplog.text


def test_keys_have_their_values(tmp_path: Path) -> None:
    keys = [
        ARCH,
        ("u8", (0, b"\xff")),
        ("i8", (1, b"\xff")),
        ("i16", (3, b"\xfe\xff")),
        ("f32", 0.5),
        ("f64", (12, struct.pack("<d", 0.1))),
        ("u64", (10, struct.pack("<Q", 2**64 - 1))),
        ("yes", True),
        ("text", "ä ▁"),
        ("broken", (8, string(b"a\xff"))),
        ("bools", np.array([True, False])),
        ("empty", array(8, b"", 0)),
        ("words", ["", "a", "ü", "x" * 300, "", "", "b"]),
    ]
    found = header_of(write_gguf(tmp_path / "m.gguf", [], keys)).metadata
    assert [found[key] for key in ("u8", "i8", "i16", "f32", "f64", "u64", "yes", "text")] == [
        *(255, -1, -2, 0.5, 0.1, 2**64 - 1, True, "ä ▁")
    ]
    assert found["broken"] == "a\ufffd" and found["bools"].tolist() == [True, False]
    assert list(found["empty"]) == []
    words = found["words"]
    assert list(words) == keys[-1][1] and len(words) == 7
    assert [words[i] for i in range(7)] == keys[-1][1] == words[:] and words[-1] == "b"
    assert words.raw(2) == "ü".encode()
    with pytest.raises(IndexError):
        words[7]


def test_a_string_that_is_no_utf8_is_an_error_when_it_is_asked_for(tmp_path: Path) -> None:
    words = [b"good", b"bad\xff"]
    path = write_gguf(tmp_path / "m.gguf", [], [("a", array(8, b"".join(map(string, words)), 2))])
    found = header_of(path).metadata["a"]
    assert found[0] == "good" and found.raw(1) == b"bad\xff"
    for ask in (lambda: found[1], found.decoded):
        with pytest.raises(FormatError) as caught:
            ask()
        assert caught.value.code == "E_UTF8"
        assert path.read_bytes()[caught.value.offset] == 0xFF


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=12),
            st.binary(min_size=200, max_size=600),
            st.sampled_from([b"", b"\0" * 9, b"\0" * 40, b"a" * 255, b"a" * 256]),
        ),
        max_size=60,
    ),
    st.integers(16, 300),
)
def test_strings_are_walked_right_whatever_they_hold(words: list[bytes], step: int) -> None:
    file = Memory(gguf_bytes([], [("a", array(8, b"".join(map(string, words)), len(words)))]))
    before = window._FIRST, window._STEP
    window._FIRST = window._STEP = step
    try:
        found = read_gguf_header(file).metadata["a"]
    finally:
        window._FIRST, window._STEP = before
    assert [found.raw(i) for i in range(len(found))] == words


def test_a_file_without_a_path_is_read_by_growing_ranges() -> None:
    keys = [ARCH, ("words", [f"word {n}" for n in range(50_000)])]
    data = gguf_bytes([f32("w", 1 << 20)], keys)
    file = Memory(data)
    header = read_gguf_header(file)
    assert header.tensors[0].offset == header.data_offset
    read = sum(size for _, size in file.reads)
    assert len(file.reads) < 10 and read < 2.1 * header.data_offset + 4096
    assert all(offset + size <= len(data) for offset, size in file.reads)


_GOOD = gguf_bytes(llama_tensors(), [*LLAMA_KEYS, ("words", ["a", "bb", ""] * 9)])


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1400),
            st.sampled_from(
                [b"\0", b"\xff", b"\x7f", b"\xff" * 8, b"\0" * 8, b"\x01", b"\xff" * 4, b"\x80"]
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([None, 0, 1, 20, 500, 1500]),
)
def test_an_edited_file_is_read_or_refused_with_a_typed_error(
    edits: list[tuple[int, bytes]], cut: int | None
) -> None:
    data = bytearray(_GOOD)
    for at, new in edits:
        data[at : at + len(new)] = new
    file = Memory(bytes(data[:cut]))
    began = time.process_time()
    try:
        for tensor in read_gguf_header(file).tensors:
            assert tensor.offset >= 0 and tensor.offset + tensor.nbytes <= file.size
    except FormatError as error:
        assert error.code.startswith("E_") and error.file == "m.gguf"
    assert time.process_time() - began < 2


def test_a_real_header_is_read_in_milliseconds(smollm2: Path) -> None:
    began = time.process_time()
    header = header_of(smollm2)
    assert time.process_time() - began < 0.5  # 0.01 on an idle machine
    kinds = [tensor.dtype for tensor in header.tensors]
    assert {kind: kinds.count(kind) for kind in kinds} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49_152


@pytest.mark.slow
def test_a_real_header_is_what_gguf_py_reads(smollm2: Path) -> None:
    import gguf

    reader, header = gguf.GGUFReader(smollm2), header_of(smollm2)
    theirs = [
        (t.name, t.tensor_type.name, tuple(map(int, t.shape))[::-1], int(t.data_offset), t.n_bytes)
        for t in reader.tensors
    ]
    assert theirs == [(t.name, t.dtype, t.shape, t.offset, t.nbytes) for t in header.tensors]
    keys = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(keys) == list(header.metadata)
    for key, field in keys.items():
        ours, value = header.metadata[key], field.contents()
        assert (list(ours) if isinstance(value, list) else ours) == value, key


@pytest.mark.large
def test_the_headers_of_large_files_are_read(gemma3: Path, qwen25: Path) -> None:
    for path, tensors, tokens in ((gemma3, 236, 262_144), (qwen25, 291, 151_936)):
        header = header_of(path)
        assert len(header.tensors) == tensors
        assert len(header.metadata["tokenizer.ggml.tokens"].decoded()) == tokens
