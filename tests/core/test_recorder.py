"""What loader code may do, by name: the line gives what the same code gives on real tensors."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.traced import Cases, Weights, check_line
from loadkit.weight_loaders import composed_weight_loader, default_weight_loader

Tensor = torch.Tensor
W = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
V = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
PQ = {"p": torch.zeros(6, 4), "q": torch.zeros(6, 4)}
CASES = Cases(W)


# ------------------------------------------------------------ the names the project asks for


@CASES.one()
def composed_loader(p: Any, w: Tensor) -> None:
    composed_weight_loader(default_weight_loader, lambda x: -x * 2)(p, w)


@CASES.one()
def composed_loader_with_exp(p: Any, w: Tensor) -> None:
    composed_weight_loader(default_weight_loader, lambda x: -torch.exp(x.float()))(p, w)


@CASES.one()
def temp_buffer_then_copy(p: Any, w: Tensor) -> None:
    temp = torch.empty_like(p.data)
    temp[:3].copy_(w[3:])
    temp[3:] = w[:3]
    p.data.copy_(temp)


@CASES.one()
def temp_buffer_of_zeros(p: Any, w: Tensor) -> None:
    temp = torch.zeros(6, 8)
    temp[:, 2:6] = w
    p.data.copy_(temp[:, 1:5])


@CASES.one()
def fill_with_an_item(p: Any, w: Tensor) -> None:
    p.data.fill_(w[2, 1].item())


@CASES.one()
def added_to_a_parameter(p: Any, w: Tensor) -> None:
    p.data.copy_(w)
    p.data += w
    p.data[1:3] += 1


@CASES.one()
def in_place_on_a_view_of_a_lazy(p: Any, w: Tensor) -> None:
    w[1:3].mul_(2)
    w.view(-1)[0] = 7
    p.data.copy_(w)


@CASES.one()
def index_put_rows(p: Any, w: Tensor) -> None:
    p.data[torch.tensor([5, 0, 1, 2, 4, 3])] = w


@CASES.one(exact="whole")
def index_put_mask(p: Any, w: Tensor) -> None:
    mask = torch.arange(24).view(6, 4) % 2 == 0
    p.data[mask] = w[mask]
    p.data[~mask] = -1


@CASES.one(exact="whole")
def index_put_two_dimensions(p: Any, w: Tensor) -> None:
    p.data.zero_()
    p.data[torch.tensor([0, 2]), torch.tensor([1, 3])] = w[0, :2]


@CASES.one()
def data_assigned(p: Any, w: Tensor) -> None:
    p.data = w


@CASES.one()
def data_assigned_then_changed_through_both(p: Any, w: Tensor) -> None:
    p.data = w
    w[0].fill_(3)
    p.data[1].mul_(2)
    w[2].copy_(p.data[1])


@CASES.one(params={"p": torch.zeros(3, 4)}, exact="exact")
def data_assigned_to_a_part(p: Any, w: Tensor) -> None:
    p.data = w[2:5]


@CASES.one(params={"p": torch.zeros(4, 6)})
def data_assigned_transposed(p: Any, w: Tensor) -> None:
    p.data = w.t()
    p.data[0] = 5


@CASES.one(
    weights={"w": W.to(torch.bfloat16)}, params={"p": torch.zeros(6, 4, dtype=torch.bfloat16)}
)
def data_assigned_from_a_cast(p: Any, w: Tensor) -> None:
    p.data = w.float() * 2


@CASES.one()
def data_assigned_from_a_real_tensor(p: Any, w: Tensor) -> None:
    buffer = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(6, 1)
    p.data = buffer
    buffer[0] = 9
    p.data[1:3].copy_(w[1:3])


@CASES.model(params=PQ)
def two_threads(model: Any, weights: Weights) -> None:
    w = dict(weights)["w"]

    def copy(param: Tensor, factor: int) -> None:
        param.data.zero_()
        param.data.copy_(w * factor)

    threads = [
        threading.Thread(target=copy, args=(model.p, 1)),
        threading.Thread(target=copy, args=(model.q, 2)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@CASES.model(params=PQ)
def a_thread_pool(model: Any, weights: Weights) -> None:
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(param.data.copy_, w[i * 0 : 6])
            for _, w in weights
            for i, param in enumerate((model.p, model.q))
        ]
        jobs.append(pool.submit(lambda: None))
    for job in jobs:
        job.result()


OLD_POOL = ThreadPoolExecutor(1)
OLD_POOL.submit(lambda: None).result()


@CASES.model(params=PQ)
def a_thread_pool_that_was_there_before(model: Any, weights: Weights) -> None:
    for _, w in weights:
        OLD_POOL.submit(model.p.data.copy_, w).result()
    OLD_POOL.submit(model.p.data[2:].fill_, 0).result()
    OLD_POOL.submit(model.q.data.copy_, model.p.data).result()


@CASES.one(weights={"w": W[:5]})
def padding_filled(p: Any, w: Tensor) -> None:
    p.data[: len(w)].copy_(w)
    p.data[len(w) :].fill_(0)


@CASES.one(weights={"w": W[:5, :3]})
def padded_by_a_function(p: Any, w: Tensor) -> None:
    p.data.copy_(nn.functional.pad(w, (0, 1, 0, 1), value=-float("inf")))


# ------------------------------------------------------------ parameters as sources


@CASES.model(params=PQ)
def parameter_to_parameter(model: Any, weights: Weights) -> None:
    for _, w in weights:
        model.p.data.copy_(w)
    model.q.data.copy_(model.p.data.flip(0))
    model.p.data.fill_(4)
    model.p.data[1] = model.q.data[2]


@CASES.model(params=PQ, weights={"w": W, "v": V})
def later_writes_win(model: Any, weights: Weights) -> None:
    got = dict(weights)
    model.p.data.fill_(1)
    model.p.data[:4].copy_(got["w"][:4])
    model.p.data[4:].zero_()
    model.q.data[1:].copy_(got["v"][1:])
    model.q.data[0] = model.p.data[0]


@CASES.one()
def writes_without_data_under_no_grad(p: Any, w: Tensor) -> None:
    with torch.no_grad():
        p.copy_(w)
        p[2:].add_(1)


@CASES.one()
def writes_in_inference_mode(p: Any, w: Tensor) -> None:
    with torch.inference_mode():
        p.data.copy_(w * 2)
        p.detach()[0].fill_(1)


@CASES.one()
def writes_with_grad_enabled(p: Any, w: Tensor) -> None:
    with torch.enable_grad():
        p.data.copy_(w.requires_grad_(False) + 1)
        p.detach().mul_(2)


@CASES.model()
def state_dict(model: Any, weights: Weights) -> None:
    model.load_state_dict(dict.fromkeys(["p"], next(iter(weights))[1]))


@CASES.one()
def list_of_tensors_at_once(p: Any, w: Tensor) -> None:
    rows = list(p.data.unbind(0))
    torch._foreach_copy_(rows, list(w.unbind(0)))
    torch._foreach_mul_(rows[:2], 3.0)
    torch._foreach_add_(rows[2:4], [1.0, 2.0])
    torch._foreach_zero_(rows[5:])


@CASES.one()
def results_given_to_out(p: Any, w: Tensor) -> None:
    torch.add(w, 1, out=p.data)
    torch.mul(w[:2], 2, out=p.data[:2])
    torch.cat([w[:1], w[1:2]], out=p.data[3:5])


@CASES.one(weights={"w": W[0]})
def broadcast_copy(p: Any, w: Tensor) -> None:
    p.data.copy_(w, non_blocking=True)
    p.data[:, 1:2] = w[2]


@CASES.one()
def where_with_numbers(p: Any, w: Tensor) -> None:
    p.data.copy_(torch.where(w > 0, w, 0.0))
    p.data[1:] = torch.where(w[1:] > 0, 1.5, w[1:])


@CASES.one(weights={"w": torch.tensor(3, dtype=torch.int8)})
def zero_d_promotion(p: Any, w: Tensor) -> None:
    p.data.fill_(1.5)
    p.data.mul_(w)
    p.data[0] = torch.tensor([2], dtype=torch.uint8) * w
    p.data[1] = w / 2
    p.data[2] = torch.tensor([300], dtype=torch.int16) + w


@CASES.one()
def branches_on_data(p: Any, w: Tensor) -> None:
    p.data.copy_(w)
    if bool((w[0] == 0).all()):
        p.data.fill_(1)
    if float(w[1, 1]) < float(p.data[1, 2]) or not torch.equal(w, p.data):
        p.data[3] = len(w[w > 0])
    for row in w[4:].tolist() if False else ():
        del row


@CASES.one(exact="whole")
def masks_of_data(p: Any, w: Tensor) -> None:
    p.data.copy_(w)
    p.data.masked_fill_(w > 0, 2)
    p.data.masked_fill_(w < -1, w[0, 0])
    p.data[p.data == 2] = 5


@CASES.one()
def bits_reinterpreted(p: Any, w: Tensor) -> None:
    p.data.view(torch.int32).copy_(w.view(torch.int32))
    p.data.view(torch.int32)[0] = w.view(torch.int32)[0] & 0x7FFFFFFF


@CASES.one(exact="whole")
def bytes_reinterpreted(p: Any, w: Tensor) -> None:
    p.data.copy_(w)
    p.data.view(torch.uint8)[:, 3] = w.view(torch.uint8)[:, 7]


@CASES.model(params=PQ)
def tied_parameters(model: Any, weights: Weights) -> None:
    model.q = model.p
    for _, w in weights:
        model.p.data.copy_(w)


@CASES.model(
    weights={"w": W[:3], "v": V[:3]},
    init=lambda m: nn.init.normal_(m.p),
)
def made_of_two(model: Any, weights: Weights) -> None:
    got = dict(weights)
    model.p.data.copy_(torch.cat([got["w"], got["v"] * 2]))


@CASES.one()
def real_tensors_copied(p: Any, w: Tensor) -> None:
    p.data.copy_(torch.arange(24).view(6, 4))
    p.data[1].copy_(torch.ones(4))
    p.data[2] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    p.data[3:].copy_(w[3:])


@CASES.one()
def a_real_scratch_buffer_used_again(p: Any, w: Tensor) -> None:
    scratch = torch.tensor([0.0, 0.0, 0.0, 0.0])
    for i in range(3):
        scratch += i + 1
        p.data[i].copy_(scratch)
    array = scratch.numpy()
    array[:] = 100
    p.data[3].copy_(scratch)
    array[:] = 7
    p.data[4:].copy_(w[4:])


@CASES.one()
def a_real_buffer_that_takes_lazies(p: Any, w: Tensor) -> None:
    buffer = torch.arange(24.0).view(6, 4)
    buffer[:3].copy_(w[:3])
    p.data.copy_(buffer)
    buffer.fill_(5)
    p.data[5] = buffer[0]


@CASES.model(
    init=lambda m: m.register_buffer("b", torch.arange(6.0)),
)
def buffers_written(model: Any, weights: Weights) -> None:
    for _, w in weights:
        model.p.data.copy_(w)
        model.b[:4].copy_(w[0])
        model.b[5] = 9


@CASES.one()
def deepcopied(p: Any, w: Tensor) -> None:
    import copy

    mine = copy.deepcopy(w)
    w.fill_(0)
    p.data.copy_(mine)
    p.data[0] = copy.deepcopy(p.data)[1]


@CASES.one(weights={"w": torch.randn(6, 0)}, params={"p": torch.zeros(6, 0)})
def no_elements(p: Any, w: Tensor) -> None:
    p.data.copy_(w * 2)


@CASES.one(weights={"w": torch.tensor(2.5)}, params={"p": torch.zeros(())})
def no_dimensions(p: Any, w: Tensor) -> None:
    p.data.copy_(w)
    p.data.mul_(w)


@CASES.one(weights={"w": torch.randn(1, 1, 6)}, params={"p": torch.zeros(6, 1, 1)})
def size_one_dimensions(p: Any, w: Tensor) -> None:
    p.data.copy_(w.permute(2, 1, 0).as_strided((6, 1, 1), (1, 77, 99)))
    p.data[1:, :, 0] = w[0, 0, :5].unsqueeze(1)


@CASES.one(
    weights={"w": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 4)},
    params={"p": torch.zeros(4, 4, dtype=torch.float8_e4m3fn)},
)
def float8(p: Any, w: Tensor) -> None:
    p.data.zero_()
    p.data[:2].copy_(w)
    p.data[3].copy_(w[0].float() * 2)
    p.data[2].fill_(0.5)


@CASES.one(
    weights={"w": torch.randn(4, dtype=torch.complex64)},
    params={"p": torch.zeros(4, dtype=torch.complex64)},
)
def complex_numbers(p: Any, w: Tensor) -> None:
    p.data.copy_(w.conj())
    torch.view_as_real(p.data)[0].copy_(torch.view_as_real(w)[1])
    p.data[2] = w[2].conj() * 2
    p.data[3] = w[3].imag


@CASES.one(
    weights={"w": torch.tensor([True, False, True])}, params={"p": torch.zeros(5, dtype=torch.bool)}
)
def booleans(p: Any, w: Tensor) -> None:
    p.data.fill_(True)
    p.data[1:4].copy_(~w)
    p.data[4] = w.any()


@CASES.one()
def stepped_slices(p: Any, w: Tensor) -> None:
    p.data[::2].copy_(w[1::2])
    p.data[1::2, ::2] = w[::2, 1::2]
    p.data[1::2, 1::2] = w[::2, ::2]


@CASES.one(params={"p": torch.zeros(2, 3, 4)})
def gate_and_up_interleaved(p: Any, w: Tensor) -> None:
    p.data[0].copy_(w[0::2])
    p.data[1].copy_(w[1::2])


@CASES.one()
def numbers_assigned(p: Any, w: Tensor) -> None:
    p.data[:] = torch.tensor(3, device=p.device)
    p.data[1:] = 2.5
    p.data[1, 1] = 1
    p.data[:, [0, 2]] = w[:, [1, 3]]
    p.data[[3, 4], 1:2] = p.data.new_tensor([[7.0], [8.0]])
    p.data[torch.arange(6, device=p.device) == 5] = 0
    p.data[2] = p.data[[1]][0] * torch.as_tensor([1.0, 2, 3, 4], device=p.device)


@CASES.one()
def factories_on_many_devices(p: Any, w: Tensor) -> None:
    p.data.copy_(torch.zeros_like(p.data) + w.to(p.device))
    p.data[0] = torch.full((4,), 2.0, device=p.device)
    p.data[1] = p.data.new_ones(4) * w.new_full((4,), 3.0)
    p.data[2] = torch.empty_like(w[0]).copy_(w[0])


@CASES.one()
def resized_views_of_meta(p: Any, w: Tensor) -> None:
    view = p.data
    view.t_()
    view.copy_(w.t())
    view.unsqueeze_(0)
    view[0, 0].fill_(2)


@CASES.one()
def a_custom_operator(p: Any, w: Tensor) -> None:
    p.data.copy_(torch.ops.loadkit_test.twice(w))


@torch.library.custom_op("loadkit_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@CASES.one()
def a_scripted_function(p: Any, w: Tensor) -> None:
    p.data.copy_(w.chunk(2)[0].repeat(2, 1).softmax(-1))


@pytest.mark.parametrize("reader", ["pread", "mmap"])
@pytest.mark.parametrize("name", list(CASES))
def test_the_line_gives_what_the_same_code_gives_on_real_tensors(
    tmp_path: Path, name: str, reader: str
) -> None:
    check_line(CASES[name], tmp_path, reader)
