"""Operations that loader code uses: recorded and executed, they give what real tensors give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.operators import add_into, copy_to, without_fake
from helpers.traced import Cases, Weights, check_line

Tensor = torch.Tensor
W = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
PQ = {"p": torch.zeros(6, 4), "q": torch.zeros(6, 4)}
CASES = Cases(W)


# ------------------------------------------------------------ dtypes


@CASES.one(
    params={"p": torch.zeros(8, dtype=torch.uint16)},
    weights={"w": torch.arange(8).to(torch.uint16)},
)
def unsigned_16(p: Any, w: Tensor) -> None:
    p.data.copy_(w)


@CASES.one(
    params={"p": torch.zeros(8, dtype=torch.float64)},
    weights={"w": torch.arange(8).to(torch.uint32)},
)
def unsigned_32_to_double(p: Any, w: Tensor) -> None:
    p.data.copy_(w.to(torch.float64) * 0.1)


@CASES.one(
    params={"p": torch.zeros(8, dtype=torch.uint64)},
    weights={"w": torch.arange(8).to(torch.uint64)},
)
def unsigned_64(p: Any, w: Tensor) -> None:
    p.data.fill_(3)
    p.data[2:].copy_(w[2:])


@CASES.one(params={"p": torch.zeros(6, 8)}, weights={"w": torch.randn(6, 4, dtype=torch.complex64)})
def complex_parts(p: Any, w: Tensor) -> None:
    p.data.copy_(torch.view_as_real(w).flatten(1))
    p.data[:, :4].copy_(w.conj().imag)
    p.data[0, :4] = w[0].real


@CASES.one()
def casts_by_example(p: Any, w: Tensor) -> None:
    p.data.copy_(w.type_as(p))
    p.data[1] = w.to(p)[1] * 2
    p.data[2].copy_(w.to(p.device, p.dtype)[2].cpu().contiguous())
    p.data[3].copy_(w[3].half().to(torch.float64, copy=True))


@CASES.one()
def bits_of_a_scratch_buffer(p: Any, w: Tensor) -> None:
    scratch = torch.empty(6, 4, dtype=torch.int32)
    scratch.copy_(w.view(torch.int32))
    p.data.copy_(scratch.view(torch.float32))


# ------------------------------------------------------------ memory under several names


@CASES.model(params=PQ)
def one_memory_for_two_parameters(model: Any, weights: Weights) -> None:
    for _, w in weights:
        model.q.data = model.p.data
        model.q.data.copy_(w)
        model.p.data[0] = 2


@CASES.model(params=PQ)
def one_tensor_behind_two_parameters(model: Any, weights: Weights) -> None:
    for _, w in weights:
        model.p.data = w
        model.q.data = w
        model.q.data.add_(1)
        w[0] = 9


def flat_and_part(model: Any) -> None:
    model.flat = nn.Parameter(torch.empty(60), requires_grad=False)
    model.a = nn.Parameter(model.flat.data[:24].view(6, 4), requires_grad=False)


@CASES.model(init=flat_and_part)
def a_parameter_inside_another(model: Any, weights: Weights) -> None:
    for _, w in weights:
        model.flat.data.zero_()
        model.a.data.copy_(w)
        model.p.data.copy_(model.flat.data[24:48].view(6, 4) + 1)


@CASES.model()
def deleted_and_made_anew(model: Any, weights: Weights) -> None:
    for _, w in weights:
        del model.p
        model.p = nn.Parameter(w * 2, requires_grad=False)


@CASES.model()
def replaced_in_the_registry(model: Any, weights: Weights) -> None:
    for _, w in weights:
        model._parameters["p"] = nn.Parameter(w.t().contiguous().t(), requires_grad=False)


@CASES.model()
def replaced_and_then_filled(model: Any, weights: Weights) -> None:
    for _, w in weights:
        model.p = nn.Parameter(torch.empty(6, 4), requires_grad=False)
        model.p.data.copy_(w)


@CASES.model()
def swapped_with_a_lazy(model: Any, weights: Weights) -> None:
    for _, w in weights:
        torch.utils.swap_tensors(model.p, nn.Parameter(w * 1, requires_grad=False))


def channels_last(model: Any) -> None:
    like = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    model.p = nn.Parameter(like, requires_grad=False)


@CASES.one(params={}, weights={"w": torch.randn(2, 3, 4, 4)}, init=channels_last)
def a_parameter_in_channels_last(p: Any, w: Tensor) -> None:
    p.data.copy_(w)


def gaps(model: Any) -> None:
    model.p = nn.Parameter(torch.empty(6, 8)[::2, ::2], requires_grad=False)


@CASES.one(params={}, init=gaps)
def a_parameter_with_gaps(p: Any, w: Tensor) -> None:
    p.data.copy_(w[:3])
    p.data[1] = 1


# ------------------------------------------------------------ views and copies


@CASES.one()
def rows_zipped(p: Any, w: Tensor) -> None:
    for a, b in zip(p.data, w, strict=True):
        a.copy_(b)
    for a, b in zip(p.data[0], w[1], strict=True):
        a.copy_(b)


@CASES.one()
def parts_put_together(p: Any, w: Tensor) -> None:
    a, b, c = w.split([1, 2, 3])
    p.data.copy_(torch.cat([c, a, b]))
    x, y = w.tensor_split(2, 1)
    p.data[:2].copy_(torch.hstack([y, x])[:2])
    p.data[2] = torch.narrow_copy(w, 0, 3, 1)[0]


@CASES.one()
def a_rotary_permutation(p: Any, w: Tensor) -> None:
    p.data.copy_(w.view(1, 2, 3, 4).transpose(1, 2).reshape(6, 4))


@CASES.one()
def slices_from_the_end(p: Any, w: Tensor) -> None:
    p.data[-2:] = w[-2:]
    p.data[:-2] = w[:-2, ...]
    p.data[None, 0, ..., 1:-1] = w[None, 3, ..., 1:-1]


@CASES.one(exact="whole")
def lists_as_indices(p: Any, w: Tensor) -> None:
    p.data[[0, 1, 2]] = w[[2, 1, 0]]
    p.data[3:] = w[[3, 4, 5]]
    p.data[[True, False, False, False, False, False]] = 1
    p.data[(torch.tensor([1, 2]), [0, 3])] = w[[4, 5], [1, 1]]


@CASES.one()
def masks_over_rows(p: Any, w: Tensor) -> None:
    mask = torch.tensor([1, 0, 1, 0, 1, 0], dtype=torch.bool)
    p.data[mask] = w[mask]
    p.data[~mask] = w[~mask] * 2


@CASES.one()
def rarer_views(p: Any, w: Tensor) -> None:
    p.data.copy_(w.swapaxes(0, 1).mT)
    p.data[0] = torch.ravel(w)[:4]
    p.data[1] = w.reshape(2, 12)[1, :4]
    p.data[2] = torch.broadcast_to(w[0, 0], (4,))
    p.data[3] = w[3].expand_as(p.data[3])
    p.data[4] = w.take(torch.tensor([0, 1, 2, 23]))


@CASES.one(exact="whole")
def strides_given_by_hand(p: Any, w: Tensor) -> None:
    p.data.copy_(w.as_strided((6, 4), (4, 1), 0))
    p.data.as_strided((3, 2), (8, 2), 1).fill_(2)
    p.data.view(-1).as_strided((2,), (3,), 5).copy_(w[0, :2])


@CASES.one()
def what_a_lazy_tensor_says_of_itself(p: Any, w: Tensor) -> None:
    assert len(w) == 6
    assert w.ndim == 2
    assert w.nbytes == 96
    assert w.is_contiguous()
    assert not w.is_meta
    assert isinstance(w, torch.Tensor)
    assert "6, 4" in f"{w.shape}{w}{p.data!r}"
    p.data.copy_(w)


# ------------------------------------------------------------ numbers


@CASES.one()
def sorted_by_data(p: Any, w: Tensor) -> None:
    p.data.copy_(w[torch.argsort(w[:, 0])])
    p.data[0] = torch.topk(w[0], 4).values


@CASES.one()
def numbers_of_data(p: Any, w: Tensor) -> None:
    p.data.copy_(w * w.max() + w.min().item())
    p.data.div_(w.abs().mean())


@CASES.one(weights={"w": torch.tensor([[1.0, 0, 2, 0]] * 6)})
def shapes_of_data(p: Any, w: Tensor) -> None:
    p.data.fill_(1)
    p.data[:, :2] = w[w != 0].view(6, 2)


@CASES.one(exact="whole")
def elementwise_with_a_reduction(p: Any, w: Tensor) -> None:
    p.data.copy_(torch.addcmul(w, w, w, value=0.5).clamp(-1, 1).lerp(w, 0.5))
    p.data.copy_(torch.maximum(p.data, w.amax(0)))


@CASES.one()
def conditions(p: Any, w: Tensor) -> None:
    p.data.copy_(torch.where(torch.tensor([True, False, True, False]), w, w * 2))
    torch.where(w[0] > 0, w[0], w[1], out=p.data[0])


@CASES.one()
def scattered(p: Any, w: Tensor) -> None:
    p.data.zero_()
    p.data.scatter_add_(0, torch.tensor([[0, 1, 2, 3]]), w[:1])
    p.data.put_(torch.tensor([1, 2]), w[0, :2])
    p.data.index_add_(0, torch.tensor([1, 1]), w[:2])
    p.data.index_put_((torch.tensor([0, 0, 1]),), w[:3], accumulate=True)


@CASES.one()
def several_at_once(p: Any, w: Tensor) -> None:
    first, second = torch._foreach_mul([w[:3], w[3:]], 2.0)
    p.data[:3].copy_(first)
    p.data[3:].copy_(second)
    torch._foreach_add_([p.data[:1], p.data[1:2]], [w[:1], w[1:2]], alpha=2)


@CASES.one()
def initialisers_that_are_not_random(p: Any, w: Tensor) -> None:
    p.data.fill_(0)
    nn.init.constant_(p[:2], 3)
    nn.init.zeros_(p[2])
    p.data[3:].copy_(w[3:])
    nn.init.ones_(p[5])


@CASES.one()
def gradients_switched_on(p: Any, w: Tensor) -> None:
    p.requires_grad_(True)
    with torch.no_grad():
        p.copy_(w)
        p.mul_(2)
    p.requires_grad_(False)
    with torch.enable_grad():
        p.data[2:].copy_((w.clone().requires_grad_(True) * 2).detach()[2:])


@CASES.one(exact="whole")
def autocast(p: Any, w: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        p.data.copy_((w @ w.t())[:, :4])


# ------------------------------------------------------------ other people's operators and modules


@CASES.one()
def operators_that_write(p: Any, w: Tensor) -> None:
    p.data.zero_()
    add_into(p.data[1:], w[1:])
    copy_to(w[0], p.data[0])


@CASES.one(exact="opaque")
def an_operator_without_a_shape_function(p: Any, w: Tensor) -> None:
    p.data.copy_(without_fake(w))


@CASES.one()
def sparse_on_the_way(p: Any, w: Tensor) -> None:
    p.data.copy_(w.to_sparse().to_dense())


@CASES.one(exact="opaque")
def a_tensor_of_tensors(p: Any, w: Tensor) -> None:
    p.data.copy_(torch.as_tensor([[w[0, 0], w[0, 1], w[0, 2], w[0, 3]]] * 6))


@CASES.model()
def weight_norm_put_on(model: Any, weights: Weights) -> None:
    for _, w in weights:
        model.p.data.copy_(w)
        nn.utils.parametrizations.weight_norm(model, "p")


@CASES.model()
def a_module_from_pretrained(model: Any, weights: Weights) -> None:
    for _, w in weights:
        model.p.data.copy_(w)
        model.embedding = nn.Embedding.from_pretrained(w[1:])


@CASES.model()
def a_buffer_from_a_sum(model: Any, weights: Weights) -> None:
    for _, w in weights:
        model.p.data.copy_(w)
        model.register_buffer("total", w[:, 1:].sum(0))


@pytest.mark.parametrize("reader", ["pread", "mmap"])
@pytest.mark.parametrize("name", list(CASES))
def test_an_operation_gives_what_it_gives_on_real_tensors(
    tmp_path: Path, name: str, reader: str
) -> None:
    check_line(CASES[name], tmp_path, reader)


def test_a_region_that_is_used_twice_is_needed_and_read_once(tmp_path: Path) -> None:
    def load(model: Any, weights: Weights) -> None:
        for _, w in weights:
            model.p.data.copy_(torch.where(w > 0, w, w * 2))
            model.q.data.copy_(w)

    case = CASES._case(load, {"params": PQ})
    result = check_line(case, tmp_path, "pread")
    assert result.plan.bytes_needed == W.nbytes
    assert result.plan.bytes_to_read == 2 * W.nbytes
