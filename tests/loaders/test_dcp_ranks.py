"""Checkpoints that several processes of torch saved: every layout, loaded at other topologies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import loadkit
from helpers.checkpoints import llama_sd, write_cfg
from helpers.dcp_jobs import LAYOUTS, SIZES, WORLD, odd_tensors, save_job
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.launch import run_ranks
from loadkit.testing import write_checkpoint
from loadkit.testing.loader_case import bits

assert save_job
CONFIG = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 60, "vocab_size": 41,
}  # fmt: skip
SAVED = [*LAYOUTS, "fsdp", "asynchronous", "alone"]
DCP = LoadConfig(load_format="dcp", use_tqdm_on_load=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout, saved by one start of four processes; beside them the same as safetensors."""
    root = tmp_path_factory.mktemp("dcp")
    world = [ParallelConfig(tp_size=WORLD, tp_rank=rank) for rank in range(WORLD)]
    run_ranks("helpers.dcp_jobs:save_job", {"folder": str(root)}, world)
    for name in SAVED:
        write_cfg(root / name, **CONFIG)
    (root / "plain").mkdir()
    write_cfg(root / "plain", **CONFIG)
    import json

    config = json.loads((root / "plain" / "config.json").read_text())
    write_checkpoint(root / "plain", llama_sd(**SIZES), config)
    return root


@pytest.mark.parametrize("layout", SAVED)
def test_every_layout_loads_the_same_at_every_topology_and_reads_what_a_rank_needs(
    layout: str, saved: Path
) -> None:
    for tp in (1, 2):
        for rank in range(tp):
            parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
            found = loadkit.load(saved / layout, parallel=parallel, load_config=DCP)
            plain = loadkit.load(saved / "plain", parallel=parallel)
            wanted = dict(plain.model.named_parameters())
            assert len(wanted) == len(list(found.model.parameters()))
            for name, param in found.model.named_parameters():
                assert torch.equal(bits(param), bits(wanted[name])), name
            assert found.report.bytes_needed == plain.report.bytes_needed
            assert found.report.bytes_read == found.plan.bytes_to_read
            assert {row.exact for row in found.plan.rows if row.parameter} == {"exact"}


def test_a_reader_of_single_ranges_takes_no_byte_of_another_rank(saved: Path) -> None:
    config = LoadConfig(load_format="dcp", reader="mmap", alias="never", use_tqdm_on_load=False)
    for rank in range(2):
        parallel = ParallelConfig(tp_size=2, tp_rank=rank)
        found = loadkit.load(saved / "rows", parallel=parallel, load_config=config)
        assert found.report.bytes_read == found.report.bytes_needed


def test_every_dtype_and_shape_is_bit_for_bit_what_was_saved(saved: Path) -> None:
    found = dict(loadkit.iter_weights(saved / "odd", load_format="dcp"))
    wanted = odd_tensors()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def test_boxes_of_an_optimizer_are_never_looked_at(saved: Path, tmp_path: Path) -> None:
    """Its bytes are spoilt: nobody notices."""
    import pickle
    import shutil

    folder = Path(shutil.copytree(saved / "fsdp", tmp_path / "m"))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    places = [
        place for index, place in metadata.storage_data.items() if index.fqn.startswith("optim.")
    ]
    assert len(places) > WORLD
    for place in places:
        with (folder / place.relative_path).open("r+b") as file:
            file.seek(place.offset)
            file.write(b"\xff" * place.length)
    result = loadkit.load(folder, load_config=DCP)
    assert result.report.skipped["optim"].endswith("the training's state")
    plain = dict(loadkit.load_model(saved / "plain").named_parameters())
    for name, param in result.model.named_parameters():
        assert torch.equal(param, plain[name]), name
