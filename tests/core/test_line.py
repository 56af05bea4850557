"""One load as a straight line: every rank's shards, counted bytes, memory, reports."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_llama
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import CheckpointError, LoadkitError, ModelError, PlanError, ReadError
from loadkit.load_plan import LoadPlan
from loadkit.report import PeakMeter

SIZES = {"hidden": 64, "heads": 8, "kv_heads": 2, "ffn": 48, "vocab": 100, "layers": 2}
ROW_PARALLEL = ("o_proj", "down_proj")


def rank(tp: int, at: int) -> ParallelConfig:
    return ParallelConfig(tp_size=tp, tp_rank=at)


def fused_on_disk(sd: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same checkpoint with q, k, v and gate, up as one tensor each."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in sd.items():
        if "q_proj" in name:
            parts = [sd[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            out[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "gate_proj" in name:
            parts = [tensor, sd[name.replace("gate_proj", "up_proj")]]
            out[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif not any(x in name for x in ("k_proj", "v_proj", "up_proj")):
            out[name] = tensor
    return out


def joined(name: str, parts: list[torch.Tensor], sizes: list[int]) -> torch.Tensor:
    """One checkpoint tensor from the ranks' parts of it, replicated kv heads taken once."""
    if any(x in name for x in ROW_PARALLEL):
        return torch.cat(parts, dim=1)
    if "norm" in name:
        assert all(part.equal(parts[0]) for part in parts)
        return parts[0]
    whole = torch.cat(parts)
    copies = len(whole) // sizes[0]
    return torch.cat(parts[::copies]) if copies > 1 and "proj" in name else whole[: sizes[0]]


def checkpoint_parts(params: dict[str, torch.Tensor], name: str, tp: int) -> torch.Tensor:
    """What one rank holds of a checkpoint tensor, out of its fused parameters."""
    head = SIZES["hidden"] // SIZES["heads"]
    q = SIZES["heads"] * head // tp
    kv = max(SIZES["kv_heads"] // tp, 1) * head
    ffn = SIZES["ffn"] // tp
    for part, (start, size) in {
        "q_proj": (0, q),
        "k_proj": (q, kv),
        "v_proj": (q + kv, kv),
    }.items():
        if part in name:
            return params[name.replace(part, "qkv_proj")][start : start + size]
    for part, start in {"gate_proj": 0, "up_proj": ffn}.items():
        if part in name:
            return params[name.replace(part, "gate_up_proj")][start : start + ffn]
    return params[name]


@pytest.mark.parametrize("alias", ["auto", "never"])
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_join_to_the_checkpoint(tmp_path: Path, tp: int, fused: bool, alias: str) -> None:
    write_cfg(
        tmp_path,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=100,
    )
    sd = llama_sd(**SIZES)
    save_file(fused_on_disk(sd) if fused else sd, tmp_path / "model.safetensors")
    options = LoadConfig(alias=alias)
    ranks = []
    for at in range(tp):
        result = loadkit.load(tmp_path, parallel=rank(tp, at), load_config=options)
        plan = loadkit.plan(tmp_path, parallel=rank(tp, at), load_config=options)
        assert result.report.bytes_read == plan.bytes_to_read
        assert result.report.bytes_needed == plan.bytes_needed
        assert {row.exact for row in plan.rows} == {"exact"}
        ranks.append(dict(result.model.named_parameters()))
    for name, tensor in sd.items():
        parts = [checkpoint_parts(params, name, tp) for params in ranks]
        assert joined(name, parts, list(tensor.size())).equal(tensor), name
    for params in ranks:  # padding rows of the vocabulary are exactly zero
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            start = next(i for i, p in enumerate(ranks) if p is params) * len(params[name])
            assert not params[name][max(0, SIZES["vocab"] - start) :].any()


def test_a_rank_needs_its_part_of_the_bytes(tmp_path: Path) -> None:
    sd = write_llama(tmp_path, **SIZES)
    norms = sum(t.numel() * 4 for n, t in sd.items() if "norm" in n)
    vocabulary = sum(t.numel() * 4 for n, t in sd.items() if "embed" in n or "lm_head" in n)
    total = sum(t.numel() * 4 for t in sd.values())
    plans = [loadkit.plan(tmp_path, parallel=rank(2, at)) for at in range(2)]
    halves = (total - norms - vocabulary) // 2 + norms
    assert sum(p.bytes_needed for p in plans) == total + norms
    assert {p.bytes_needed - halves for p in plans} == {
        2 * 64 * 4 * 64 * 1,  # 64 of the 100 vocabulary rows, twice
        2 * 36 * 4 * 64 * 1,
    }


def test_no_memory_is_shared_with_the_file_unless_it_may_be(tmp_path: Path) -> None:
    write_llama(tmp_path, **SIZES)
    file = tmp_path / "model.safetensors"
    assert loadkit.load(tmp_path).report.aliased_bytes > 0
    assert loadkit.load(tmp_path, load_config=LoadConfig(alias="never")).report.aliased_bytes == 0
    owned = loadkit.load(tmp_path, load_config=LoadConfig(reader="pread"))
    assert (owned.report.aliased_bytes, owned.report.reader) == (0, "pread")
    file.chmod(0o666)
    report = loadkit.load(tmp_path).report
    assert report.aliased_bytes == 0 and "write" in report.reader_why


def test_writing_to_an_aliased_parameter_leaves_the_file_alone(tmp_path: Path) -> None:
    write_llama(tmp_path, **SIZES)
    before = (tmp_path / "model.safetensors").read_bytes()
    model = loadkit.load_model(tmp_path)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_neighbours_in_the_file_become_one_view(tmp_path: Path) -> None:
    write_cfg(tmp_path)
    save_file(llama_sd(), tmp_path / "model.safetensors")  # sorted: gate_proj, then up_proj
    result = loadkit.load(tmp_path)
    qkv = 2 * (16 + 8 + 8) * 16 * 4  # k, o, q, v in the file; q, k, v in the parameter
    padded = 2 * 40 * 16 * 4  # embedding and head have rows that the file has not
    report = result.report
    assert report.aliased_bytes == result.plan.aliased_bytes == report.bytes_read - qkv - padded
    mlp = result.model.get_parameter("model.layers.0.mlp.gate_up_proj.weight")
    assert mlp.equal(
        torch.cat([llama_sd()[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up")])
    )


def test_a_plan_survives_saving(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_llama(tmp_path / "model")
    plan = loadkit.plan(tmp_path / "model", parallel=rank(2, 1))
    plan.save(tmp_path / "plan.json")
    assert LoadPlan.load(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["ok"] is True


def test_the_model_is_ready(tmp_path: Path) -> None:
    write_llama(tmp_path)
    result = loadkit.load(tmp_path)
    assert not result.model.training
    assert all(t.device.type == "cpu" for t in result.model.state_dict().values())
    report = result.report.to_dict()
    assert set(report["seconds"]) == {"resolve", "build", "plan", "read", "finish"}
    assert report["peak"].keys() == {"host_anonymous_bytes", "device_bytes"}
    json.dumps(report)


def test_a_bad_plan_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cfg(tmp_path)
    sd = llama_sd()
    del sd["model.norm.weight"]
    sd["model.layers.1.mlp.up_proj.weight"] = torch.zeros(31, 16)
    save_file(sd, tmp_path / "model.safetensors")

    def no_read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("loadkit.loader.read_turns", no_read)
    with pytest.raises(PlanError) as caught:
        loadkit.load(tmp_path)
    assert {p.code for p in caught.value.problems} == {"SHAPE_MISMATCH", "MISSING"}
    assert "model.norm.weight" in str(caught.value)


def test_every_descriptor_is_closed(tmp_path: Path) -> None:
    write_llama(tmp_path, shards=3)

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    options = LoadConfig(alias="never")
    loadkit.load(tmp_path, load_config=options)
    before = count()
    for _ in range(3):
        loadkit.load(tmp_path, load_config=options)
        loadkit.plan(tmp_path)
    assert count() == before


def test_weights_can_be_iterated(tmp_path: Path) -> None:
    sd = write_llama(tmp_path, shards=2)
    for options in ({}, {"reader": "mmap"}, {"reader": "pread"}):
        seen = dict(loadkit.iter_weights(tmp_path, load_config=LoadConfig(**options)))
        assert seen.keys() == sd.keys()
        assert all(seen[name].equal(tensor) for name, tensor in sd.items())


def test_iterated_weights_are_in_memory_once_and_their_own(tmp_path: Path) -> None:
    sizes = [3 << 20, 2 << 20, 1 << 20]
    sd = {f"w{i}": torch.full((n,), float(i)) for i, n in enumerate(sizes)}
    save_file(
        {**sd, "empty": torch.zeros(0, 3), "number": torch.tensor(7)}, tmp_path / "m.safetensors"
    )
    for name, _ in loadkit.iter_weights(tmp_path / "m.safetensors"):
        assert name  # everything is imported
    with PeakMeter(0.001) as meter:
        weights = loadkit.iter_weights(tmp_path / "m.safetensors")
        for name, tensor in weights:
            assert name not in sd or tensor.equal(sd[name])
            del tensor
    assert meter.peak()["host_anonymous_bytes"] < 4 * sizes[0] + (6 << 20)
    shapes = {name: list(t.shape) for name, t in loadkit.iter_weights(tmp_path / "m.safetensors")}
    assert (shapes["empty"], shapes["number"]) == ([0, 3], [])


def test_iterated_weights_of_a_file_that_changes_are_an_error(tmp_path: Path) -> None:
    write_llama(tmp_path)
    weights = loadkit.iter_weights(tmp_path)
    next(weights)
    os.truncate(tmp_path / "model.safetensors", 3000)
    with pytest.raises(LoadkitError) as caught:
        list(weights)
    assert caught.value.code in ("E_CHANGED", "E_TRUNCATED")


class Plain(torch.nn.Module):
    """A module by somebody who never heard of loadkit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_plain_module_is_filled_by_names(tmp_path: Path, device: str) -> None:
    source = Plain()
    source.norm.running_mean.uniform_()
    tensors = {f"net.{k}": v for k, v in source.state_dict().items()}
    save_file(tensors, tmp_path / "weights.safetensors")
    with torch.device(device):
        module = Plain()
    module.norm.to_empty(device="cpu")
    result = loadkit.load_into(
        module,
        tmp_path / "weights.safetensors",
        mapper=loadkit.WeightsMapper(orig_to_new_prefix={"net.": ""}),
    )
    assert result.model is module
    state = module.state_dict()
    assert all(state[k].equal(v) for k, v in source.state_dict().items())


def test_a_module_is_untouched_by_a_checkpoint_that_misfits(tmp_path: Path) -> None:
    module = Plain()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    tensors = {k: v + 1 for k, v in module.state_dict().items()}
    tensors["first.bias"] = torch.zeros(5)
    save_file(tensors, tmp_path / "weights.safetensors")
    with pytest.raises(PlanError, match=r"first\.bias"):
        loadkit.load_into(module, tmp_path / "weights.safetensors")
    assert all(module.state_dict()[k].equal(v) for k, v in before.items())


def test_shards_equal_one_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_llama(tmp_path / "a")
    write_llama(tmp_path / "b", shards=3)
    a, b = loadkit.load_model(tmp_path / "a"), loadkit.load_model(tmp_path / "b")
    assert all(v.equal(b.state_dict()[k]) for k, v in a.state_dict().items())


def test_a_module_that_may_be_half_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loadkit.readers.mmap import MmapReader

    module = Plain()
    save_file(module.state_dict(), tmp_path / "weights.safetensors")

    def fail(*_: object) -> int:
        raise ReadError("the disk is gone", errno=5)

    with monkeypatch.context() as patch:
        patch.setattr(MmapReader, "read", fail)
        with pytest.raises(ReadError) as caught:
            loadkit.load_into(module, tmp_path / "weights.safetensors")
    assert "half-written" in caught.value.__notes__[0]
    assert "the disk is gone" in module.__dict__["loadkit_unusable"]
    loadkit.load_into(module, tmp_path / "weights.safetensors")
    assert "loadkit_unusable" not in module.__dict__


class Rehomed(torch.nn.Module):
    """Its loader gives parameters other memory, and writes where it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2, 3))
        self.b = torch.nn.Parameter(torch.zeros(2))
        self.missing = torch.nn.Parameter(torch.zeros(2))

    def load_weights(self, weights: object) -> None:
        for name, weight in weights:  # type: ignore[attr-defined]
            getattr(self, name).data = weight


def test_a_module_whose_memory_was_exchanged_gets_it_back_from_a_bad_plan(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 3), "b": torch.ones(2)}, tmp_path / "weights.safetensors")
    module = Rehomed()
    where = {name: param.data_ptr() for name, param in module.named_parameters()}
    with pytest.raises(PlanError, match="missing"):
        loadkit.load_into(module, tmp_path / "weights.safetensors")
    assert {name: param.data_ptr() for name, param in module.named_parameters()} == where
    assert not any(param.any() for param in module.parameters())
    assert "loadkit_unusable" not in module.__dict__


def test_a_region_that_is_used_twice_is_one_row(tmp_path: Path) -> None:
    class Centred(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(4))

        def load_weights(self, weights: object) -> None:
            for _, weight in weights:  # type: ignore[attr-defined]
                centred = weight - weight.mean()
                self.w.data.copy_(centred / (centred * centred).sum().sqrt())

    value = torch.tensor([1.0, 2.0, 4.0, 9.0])
    save_file({"w": value}, tmp_path / "weights.safetensors")
    module = Centred()
    plan = loadkit.load_into(module, tmp_path / "weights.safetensors").plan
    assert [(row.tensor, row.kind) for row in plan.rows] == [("w", "compute")]
    assert plan.bytes_needed == plan.bytes_to_read == 16
    expected = value - value.mean()
    assert module.w.equal(expected / (expected * expected).sum().sqrt())


def test_a_failed_post_processing_names_its_module_and_marks_the_model(tmp_path: Path) -> None:
    class Inner(torch.nn.Linear):
        def process_weights_after_loading(self, dtype: torch.dtype) -> None:
            raise ValueError("no such kernel")

    module = torch.nn.Sequential(Inner(2, 2))
    save_file(module.state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(
        ModelError, match=r"weights of 0 \(Inner\) failed.*no such kernel"
    ) as caught:
        loadkit.load_into(module, tmp_path / "weights.safetensors")
    assert isinstance(caught.value.__cause__, ValueError)
    assert "no such kernel" in module.__dict__["loadkit_unusable"]


def test_the_one_problem_of_a_plan_is_said_once_with_its_place(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "weights.safetensors")
    module = torch.nn.Linear(2, 2, bias=False)
    module.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.int32), requires_grad=False)
    with pytest.raises(PlanError) as caught:
        loadkit.load_into(module, tmp_path / "weights.safetensors")
    hint = caught.value.problems[0].hint
    assert hint and str(caught.value).count(hint) == 1
    assert "file weights.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (None, ReadError),
        ("[1]", CheckpointError),
        ("{}", CheckpointError),
        ("[" * 99999, CheckpointError),
    ],
    ids=["missing", "list", "empty", "deep"],
)
def test_what_is_no_saved_plan_is_a_typed_error(
    tmp_path: Path, text: str | None, kind: type[Exception]
) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(kind, match=r"plan\.json"):
        LoadPlan.load(tmp_path / "plan.json")
