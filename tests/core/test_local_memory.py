"""Which elements of a tensor a rank of a mesh holds: what torch's own distribution says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import loadkit
from helpers.fake_world import as_rank
from loadkit.config import LoadConfig
from loadkit.errors import PlanError, UsageError, WeightLoadError
from loadkit.local_memory import is_spread, local_of, local_regions, mesh_device
from loadkit.weight_loaders import default_weight_loader

ONE_DIM: list[Placement] = [Replicate(), Shard(0), Shard(1)]
STRIDED: list[Placement] = [_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]
MESHES: list[tuple[tuple[int, ...], list[tuple[Placement, ...]]]] = [
    ((2,), [(p,) for p in (*ONE_DIM, *STRIDED)]),
    ((3,), [(p,) for p in (*ONE_DIM, *STRIDED)]),
    ((4,), [(p,) for p in ONE_DIM]),
    ((2, 2), list(itertools.product((*ONE_DIM, *STRIDED), (*ONE_DIM, *STRIDED)))),
    ((3, 2), list(itertools.product((*ONE_DIM, *STRIDED), ONE_DIM))),
    ((2, 1, 2), list(itertools.product(ONE_DIM, ONE_DIM, ONE_DIM))),
]
SIZES = [(8, 6), (7, 5), (5, 1), (1, 3), (12, 9)]


def spread(full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Any:
    """Torch's DTensor, cut on this rank alone."""
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


@pytest.mark.parametrize(("shape", "layouts"), MESHES, ids=[str(m) for m, _ in MESHES])
def test_a_rank_holds_what_torch_gives_it(
    shape: tuple[int, ...], layouts: list[tuple[Placement, ...]]
) -> None:
    for rank in range(prod(shape)):
        with as_rank(rank, shape) as mesh:
            for size, placements in itertools.product(SIZES, layouts):
                full = torch.arange(prod(size)).view(size)
                expected = spread(full, mesh, placements)
                blank = spread(torch.full_like(full, -1), mesh, placements)
                default_weight_loader(blank, full)
                assert torch.equal(local_of(blank), local_of(expected)), (rank, size, placements)


def test_neighbours_are_one_region() -> None:
    with as_rank(1, (2, 2)) as mesh:
        param = spread(torch.zeros(8, 3), mesh, (_StridedShard(0, split_factor=2), Shard(0)))
        ((_, cuts),) = local_regions(param)
        assert cuts == [(0, 0, 2, 4), (1, 0, 3, 0)]
        param = spread(torch.zeros(8, 3), mesh, (_StridedShard(0, split_factor=2), Replicate()))
        assert [cuts[0] for _, cuts in local_regions(param)] == [(0, 0, 2, 0), (0, 2, 2, 4)]


def test_an_order_of_cutting_that_a_layout_names_is_followed() -> None:
    """torch 2.10 and later may keep right-to-left sharding beside plain ``Shard`` placements."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec_module = pytest.importorskip("torch.distributed.tensor._dtensor_spec")
    entry = getattr(spec_module, "ShardOrderEntry", None)
    if entry is None:
        pytest.skip("this torch has no shard order")
    with as_rank(1, (2, 2)) as mesh:
        meta = TensorMeta(torch.Size([8]), (1,), torch.float32)
        order = (entry(tensor_dim=0, mesh_dims=(1, 0)),)
        spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
        param = DTensor(torch.zeros(2), spec, requires_grad=False)  # type: ignore[arg-type]
        assert [cuts for _, cuts in local_regions(param)] == [[(0, 0, 2, 4)]]


def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    with as_rank(2, (3,)):
        mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
        param = spread(torch.zeros(4, 2), mesh, (Shard(0),))
        assert list(local_regions(param)) == []


def test_what_is_not_a_plain_part_is_refused() -> None:
    with as_rank(0, (2,)) as mesh:
        partial = DTensor.from_local(torch.zeros(4), mesh, [Partial()])
        with pytest.raises(WeightLoadError, match="does not say which elements are here"):
            default_weight_loader(partial, torch.zeros(4))
        wrong = DTensor.from_local(
            torch.zeros(3), mesh, [Shard(0)], shape=torch.Size([8]), stride=(1,)
        )
        with pytest.raises(WeightLoadError, match=r"local part .* is \[3\]; .* say \[4\]"):
            default_weight_loader(wrong, torch.zeros(8))


def test_parts_on_meta_get_the_device_of_their_mesh() -> None:
    with as_rank(0, (2,)):
        mesh = DeviceMesh("cuda", [0, 1], _init_backend=False)
        module = nn.Module()
        module.plain = nn.Parameter(torch.zeros(2))
        assert mesh_device(module) is None
        part = torch.empty(2, device="meta")
        made = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        module.spread = nn.Parameter(made)
        assert mesh_device(module) == "cuda"


# -- whole loads ----------------------------------------------------------------------------------


class Net(nn.Module):
    """Sizes that no mesh here divides."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)


@pytest.fixture
def state(tmp_path: Path) -> dict[str, torch.Tensor]:
    """The checkpoint that is written to ``tmp_path``."""
    state = {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    return state


def tp(module: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "emb": RowwiseParallel()}
    parallelize_module(module, mesh, plan)


def dim_of(mesh: DeviceMesh, dim: int) -> DeviceMesh:
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[dim]]


def only_tp(module: nn.Module, mesh: DeviceMesh) -> None:
    tp(module, dim_of(mesh, 1))


def only_fsdp(module: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(module.up, mesh=dim_of(mesh, 0))
    fully_shard(module, mesh=dim_of(mesh, 0))


def both(module: nn.Module, mesh: DeviceMesh) -> None:
    only_tp(module, mesh)
    only_fsdp(module, mesh)


def hybrid(module: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(module, mesh=mesh)  # replicated over one dim, sharded over the other


@pytest.fixture(params=["meta", "real"])
def made_on(request: pytest.FixtureRequest) -> str:
    """Where the module is made."""
    return str(request.param)


def loaded(folder: Path, made_on: str, lay_out: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
    """A module that was laid out over a mesh and loaded."""
    with torch.device("meta" if made_on == "meta" else "cpu"):
        module: Any = Net()
    lay_out(module, mesh)
    held = {name: id(param) for name, param in module.named_parameters()}
    result = loadkit.load_into(module, folder / "w.safetensors")
    assert {name: id(param) for name, param in module.named_parameters()} == held
    return module, result


def check(module: Any, result: Any, state: dict[str, torch.Tensor]) -> None:
    """Every part is torch's, and its bytes are all that was read."""
    nbytes = 0
    for name, param in module.named_parameters():
        local = local_of(param)
        expected = state[name]
        if is_spread(param):
            expected = local_of(spread(state[name], param.device_mesh, tuple(param.placements)))
            assert param.device.type == local.device.type == "cpu"
        assert torch.equal(local, expected), name
        assert isinstance(param, nn.Parameter)
        assert param.requires_grad
        nbytes += local.numel() * 4
    assert result.report.bytes_needed == result.report.parameter_bytes == nbytes
    assert {row.exact for row in result.plan.rows} <= {"exact"}


@pytest.mark.parametrize("lay_out", [only_tp, only_fsdp, both, hybrid])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2)], ids=str)
def test_every_rank_reads_its_boxes_and_nothing_else(
    tmp_path: Path,
    state: dict[str, torch.Tensor],
    made_on: str,
    shape: tuple[int, int],
    lay_out: Any,
) -> None:
    for rank in range(prod(shape)):
        with as_rank(rank, shape) as mesh:
            check(*loaded(tmp_path, made_on, lay_out, mesh), state)


def padding_of(module: Any) -> Iterator[torch.Tensor]:
    """The elements behind every local part, which ``fully_shard`` keeps to make ranks even."""
    for param in module.parameters():
        local = local_of(param)
        whole = local.untyped_storage().nbytes() // 4
        yield local.as_strided((whole,), (1,), 0)[local.numel() :]


def test_padding_of_uneven_shards_stays_zero(
    tmp_path: Path, state: dict[str, torch.Tensor], made_on: str
) -> None:
    with as_rank(2, (3, 1)) as mesh:
        module, result = loaded(tmp_path, made_on, only_fsdp, mesh)
        check(module, result, state)
        padded = [pad for pad in padding_of(module) if pad.numel()]
        assert padded
        assert not any(pad.any() for pad in padded)


def test_a_rank_whose_shard_is_empty_reads_nothing_of_it(
    tmp_path: Path, state: dict[str, torch.Tensor], made_on: str
) -> None:
    with as_rank(6, (7, 1)) as mesh:  # 6 rows over 7 ranks
        module, result = loaded(tmp_path, made_on, only_fsdp, mesh)
        check(module, result, state)
        assert local_of(module.norm.weight).numel() == 0
        assert "norm.weight" in result.report.skipped


def test_tied_dtensors_stay_tied(tmp_path: Path, made_on: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.emb.weight

    table = torch.randn(11, 6)
    save_file({"emb.weight": table}, tmp_path / "w.safetensors")
    with as_rank(1, (2,)) as mesh:
        with torch.device("meta" if made_on == "meta" else "cpu"):
            module: Any = Tied()
        fully_shard(module, mesh=mesh)
        result = loadkit.load_into(module, tmp_path / "w.safetensors")
        assert module.head.weight is module.emb.weight
        assert torch.equal(local_of(module.emb.weight), table[6:])
        assert result.report.bytes_read == 5 * 6 * 4


def test_shapes_are_held_against_the_whole_parameter(tmp_path: Path, made_on: str) -> None:
    state = {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    state["up.weight"] = torch.zeros(5, 6)  # a rank's part is no whole
    del state["norm.bias"]
    save_file(state, tmp_path / "w.safetensors")
    with as_rank(0, (2, 1)) as mesh, pytest.raises(PlanError) as caught:
        loaded(tmp_path, made_on, only_fsdp, mesh)
    found = {(p.code, p.tensor or p.parameter) for p in caught.value.problems}
    assert found == {("SHAPE_MISMATCH", "up.weight"), ("MISSING", "norm.bias")}
    assert "[10, 6]" in "".join(p.message for p in caught.value.problems)


def test_a_module_over_a_mesh_is_not_saved_as_a_checkpoint(
    tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    with as_rank(0, (2, 1)) as mesh:
        module, _ = loaded(tmp_path, "real", only_fsdp, mesh)
        with pytest.raises(UsageError) as caught:
            loadkit.save(module, tmp_path / "copy")
    assert caught.value.code == "PARTIAL_MODEL"
    assert "full_tensor" in (caught.value.hint or "")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("options", [{"reader": "pread"}, {"alias": "never"}], ids=str)
def test_readers_do_not_matter(
    tmp_path: Path, state: dict[str, torch.Tensor], options: dict[str, Any]
) -> None:
    with as_rank(3, (2, 2)) as mesh:
        with torch.device("meta"):
            module: Any = Net()
        both(module, mesh)
        config = LoadConfig(**options)
        result = loadkit.load_into(module, tmp_path / "w.safetensors", load_config=config)
        check(module, result, state)
        assert result.report.aliased_bytes == 0 or "reader" in options
