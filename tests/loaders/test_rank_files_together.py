"""Ranks of one process group that load files of their own: nobody has to see another's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loadkit
from helpers.checkpoints import write_llama
from helpers.loading_jobs import contents
from helpers.plain_ranks import PerRank, PlainRanks
from helpers.sharded import QUIET, ranks_of
from loadkit.config import LoadConfig
from loadkit.manifest import MANIFEST

LOAD = "helpers.loading_jobs:load"
PAIRS = {"tp_size": 2, "dp_size": 2}
EACH = LoadConfig(rank_timeout=10)
SHARED = LoadConfig(rank_timeout=10, distribute="broadcast")
FORMATS = ["sharded_state", "tensorizer"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[PlainRanks]:
    started = PlainRanks(4)
    yield started
    started.close()


def saved(folder: Path, save_format: str, seed: int = 0) -> Path:
    """A toy model as two ranks hold it."""
    if save_format == "tensorizer":
        pytest.importorskip("tensorizer")
    write_llama(folder / "whole", seed=seed, heads=8, kv_heads=4, hidden=32, vocab=41)
    for parallel in ranks_of(tp_size=2):
        model = loadkit.load_model(folder / "whole", parallel=parallel, load_config=QUIET)
        loadkit.save(model, folder / save_format, save_format=save_format)
    return folder / save_format


@pytest.mark.parametrize("config", [EACH, SHARED], ids=["each for itself", "sharing"])
@pytest.mark.parametrize("save_format", FORMATS)
def test_every_rank_and_its_replica_hold_what_one_alone_does(
    ranks: PlainRanks, tmp_path: Path, save_format: str, config: LoadConfig
) -> None:
    source = saved(tmp_path, save_format)
    alone = [loadkit.load(source, parallel=p, load_config=QUIET) for p in ranks_of(tp_size=2)]
    found = ranks.run(LOAD, source=source, sizes=PAIRS, load_config=config)
    assert [each["contents"] for each in found] == [contents(one.model) for one in alone] * 2
    assert all(each["planned"] == each["report"]["bytes_read"] for each in found)
    read = sum(each["report"]["bytes_read"] for each in found)
    once = sum(one.report.bytes_read for one in alone)
    if config is EACH:
        assert read == 2 * once
    elif save_format == "sharded_state":
        assert read == once
    else:  # what two ranks read parts of is hashed by both
        assert once < read == found[0]["group"] < 2 * once


def refused(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The one error of all ranks."""
    assert len({each["message"] for each in found}) == 1
    assert found[0]["code"] == "E_RANK_MISMATCH"
    return found[0]


@pytest.mark.parametrize("save_format", FORMATS)
def test_files_of_two_saves_are_not_one_model(
    ranks: PlainRanks, tmp_path: Path, save_format: str
) -> None:
    """Each is whole, and a model of both would be nonsense."""
    good, other = saved(tmp_path / "a", save_format), saved(tmp_path / "b", save_format, seed=1)
    folders = PerRank([good, other, good, other])  # by tp rank: no file is seen by both
    told = refused(ranks.run(LOAD, source=folders, sizes=PAIRS, load_config=EACH))
    assert (told["file"], told["rank"]) == (MANIFEST, 1)


def test_a_replica_with_another_file_of_its_rank_is_told(ranks: PlainRanks, tmp_path: Path) -> None:
    good = saved(tmp_path, "sharded_state")
    other = shutil.copytree(good, tmp_path / "other")
    (name,) = (path.name for path in other.glob("model-rank-1-*"))
    with (other / name).open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\xff" * 4)
    folders = PerRank([good, good, good, other])
    told = refused(ranks.run(LOAD, source=folders, sizes=PAIRS, load_config=EACH))
    assert (told["file"], told["rank"]) == (name, 3)
    assert f"sees another {name} than rank 1 (" in told["message"]
