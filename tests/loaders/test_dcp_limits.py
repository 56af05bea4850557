"""A small ``.metadata`` that stands for much: what is said once and counts many times."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from helpers.bad_dcp import NAME, opened, place_of, refused, small
from helpers.dcp_files import edited
from loadkit_dcp.metadata import Box
from loadkit_dcp.partition import fault_of
from loadkit_dcp.select import choose


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small(tmp_path / "m")


def _share(metadata: Any, tensors: int, boxes: list[ChunkStorageMetadata]) -> None:
    """Tensors that have one list of boxes, which the pickle holds once."""
    place, known = place_of(metadata), metadata.state_dict_metadata[NAME]
    for number in range(tensors):
        name = f"model.t{number}"
        size = torch.Size([1 << 20])
        metadata.state_dict_metadata[name] = TensorStorageMetadata(known.properties, size, boxes)
        metadata.planner_data[name] = ("model", f"t{number}")
        metadata.storage_data[MetadataIndex(name, torch.Size([0]), 0)] = place


@pytest.mark.parametrize("length", [0, 1])
def test_a_list_of_boxes_that_many_tensors_share_is_refused_by_its_count(
    length: int, folder: Path
) -> None:
    one = ChunkStorageMetadata(torch.Size([0]), torch.Size([length]))
    with edited(folder) as metadata:
        _share(metadata, 300, [one] * 60_000)
    start = time.process_time()
    error = refused(folder)
    assert error.code == "E_STRUCTURE" and "18000002 boxes" in error.message
    assert time.process_time() - start < 5


def test_boxes_that_begin_at_one_element_are_refused_before_they_are_kept(folder: Path) -> None:
    zero = torch.Size([0])
    with edited(folder) as metadata:
        boxes = [ChunkStorageMetadata(zero, torch.Size([n])) for n in range(1, 20_000)]
        _share(metadata, 1, boxes)
    error = refused(folder)
    assert error.code == "E_LAYOUT" and "element [0] is in two boxes" in error.message
    assert error.tensor == "model.t0"


def test_a_box_that_is_said_twice_counts_once(folder: Path) -> None:
    with edited(folder) as metadata:
        metadata.state_dict_metadata[NAME].chunks *= 2
    assert len(opened(folder).tensors["w"]) == 1


def test_a_long_key_that_is_in_every_path_is_not_put_together(folder: Path) -> None:
    key = "k" * 1_000_000
    with edited(folder) as metadata:
        _share(metadata, 20, metadata.state_dict_metadata[NAME].chunks)
        for number in range(20):
            metadata.planner_data[f"model.t{number}"] = (*[key] * 60, f"t{number}")
    tracemalloc.start()
    try:
        error = refused(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error.code == "E_NAME"
    assert peak < 30e6


@pytest.mark.parametrize("key", ["a\x1b[2J", "b\nc", ""])
def test_the_planners_mapping_gives_no_name_that_a_tensor_may_not_have(
    key: str, folder: Path
) -> None:
    with edited(folder) as metadata:
        metadata.planner_data[NAME] = (key,)
    assert refused(folder).code == "E_NAME"


def test_numbers_that_are_keys_are_indices_of_a_list_and_no_huge_ones(folder: Path) -> None:
    with edited(folder) as metadata:
        metadata.planner_data[NAME] = ("model", 0, "w")
        metadata.planner_data["model.x"] = ("model", 0, "x")
    assert sorted(opened(folder).tensors) == ["w", "x"]
    with edited(folder) as metadata:
        metadata.planner_data[NAME] = ("model", 1 << 2000)
        metadata.planner_data["model.x"] = ("model", "x")
    assert "model.w" in opened(folder).tensors  # by its own name


def test_work_grows_with_the_boxes_and_not_with_their_square() -> None:
    """Peeled off line by line, boxes would be looked at as often as there are boxes."""

    def peeled(count: int) -> list[Box]:
        found, at, left = [], [0, 0], [count, count]
        for n in range(2 * count - 2):
            dim = n % 2
            sizes = list(left)
            sizes[dim] = 1
            found.append(Box(tuple(at), tuple(sizes)))
            at[dim] += 1
            left[dim] -= 1
        return [*found, Box(tuple(at), tuple(left))]

    assert fault_of((40, 40), peeled(40)) is None
    fault = fault_of((2000, 2000), peeled(2000))
    assert fault is not None and "entangled" in fault.what


def test_a_mesh_of_many_ranks_is_far_from_the_limit() -> None:
    grid = [Box((a, b, c), (1, 1, 1)) for a in range(32) for b in range(32) for c in range(32)]
    assert fault_of((32, 32, 32), grid) is None


def test_what_is_skipped_under_one_key_is_all_listed() -> None:
    paths = {
        "a.w": ("a", "w"),
        "b.w": ("b", "w"),
        "b.optim.w": ("b", "optim", "w"),
    }
    found = choose(paths, "a", ".metadata")  # type: ignore[arg-type]
    assert found.names == {"a.w": "w"}
    assert found.skipped == {
        "b": "1 tensor(s) of another dict than 'a'; 1 tensor(s) of the training's state"
    }
