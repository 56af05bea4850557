"""Data files of a checkpoint that are not what its metadata says of them."""

from __future__ import annotations

import os
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._extension import StreamTransformExtension

import loadkit
from helpers.bad_dcp import MARKER, NAME, Runs, chunks, opened, place_of, refused, small
from helpers.dcp_files import edited, write_dcp
from loadkit.errors import FormatError, LoadkitError, PathError, ReadError, TruncatedError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tensor of 12 elements, a second one, and a number."""
    return small(tmp_path / "m")


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
        chunks(((0, 0), (2, 4)))(metadata)
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.full((3, 4), 7.0))
    with pytest.raises(FormatError):
        loadkit.load_into(module, folder, load_format="dcp")
    assert bool((module.w == 7).all())
