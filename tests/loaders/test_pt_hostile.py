"""Archives that lie: one typed error each, in time and memory, and nothing in them is ever run."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import nn

import loadkit
from helpers.bad_pt import MARKER, ROWS, archive, one_tensor
from loadkit.config import LoadConfig
from loadkit.errors import CheckpointError, FormatError, LoadkitError
from loadkit.sources.local import LocalSource
from loadkit.torch_archive.tensors import Archive
from loadkit_default.pt.archive import read_archive

BAD = [row for row, made in ROWS.items() if made.codes]
GOOD = [row for row, made in ROWS.items() if not made.codes]
# Rows about a pickle: the error says where in the file the opcode is that was refused.
# Rows that claim much, or are long.
HUGE = [row for row in BAD if row[:3] in ("P08", "P16", "P17", "P23", "P24", "P25", "P26", "P28")]
HUGE += ["P20", "P31", "P32-million", "P57-2^40", "P57-many"]
AT_AN_OPCODE = [
    row for row in BAD if "E_PICKLE" in ROWS[row].codes and row not in ("P01", "P02-noise")
]


def read(path: Path, weights_key: str | None = None) -> Archive:
    with LocalSource(path, LoadConfig()) as source:
        return read_archive(source.open(path.name), weights_key)


def refused(path: Path) -> LoadkitError:
    with pytest.raises(LoadkitError) as caught:
        read(path)
    return caught.value


@pytest.mark.parametrize("row", BAD)
def test_an_archive_that_lies_is_refused_in_time(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(ROWS[row].data())
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)
    began = time.process_time()
    error = refused(path)
    assert time.process_time() - began < 2
    assert isinstance(error, CheckpointError)
    assert error.code in ROWS[row].codes, error
    assert error.file == "m.bin" and error.hint
    assert [each.name for each in tmp_path.iterdir()] == ["m.bin"], MARKER
    assert not {name for name in set(sys.modules) - modules if not name.startswith("loadkit")}


@pytest.mark.parametrize("row", HUGE)
def test_memory_stays_within_64_mib_and_8_times_the_header(row: str, tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(ROWS[row].data())
    gc.collect()
    tracemalloc.start()
    try:
        refused(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (64 << 20) + 8 * path.stat().st_size


@pytest.mark.parametrize("row", AT_AN_OPCODE)
def test_an_error_in_a_pickle_says_where(row: str, tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(ROWS[row].data())
    offset = refused(path).offset
    assert offset is not None and 0 <= offset <= path.stat().st_size


@pytest.mark.parametrize(
    ("row", "name"),
    [("P04", "posix system"), ("P05", "posix system"), ("P19", "torch Tensor"),
     ("P04-text", "posix system"), ("P16", "__builtin__ bytearray")],
)  # fmt: skip
def test_a_refused_import_is_named_at_its_opcode(row: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(ROWS[row].data())
    error = refused(path)
    assert error.detail["global"] == name and name in str(error)
    module = name.partition(" ")[0].encode()
    assert path.read_bytes()[error.offset :].startswith(b"c" + module + b"\n")


@pytest.mark.parametrize("row", GOOD)
def test_an_archive_that_is_only_odd_gives_its_numbers(row: str, tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(ROWS[row].data())
    found = dict(loadkit.iter_weights(path))
    wanted = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for name, tensor in found.items():
        assert row == "P61" or tensor.equal(wanted), name


@pytest.mark.parametrize("reader", ["mmap", "pread", "direct", "eager"])
@pytest.mark.parametrize("row", ["P05", "P09", "P27", "P48", "P56-coo", "P57-short"])
def test_every_reader_refuses_it_and_leaves_the_module_alone(
    row: str, reader: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(ROWS[row].data())
    module = nn.Linear(2, 2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        loadkit.load_into(module, path, load_config=LoadConfig(reader=reader))
    assert caught.value.code in ROWS[row].codes
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())


@pytest.mark.slow  # a process that imports torch
def test_the_same_without_asserts(tmp_path: Path) -> None:
    rows = ["P05", "P09", "P12", "P24", "P29", "P31", "P41", "P48", "P57-many"]
    for row in rows:
        (tmp_path / f"{row}.bin").write_bytes(ROWS[row].data())
    code = (
        "import sys, loadkit\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n        list(loadkit.iter_weights(path))\n"
        "    except loadkit.LoadkitError as error:\n        print(error.code)\n"
    )
    files = [str(tmp_path / f"{row}.bin") for row in rows]
    done = subprocess.run(
        [sys.executable, "-O", "-c", code, *files], capture_output=True, text=True
    )
    assert done.stdout.split() == [ROWS[row].codes[0] for row in rows], done.stderr


# -- rows that are more than a code ---------------------------------------------------------------


def test_P61_a_flipped_byte_is_an_error_where_integrity_is_on(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(ROWS["P61"].data())
    assert len(list(loadkit.iter_weights(path))) == 1
    with pytest.raises(CheckpointError) as caught:
        list(loadkit.iter_weights(path, load_config=LoadConfig(verify="digest")))
    assert (caught.value.code, caught.value.tensor) == ("E_CRC", "w")
    path.write_bytes(ROWS["good"].data())
    assert len(list(loadkit.iter_weights(path, load_config=LoadConfig(verify="digest")))) == 1


def test_P61_a_writer_that_computed_no_checksum_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    try:
        torch.serialization.set_crc32_options(False)
        torch.save({"w": torch.ones(3)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    config = LoadConfig(verify="digest")
    assert [t.tolist() for _, t in loadkit.iter_weights(path, load_config=config)] == [[1.0] * 3]


def test_P63_tensors_of_one_storage_are_reported_as_ties(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(ROWS["P63"].data())
    assert read(path).ties == (("a", "b"),)
    with caplog.at_level("INFO", "loadkit_default"):
        assert len(dict(loadkit.iter_weights(path))) == 2
    assert "'m.bin': one storage: a = b" in caplog.text


def test_P53_a_location_that_is_not_here_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(ROWS["P53"].data())
    ((_, tensor),) = loadkit.iter_weights(path)
    assert tensor.device.type == "cpu" and tensor.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_directory_of_a_million_records_is_not_begun(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    data = bytearray(archive(one_tensor()))
    at = data.rfind(b"PK\x05\x06")
    zip64 = b"PK\x06\x06" + (44).to_bytes(8, "little") + bytes(4 + 8)
    zip64 += (2**62).to_bytes(8, "little") * 2 + (100).to_bytes(8, "little") * 2
    locator = b"PK\x06\x07" + bytes(4) + at.to_bytes(8, "little") + (1).to_bytes(4, "little")
    data[at:at] = zip64 + locator
    path.write_bytes(data)
    error = refused(path)
    assert isinstance(error, FormatError) and error.code == "E_ZIP"
