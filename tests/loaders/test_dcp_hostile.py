"""Metadata and data files that lie: each a typed error that names file, tensor and offset."""

from __future__ import annotations

import os
import pickle
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)

import loadkit
import loadkit_dcp.metadata
from helpers.dcp_files import edited, write_dcp
from loadkit.config import LoadConfig
from loadkit.errors import FormatError, LoadkitError, PathError, ReadError, TruncatedError
from loadkit.sources.local import LocalSource
from loadkit_dcp.checkpoint import open_checkpoint

Change = Callable[[Metadata], None]
NAME = "model.w"
MARKER = "loadkit-was-run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tensor of 12 elements, a second one, and a number."""
    state = {"w": torch.arange(12.0).view(3, 4), "x": torch.ones(5)}
    return write_dcp(tmp_path / "m", {"model": state, "step": 3})


def opened(folder: Path) -> Any:
    with LocalSource(folder, LoadConfig()) as source:
        return open_checkpoint(source, None)


def refused(folder: Path, kind: type[LoadkitError] = FormatError) -> Any:
    with pytest.raises(kind) as caught:
        opened(folder)
    error: Any = caught.value
    assert error.file is not None
    assert error.hint
    return error


def place_of(metadata: Metadata, name: str = NAME) -> Any:
    return next(place for key, place in metadata.storage_data.items() if key.fqn == name)


# -- the pickle ----------------------------------------------------------------------------------


class Runs:
    """Pickled, it is a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], tuple(self.call[1:])


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


def _chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Change:
    """Other boxes, each said to lie where the whole is."""

    def change(metadata: Metadata) -> None:
        place = place_of(metadata)
        entry: Any = metadata.state_dict_metadata[NAME]
        entry.chunks = [
            ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes
        ]
        for at, _ in boxes:
            metadata.storage_data[MetadataIndex(NAME, at)] = place

    return change


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
    pytest.param(_chunks(((0, 0), (2, 4)), ((1, 0), (2, 4))), "E_LAYOUT", "in two boxes",
                 id="overlap"),
    pytest.param(_chunks(((0, 0), (2, 4))), "E_LAYOUT", "in no box", id="hole at the end"),
    pytest.param(_chunks(((0, 0), (3, 1)), ((0, 2), (3, 2))), "E_LAYOUT", "in no box",
                 id="hole inside"),
    pytest.param(_chunks(((1, 0), (3, 4))), "E_LAYOUT", "reaches out of it", id="beyond"),
    pytest.param(_chunks(((0, 0, 0), (3, 4, 1))), "E_LAYOUT", "a box of it", id="dims"),
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


# -- where it says they are ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["../m/__0_0.distcp", "/etc/passwd", "a/../../b", "C:\\x", "", "a\0b", "./x", 3]
)
def test_F_a_path_out_of_the_folder_is_refused(path: Any, folder: Path) -> None:
    with edited(folder) as metadata:
        place_of(metadata).relative_path = path
    error = refused(folder, PathError)
    assert (error.file, error.tensor) == (".metadata", NAME)
    assert error.offset is not None


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes((folder / "__0_0.distcp").read_bytes())
    (folder / "__0_0.distcp").unlink()
    (folder / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    assert refused(folder, PathError).file == "__0_0.distcp"


def test_a_missing_file_is_named_with_a_tensor_of_it(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    error = refused(folder, ReadError)
    assert (error.file, error.tensor, error.exit_code) == ("__0_0.distcp", NAME, 3)
    assert error.offset is not None


def test_a_file_that_ends_early_is_refused(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    error = refused(folder, TruncatedError)
    assert (error.file, error.tensor) == ("__0_0.distcp", "model.x")
    assert error.offset is not None


@pytest.mark.parametrize(
    ("field", "change", "kind"),
    [
        pytest.param("offset", 1 << 40, TruncatedError, id="offset beyond the file"),
        pytest.param("offset", 1 << 80, TruncatedError, id="offset beyond all files"),
        pytest.param("length", 1 << 40, TruncatedError, id="length beyond the file"),
        pytest.param("offset", 1, FormatError, id="offset off by one"),
        pytest.param("length", 1, FormatError, id="length one more"),
        pytest.param("length", -1, FormatError, id="length one less"),
        pytest.param("length", -4000, FormatError, id="a negative length"),
        pytest.param("offset", -4000, FormatError, id="a negative offset"),
    ],
)
def test_a_place_that_is_not_the_items_is_refused(
    field: str, change: int, kind: type[LoadkitError], folder: Path
) -> None:
    with edited(folder) as metadata:
        place = place_of(metadata)
        setattr(place, field, getattr(place, field) + change)
    error = refused(folder, kind)
    assert error.tensor == NAME
    assert error.offset is not None


def test_a_length_of_nothing_is_refused(folder: Path) -> None:
    with edited(folder) as metadata:
        place_of(metadata).length = 0
    assert refused(folder).tensor == NAME


@pytest.mark.parametrize(
    ("item", "said"),
    [
        pytest.param(torch.zeros(4, 3), r"[3, 4] by the metadata, and F32 [4, 3]", id="shape"),
        pytest.param(torch.zeros(3, 4).double(), "F32 [3, 4] by the metadata, and F64", id="dtype"),
        pytest.param(3, "it holds a number, and no tensor", id="number"),
        pytest.param({"w": torch.zeros(3, 4)}, "a dict of 1, and no tensor", id="dict"),
        pytest.param(torch.zeros(3, 4).to_sparse(), "another kind", id="sparse"),
    ],
)
def test_an_item_that_is_another_tensor_is_refused(item: Any, said: str, folder: Path) -> None:
    path = folder / "__0_0.distcp"
    start = path.stat().st_size
    with path.open("ab") as file:
        torch.save(item, file)
    with edited(folder) as metadata:
        place = place_of(metadata)
        place.offset, place.length = start, path.stat().st_size - start
    error = refused(folder)
    assert said in error.message
    assert (error.file, error.tensor) == ("__0_0.distcp", NAME)
    assert error.offset >= start


def test_an_item_whose_pickle_runs_code_runs_nothing(folder: Path, tmp_path: Path) -> None:
    path = folder / "__0_0.distcp"
    start = path.stat().st_size
    with path.open("ab") as file:
        torch.save(Runs(os.system, f"touch {tmp_path / MARKER}"), file)
    with edited(folder) as metadata:
        place = place_of(metadata)
        place.offset, place.length = start, path.stat().st_size - start
    error = refused(folder)
    assert (error.code, error.tensor) == ("E_PICKLE", NAME)
    assert error.offset > start
    assert not (tmp_path / MARKER).exists()


def test_an_entry_that_is_no_tensor_is_never_unpickled(folder: Path, tmp_path: Path) -> None:
    with edited(folder) as metadata:
        place = place_of(metadata, "step")
    evil = pickle.dumps(Runs(os.system, f"touch {tmp_path / MARKER}"))
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.seek(place.offset)
        file.write(evil.ljust(place.length, b"\0"))
    assert list(opened(folder).tensors) == ["w", "x"]
    assert not (tmp_path / MARKER).exists()


def test_no_changed_byte_of_an_items_ends_does_more_than_a_typed_error(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    with edited(folder) as metadata:
        place = place_of(metadata)
    rng = random.Random(2)
    seen = 0
    for _ in range(400):
        bad = bytearray(data)
        bad[place.offset + rng.randrange(place.length)] = rng.randrange(256)
        path.write_bytes(bad)
        try:
            opened(folder)
        except LoadkitError as error:
            seen += 1
            assert error.file == path.name
            assert error.tensor == NAME
            assert error.offset is not None
    assert seen > 50


def test_a_stream_that_was_transformed_is_refused_by_the_transforms_name(folder: Path) -> None:
    with edited(folder) as metadata:
        place_of(metadata).transform_descriptors = ["stream.zstd"]
    error = refused(folder)
    assert (error.code, error.tensor) == ("E_UNSUPPORTED", NAME)
    assert "'stream.zstd'" in error.message
    assert error.detail == {"transforms": ["stream.zstd"]}


class Same(StreamTransformExtension):
    """A transform that changes nothing, which its reader cannot know."""

    @staticmethod
    def registry_name() -> str:
        return "tests.same"

    @staticmethod
    def from_descriptor(version: str) -> Same:
        return Same()

    def get_descriptor(self) -> str:
        return "tests.same/1"

    def transform_to(self, output: Any) -> Any:
        return output

    def transform_from(self, input: Any) -> Any:  # noqa: A002
        return input


def test_a_checkpoint_that_torch_wrote_through_an_extension_is_refused(tmp_path: Path) -> None:
    folder = write_dcp(tmp_path / "m", {"w": torch.ones(3)}, _extensions=[Same()])
    error = refused(folder)
    assert error.code == "E_UNSUPPORTED"
    assert "'tests.same/1'" in error.message


def test_a_safetensors_item_that_is_not_there_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    state = {"w": torch.arange(12.0).view(3, 4), "x": torch.ones(5)}
    folder = write_dcp(tmp_path / "m", state, serialization_format=SerializationFormat.SAFETENSORS)
    assert opened(folder).tensors.keys() == {"w", "x"}
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    at = data.index(b'"w"')
    path.write_bytes(data[:at] + b'"v"' + data[at + 3 :])
    error = refused(folder)
    assert (error.code, error.file, error.tensor) == ("E_LAYOUT", path.name, "w")
    path.write_bytes(struct.pack("<Q", 1 << 40) + data[8:])
    error = refused(folder)
    assert (error.file, error.tensor) == (path.name, "w")


def test_ranks_that_disagree_are_refused(folder: Path) -> None:
    (folder / ".metadata").rename(folder / "__0.metadata")
    (folder / "__1.metadata").write_bytes((folder / "__0.metadata").read_bytes())
    assert opened(folder).tensors.keys() == {"w", "x"}
    metadata = pickle.loads((folder / "__1.metadata").read_bytes())
    metadata.state_dict_metadata[NAME].properties.dtype = torch.float16
    (folder / "__1.metadata").write_bytes(pickle.dumps(metadata))
    error = refused(folder)
    assert (error.code, error.tensor) == ("E_LAYOUT", NAME)
    assert "by one rank" in error.message


def test_a_plan_of_a_bad_checkpoint_raises_before_anything_is_placed(folder: Path) -> None:
    with edited(folder) as metadata:
        _chunks(((0, 0), (2, 4)))(metadata)
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.full((3, 4), 7.0))
    with pytest.raises(FormatError):
        loadkit.load_into(module, folder, load_format="dcp")
    assert bool((module.w == 7).all())
