"""Models saved as folders of torch.distributed.checkpoint, read back by torch and by loadkit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import llama_sd, write_cfg
from helpers.dcp_files import (
    CONFIG,
    SIZES,
    check_equal,
    plain_folder,
    read_back,
    trainer_folder,
    write_dcp,
)
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import (
    OptionError,
    UsageError,
)
from loadkit.testing.loader_case import bits


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return llama_sd(**SIZES)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, torch.Tensor]) -> Path:
    return plain_folder(tmp_path_factory.mktemp("plain"), weights)


@pytest.fixture
def folder(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Path:
    """A trainer's checkpoint."""
    return trainer_folder(tmp_path / "m", weights)


# -- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "model", "app/model"])
def test_torch_reads_back_what_is_saved_and_so_do_we_at_tp_1_2_and_3(
    key: str, plain: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = loadkit.load_model(plain)
    report = loadkit.save(
        model, tmp_path / "s", save_format="dcp", max_shard_bytes=60_000,
        model_loader_extra_config={"weights_key": key} if key else None,
    )  # fmt: skip
    assert report.files[-1] == ".metadata" and len(report.files) > 2
    assert report.tensors == len(weights)
    named = {f"{key.replace('/', '.')}.{name}" if key else name: one
             for name, one in weights.items()}  # fmt: skip
    for name, one in read_back(tmp_path / "s", named).items():
        assert torch.equal(bits(one), bits(named[name])), name
    for tp in (1, 3):
        for rank in range(tp):
            parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
            check_equal(
                loadkit.load_model(tmp_path / "s", parallel=parallel),
                loadkit.load_model(plain, parallel=parallel),
            )


def test_a_saved_model_is_cut_for_two_ranks(tmp_path: Path) -> None:
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 60, "vocab": 41}
    write_dcp(tmp_path / "m", llama_sd(**sizes))
    write_cfg(tmp_path / "m", **{**CONFIG, "hidden_size": 32, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 60, "vocab_size": 41})  # fmt: skip
    loadkit.save(loadkit.load_model(tmp_path / "m"), tmp_path / "s", save_format="dcp")
    for rank in range(2):
        parallel = ParallelConfig(tp_size=2, tp_rank=rank)
        check_equal(
            loadkit.load_model(tmp_path / "s", parallel=parallel),
            loadkit.load_model(tmp_path / "m", parallel=parallel),
        )


class Odd(torch.nn.Module):
    """Parameters and buffers of unusual kinds."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(24_000, dtype=torch.float32).bfloat16().view(4000, 6)
        self.part = torch.nn.Parameter(whole[1:3])
        self.turned = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.one = torch.nn.Parameter(torch.tensor(2.5))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("small", torch.arange(8.0).to(torch.float8_e5m2))
        self.register_buffer("count", torch.tensor([3, 4]))


def test_views_strides_scalars_and_small_floats_are_written_as_they_are(tmp_path: Path) -> None:
    module = Odd()
    loadkit.save(module, tmp_path / "s", save_format="dcp")
    wanted = {name: one.detach() for name, one in module.state_dict().items()}
    ours = dict(loadkit.iter_weights(tmp_path / "s", load_format="dcp"))
    theirs = read_back(tmp_path / "s", wanted)
    for name, one in wanted.items():
        assert ours[name].shape == one.shape and ours[name].dtype == one.dtype
        assert torch.equal(bits(ours[name]), bits(one)), name
        assert torch.equal(bits(theirs[name]), bits(one)), name
    assert (tmp_path / "s" / "__0_0.distcp").stat().st_size < 16_000  # no storage is written whole


def test_items_are_aligned_so_that_parameters_can_be_views_of_the_file(
    plain: Path, tmp_path: Path
) -> None:
    loadkit.save(loadkit.load_model(plain), tmp_path / "s", save_format="dcp")
    result = loadkit.load(tmp_path / "s", load_config=LoadConfig(reader="mmap"))
    norms = sum(p.nbytes for name, p in result.model.named_parameters() if "norm" in name)
    assert result.report.aliased_bytes >= norms > 0


def test_a_save_replaces_another_format_and_a_failed_one_leaves_it(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loadkit.load_model(plain)
    loadkit.save(model, tmp_path / "s")
    import loadkit_dcp.save

    def fails(_: Any) -> bytes:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(loadkit_dcp.save, "metadata_bytes", fails)
        with pytest.raises(OSError, match="No space"):
            loadkit.save(model, tmp_path / "s", save_format="dcp")
    assert (tmp_path / "s" / "model.safetensors").exists()
    assert not list((tmp_path / "s").glob("*.distcp"))
    loadkit.save(model, tmp_path / "s", save_format="dcp")
    names = {path.name for path in (tmp_path / "s").iterdir()}
    assert names == {".metadata", "__0_0.distcp", "config.json"}
    loadkit.save(model, tmp_path / "s")
    names = {path.name for path in (tmp_path / "s").iterdir()}
    assert names == {"model.safetensors", "config.json"}


def test_one_rank_of_several_is_not_saved(plain: Path, tmp_path: Path) -> None:
    model = loadkit.load_model(plain, parallel=ParallelConfig(tp_size=3))
    with pytest.raises(UsageError) as caught:
        loadkit.save(model, tmp_path / "s", save_format="dcp")
    assert caught.value.code == "PARTIAL_MODEL"
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("options", [{"model_loader_extra_config": {"weights_key": "a//b"}},
                                     {"metadata": {"a": "b"}}])  # fmt: skip
def test_options_that_cannot_be_are_refused(options: Any, plain: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        loadkit.save(loadkit.load_model(plain), tmp_path / "s", save_format="dcp", **options)


def test_a_checkpoint_is_converted_to_safetensors(
    folder: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    report = loadkit.convert(folder, tmp_path / "c")
    assert report.tensors == len(weights)
    found = dict(loadkit.iter_weights(tmp_path / "c"))
    for name, one in weights.items():
        assert torch.equal(found[name], one), name


def test_without_a_config_tensors_are_converted_by_the_checkpoints_names(
    folder: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    (folder / "config.json").unlink()
    report = loadkit.convert(folder, tmp_path / "c", names="checkpoint")
    assert report.tensors == len(weights)
    found = dict(loadkit.iter_weights(tmp_path / "c"))
    assert found.keys() == weights.keys()


# A process of its own: what other tests loaded may keep memory that was freed.
PEAKS = """
import sys
import torch
import loadkit
from loadkit.report import PeakMeter

def peak(views, name):
    module = torch.nn.Module()
    module.views = torch.nn.ParameterList(views)
    with PeakMeter(interval=0.002) as meter:
        loadkit.save(module, f"{sys.argv[1]}/{name}", save_format="dcp")
    print(meter.peak()["host_anonymous_bytes"])

peak([torch.ones(4)], "warm")  # what torch imports for it
peak(torch.ones(4, 8 << 20).unbind(), "views")  # 4 of 32 MiB
peak(torch.ones(12 << 20, 2).t().unbind(), "turned")  # 2 of 48 MiB
"""


def test_a_save_copies_nothing_that_lies_in_one_piece_and_one_tensor_of_what_does_not(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", PEAKS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, views, turned = map(int, done.stdout.split())
    assert views < 16 << 20
    assert turned < 72 << 20
