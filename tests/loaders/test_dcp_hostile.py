"""Metadata and data files that lie: each a typed error that names file, tensor and offset."""

from __future__ import annotations

import os
import pickle
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
)

import loadkit_dcp.metadata
from helpers.bad_dcp import MARKER, NAME, Change, Runs, chunks, opened, refused, small
from helpers.dcp_files import edited
from loadkit.errors import LoadkitError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tensor of 12 elements, a second one, and a number."""
    return small(tmp_path / "m")


# -- the pickle ----------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("place", ["all", "planner_data", "entry", "storage", "version"])
def test_SEC_01_no_name_outside_of_the_metadata_is_taken(
    place: str, protocol: int, folder: Path, tmp_path: Path
) -> None:
    marker = tmp_path / MARKER
    evil: Any = Runs(os.system, f"touch {marker}")
    metadata: Any = pickle.loads((folder / ".metadata").read_bytes())
    if place == "all":
        metadata = evil
    elif place == "planner_data":
        metadata.planner_data[NAME] = evil
    elif place == "entry":
        metadata.state_dict_metadata[NAME] = evil
    elif place == "storage":
        metadata.storage_data[MetadataIndex("y")] = evil
    else:
        metadata.version = evil
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))
    error = refused(folder)
    assert error.code == "E_PICKLE"
    assert error.file == ".metadata"
    assert error.offset is not None
    if protocol >= 2:
        assert error.detail["global"] == "posix system"
    assert not marker.exists()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param((eval, "1"), id="eval"),
        pytest.param((getattr, "x", "upper"), id="getattr"),
        pytest.param((__import__, "os"), id="import"),
        pytest.param((bytearray, 1 << 40), id="memory"),
    ],
)
def test_no_builtin_is_called(call: tuple[Any, ...], folder: Path) -> None:
    with edited(folder) as metadata:
        metadata.planner_data[NAME] = Runs(*call)
    assert refused(folder).code == "E_PICKLE"


def test_a_class_of_the_metadata_is_not_called_as_a_function(folder: Path) -> None:
    with edited(folder) as metadata:
        metadata.planner_data[NAME] = Runs(MetadataIndex, "w")
    assert "is called with 1 arguments" in refused(folder).message


def test_every_cut_of_the_metadata_is_refused(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    for end in range(len(data)):
        (folder / ".metadata").write_bytes(data[:end])
        assert refused(folder).code == "E_PICKLE"
    (folder / ".metadata").write_bytes(data + b"x")
    assert "1 bytes follow the pickle" in refused(folder).message


def test_no_changed_byte_of_the_metadata_does_more_than_a_typed_error(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    rng = random.Random(1)
    seen = 0
    for _ in range(1500):
        bad = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        (folder / ".metadata").write_bytes(bad)
        try:
            opened(folder)
        except LoadkitError as error:
            seen += 1
            assert error.file or error.detail
    assert seen > 500


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", id="lfs"),
        pytest.param(b"\x80\x04N.", id="none"),
        pytest.param(b"\x80\x04}.", id="a dict"),
        pytest.param(b"\x80\x04h\x07.", id="memo"),
        pytest.param(b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.", id="frame"),
        pytest.param(b"\x80\x04X\xff\xff\xff\xff.", id="string"),
        pytest.param(b"\x80\x04\x8c\xffabc", id="short string"),
        pytest.param(b"\x80\x04" + b"(" * 100_000, id="marks"),
        pytest.param(b"\x80\x04" + b"]" * 100_000 + b".", id="lists"),
        pytest.param(b"\x80\x04]" + b"\x94h\x00h\x00a" * 1000 + b".", id="itself"),
        pytest.param(b"\x80\x04)\x94" + b"\x85" * 100_000 + b".", id="tuples"),
        pytest.param(b"\x80\x06N.", id="protocol"),
        pytest.param(b"\x80\x04\x8c\x05torch\x8c\x04load\x93.", id="stack global"),
        pytest.param(b"\x80\x04N\x8c\x04load\x93.", id="no module"),
        pytest.param(b"\x80\x04\x8c\x05torch\x8c\x04Size\x93N\x85R.", id="size of none"),
        pytest.param(b"\x80\x04NN\x81.", id="an object of nothing"),
        pytest.param(b"\x80\x04N}b.", id="attributes of nothing"),
        pytest.param(b"\x80\x04\x8f.", id="a set"),
        pytest.param(b"\x80\x04" + b"0" * 9, id="pop"),
    ],
)
def test_what_is_no_metadata_is_refused(data: bytes, folder: Path) -> None:
    (folder / ".metadata").write_bytes(data)
    start = time.process_time()
    assert refused(folder).code in ("E_PICKLE", "E_STRUCTURE")
    assert time.process_time() - start < 5


def test_a_metadata_too_large_is_not_read(folder: Path) -> None:
    with (folder / ".metadata").open("r+b") as file:
        file.truncate(loadkit_dcp.metadata.MAX_METADATA_BYTES + 1)
    assert refused(folder).code == "E_PICKLE"


# -- what it says of tensors ---------------------------------------------------------------------


def _entry(name: str, value: Any) -> Change:
    return lambda metadata: setattr(metadata.state_dict_metadata[NAME], name, value)


def _properties(value: Any) -> Change:
    return _entry("properties", value)


def _too_many(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata[NAME]
    entry.chunks = entry.chunks * (loadkit_dcp.metadata.MAX_BOXES + 1)


def _nowhere(metadata: Metadata) -> None:
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != NAME}


def _negative(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata[NAME]
    entry.chunks[0].offsets = torch.Size((-1, 0))


BAD_TENSORS = [
    pytest.param(chunks(((0, 0), (2, 4)), ((1, 0), (2, 4))), "E_LAYOUT", "in two boxes",
                 id="overlap"),
    pytest.param(chunks(((0, 0), (2, 4))), "E_LAYOUT", "in no box", id="hole at the end"),
    pytest.param(chunks(((0, 0), (3, 1)), ((0, 2), (3, 2))), "E_LAYOUT", "in no box",
                 id="hole inside"),
    pytest.param(chunks(((1, 0), (3, 4))), "E_LAYOUT", "reaches out of it", id="beyond"),
    pytest.param(chunks(((0, 0, 0), (3, 4, 1))), "E_LAYOUT", "a box of it", id="dims"),
    pytest.param(_negative, "E_LAYOUT", "-1 in a box", id="negative"),
    pytest.param(_entry("chunks", []), "E_LAYOUT", "in no box", id="no boxes"),
    pytest.param(_entry("chunks", None), "E_LAYOUT", "None; the limit", id="boxes of nothing"),
    pytest.param(_too_many, "E_LAYOUT", "65537 boxes", id="huge count"),
    pytest.param(_entry("size", torch.Size((1 << 40, 1 << 40))), "E_LAYOUT", "",
                 id="huge size"),
    pytest.param(_entry("size", torch.Size((1 << 62,))), "E_LAYOUT", "", id="huge dim"),
    pytest.param(_entry("size", torch.Size((1,) * 60)), "E_LAYOUT", "60 numbers", id="many dims"),
    pytest.param(_entry("size", (3, True)), "E_LAYOUT", "True in a size", id="bool"),
    pytest.param(_entry("size", None), "E_LAYOUT", "None for a size", id="no size"),
    pytest.param(_nowhere, "E_LAYOUT", "no file is said to hold it", id="nowhere"),
    pytest.param(_properties(TensorProperties(dtype=torch.qint8)), "E_DTYPE", "qint8",
                 id="quantised"),
    pytest.param(_properties(TensorProperties(layout=torch.sparse_coo)), "E_UNSUPPORTED",
                 "no strided tensor", id="sparse"),
    pytest.param(_properties(None), "E_DTYPE", "", id="no properties"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code", "said"), BAD_TENSORS)
def test_a_tensor_that_cannot_be_is_refused_by_name(
    change: Change, code: str, said: str, folder: Path
) -> None:
    with edited(folder) as metadata:
        change(metadata)
    error = refused(folder)
    assert (error.code, error.file, error.tensor) == (code, ".metadata", NAME)
    assert error.offset is not None
    assert said in error.message


def _structure(metadata: Any, name: str, value: Any) -> None:
    setattr(metadata, name, value)


@pytest.mark.parametrize("name", ["state_dict_metadata", "storage_data"])
@pytest.mark.parametrize("value", [None, [], {1: 2}, "x"], ids=repr)
def test_tables_of_another_kind_are_refused(name: str, value: Any, folder: Path) -> None:
    with edited(folder) as metadata:
        setattr(metadata, name, value)
    assert refused(folder).code == "E_STRUCTURE"


def test_a_name_with_control_characters_is_refused(folder: Path) -> None:
    with edited(folder) as metadata:
        metadata.state_dict_metadata["a\x1b[2J"] = metadata.state_dict_metadata.pop(NAME)
        metadata.planner_data = None
    assert refused(folder).code == "E_NAME"
