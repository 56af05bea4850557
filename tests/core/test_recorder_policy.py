"""Where recording ends: what is refused, what is loaded as real data, and what is a problem."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadkit
from helpers.checkpoints import write_st
from helpers.traced import Checkpoint, Weights, codes, each, words
from loadkit.config import LoadConfig
from loadkit.errors import PlanError

Tensor = torch.Tensor
W = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
V = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
P = {"p": torch.zeros(6, 4)}
PQ = {"p": torch.zeros(6, 4), "q": torch.zeros(6, 4)}


def to_p_and_q(first: Callable[[Tensor, Tensor], Any]) -> Any:
    """w goes to p through ``first``, v is copied to q."""

    def place(model: Any, name: str, tensor: Tensor) -> None:
        if name == "w":
            first(model.p, tensor)
        else:
            model.q.data.copy_(tensor)

    return each(place)


def from_numpy(p: Tensor, w: Tensor) -> None:
    p.data.copy_(torch.from_numpy(w.numpy() * 2))


def from_list(p: Tensor, w: Tensor) -> None:
    p.data.copy_(torch.tensor(w.tolist()) * 2)


def from_array(p: Tensor, w: Tensor) -> None:
    p.data.copy_(torch.from_numpy(np.asarray(w) * 2))


def through_pickle(p: Tensor, w: Tensor) -> None:
    p.data.copy_(pickle.loads(pickle.dumps(w)) * 2)


def by_address(p: Tensor, w: Tensor) -> None:
    assert w.data_ptr()
    p.data.copy_(w * 2)


def shared_memory(p: Tensor, w: Tensor) -> None:
    p.data.copy_(w.clone().share_memory_() * 2)


def by_storage(p: Tensor, w: Tensor) -> None:
    flat = torch.empty(0).set_(w.untyped_storage())
    p.data.copy_(flat[-24:].view(6, 4) * 2 if flat.numel() == 24 else w * 2)


def shape_changed_in_place(p: Tensor, w: Tensor) -> None:
    w.t_()
    p.data.copy_(w.t() * 2)


def random_numbers(p: Tensor, w: Tensor) -> None:
    p.data.copy_(w * 2 + torch.rand_like(w) * 0)


def array_behind_a_buffer(p: Tensor, w: Tensor) -> None:
    array = np.zeros((6, 4), dtype=np.float32)
    torch.from_numpy(array).copy_(w)
    p.data.copy_(torch.from_numpy(array * 2))


def buffer_seen_as_an_array(p: Tensor, w: Tensor) -> None:
    buffer = torch.empty(6, 4)
    array = buffer.numpy()
    array[:] = w.numpy()
    array *= 2
    p.data.copy_(buffer)


def overlapping_windows(p: Tensor, w: Tensor) -> None:
    p.data.copy_(w)
    twice = w.clone()
    twice.unfold(0, 2, 1)[0].mul_(2)
    twice[2:].unfold(0, 1, 1).mul_(2)
    p.data.copy_(twice)


OPAQUE = [
    from_numpy,
    from_list,
    from_array,
    through_pickle,
    by_address,
    shared_memory,
    by_storage,
    shape_changed_in_place,
    random_numbers,
    array_behind_a_buffer,
    buffer_seen_as_an_array,
]


@pytest.mark.parametrize("reader", ["pread", "mmap"])
@pytest.mark.parametrize("first", OPAQUE, ids=lambda f: f.__name__)
def test_what_cannot_be_recorded_is_loaded_as_real_data_and_is_right(
    tmp_path: Path, first: Callable[[Tensor, Tensor], None], reader: str
) -> None:
    made = Checkpoint(tmp_path, {"w": W, "v": V}, PQ, to_p_and_q(first))
    result = made.load(reader)
    assert torch.equal(result.model.p, W * 2)  # type: ignore[arg-type]
    assert torch.equal(result.model.q, V)  # type: ignore[arg-type]
    assert words(result.plan) == {"w": "opaque", "v": "exact"}
    assert [n.tensor for n in result.plan.notes if n.code == "OPAQUE_TENSOR"] == ["w"]
    assert result.plan.bytes_needed == W.nbytes + V.nbytes
    assert result.report.bytes_read == result.plan.bytes_to_read


def test_writes_to_windows_that_share_elements_are_not_guessed(tmp_path: Path) -> None:
    made = Checkpoint(tmp_path, {"w": W, "v": V}, PQ, to_p_and_q(overlapping_windows))
    result = made.load()
    want = W.clone()
    want[:2] *= 2
    want[2:] *= 2
    assert torch.equal(result.model.p, want)  # type: ignore[arg-type]


# ------------------------------------------------------------ leaks


class Bag:
    """An object that loader code keeps things in."""

    def __init__(self) -> None:
        self.kept: Any = None


def _in_object(model: Any, w: Tensor) -> Callable[[Any], Tensor]:
    model.bag = Bag()
    model.bag.kept = [{"deep": w}]
    return lambda m: m.bag.kept[0]["deep"]


def _put(how: str) -> Callable[[Any, Tensor], Callable[[Any], Tensor]]:
    def put(model: Any, w: Tensor) -> Callable[[Any], Tensor]:
        if how == "attribute":
            model.kept = w
        elif how == "list":
            model.kept = [1, [w]]
            return lambda m: m.kept[1][0]
        elif how == "tuple":
            model.kept = (w,)
            return lambda m: m.kept[0]
        elif how == "dict":
            model.kept = {"a": {"b": w}}
            return lambda m: m.kept["a"]["b"]
        elif how == "buffer":
            model.register_buffer("kept", w)
        elif how == "parameter":
            model.kept = nn.Parameter(w, requires_grad=False)
        elif how == "parameter of a result":
            model.kept = nn.Parameter((w * 2) / 2, requires_grad=False)
        elif how == "closure":
            model.kept = lambda: w
            return lambda m: m.kept()  # type: ignore[no-any-return]
        elif how == "partial":
            model.kept = partial(torch.add, w)
            return lambda m: m.kept(0)  # type: ignore[no-any-return]
        elif how == "on a parameter":
            model.p.kept = w
            return lambda m: m.p.kept
        elif how == "instead of a parameter":
            model.q = nn.Parameter(w[:3], requires_grad=False)
            return lambda m: m.q
        elif how == "swapped":
            model.q = nn.Parameter(torch.empty(6, 4), requires_grad=False)
            torch.utils.swap_tensors(model.q, nn.Parameter(w * 1, requires_grad=False))
            return lambda m: m.q
        return lambda m: m.kept

    return put


LEAKS = [
    "attribute",
    "list",
    "tuple",
    "dict",
    "buffer",
    "parameter",
    "parameter of a result",
    "closure",
    "partial",
    "on a parameter",
    "instead of a parameter",
    "swapped",
]


ADOPTED = {"buffer", "parameter", "parameter of a result", "instead of a parameter", "swapped"}


@pytest.mark.parametrize("how", [*LEAKS, "object"])
def test_a_leaked_lazy_tensor_becomes_real(tmp_path: Path, how: str) -> None:
    get: list[Callable[[Any], Tensor]] = []

    def place(model: Any, name: str, tensor: Tensor) -> None:
        if name == "v":
            model.p.data.copy_(tensor)
            return
        get.append((_in_object if how == "object" else _put(how))(model, tensor))

    made = Checkpoint(tmp_path, {"v": V, "w": W}, P, each(place))
    result = made.load()
    kept = get[-1](result.model)
    assert type(kept) in (Tensor, nn.Parameter)
    assert torch.equal(kept, W[: len(kept)])
    assert torch.equal(result.model.p, V)  # type: ignore[arg-type]
    assert words(result.plan)["v"] == "exact"
    registered = how in ADOPTED
    assert words(result.plan)["w"] == ("exact" if registered else "opaque")
    assert ("OPAQUE_TENSOR" in [n.code for n in result.plan.notes]) is not registered


def test_a_tensor_that_nobody_asks_for_is_listed(tmp_path: Path) -> None:
    def load(model: Any, weights: Weights) -> None:
        for _, tensor in weights:
            model.p.data.copy_(tensor)
            break

    plan = Checkpoint(tmp_path, {"a": W, "b": V}, P, load).plan()
    skipped = {row.tensor: row.reason for row in plan.rows if row.kind == "skipped"}
    assert skipped == {"b": "the model's load_weights did not ask for it"}


def test_a_model_may_be_cast_while_it_loads(tmp_path: Path) -> None:
    def load(model: Any, weights: Weights) -> None:
        for _, tensor in weights:
            model.p.data.copy_(tensor)
        model.half()
        model.p.data[0] = 3

    result = Checkpoint(tmp_path, {"a": W}, P, load).load()
    want = W.half()
    want[0] = 3
    assert torch.equal(result.model.p, want)  # type: ignore[arg-type]
    assert words(result.plan) == {"a": "exact"}


def test_parameters_may_be_replaced_by_those_of_a_state_dict(tmp_path: Path) -> None:
    def load(model: Any, weights: Weights) -> None:
        model.load_state_dict(dict(weights), assign=True)
        model.q = model.p

    result = Checkpoint(tmp_path, {"p": W}, P, load).load()
    assert torch.equal(result.model.p, W)  # type: ignore[arg-type]
    assert result.model.q is result.model.p
    assert type(result.model.p) is nn.Parameter


def test_buffers_made_while_loading_are_real_when_the_model_keeps_them(tmp_path: Path) -> None:
    def place(model: Any, name: str, tensor: Tensor) -> None:
        model.p.data.copy_(tensor)
        model.cache = torch.zeros(3)
        model.cache[1] = 5
        model.same = [model.cache[1:]]
        model.register_buffer("ones", torch.ones(2, 2, dtype=torch.bfloat16))
        model.scale = nn.Parameter(torch.full((2,), 4.0), requires_grad=False)
        model.scale.weight_loader = len

    result = Checkpoint(tmp_path, {"w": W}, P, each(place)).load()
    model: Any = result.model
    assert model.cache.tolist() == [0, 5, 0]
    model.cache[2] = 7
    assert model.same[0].tolist() == [5, 7]
    assert model.ones.tolist() == [[1, 1], [1, 1]]
    assert model.scale.tolist() == [4, 4]
    assert model.scale.weight_loader is len
    assert {type(t) for t in (model.cache, model.ones, model.scale)} == {Tensor, nn.Parameter}
    assert words(result.plan) == {"w": "exact"}


def test_a_plain_attribute_that_is_written_to_holds_the_numbers(tmp_path: Path) -> None:
    def init(model: nn.Module) -> None:
        model.table = torch.zeros(6, 4)
        model.nested = {"t": [torch.zeros(4)]}

    def place(model: Any, name: str, tensor: Tensor) -> None:
        model.p.data.copy_(tensor)
        model.table[1:].copy_(tensor[1:])
        model.nested["t"][0].copy_(tensor[0])

    result = Checkpoint(tmp_path, {"w": W}, P, each(place), init).load()
    assert torch.equal(result.model.table[1:], W[1:])  # type: ignore[index,arg-type]
    assert result.model.table[0].tolist() == [0, 0, 0, 0]  # type: ignore[index,operator]
    assert torch.equal(result.model.nested["t"][0], W[0])  # type: ignore[index,arg-type]


def test_a_view_of_a_parameter_that_would_stay_empty_is_a_problem(tmp_path: Path) -> None:
    def init(model: Any) -> None:
        model.alias = model.p.data[:3]

    made = Checkpoint(tmp_path, {"w": W}, P, to_p_and_q(lambda p, w: p.data.copy_(w)), init)
    plan = made.plan()
    assert codes(plan) == ["STALE_TENSOR"]
    assert "alias" in plan.problems[0].message
    assert "p" in plan.problems[0].message


# ------------------------------------------------------------ threads


def test_writes_from_threads_that_ran_before_fail_the_plan(tmp_path: Path) -> None:
    work: queue.Queue[Any] = queue.Queue()
    done = threading.Event()

    def run() -> None:
        while (job := work.get()) is not None:
            try:
                job()
            except Exception:  # swallowed, as careless code does
                pass
            done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def place(model: Any, name: str, tensor: Tensor) -> None:
        model.p.data.copy_(tensor)
        done.clear()
        work.put(lambda: model.p.data[2:].copy_(tensor[:4]))
        done.wait()

    try:
        plan = Checkpoint(tmp_path, {"w": W}, P, each(place)).plan()
    finally:
        work.put(None)
        thread.join()
    assert codes(plan) == ["FOREIGN_THREAD"]


def test_a_thread_that_outlives_the_load_is_not_recorded_any_more(tmp_path: Path) -> None:
    go = threading.Event()
    made: list[Tensor] = []

    def later() -> None:
        go.wait()
        t = torch.zeros(3)
        t.add_(1)
        t[torch.tensor([0])] = 4
        made.append(t)

    threads: list[threading.Thread] = []

    def place(model: Any, name: str, tensor: Tensor) -> None:
        model.p.data.copy_(tensor)
        if not threads:
            threads.append(threading.Thread(target=later))
            threads[0].start()

    Checkpoint(tmp_path, {"w": W}, P, each(place)).load()
    go.set()
    threads[0].join()
    assert type(made[0]) is Tensor
    assert made[0].tolist() == [4, 1, 1]


# ------------------------------------------------------------ coverage


def nothing(p: Tensor, w: Tensor) -> None:
    pass


def first_rows(p: Tensor, w: Tensor) -> None:
    p.data[:4].copy_(w[:4])


def half_by_mask(p: Tensor, w: Tensor) -> None:
    mask = (torch.arange(24) % 2 == 0).view(6, 4)
    p.data[mask] = w[mask]


def half_of_scratch(p: Tensor, w: Tensor) -> None:
    scratch = torch.empty(6, 4)
    scratch[:3] = w[:3]
    p.data.copy_(scratch)


def added_to_nothing(p: Tensor, w: Tensor) -> None:
    p.data += w


def written_to_another(p: Tensor, w: Tensor) -> None:
    torch.empty_like(p.data).copy_(w)


def from_an_unwritten_parameter(p: Tensor, w: Tensor) -> None:
    p.data.copy_(p.data.clone() * 0 + w)


UNWRITTEN: list[tuple[Callable[[Tensor, Tensor], None], str, str]] = [
    (nothing, "MISSING", "p"),
    (first_rows, "PARTLY_WRITTEN", "8 of the 24"),
    (half_by_mask, "PARTLY_WRITTEN", "12 of the 24"),
    (half_of_scratch, "READ_UNWRITTEN", "p"),
    (added_to_nothing, "READ_UNWRITTEN", "p"),
    (written_to_another, "MISSING", "p"),
    (from_an_unwritten_parameter, "READ_UNWRITTEN", "p"),
]


@pytest.mark.parametrize("init", ["nothing", "initialisers"])
@pytest.mark.parametrize(
    ("first", "code", "says"), UNWRITTEN, ids=lambda x: getattr(x, "__name__", "")
)
def test_elements_that_no_tensor_wrote_are_problems(
    tmp_path: Path, first: Callable[[Tensor, Tensor], None], code: str, says: str, init: str
) -> None:
    def initialise(model: Any) -> None:
        if init == "initialisers":
            nn.init.kaiming_uniform_(model.p)
            nn.init.normal_(model.p)
            model.p.data.uniform_().mul_(2)

    made = Checkpoint(tmp_path, {"w": W}, P, to_p_and_q(first), initialise)
    plan = made.plan()
    assert codes(plan) == [code]
    assert says in plan.problems[0].message
    assert plan.problems[0].parameter == "p"
    with pytest.raises(PlanError):
        made.load()


def test_a_constructors_ones_cover_nothing(tmp_path: Path) -> None:
    made = Checkpoint(
        tmp_path,
        {"w": W},
        P,
        to_p_and_q(nothing),
        lambda m: nn.init.ones_(m.p),  # type: ignore[arg-type]
    )
    assert codes(made.plan()) == ["MISSING"]
    loaded = made.load(strict=False)
    assert loaded.model.p.data.tolist() == torch.ones(6, 4).tolist()  # type: ignore[union-attr,operator]


def test_without_strict_a_half_masked_parameter_is_filled_up(tmp_path: Path) -> None:
    result = Checkpoint(tmp_path, {"w": W}, P, to_p_and_q(half_by_mask)).load(strict=False)
    mask = (torch.arange(24) % 2 == 0).view(6, 4)
    assert torch.equal(result.model.p, torch.where(mask, W, 0))  # type: ignore[arg-type]


def test_two_tensors_on_the_same_elements_are_a_problem(tmp_path: Path) -> None:
    def place(model: Any, name: str, tensor: Tensor) -> None:
        model.p.data[:4].copy_(tensor[:4])
        model.p.data[3:].copy_(tensor[3:])

    plan = Checkpoint(tmp_path, {"w": W, "v": V}, P, each(place)).plan()
    assert set(codes(plan)) == {"DOUBLE_WRITE"}
    assert "v" in plan.problems[0].message
    assert "w" in plan.problems[0].message


def test_interleaved_columns_of_two_tensors_do_not_overlap(tmp_path: Path) -> None:
    def place(model: Any, name: str, tensor: Tensor) -> None:
        start = int(name == "w")
        model.p.data[:, start::2].copy_(tensor[:, start::2])

    result = Checkpoint(tmp_path, {"w": W, "v": V}, P, each(place)).load()
    want = torch.stack([V[:, 0], W[:, 1], V[:, 2], W[:, 3]], 1)
    assert torch.equal(result.model.p, want)  # type: ignore[arg-type]


# ------------------------------------------------------------ problems


def test_several_failures_are_reported_together_and_name_their_tensors(tmp_path: Path) -> None:
    names = {f"w{i}": W.clone() for i in range(5)}

    def place(model: Any, name: str, tensor: Tensor) -> None:
        if name == "w1":
            raise KeyError("no such layer")
        if name == "w3":
            model.p.data.copy_(tensor[:, :3])
        if name == "w4":
            tensor.narrow(0, 4, 9)
        getattr(model, f"p{name[1:]}").data.copy_(tensor)

    made = Checkpoint(tmp_path, names, {f"p{i}": W for i in range(5)} | P, each(place))
    plan = made.plan()
    failed = {p.tensor: p.message for p in plan.problems if p.code == "LOADER_FAILED"}
    assert set(failed) == {"w1", "w3", "w4"}
    assert all(name in message for name, message in failed.items())
    assert "no such layer" in failed["w1"]
    assert "[6, 3]" in failed["w3"]
    missing = {p.parameter for p in plan.problems if p.code == "MISSING"}
    assert missing == {"p", "p1", "p3", "p4"}


@pytest.mark.parametrize(
    "bad",
    [
        lambda p, w: p.data.copy_(w).numpy(),
        lambda p, w: p.data.data_ptr(),
        lambda p, w: p.data.normal_(),
        lambda p, w: p.data.share_memory_(),
        lambda p, w: float(p.data[0, 0]),
        lambda p, w: p.data.nonzero(),
        lambda p, w: p.data.copy_(pickle.loads(pickle.dumps(p.data.copy_(w)))),
    ],
    ids=["numpy", "address", "random", "shared", "item", "nonzero", "pickle"],
)
def test_what_no_real_data_can_save_is_a_problem(
    tmp_path: Path, bad: Callable[[Tensor, Tensor], None]
) -> None:
    plan = Checkpoint(tmp_path, {"w": W}, P, to_p_and_q(bad)).plan()
    assert not plan.ok
    assert {p.code for p in plan.problems} <= {"TRACE", "MISSING", "READ_UNWRITTEN"}


def test_a_parameter_without_a_shape_is_a_problem(tmp_path: Path) -> None:
    def init(model: Any) -> None:
        model.later = nn.LazyLinear(3, bias=False)

    plan = Checkpoint(tmp_path, {"w": W}, P, to_p_and_q(first_rows), init).plan()
    found = {p.parameter: p.code for p in plan.problems}
    assert found == {"p": "PARTLY_WRITTEN", "later.weight": "UNINITIALISED"}


def test_too_long_a_chain_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    def place(model: Any, name: str, tensor: Tensor) -> None:
        model.p.data.copy_(tensor)
        for _ in range(3000):
            model.p.data.add_(1)

    plan = Checkpoint(tmp_path, {"w": W}, P, each(place)).plan()
    assert codes(plan) == ["TRACE"]


def test_memory_that_is_made_and_dropped_is_never_mistaken_for_other_memory(
    tmp_path: Path,
) -> None:
    tensors = {f"w{i}": torch.randn(8, 8) for i in range(40)}

    def place(model: Any, name: str, tensor: Tensor) -> None:
        for _ in range(3):
            scratch = torch.empty_like(getattr(model, name).data)
            scratch.copy_(tensor + 1)
            del scratch
            torch.empty(8, 8, device="meta").fill_(3)
        fresh = torch.empty_like(getattr(model, name).data)
        fresh.copy_(tensor)
        getattr(model, name).data.copy_(fresh)

    result = Checkpoint(tmp_path, tensors, tensors, each(place)).load()
    for name, tensor in tensors.items():
        assert torch.equal(getattr(result.model, name), tensor)


def test_a_default_dtype_set_by_loader_code_counts(tmp_path: Path) -> None:
    def place(model: Any, name: str, tensor: Tensor) -> None:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model.p.data.copy_(tensor.to(torch.int32) / 3)
        finally:
            torch.set_default_dtype(torch.float32)

    result = Checkpoint(tmp_path, {"w": W * 100}, P, each(place)).load()
    want = ((W * 100).to(torch.int32).to(torch.bfloat16) / 3).float()
    assert torch.equal(result.model.p, want)  # type: ignore[arg-type]


# ------------------------------------------------------------ modules that are there already


class Live(nn.Module):
    def __init__(self, load: Callable[[Any, Weights], None]) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(24.0).view(6, 4), requires_grad=False)
        self.q = nn.Parameter(torch.full((6, 4), 2.0), requires_grad=False)
        self.register_buffer("b", torch.arange(4.0))
        self._load = load

    def load_weights(self, weights: Weights) -> None:
        self._load(self, weights)


def old_goes_to_q(model: Any, weights: Weights) -> None:
    for _, w in weights:
        model.q.data.copy_(model.p.data)
        model.p.data.copy_(w)


def rows_move_up(model: Any, weights: Weights) -> None:
    for _, w in weights:
        model.p.data[0:3] = model.p.data[3:6].clone()
        model.p.data[3:6] = w[3:6]
        model.q.data.copy_(model.q.data * 3 + model.b)
        model.b.copy_(w[0])


def added(model: Any, weights: Weights) -> None:
    for _, w in weights:
        model.p.data += w
        model.q.data.zero_()
        model.q.data[1:3].copy_(model.p.data[:2])


def assigned(model: Any, weights: Weights) -> None:
    for _, w in weights:
        model.p.data = w
        model.q.data = model.p.data + 1
        model.p.data[0] = 4


@pytest.mark.parametrize("load", [old_goes_to_q, rows_move_up, added, assigned])
@pytest.mark.parametrize("reader", ["pread", "mmap"])
def test_a_live_module_gets_what_the_same_code_gives_it(
    tmp_path: Path, load: Callable[[Any, Weights], None], reader: str
) -> None:
    write_st(tmp_path / "m.safetensors", {"w": W})
    real, module = Live(load), Live(load)
    objects = dict(module.named_parameters())
    with torch.no_grad():
        real.load_weights([("w", W.clone())])
    config = LoadConfig(reader=reader, use_tqdm_on_load=False)
    loadkit.load_into(module, tmp_path, load_config=config)
    for name, value in real.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert all(param is objects[name] for name, param in module.named_parameters())


def test_a_live_module_is_untouched_if_the_plan_fails(tmp_path: Path) -> None:
    def load(model: Any, weights: Weights) -> None:
        for _, w in weights:
            model.b.fill_(9)
            model.q.data[2:].zero_()
            model.p.data = w
            model.q.data = torch.ones(6, 4)
            raise KeyError("lost")

    write_st(tmp_path / "m.safetensors", {"w": W})
    module, before = Live(load), Live(load)
    with pytest.raises(PlanError, match="lost"):
        loadkit.load_into(module, tmp_path)
    for name, value in before.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


def test_parameters_of_a_live_module_that_nothing_writes_are_problems(tmp_path: Path) -> None:
    def load(model: Any, weights: Weights) -> None:
        for _, w in weights:
            model.p.data[1:].copy_(w[1:])

    write_st(tmp_path / "m.safetensors", {"w": W})
    with pytest.raises(PlanError) as caught:
        loadkit.load_into(Live(load), tmp_path)
    found = {p.parameter: p.code for p in caught.value.problems}
    assert found == {"p": "PARTLY_WRITTEN", "q": "MISSING"}


@pytest.mark.parametrize("steps", [40, 400])
@pytest.mark.parametrize("how", ["doubles", "in place"])
def test_a_program_too_long_to_read_regions_by_is_run_on_real_data(
    tmp_path: Path, steps: int, how: str
) -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(4, 3))

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, w in weights:
                for _ in range(steps):
                    if how == "doubles":
                        w = (w + w) / 2
                    else:
                        w = w + 1
                self.w.data.copy_(w)

    save_file({"w": torch.arange(12.0).view(4, 3)}, tmp_path / "w.safetensors")
    module = Long()
    result = loadkit.load_into(module, tmp_path / "w.safetensors")
    want = torch.arange(12.0).view(4, 3) + (0 if how == "doubles" else steps)
    assert module.w.equal(want)
    assert {row.exact for row in result.plan.rows} <= {"exact", "opaque"}
