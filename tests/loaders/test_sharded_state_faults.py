"""Rank files that are missing, cut or lie, saves that are killed, layouts that do not fit."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import loadkit
from helpers.checkpoints import write_llama
from helpers.gguf_blocks import quantised
from helpers.gguf_files import LLAMA_KEYS, llama_tensors, write_gguf
from helpers.saving import Fault, contents, same
from helpers.sharded import QUIET, edit_manifest, ranks_of, same_state, save_ranks
from loadkit import tables
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import (
    ConfigFileError,
    DistributedError,
    LoadkitError,
    ManifestError,
    ModelError,
    NoWeightsError,
    PlanError,
    ShardedError,
    WriteError,
)
from loadkit.manifest import MANIFEST, parse_manifest
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
    last = sorted(tmp_path.glob("model-rank-0-part-*"))[-1]
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
    tensors = load_file(four / "model-rank-1-part-0.safetensors") if False else None
    del tensors
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

SAVER = """
import os, sys
from pathlib import Path
import loadkit
from loadkit.output_file import OutputFile
source, target, world, files = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
made = []
init = OutputFile.__init__
def counted(self, path, name, **options):
    if "model-rank" in name:
        if len(made) == files:
            os.kill(os.getpid(), 9)
        made.append(name)
    init(self, path, name, **options)
OutputFile.__init__ = counted
quiet = loadkit.LoadConfig(use_tqdm_on_load=False)
for rank in range(world):
    parallel = loadkit.ParallelConfig(tp_size=world, tp_rank=rank)
    model = loadkit.load_model(source, parallel=parallel, load_config=quiet)
    loadkit.save(model, target, save_format="sharded_state")
"""


def killed_save(source: Path, target: Path, world: int, files: int) -> None:
    """A process that saves and is killed before it makes another file."""
    done = subprocess.run(
        [sys.executable, "-c", SAVER, source, target, str(world), str(files)], check=False
    )
    assert done.returncode == -signal.SIGKILL


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


def test_processes_of_a_group_agree(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    code = """
import sys
import torch.distributed as dist
import loadkit
source, target, store, rank, spoil = *sys.argv[1:4], int(sys.argv[4]), sys.argv[5]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
parallel = loadkit.ParallelConfig(tp_size=2, tp_rank=rank)
quiet = loadkit.LoadConfig(use_tqdm_on_load=False)
model = loadkit.load_model(source, parallel=parallel, load_config=quiet)
if spoil and rank == 1:
    import torch
    model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
try:
    report = loadkit.save(model, target, save_format="sharded_state")
    print("saved", report.missing_ranks)
except loadkit.LoadkitError as error:
    print(type(error).__name__, error)
dist.destroy_process_group()
"""
    for spoil in ("yes", ""):
        store = tmp_path / f"store{spoil}"
        running = [
            subprocess.Popen(
                [sys.executable, "-c", code, llama, target, store, str(rank), spoil],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [process.communicate(timeout=120)[0] for process in running]
        if spoil:
            assert said[0].startswith(DistributedError.__name__) and "rank 1" in said[0]
            assert said[1].startswith(ShardedError.__name__)
            assert not target.exists() or not list(target.glob("*.safetensors"))
        else:
            assert said == ["saved ()\n"] * 2
            same_state(load(target).model, load(llama).model)


# -- SS-02, SS-04 -------------------------------------------------------------------------------


class Scales(nn.Module):
    """Four 0-dim parameters in one memory, a view of another parameter, buffers of both kinds."""

    def __init__(self, *, config: Any = None, prefix: str = "") -> None:
        super().__init__()
        memory = torch.ones(4)
        for at, name in enumerate(("q_scale", "k_scale", "v_scale", "prob_scale")):
            self.register_parameter(name, nn.Parameter(memory[at], requires_grad=False))
        self.w = nn.Parameter(torch.zeros(4, 4))
        self.turned = nn.Parameter(torch.zeros(3, 5).t())
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("cache", torch.full((2,), 7.0), persistent=False)

    def load_weights(self, weights: Any) -> set[str]:
        from loadkit import AutoWeightsLoader

        return AutoWeightsLoader(self).load_weights(weights)


def numbered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Different numbers for everything a checkpoint of the module has."""
    found = {}
    for at, (name, tensor) in enumerate(model.state_dict().items()):
        made = torch.arange(tensor.numel()).reshape(tensor.shape) + 100 * at
        found[name] = made.to(tensor.dtype)
    return found


@pytest.fixture
def scales(tmp_path: Path) -> Any:
    """A model that loadkit built and loaded, and its numbers."""
    tables.models.register("Scales", Scales)
    source = tmp_path / "source"
    source.mkdir()
    config = {"architectures": ["Scales"], "model_type": "scales", "torch_dtype": "float32"}
    (source / "config.json").write_text(json.dumps(config))
    numbers = numbered(Scales())
    save_file(numbers, source / "model.safetensors")
    yield load(source).model, numbers
    tables.models.unregister("Scales") if hasattr(tables.models, "unregister") else None


def test_SS_02_every_small_parameter_comes_back(scales: Any, tmp_path: Path) -> None:
    model, numbers = scales
    save(model, tmp_path / "out")
    found = load(tmp_path / "out").model
    same({name: t.detach().contiguous() for name, t in found.state_dict().items()}, numbers)
    assert found.q_scale.dim() == 0 and found.turned.shape == (5, 3)


def test_SS_02_scalars_that_share_memory_of_a_module_the_user_built(tmp_path: Path) -> None:
    module = Scales()
    assert (
        module.q_scale.untyped_storage().data_ptr() == module.k_scale.untyped_storage().data_ptr()
    )
    with torch.no_grad():
        for at, name in enumerate(("q_scale", "k_scale", "v_scale", "prob_scale")):
            getattr(module, name).fill_(at + 2)
    save(module, tmp_path / "out")
    other = Scales()
    loadkit.load_into(other, tmp_path / "out")
    assert [float(getattr(other, n)) for n in ("q_scale", "k_scale", "v_scale", "prob_scale")] == [
        2, 3, 4, 5,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.register_parameter("more", nn.Parameter(torch.zeros(2))),
        lambda model: delattr(model, "w"),
        lambda model: setattr(model, "w", nn.Parameter(torch.zeros(2, 4))),
        lambda model: delattr(model, "counts"),
    ],
    ids=["more", "fewer", "shape", "buffer"],
)
def test_SS_02_what_a_load_would_not_take_is_not_written(
    change: Callable[[Any], None], scales: Any, tmp_path: Path
) -> None:
    model, _ = scales
    change(model)
    with pytest.raises(ShardedError, match="could not be loaded back"):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Halving(nn.Module):
    """SS-04: post-processing keeps every second column, turned."""

    layout_version: ClassVar[int | None] = 1

    def __init__(self, *, config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8))
        self.scale = nn.Parameter(torch.zeros(4))
        self.runs = 0

    def load_weights(self, weights: Any) -> set[str]:
        from loadkit import AutoWeightsLoader

        return AutoWeightsLoader(self).load_weights(weights)

    def process_weights_after_loading(self, dtype: Any = None) -> None:
        self.runs += 1
        self.weight = nn.Parameter(self.weight.data[:, ::2].t().contiguous(), requires_grad=False)
        self.packed = nn.Parameter(self.scale.data.view(torch.int32).clone(), requires_grad=False)
        del self.scale


class Unsaid(Halving):
    layout_version = None


@pytest.fixture
def halving(tmp_path: Path) -> Any:
    source = tmp_path / "source"
    source.mkdir()
    for name, cls in (("Halving", Halving), ("Unsaid", Unsaid)):
        tables.models.register(name, cls, override=True)
    config = {"architectures": ["Halving"], "model_type": "x", "torch_dtype": "float32"}
    (source / "config.json").write_text(json.dumps(config))
    save_file(numbered(Halving()), source / "model.safetensors")
    return source


def test_SS_04_a_processed_state_is_not_processed_twice(halving: Path, tmp_path: Path) -> None:
    model = load(halving).model
    save(model, tmp_path / "out")
    manifest = parse_manifest((tmp_path / "out" / MANIFEST).read_bytes())
    assert manifest.layout == "runtime-processed"
    (version,) = manifest.layout_versions.items()
    assert version == (f"{Halving.__module__}:Halving", "1")
    found = load(tmp_path / "out")
    same_state(found.model, model)
    assert (model.runs, found.model.runs) == (1, 0)
    assert found.model.weight.shape == (4, 4) and not hasattr(found.model, "scale")
    assert found.report.aliased_bytes == found.report.bytes_read
    save(found.model, tmp_path / "again")
    same_state(load(tmp_path / "again").model, model)


def test_SS_04_a_processed_state_is_not_cut_anew(halving: Path, tmp_path: Path) -> None:
    save(load(halving).model, tmp_path / "out")
    for parallel in (ParallelConfig(tp_size=2), ParallelConfig(tp_size=4, tp_rank=3)):
        error = refused(
            tmp_path / "out", "tp 1", "Halving", "cannot be cut anew", parallel=parallel
        )
        assert error.detail["saved"] == "tp 1"


def test_SS_04_a_class_that_does_not_say_its_layout_is_not_saved(
    halving: Path, tmp_path: Path
) -> None:
    model = load(halving, architecture="Unsaid").model
    with pytest.raises(ModelError, match=r"Unsaid.*no layout_version") as caught:
        save(model, tmp_path / "out")
    assert caught.value.code == "LAYOUT_UNKNOWN"
    assert not (tmp_path / "out").exists()


def test_SS_04_nobody_knows_whether_a_module_of_the_users_was_processed(tmp_path: Path) -> None:
    for run in (False, True):
        module = Halving()
        if run:
            module.process_weights_after_loading()
        with pytest.raises(ModelError, match="may have run or not"):
            save(module, tmp_path / "out")


def test_SS_04_another_version_of_a_layout_is_refused(
    halving: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(load(halving).model, tmp_path / "out")
    monkeypatch.setattr(Halving, "layout_version", 2)
    with pytest.raises(PlanError, match="saved 1, here 2"):
        load(tmp_path / "out")


def test_SS_04_a_processed_state_in_another_dtype_is_refused(halving: Path, tmp_path: Path) -> None:
    save(load(halving).model, tmp_path / "out")
    found = load(tmp_path / "out", dtype="bfloat16").model
    assert found.weight.dtype == torch.float32  # parameters are what was saved, not cast


# -- packed GGUF --------------------------------------------------------------------------------


def packed_source(folder: Path) -> Path:
    keys = [(k, {"llama.embedding_length": 128, "llama.attention.head_count": 8}.get(k, v))
            for k, v in LLAMA_KEYS]  # fmt: skip
    keys = [(k, {"llama.attention.head_count_kv": 4, "llama.feed_forward_length": 256}.get(k, v))
            for k, v in keys]  # fmt: skip
    tensors = llama_tensors(hidden=128, heads=8, kv=4, ffn=256, vocab=41, head=True)
    kinds = {"attn_k": "Q4_1", "ffn_up": "Q5_0"}

    def kind_of(name: str) -> str | None:
        if "norm" in name:
            return None
        return next((kind for part, kind in kinds.items() if part in name), "Q8_0")

    folder.mkdir()
    return write_gguf(folder / "m.gguf", quantised(tensors, kind_of), keys)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_packed_gguf_blocks_come_back_bit_for_bit(tp: int, tmp_path: Path) -> None:
    source = packed_source(tmp_path / "source")
    ranks = ranks_of(tp_size=tp)
    models = save_ranks(source, tmp_path / "out", ranks, quantization="gguf", dtype="float32")
    assert any(param.dtype == torch.uint8 for param in models[0].parameters())
    for parallel, model in zip(ranks, models, strict=True):
        found = load(tmp_path / "out", parallel)
        same_state(found.model, model)
        if tp == 1:
            ids = torch.arange(5)
            with torch.inference_mode():
                assert torch.equal(found.model(ids, ids), model(ids, ids))


@pytest.mark.parametrize(("saved", "asked"), [(1, 2), (4, 1), (2, 4)])
def test_packed_gguf_blocks_are_cut_anew(saved: int, asked: int, tmp_path: Path) -> None:
    source = packed_source(tmp_path / "source")
    options = {"quantization": "gguf", "dtype": "float32"}
    save_ranks(source, tmp_path / "out", ranks_of(tp_size=saved), **options)
    for parallel in ranks_of(tp_size=asked):
        expected = load(source, parallel, **options).model
        same_state(load(tmp_path / "out", parallel).model, expected)


def test_decoded_gguf_is_saved_in_hugging_faces_order(tmp_path: Path) -> None:
    source = packed_source(tmp_path / "source")
    save_ranks(source, tmp_path / "out", ranks_of(tp_size=2), dtype="bfloat16")
    for parallel in ranks_of(tp_size=4):
        expected = load(source, parallel, dtype="bfloat16").model
        same_state(load(tmp_path / "out", parallel).model, expected)


def test_another_quantization_than_the_saved_one_is_refused(tmp_path: Path) -> None:
    source = packed_source(tmp_path / "source")
    save_ranks(source, tmp_path / "out", ranks_of(tp_size=1), quantization="gguf", dtype="float32")
    with pytest.raises(ConfigFileError, match="gguf"):
        load(tmp_path / "out", quantization="bitsandbytes")


@pytest.mark.parametrize(
    "values", [{}, {"misaligned": "error"}, {"misaligned": "error", "tensors": [["a"]]}]
)
def test_a_saved_quantization_that_lies_is_a_typed_error(values: Any, tmp_path: Path) -> None:
    source = packed_source(tmp_path / "source")
    save_ranks(source, tmp_path / "out", ranks_of(tp_size=1), quantization="gguf", dtype="float32")
    edit_manifest(tmp_path / "out", lambda content: content["quantization"].update(config=values))
    with pytest.raises(LoadkitError) as caught:
        load(tmp_path / "out")
    assert isinstance(caught.value, ConfigFileError)
