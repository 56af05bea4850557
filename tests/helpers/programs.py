"""Random loader programs, run on real tensors and on recorded ones.

A program is a list of seeds. Each step draws from its own seed and looks only at shapes and dtypes,
so it does the same on real tensors and on lazy ones. The real run happens twice, over two garbage
memories: an element that differs in the end depends on memory that nothing wrote.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loadkit.execution import Target
from loadkit.load_config import LoadConfig
from loadkit.read import read_targets
from loadkit.readers.base import Reader
from loadkit.readers.pread import PreadReader
from loadkit.tracing.coverage import final_pieces
from loadkit.tracing.evaluate import strided
from loadkit.tracing.expressions import Expr, Missing
from loadkit.tracing.lazies import view_of
from loadkit.tracing.lazy_tensor import generated
from loadkit.tracing.program import walk
from loadkit.tracing.recorder import Recorder
from loadkit.tracing.storage import GeneratedLeaf
from loadkit.tracing.view import View

__all__ = ["Env", "Model", "bits", "lazy_of", "record", "run_recorded", "same_bits", "steps"]

Tensor = torch.Tensor
Rng = random.Random


@dataclass
class Env:
    """What a loader has at hand: parameters, weights and what it made of them."""

    params: list[Tensor]
    pool: list[Tensor]
    rank: int = 0
    ranks: int = 1
    real: bool = True


class Model(nn.Module):
    """A parameter per (size, dtype)."""

    def __init__(self, kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        for i, (size, dtype) in enumerate(kinds):
            param = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
            self.register_parameter(f"p{i}", param)


def lazy_of(name: str, tensor: Tensor) -> Tensor:
    """A tensor without data that knows how to make any region of ``tensor``."""
    flat = tensor.detach().clone().reshape(-1)

    def make(view: View) -> Tensor:
        return flat.as_strided(view.size, view.stride, view.offset)

    return generated(GeneratedLeaf(name, tuple(tensor.shape), tensor.dtype, make))


def bits(tensor: Tensor) -> Tensor:
    """The bytes of each element, one more dimension."""
    t = tensor.detach().contiguous()
    return (
        t.view(-1).view(torch.uint8).view(*t.shape, t.itemsize) if t.numel() else t.to(torch.uint8)
    )


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Per element."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    return (bits(a) == bits(b)).all(-1) if a.numel() else torch.ones(a.shape, dtype=torch.bool)


# ------------------------------------------------------------------ steps: views


def _dim(rng: Rng, t: Tensor) -> int:
    d = rng.randrange(t.dim())
    return d - t.dim() if rng.random() < 0.3 else d


def _factor(n: int) -> int:
    return next((f for f in (2, 3, 5, 7) if n % f == 0), n)


def _ranked(rng: Rng, t: Tensor, env: Env) -> Tensor:
    d = _dim(rng, t)
    part = t.size(d) // env.ranks
    return t.narrow(d, part * env.rank, part) if part else t


def _merge(rng: Rng, t: Tensor, env: Env) -> Tensor:
    d = rng.randrange(t.dim() - 1)
    return (
        t.flatten(d, d + 1)
        if rng.random() < 0.5
        else t.reshape(*t.shape[:d], -1, *t.shape[d + 2 :])
    )


def _shuffled(rng: Rng, n: int) -> list[int]:
    order = list(range(n))
    rng.shuffle(order)
    return order


def _narrow(rng: Rng, t: Tensor, env: Env) -> Tensor:
    d = _dim(rng, t)
    start = rng.randrange(t.size(d))
    return t.narrow(d, start, rng.randint(1, t.size(d) - start))


def _steps(rng: Rng, t: Tensor, env: Env) -> Tensor:
    d = rng.randrange(t.dim())
    cut = slice(rng.choice([None, 0, 1, -2]), rng.choice([None, -1, 5]), rng.choice([1, 2, 3]))
    return t[(slice(None),) * d + (cut,)]


def _chunk(rng: Rng, t: Tensor, env: Env) -> Tensor:
    return rng.choice(t.chunk(rng.choice([2, 3]), _dim(rng, t)))


VIEWS: list[Callable[[Rng, Tensor, Env], Tensor]] = [
    _narrow,
    _steps,
    _ranked,
    _ranked,
    _merge,
    _chunk,
    lambda r, t, e: t.select(_dim(r, t), 0),
    lambda r, t, e: t[-1],
    lambda r, t, e: t[..., 0],
    lambda r, t, e: t.t(),
    lambda r, t, e: t.transpose(_dim(r, t), _dim(r, t)),
    lambda r, t, e: t.permute(_shuffled(r, t.dim())),
    lambda r, t, e: t.movedim(_dim(r, t), _dim(r, t)),
    lambda r, t, e: t.unflatten(-1, (_factor(t.size(-1)), -1)),
    lambda r, t, e: t.unflatten(0, (-1, _factor(t.size(0)))),
    lambda r, t, e: t.view(-1),
    lambda r, t, e: t.unsqueeze(_dim(r, t)),
    lambda r, t, e: t.squeeze(),
    lambda r, t, e: t.expand(2, *t.shape),
    lambda r, t, e: t[:1].expand(3, *t.shape[1:]),
    lambda r, t, e: r.choice(t.split(r.choice([1, 2, 3]), _dim(r, t))),
    lambda r, t, e: r.choice(t.unbind(_dim(r, t))),
    lambda r, t, e: t.detach(),
    lambda r, t, e: t.data,
    lambda r, t, e: t.diagonal(),
    lambda r, t, e: t.unfold(0, 2, 1),
    lambda r, t, e: t.view(r.choice([torch.int8, torch.int16, torch.int32, torch.uint8])),
    lambda r, t, e: t.view(r.choice([torch.float32, torch.bfloat16, torch.float16])),
    lambda r, t, e: t.view_as(t.detach()),
]

# ------------------------------------------------------------------ steps: fresh results


def _positions(rng: Rng, n: int) -> Tensor:
    return torch.tensor([rng.randrange(n) for _ in range(rng.randint(1, n + 1))])


def _partner(rng: Rng, t: Tensor, env: Env) -> Tensor:
    """Another tensor that fits beside this one."""
    fits = [o for o in env.pool if o.shape == t.shape]
    return rng.choice(fits) if fits else t


def _pad(rng: Rng, t: Tensor, env: Env) -> Tensor:
    return nn.functional.pad(t, (rng.randrange(2), rng.randrange(3)), value=rng.choice([0, 3]))


def _scalar(rng: Rng, t: Tensor) -> Any:
    return rng.choice([2, -1, 3]) if not t.is_floating_point() else rng.choice([2, 0.5, -1.25])


COPIES: list[Callable[[Rng, Tensor, Env], Tensor]] = [
    lambda r, t, e: t.contiguous(),
    lambda r, t, e: t.clone(),
    lambda r, t, e: t.t().contiguous(),
    lambda r, t, e: torch.cat([t, _partner(r, t, e)], r.randrange(t.dim())),
    lambda r, t, e: torch.stack([t, _partner(r, t, e)], r.randrange(t.dim() + 1)),
    lambda r, t, e: t[_positions(r, t.size(0))],
    lambda r, t, e: t.index_select(-1, _positions(r, t.size(-1))),
    lambda r, t, e: t[:, torch.tensor(_shuffled(r, t.size(1)))],
    lambda r, t, e: t[torch.arange(t.size(0)) % 2 == 0],
    lambda r, t, e: t.repeat(2, *(1 for _ in range(t.dim() - 1))),
    lambda r, t, e: t.repeat_interleave(2, 0),
    _pad,
]

MOVES: list[Callable[[Rng, Tensor, Env], Tensor]] = [
    lambda r, t, e: t.flip(0),
    lambda r, t, e: t.roll(1, -1),
]

VALUES: list[Callable[[Rng, Tensor, Env], Tensor]] = [
    lambda r, t, e: t.to(r.choice([torch.float32, torch.bfloat16, torch.float16])),
    lambda r, t, e: t.to(torch.float8_e4m3fn).to(torch.float32),
    lambda r, t, e: t.float(),
    lambda r, t, e: t * _scalar(r, t),
    lambda r, t, e: t + _partner(r, t, e),
    lambda r, t, e: t - 1,
    lambda r, t, e: 1 - t,
    lambda r, t, e: -t,
    lambda r, t, e: t * t.float(),
    lambda r, t, e: t / 4,
    lambda r, t, e: t * t.reshape(-1)[0],
    lambda r, t, e: t * torch.tensor(2.0),
    lambda r, t, e: t + torch.arange(t.size(-1)),
    lambda r, t, e: t[:1] + t,
    lambda r, t, e: torch.where(t > 0, t, 0),
    lambda r, t, e: torch.where(t > 0, t, t.float() * 2),
    lambda r, t, e: t.clamp(-1, 1),
    lambda r, t, e: t.abs(),
    lambda r, t, e: t.masked_fill(t > 0, 1),
    lambda r, t, e: t.sum(0),
    lambda r, t, e: t.amax(-1, keepdim=True),
    lambda r, t, e: t.sort(-1).values,
    lambda r, t, e: torch.tril(t),
    lambda r, t, e: t == 0,
    lambda r, t, e: t.to(torch.int32) & 3,
    lambda r, t, e: (t.to(torch.uint8) >> 1).to(t.dtype),
    lambda r, t, e: torch.addcmul(t, t, t, value=2),
    lambda r, t, e: t[t.to(torch.int64).abs().reshape(-1) % t.size(0)],
    lambda r, t, e: torch.gather(t, 0, t.to(torch.int64).abs() % t.size(0)),
    lambda r, t, e: torch.cat([t.float(), t.to(torch.bfloat16)]),
    lambda r, t, e: torch.stack(list(t.to(torch.float16).unbind(0))[::-1]),
]

SCRATCH: list[Callable[[Rng, Tensor, Env], Tensor]] = [
    lambda r, t, e: torch.zeros(t.shape),
    lambda r, t, e: torch.zeros_like(t),
    lambda r, t, e: torch.empty_like(t),
    lambda r, t, e: torch.full(t.shape, 3, dtype=torch.bfloat16),
    lambda r, t, e: torch.full_like(t, 2),
    lambda r, t, e: t.new_zeros(t.shape),
    lambda r, t, e: t.new_empty(*t.shape, 2)[..., 1],
    lambda r, t, e: torch.empty_like(e.params[0].data),
    lambda r, t, e: torch.zeros_like(e.params[-1]).flatten(),
    lambda r, t, e: torch.ones(2, 3, device=e.params[0].device),
    lambda r, t, e: torch.empty_strided((2, 3), (1, 2)),
    lambda r, t, e: torch.eye(3),
]

# ------------------------------------------------------------------ steps: writes


def fitted(rng: Rng, source: Tensor, target: Tensor) -> Tensor:
    """A tensor made of ``source``'s elements that may be copied into ``target``."""
    n = target.numel()
    if source.shape == target.shape:
        out = source
    elif source.numel() >= n:
        out = source.reshape(-1)[:n].view(target.shape)
    elif source.dim() and target.dim() and source.shape[-1] == target.shape[-1]:
        out = source.reshape(-1, source.shape[-1])[0]
    else:
        out = source.reshape(-1)[0]
    return out


def _apart(source: Tensor, target: Tensor) -> Tensor:
    """Never copy within one memory: real tensors leave open what that does."""
    return source.clone()


def _copy(rng: Rng, t: Tensor, s: Tensor) -> None:
    t.copy_(_apart(fitted(rng, s, t), t), non_blocking=rng.random() < 0.2)


def _assign(rng: Rng, t: Tensor, s: Tensor) -> None:
    d = rng.randrange(t.dim())
    part = (slice(None),) * d + (slice(rng.randrange(t.size(d)), None),)
    t[part] = _apart(fitted(rng, s, t[part]), t)


def _assign_rows(rng: Rng, t: Tensor, s: Tensor) -> None:
    rows = torch.tensor(_shuffled(rng, t.size(0))[: rng.randint(1, t.size(0))])
    t[rows] = _apart(fitted(rng, s, t[: len(rows)]), t)


def _assign_columns(rng: Rng, t: Tensor, s: Tensor) -> None:
    cols = torch.tensor(_shuffled(rng, t.size(1))[: rng.randint(1, t.size(1))])
    t[:, cols] = _apart(fitted(rng, s, t[:, : len(cols)]), t)


def _assign_mask(rng: Rng, t: Tensor, s: Tensor) -> None:
    mask = torch.tensor([rng.random() < 0.5 for _ in range(t.numel())]).view(t.shape)
    t[mask] = _apart(s.reshape(-1)[0], t)


def _index_copy(rng: Rng, t: Tensor, s: Tensor) -> None:
    d = rng.randrange(t.dim())
    index = torch.tensor(_shuffled(rng, t.size(d))[: rng.randint(1, t.size(d))])
    part = t.narrow(d, 0, len(index))
    t.index_copy_(d, index, _apart(fitted(rng, s, part), t).to(t.dtype).expand(part.shape))


def _index_fill(rng: Rng, t: Tensor, s: Tensor) -> None:
    d = rng.randrange(t.dim())
    t.index_fill_(d, torch.tensor([rng.randrange(t.size(d))]), 2)


def _index_add(rng: Rng, t: Tensor, s: Tensor) -> None:
    index = torch.tensor([rng.randrange(t.size(0)) for _ in range(2)])
    t.index_add_(0, index, _apart(fitted(rng, s, t[:1].expand(2, *t.shape[1:])), t).to(t.dtype))


def _scatter(rng: Rng, t: Tensor, s: Tensor) -> None:
    index = torch.tensor([[rng.randrange(t.size(0)) for _ in range(t.size(1))]])
    t.scatter_(0, index, _apart(fitted(rng, s, t[:1]), t).to(t.dtype).expand(1, t.size(1)))


def _masked_scatter(rng: Rng, t: Tensor, s: Tensor) -> None:
    mask = torch.arange(t.numel()).view(t.shape) % 2 == 0
    t.masked_scatter_(mask, _apart(fitted(rng, s, t), t).to(t.dtype).expand(t.shape))


WRITES: list[Callable[[Rng, Tensor, Tensor], Any]] = [
    _copy,
    _copy,
    _copy,
    _assign,
    _assign_rows,
    _assign_columns,
    _assign_mask,
    _index_copy,
    _index_fill,
    _index_add,
    _scatter,
    _masked_scatter,
    lambda r, t, s: t.fill_(_scalar(r, t)),
    lambda r, t, s: t.zero_(),
    lambda r, t, s: t.fill_(s.reshape(-1)[0].clone()),
    lambda r, t, s: t.add_(_apart(fitted(r, s, t), t)),
    lambda r, t, s: t.mul_(_scalar(r, t)),
    lambda r, t, s: t.sub_(1),
    lambda r, t, s: t.div_(2),
    lambda r, t, s: t.neg_(),
    lambda r, t, s: t.clamp_(min=0),
    lambda r, t, s: t.masked_fill_(torch.arange(t.numel()).view(t.shape) % 3 == 0, 1),
    lambda r, t, s: t.masked_fill_(t > 0, s.reshape(-1)[0].clone()),
    lambda r, t, s: t.masked_fill_(torch.arange(t.size(-1)) > 1, 0),
    lambda r, t, s: t.copy_(t * 2),
    lambda r, t, s: t.copy_(t.flip(0)),
    lambda r, t, s: t.addcmul_(_apart(fitted(r, s, t), t), torch.tensor(2.0)),
    lambda r, t, s: t.bitwise_and_(3),
    lambda r, t, s: t.diagonal().fill_(1),
]


def _data(rng: Rng, env: Env, t: Tensor, target: Tensor) -> Any:
    """What loader code may ask a tensor while it loads; the answer goes into a write."""
    kind = rng.randrange(4)
    seen = bytes(bits(t).reshape(-1).tolist()) if env.real else b""  # garbage must not decide
    if kind == 0:
        number = t.reshape(-1)[0].item()
        target.fill_(number)
    elif kind == 1:
        number = float(t.reshape(-1)[-1])
        target.mul_(0).add_(number)
    elif kind == 2:
        number = bool((t == 0).all())
        target.fill_(1 if number else 2)
    else:
        number = tuple(t.nonzero().shape)
        target.fill_(number[0])
    return number, seen


# ------------------------------------------------------------------ running


def _places(env: Env) -> list[Tensor]:
    return [p.data for p in env.params]


def step(seed: int, env: Env, *, plain: bool = False) -> Any:
    """One step; ``plain``: views and copies only; below 0: fill a parameter."""
    rng = Rng(seed)
    if seed < 0:
        _copy(rng, env.params[-seed % len(env.params)].data, env.pool[-seed % len(env.pool)])
        return None
    kind = rng.random()
    anything = env.pool + _places(env)
    if kind < 0.35:
        t = rng.choice(anything)
        for _ in range(rng.randint(1, 3)):
            t = rng.choice(VIEWS)(rng, t, env)
        if plain and t.dtype != env.pool[0].dtype:
            raise RuntimeError("other bits are other numbers")
        return _keep(env, t)
    if kind < 0.5:
        return _keep(env, rng.choice(COPIES)(rng, rng.choice(anything), env))
    if kind < 0.62 and not plain:
        return _keep(env, rng.choice(VALUES + MOVES)(rng, rng.choice(anything), env))
    if kind < 0.68 and not plain:
        return _keep(env, rng.choice(SCRATCH)(rng, rng.choice(anything), env))
    target = rng.choice(_places(env)) if rng.random() < 0.8 else rng.choice(env.pool)
    for _ in range(rng.choice([0, 0, 1, 2])):
        target = rng.choice(VIEWS)(rng, target, env)
    if not view_of(target).is_apart():
        raise RuntimeError("several elements are one in memory")
    source = rng.choice(anything) if rng.random() < 0.2 else rng.choice(env.pool)
    if plain and target.dtype != source.dtype:
        raise RuntimeError("other bits are other numbers")
    if plain:
        _copy(rng, target, source)
        return None
    if kind < 0.73:
        return _data(rng, env, rng.choice(env.pool), target)
    rng.choice(WRITES)(rng, target, source)
    return None


def _keep(env: Env, t: Tensor) -> None:
    if not 0 < t.numel() <= 400 or t.dim() > 5:
        raise RuntimeError("not worth keeping")
    env.pool.append(t)


def steps(seeds: Sequence[int], env: Env, other: Env, *, plain: bool = False) -> list[int]:
    """Run on two real environments in lockstep; returns the seeds of the steps that worked."""
    good: list[int] = []
    for seed in seeds:
        before = [_snapshot(e) for e in (env, other)]
        try:
            saw = step(seed, env, plain=plain), step(seed, other, plain=plain)
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            saw = (0, 1)
        if saw[0] != saw[1]:
            for e, old in zip((env, other), before, strict=True):
                _restore(e, old)
            continue
        good.append(seed)
    return good


def _snapshot(env: Env) -> tuple[int, list[tuple[Tensor, Tensor]]]:
    memory = {t.untyped_storage()._cdata: t for t in (*env.pool, *env.params)}
    return len(env.pool), [(t, _flat(t).clone()) for t in memory.values()]


def _restore(env: Env, old: tuple[int, list[tuple[Tensor, Tensor]]]) -> None:
    del env.pool[old[0] :]
    for t, flat in old[1]:
        _flat(t).copy_(flat)


def _flat(t: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(t.detach().untyped_storage())


def garbage(size: tuple[int, ...], dtype: torch.dtype, flip: bool) -> Tensor:
    """Memory that nobody wrote: two kinds that agree in no element."""
    if dtype == torch.bool:
        return torch.full(size, flip)
    generator = torch.Generator().manual_seed(7)
    n = torch.empty(size).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator)
    return (raw ^ 0x55 if flip else raw).view(dtype).view(size)


def record(
    good: Sequence[int],
    model: Model,
    weights: Sequence[Tensor],
    rank: int,
    ranks: int,
    *,
    plain: bool = False,
) -> Recorder:
    """The same steps on lazy tensors and parameters on meta."""
    with Recorder() as recorder, torch.no_grad():
        recorder.begin_load()
        env = Env(list(model.parameters()), list(weights), rank, ranks, real=False)
        for seed in good:
            step(seed, env, plain=plain)
    return recorder


@dataclass
class Recorded:
    """What the program put into each parameter, and which of its elements that is sure of."""

    targets: list[Target]
    values: list[Tensor]
    known: list[Tensor]


def run_recorded(
    recorder: Recorder, model: nn.Module, reader: Reader | None = None, *, alias: bool = False
) -> Recorded:
    """Execute what was recorded, as the read step does."""
    targets: list[Target] = []
    known: list[Tensor] = []
    for name, param in model.named_parameters():
        storage = recorder.track(param)
        view = view_of(param)
        pieces = final_pieces(storage, view, param.dtype)
        good = [(at, expr) for at, expr in pieces if not reads_unwritten(expr)]
        sure = torch.zeros(max(view.span()[1], storage.numel * storage.itemsize), dtype=torch.bool)
        for at, _ in good:
            sure.as_strided(at.size, at.stride, at.offset).fill_(True)
        known.append(sure.as_strided(view.size, view.stride, view.offset))
        targets.append(Target((name,), storage, view, param.dtype, True, good))
    opened = reader or PreadReader(LoadConfig())
    try:
        _, memory = read_targets(targets, opened, device=torch.device("cpu"), alias=alias)
    finally:
        if reader is None:
            opened.close()
    values = [
        strided(memory[id(t.storage)], t.view, t.dtype)
        if id(t.storage) in memory
        else torch.empty(t.view.size, dtype=t.dtype)
        for t in targets
    ]
    return Recorded(targets, values, known)


def reads_unwritten(expr: Expr) -> bool:
    """Whether anything in it was never written."""
    return any(isinstance(item, Missing) for item in walk(expr))
