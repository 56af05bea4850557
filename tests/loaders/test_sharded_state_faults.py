"""Rank files that are missing, cut or lie, and saves that are killed or fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import loadkit
from helpers.checkpoints import write_llama
from helpers.saving import Fault, contents
from helpers.sharded import QUIET, edit_manifest, ranks_of, same_state, save_ranks
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import (
    ManifestError,
    NoWeightsError,
    PlanError,
    ShardedError,
    WriteError,
)
from loadkit.manifest import MANIFEST, parse_manifest
from loadkit.output_file import OutputFile
from loadkit_sharded_state.pattern import FilePattern


def load(folder: Path, parallel: ParallelConfig | None = None, **options: Any) -> Any:
    options = {"load_config": QUIET, **options}
    return loadkit.load(folder, parallel=parallel or ParallelConfig(), **options)


def save(model: nn.Module, folder: Path, **extra: Any) -> Any:
    return loadkit.save(model, folder, save_format="sharded_state", model_loader_extra_config=extra)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, shards=2)
    return folder


@pytest.fixture(scope="module")
def saved(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks, each in several parts, with a parameter cut into rows."""
    folder = tmp_path_factory.mktemp("saved")
    save_ranks(llama, folder, ranks_of(tp_size=4), saving={"max_shard_bytes": 1500})
    return folder


@pytest.fixture
def four(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "four"))


FOUR = ParallelConfig(tp_size=4, tp_rank=1)


# -- F33 ---------------------------------------------------------------------------------------


def refused(folder: Path, *said: str, parallel: ParallelConfig = FOUR) -> ShardedError:
    """Loading is E_SHARDED and says this."""
    with pytest.raises(ShardedError) as caught:
        load(folder, parallel, load_format="sharded_state")
    assert caught.value.code == "E_SHARDED"
    for text in said:
        assert text in str(caught.value), str(caught.value)
    return caught.value


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("tp", [1, 4])
def test_F33_ranks_0_1_3_of_4(manifest: bool, tp: int, four: Path) -> None:
    for file in four.glob("model-rank-2-*"):
        file.unlink()
    if not manifest:
        (four / MANIFEST).unlink()
    error = refused(four, "2 missing", parallel=ParallelConfig(tp_size=tp))
    assert error.detail["missing_ranks"] == [2]


def test_F33_one_part_of_a_rank_is_missing(four: Path) -> None:
    (four / "model-rank-1-part-1.safetensors").unlink()
    refused(four, "model-rank-1-part-1.safetensors", "missing")
    (four / MANIFEST).unlink()
    refused(four, "model-rank-1-part-1.safetensors", "missing")


def test_F33_a_part_that_names_cannot_tell_is_missing_is_seen_by_coverage(
    llama: Path, tmp_path: Path
) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=1), saving={"max_shard_bytes": 20_000})
    (tmp_path / MANIFEST).unlink()
    last = max(tmp_path.glob("model-rank-0-part-*"))
    last.unlink()
    with pytest.raises(PlanError) as caught:
        load(tmp_path)
    assert {problem.code for problem in caught.value.problems} == {"MISSING"}


def test_F33_another_world_size(four: Path) -> None:
    (four / MANIFEST).unlink()
    for tp in (1, 2, 8):
        refused(four, "tp 4", f"tp {tp} was asked for", parallel=ParallelConfig(tp_size=tp))


def cut_tensor(folder: Path) -> tuple[str, list[str]]:
    """A tensor of rank 1 that is cut into rows, and the files it is in."""
    manifest = parse_manifest((folder / MANIFEST).read_bytes())
    places: dict[str, list[str]] = {}
    for file, entry in manifest.files_of(1).items():
        for name, tensor in entry.tensors.items():
            if tensor.rows is not None:
                places.setdefault(name, []).append(file)
    return max(places.items(), key=lambda item: len(item[1]))


@pytest.mark.parametrize("step", [-1, 1])
def test_F33_two_parts_of_one_tensor_overlap_or_leave_a_hole(step: int, four: Path) -> None:
    name, files = cut_tensor(four)

    def edit(content: Any) -> None:
        entry = content["files"][files[1]]["tensors"][name]
        entry["row"] += step
        for file in files:
            content["files"][file]["tensors"][name]["rows"] += max(step, 0)

    edit_manifest(four, edit)
    error = refused(four, "overlap" if step < 0 else "leave a hole", name, files[0])
    assert error.tensor == name


def test_F33_the_last_rows_of_a_tensor_are_missing(four: Path) -> None:
    name, files = cut_tensor(four)

    def edit(content: Any) -> None:
        for file in files:
            content["files"][file]["tensors"][name]["rows"] += 2

    edit_manifest(four, edit)
    refused(four, "leave a hole", name)


def test_F33_one_tensor_in_two_files_without_a_manifest(llama: Path, tmp_path: Path) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=1))
    (tmp_path / MANIFEST).unlink()
    part = load_file(tmp_path / "model-rank-0-part-0.safetensors")
    one = {"model.norm.weight": part["model.norm.weight"]}
    save_file(one, tmp_path / "model-rank-0-part-1.safetensors")
    refused(tmp_path, "there twice", "model.norm.weight", parallel=ParallelConfig())


@pytest.mark.parametrize(
    "pattern",
    [
        "{rank.__class__}-{part}.safetensors",
        "{rank}-{part}-{0}.safetensors",
        "{rank!r}-{part}.safetensors",
        "{rank:>999999999}-{part}.safetensors",
        "{rank}-{part}{part}.safetensors",
        "{rank}{part}.safetensors",
        "{rank}-x.safetensors",
        "{{rank}}-{part}.safetensors",
        "../{rank}-{part}.safetensors",
        "/x/{rank}-{part}.safetensors",
        "{rank}-{part}.bin",
        "%s-{rank}-{part}{.safetensors",
    ],
)
def test_F33_format_injection_in_the_pattern(pattern: str, saved: Path, llama: Path) -> None:
    config = LoadConfig(load_format="sharded_state", model_loader_extra_config={"pattern": pattern})
    with pytest.raises(ShardedError, match="pattern") as caught:
        load(saved, FOUR, load_config=config)
    assert caught.value.code == "E_SHARDED"


def test_a_pattern_gives_names_and_knows_them_again() -> None:
    for text in ("model-rank-{rank}-part-{part}.safetensors", "p{part:03d}_{rank}.safetensors"):
        pattern = FilePattern(text)
        for numbers in ((0, 0), (3, 12), (127, 1000)):
            assert pattern.match(pattern.name(*numbers)) == numbers
        for name in ("model.safetensors", "model-rank-00-part-0.safetensors", "pxxx_1.safetensors"):
            assert pattern.match(name) is None


def test_F33_boxes_that_lie(four: Path) -> None:
    def first_box(content: Any) -> Any:
        boxes = content["ranks"][1]["boxes"]
        return next(boxes[name][0] for name in boxes if "o_proj" in name)

    def shift(content: Any) -> None:
        first_box(content)[2][0] += 1

    def outside(content: Any) -> None:
        first_box(content)[2][0] += 1 << 20

    def target_outside(content: Any) -> None:
        first_box(content)[3][0] += 1 << 20

    def drop(content: Any) -> None:
        boxes = content["ranks"][1]["boxes"]
        del boxes[next(name for name in boxes if "o_proj" in name)]

    def rename(content: Any) -> None:
        first_box(content)[0] = "no.such.tensor"

    clean = (four / MANIFEST).read_bytes()
    for edit, said in (
        (shift, "overlap"),
        (outside, "reaches out"),
        (target_outside, "reaches out"),
        (drop, "hole"),
        (rename, "one of them is missing"),
    ):
        (four / MANIFEST).write_bytes(clean)
        edit_manifest(four, edit)
        refused(four, said, parallel=ParallelConfig())


# -- files and manifests that do not belong together --------------------------------------------


def test_a_file_of_another_size_or_another_header_is_named(four: Path) -> None:
    file = four / "model-rank-1-part-0.safetensors"
    clean = file.read_bytes()
    file.write_bytes(clean + b"\0" * 8)
    refused(four, file.name, str(len(clean)))
    file.write_bytes(clean)
    swapped = {name: tensor.view(torch.int32) for name, tensor in load_file(file).items()}
    save_file(swapped, file, metadata={"format": "pt"})
    if file.stat().st_size != len(clean):
        edit_manifest(four, lambda c: c["files"][file.name].update(size=file.stat().st_size))
    refused(four, file.name, "is not the file that", "I32")


@pytest.mark.parametrize("data", [b"", b"{", b'{"schema": "loadkit.manifest/2"}', b"[]"])
def test_a_broken_manifest_is_no_licence_to_guess(data: bytes, four: Path) -> None:
    (four / MANIFEST).write_bytes(data)
    with pytest.raises(ManifestError):
        load(four, FOUR)


def test_a_rank_that_the_manifest_does_not_have(four: Path) -> None:
    edit_manifest(four, lambda content: content["ranks"].pop(2))
    refused(four, "rank(s) 2 missing")


def test_a_model_of_another_shape_is_a_problem_for_every_parameter(four: Path) -> None:
    config = json.loads((four / "config.json").read_text())
    (four / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(PlanError) as caught:
        load(four, FOUR)
    found = {(p.code, p.parameter) for p in caught.value.problems}
    assert {code for code, _ in found} == {"SHAPE_MISMATCH"} and len(found) == 4


def test_a_tensor_that_the_model_does_not_have_is_a_problem(llama: Path, tmp_path: Path) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=1))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(PlanError) as caught:
        load(tmp_path)
    assert {problem.code for problem in caught.value.problems} == {"UNEXPECTED_TENSOR"}


def test_a_folder_without_rank_files_lists_what_is_there(llama: Path) -> None:
    with pytest.raises(NoWeightsError, match="safetensors"):
        load(llama, load_format="sharded_state")


# -- saves that are killed or fail --------------------------------------------------------------


def killed_save(source: Path, target: Path, world: int, files: int) -> None:
    """A process that saves and is killed before it makes one more weight file."""
    models = [load(source, parallel).model for parallel in ranks_of(tp_size=world)]
    pid = os.fork()
    if pid == 0:
        made: list[str] = []
        real = OutputFile.__init__

        def counted(self: OutputFile, path: Path, name: str, **options: Any) -> None:
            if "model-rank" in name:
                if len(made) == files:
                    os.kill(os.getpid(), signal.SIGKILL)
                made.append(name)
            real(self, path, name, **options)

        OutputFile.__init__ = counted  # type: ignore[method-assign]
        with suppress(BaseException):
            for model in models:
                save(model, target)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)


def test_fault_16_killed_between_files_names_the_missing_ranks(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    killed_save(llama, target, world=4, files=2)
    for options in ({}, {"load_format": "sharded_state"}):
        with pytest.raises(ShardedError) as caught:
            load(target, FOUR, **options)
        assert caught.value.code == "E_SHARDED"
        assert caught.value.detail == {"missing_ranks": [2, 3], "saved_ranks": [0, 1]}
        assert "no manifest" in str(caught.value) and "missing: 2, 3" in str(caught.value)
    save_ranks(llama, target, ranks_of(tp_size=2))
    assert [p.name for p in target.iterdir() if p.is_dir()] == []
    same_state(load(target).model, load(llama).model)


def test_fault_16_a_killed_save_leaves_the_old_folder(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    save_ranks(llama, target, ranks_of(tp_size=1))
    old = contents(target)
    killed_save(llama, target, world=2, files=1)
    left = {name: data for name, data in contents(target).items() if "unfinished" not in name}
    assert left == old
    same_state(load(target).model, load(llama).model)


def test_fault_13_an_error_at_any_call_leaves_the_old_folder(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    save_ranks(llama, target, ranks_of(tp_size=2))
    old = contents(target)
    model = load(llama).model
    for name in ("write", "fsync", "rename"):
        for at in range(1, 40):
            with monkeypatch.context() as patched:
                fault = Fault(patched, name, 28, at)
                try:
                    save(model, target)
                except WriteError as error:
                    assert error.errno == 28
                    assert fault.hit
            if not fault.hit:
                break
            assert contents(target) == old, (name, at)
        assert at > 1
        same_state(load(target).model, load(llama).model)
        shutil.rmtree(target)
        save_ranks(llama, target, ranks_of(tp_size=2))
        old = contents(target)


def test_until_the_last_rank_is_saved_the_old_folder_stays(llama: Path, tmp_path: Path) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=1))
    two = [load(llama, parallel).model for parallel in ranks_of(tp_size=2)]
    assert save(two[1], tmp_path).missing_ranks == (0,)
    same_state(load(tmp_path).model, load(llama).model)
    assert save(two[1], tmp_path).missing_ranks == (0,)  # again: it replaces its own
    assert save(two[0], tmp_path).missing_ranks == ()
    for parallel, model in zip(ranks_of(tp_size=2), two, strict=True):
        same_state(load(tmp_path, parallel).model, model)


def test_ranks_of_two_saves_are_not_put_together(llama: Path, tmp_path: Path) -> None:
    two = [load(llama, parallel).model for parallel in ranks_of(tp_size=2)]
    assert save(two[0], tmp_path, save_id="a").missing_ranks == (1,)
    assert save(two[1], tmp_path, save_id="b").missing_ranks == (0,)
    with pytest.raises(ShardedError, match="not finished"):
        load(tmp_path, load_format="sharded_state")
    assert save(two[1], tmp_path, save_id="a").missing_ranks == ()
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


def test_ranks_of_two_models_are_told_by_what_both_hold(llama: Path, tmp_path: Path) -> None:
    two: list[Any] = [load(llama, parallel).model for parallel in ranks_of(tp_size=2)]
    save(two[0], tmp_path / "out")
    norm = two[1].model.norm.weight
    norm.data = norm.data + 1
    with pytest.raises(ShardedError, match=r"not of one model.*model.norm.weight"):
        save(two[1], tmp_path / "out")


GROUP = """
import sys
import torch
import torch.distributed as dist
import loadkit
source, target, store, rank = *sys.argv[1:4], int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
parallel = loadkit.ParallelConfig(tp_size=2, tp_rank=rank)
quiet = loadkit.LoadConfig(use_tqdm_on_load=False)
model = loadkit.load_model(source, parallel=parallel, load_config=quiet)
for attempt in range(2):
    if rank == 1 and attempt == 0:
        model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    elif rank == 1:
        del model.extra
    try:
        report = loadkit.save(model, target, save_format="sharded_state")
        print("saved", report.missing_ranks)
    except loadkit.LoadkitError as error:
        print(type(error).__name__, "rank 1" in str(error))
dist.destroy_process_group()
"""


def test_processes_of_a_group_agree_and_fail_together(llama: Path, tmp_path: Path) -> None:
    target, store = tmp_path / "out", tmp_path / "store"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", GROUP, llama, target, store, str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0].splitlines() for process in running]
    assert said == [["DistributedError True", "saved ()"], ["ShardedError False", "saved ()"]]
    same_state(load(target).model, load(llama).model)


@pytest.mark.slow
def test_killed_at_any_moment_the_folder_is_old_or_new(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    save_ranks(llama, target, ranks_of(tp_size=1))
    one, two = load(llama).model, [load(llama, p).model for p in ranks_of(tp_size=2)]
    seen: set[int] = set()
    random = Random(7)
    for _ in range(50):
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                for _ in range(100):
                    for model in (*two, one):
                        save(model, target)
            os._exit(1)
        time.sleep(random.uniform(0.0, 0.4))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        world = parse_manifest((target / MANIFEST).read_bytes()).topology.world_size
        seen.add(world)
        for parallel, model in zip(
            ranks_of(tp_size=world), [one] if world == 1 else two, strict=True
        ):
            same_state(load(target, parallel).model, model)
    assert seen == {1, 2}
    for model in two:
        save(model, target)
    assert not [path for path in target.iterdir() if path.is_dir()]


def test_a_folder_that_the_process_stands_in_stays_where_it_is(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    save_ranks(llama, target, ranks_of(tp_size=2))
    node = target.stat().st_ino
    monkeypatch.chdir(target)
    save(load(llama).model, target)
    assert target.stat().st_ino == node
    assert not list(target.glob("model-rank-1-*"))
    assert not [path for path in target.iterdir() if path.is_dir()]
    same_state(load(target).model, load(llama).model)
