"""Tensorizer files that are cut, lie or are not what they say; rows T of the bad inputs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loadkit
from helpers.tensorizer_files import GOOD, HEAD, ROWS, Container, Row, plain_file, write_tensors
from loadkit.config import LoadConfig
from loadkit.errors import FormatError, IntegrityError, LoadkitError
from loadkit_tensorizer.header import read_index

PLANNED = [row for row in ROWS if row.name != "T08"]  # whose bytes no plan reads
QUIET = LoadConfig(load_format="tensorizer", use_tqdm_on_load=False)


class Pair(nn.Module):
    """What the good file fills."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(64, 32))
        self.second = nn.Parameter(torch.zeros(16))


def load(path: Path, module: nn.Module | None = None, **extra: Any) -> Any:
    config = LoadConfig(
        load_format="tensorizer", use_tqdm_on_load=False, model_loader_extra_config=extra
    )
    return loadkit.load_into(module or Pair(), path, load_config=config)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return bytes(plain_file(tmp_path_factory.mktemp("good")).data)


def spoiled(good: bytes, row: Row, path: Path) -> Path:
    file = Container(good)
    row.spoil(file)
    path.write_bytes(file.data)
    return path


def test_the_good_file_loads(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.tensors").write_bytes(good)
    module = Pair()
    report = load(tmp_path / "a.tensors", module).report
    assert torch.equal(module.first, GOOD["first"])
    assert torch.equal(module.second, GOOD["second"])
    assert report.verified["compared_bytes"] == sum(t.nbytes for t in GOOD.values())
    assert not report.warnings


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_bad_file_is_one_typed_error_and_the_model_is_untouched(
    row: Row, good: bytes, tmp_path: Path
) -> None:
    path = spoiled(good, row, tmp_path / "a.tensors")
    module = Pair()
    began = time.monotonic()
    with pytest.raises(LoadkitError) as caught:
        load(path, module)
    error = caught.value
    assert time.monotonic() - began < 2
    assert error.code == row.code, error
    assert error.file == "a.tensors"
    assert error.offset is not None
    assert error.hint
    assert not module.first.any() or row.name == "T08"  # found while it is read: marked unusable


@pytest.mark.parametrize("row", PLANNED, ids=lambda r: r.name)
def test_a_bad_file_is_refused_by_a_plan_too(row: Row, good: bytes, tmp_path: Path) -> None:
    path = spoiled(good, row, tmp_path / "a.tensors")
    with pytest.raises(LoadkitError) as caught:
        list(loadkit.iter_weights(path, load_format="tensorizer", load_config=QUIET))
    assert caught.value.code == row.code


def test_T16_T17_and_T13_hold_without_asserts(good: bytes, tmp_path: Path) -> None:
    rows = [row for row in ROWS if row.name.startswith(("T13", "T16", "T17"))]
    paths = {
        row.name: str(spoiled(good, row, tmp_path / f"{n}.tensors")) for n, row in enumerate(rows)
    }
    code = (
        "import json, sys, loadkit\n"
        "from loadkit.errors import LoadkitError\n"
        "assert False\n"
        "found = {}\n"
        "for name, path in json.loads(sys.argv[1]).items():\n"
        "    try:\n"
        "        list(loadkit.iter_weights(path, load_format='tensorizer'))\n"
        "    except LoadkitError as error:\n"
        "        found[name] = error.code\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", code, json.dumps(paths)], capture_output=True, text=True
    )
    assert json.loads(done.stdout) == {row.name: row.code for row in rows}, done.stderr


def hash_count_zero(good: bytes, path: Path) -> None:
    """A file whose first tensor has no hash, and is right otherwise."""
    file = Container(good)
    at = file.hashes("first")
    gone = file.get(at - 2, "<H") - 1
    del file.data[at + 1 : at + 1 + gone]
    file.data[at] = 0
    file.put(at - 2, "<H", 1)
    file.put(file.header("first"), "<Q", file.get(file.header("first"), "<Q") - gone)
    file.put(file.location("first") + 8, "<Q", file.start("first") - gone)
    for field in (0, 8):
        where = file.location("second") + field
        file.put(where, "<Q", file.get(where, "<Q") - gone)
    path.write_bytes(file.data)


def test_T09_a_hash_is_required(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.tensors"
    hash_count_zero(good, path)
    with pytest.raises(IntegrityError) as caught:
        load(path)
    assert (caught.value.code, caught.value.tensor) == ("E_HASH", "first")
    module = Pair()
    load(path, module, verify_hash=False)
    assert torch.equal(module.first, GOOD["first"])


def test_T09_the_library_alone_takes_it(good: bytes, tmp_path: Path) -> None:
    from tensorizer import TensorDeserializer

    hash_count_zero(good, tmp_path / "a.tensors")
    with TensorDeserializer(tmp_path / "a.tensors", device="cpu", verify_hash=True) as reader:
        assert torch.equal(reader["first"], GOOD["first"])


def hash_types(good: bytes, path: Path, first: int, second: int) -> None:
    file = Container(good)
    at = file.hashes("first") + 1
    file.data[at] = first
    file.data[at + 2 + file.data[at + 1]] = second
    file.rehash("first")
    path.write_bytes(file.data)


@pytest.mark.parametrize(
    ("types", "word"),
    [
        pytest.param((77, 1), "", id="T11-beside-sha256"),
        pytest.param((0, 77), "CRC-32", id="T12-crc32-only"),
        pytest.param((77, 78), "unknown", id="T11-alone"),
    ],
)
def test_weak_hashes_are_allowed_and_told(
    types: tuple[int, int], word: str, good: bytes, tmp_path: Path
) -> None:
    path, module = tmp_path / "a.tensors", Pair()
    hash_types(good, path, *types)
    warnings = load(path, module).report.warnings
    assert torch.equal(module.first, GOOD["first"])
    assert [word in text and "weak" in text for text in warnings] == ([True] if word else [])


def test_T12_a_crc32_alone_still_finds_a_flipped_bit(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.tensors"
    hash_types(good, path, 0, 77)
    file = Container(path.read_bytes())
    file.data[file.start("first") + 5] ^= 1
    path.write_bytes(file.data)
    with pytest.raises(IntegrityError) as caught:
        load(path)
    assert (caught.value.code, caught.value.tensor) == ("E_HASH", "first")
    assert "CRC-32" in str(caught.value)


def test_T08_without_verification_the_bytes_are_taken_as_they_are(
    good: bytes, tmp_path: Path
) -> None:
    row = next(row for row in ROWS if row.name == "T08")
    module = Pair()
    load(spoiled(good, row, tmp_path / "a.tensors"), module, verify_hash=False)
    assert not torch.equal(module.first, GOOD["first"])


def test_T08_a_flip_in_the_header_is_found_too(good: bytes, tmp_path: Path) -> None:
    file = Container(good)
    file.data[file.header("second") + 8] ^= 1  # the module's number, which nothing else looks at
    (tmp_path / "a.tensors").write_bytes(file.data)
    with pytest.raises(IntegrityError) as caught:
        load(tmp_path / "a.tensors")
    assert (caught.value.code, caught.value.tensor) == ("E_HASH", "second")


def test_T21_a_huge_tensor_without_data_is_refused(tmp_path: Path) -> None:
    huge = torch.empty(500_000_000, device="meta")
    path = write_tensors(tmp_path / "a.tensors", {"first": GOOD["first"], "huge": huge})
    with pytest.raises(FormatError) as caught:
        load(path)
    assert (caught.value.code, caught.value.tensor) == ("E_LIMIT", "huge")


def test_a_small_tensor_without_data_is_zeros(tmp_path: Path) -> None:
    path = write_tensors(
        tmp_path / "a.tensors",
        {"first": torch.empty(64, 32, device="meta"), "second": GOOD["second"]},
    )
    module = Pair()
    nn.init.ones_(module.first)
    load(path, module)
    assert not module.first.any()
    assert torch.equal(module.second, GOOD["second"])


PATHS = {
    "T24-nested": b'["a",["b"]]',
    "T24-deep": b"[" * 500 + b"]" * 500,
    "T24-float": b'["a",1.5]',
    "T24-negative": b'["a",-1]',
    "T24-true": b'["a",true]',
    "T24-object": b'["a",{"b":1}]',
    "T24-empty": b"[]",
    "T24-nan": b'["a",NaN]',
}


def named(folder: Path, raw: bytes) -> Path:
    """A file with a tensor whose stored name is ``raw``."""
    length = len(raw)
    file = plain_file(folder, {"x" * length: torch.ones(4), "other": torch.ones(2)})
    for at in (file.entry("x" * length), file.header("x" * length) + 13):
        file.data[at : at + length] = raw
    path = folder / "a.tensors"
    path.write_bytes(file.data)
    return path


@pytest.mark.parametrize("raw", PATHS.values(), ids=PATHS)
def test_a_structured_name_that_breaks_a_rule(raw: bytes, tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        load(named(tmp_path, b"\x1e" + raw))
    assert caught.value.code == "E_NAME"


@pytest.mark.parametrize("raw", [b"a\x00b", b"a\x1b[31m", b"\xff\xfe\xfd", b"a" * 1025])
def test_a_plain_name_that_breaks_a_rule(raw: bytes, tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        load(named(tmp_path, raw))
    assert caught.value.code == "E_NAME"
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(b'["a","b"]', b'["a"]     ', id="T24-prefix-conflict"),
        pytest.param(b'["a","b"]', b'["a",   1]', id="T24-key-and-position"),
        pytest.param(b'["a","b"]', b'["a", "b"]', id="T24-twice"),
    ],
)
def test_structured_names_that_conflict(first: bytes, second: bytes, tmp_path: Path) -> None:
    raws = [b"\x1e" + first, b"\x1e" + second.rstrip()]
    names = [letter * len(raw) for letter, raw in zip("xy", raws, strict=True)]
    file = plain_file(tmp_path, {name: torch.ones(4) for name in names})
    for name, raw in zip(names, raws, strict=True):
        for at in (file.header(name) + 13, file.entry(name)):
            file.data[at : at + len(raw)] = raw
    (tmp_path / "a.tensors").write_bytes(file.data)
    with pytest.raises(FormatError) as caught:
        load(tmp_path / "a.tensors")
    assert caught.value.code == "E_NAME"


def test_nested_state_dicts_get_dotted_names(tmp_path: Path) -> None:
    path = write_tensors(
        tmp_path / "a.tensors", {"model": {"layers": [{"w": torch.ones(3)}, {"w": torch.zeros(3)}]}}
    )
    found = dict(loadkit.iter_weights(path, load_format="tensorizer", load_config=QUIET))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "model.layers.0.w": [1.0] * 3,
        "model.layers.1.w": [0.0] * 3,
    }


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"version https://git-lfs.github.com/spec/v1\nsize 12\n", "LFS"),
        (b"<!DOCTYPE html>" * 9, "HTML"),
    ],
)
def test_what_is_no_weights_at_all_is_named(data: bytes, word: str, tmp_path: Path) -> None:
    (tmp_path / "a.tensors").write_bytes(data)
    with pytest.raises(FormatError, match=word) as caught:
        load(tmp_path / "a.tensors")
    assert caught.value.code == "E_FORMAT"


def test_random_edits_of_a_good_file_are_typed_errors_or_good_loads(
    good: bytes, tmp_path: Path
) -> None:
    from random import Random

    random = Random(3)
    path = tmp_path / "a.tensors"
    interesting = [*range(HEAD + 90), *range(HEAD + (1 << 18), len(good))]
    refused = 0
    for _ in range(150):
        data = bytearray(good)
        for _ in range(random.randint(1, 3)):
            data[random.choice(interesting)] = random.choice([0, 1, 127, 128, 255])
        path.write_bytes(data)
        try:
            found = dict(loadkit.iter_weights(path, load_format="tensorizer", load_config=QUIET))
        except LoadkitError:
            refused += 1
        else:
            assert {n: t.tolist() for n, t in found.items()} == {
                n: t.tolist() for n, t in GOOD.items()
            }
    assert refused > 100


def test_the_index_is_what_the_library_says(tmp_path: Path) -> None:
    from tensorizer import TensorDeserializer

    from loadkit.sources.local_file import LocalFile

    tensors = {f"t{n}": torch.ones(2, 3).to(dtype) for n, dtype in enumerate(
        (torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.int64)
    )}  # fmt: skip
    path = write_tensors(tmp_path / "a.tensors", {**tensors, "scalar": torch.tensor(3.0)})
    file = LocalFile("a.tensors", str(path))
    index = read_index(file)
    with TensorDeserializer(path, device="cpu", lazy_load=True) as reader:
        theirs = {entry.name[0]: entry for entry in reader._metadata.values()}
        for entry in index.entries:
            other = theirs[entry.name]
            assert (entry.offset, entry.start, entry.nbytes, entry.shape) == (
                other.offset, other.data_offset, other.data_length, other.shape,
            )  # fmt: skip
    file.close()
    found = dict(loadkit.iter_weights(path, load_format="tensorizer", load_config=QUIET))
    assert all(torch.equal(found[n].float(), t.float()) for n, t in tensors.items())
