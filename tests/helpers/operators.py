"""Other people's operators. Defined once in a process: a second definition ends the first one."""

from __future__ import annotations

import torch

__all__ = ["add_into", "copy_to", "without_fake"]

Tensor = torch.Tensor


@torch.library.custom_op("loadkit_test::add_into", mutates_args=("x",))
def add_into(x: Tensor, y: Tensor) -> None:
    x.add_(y)


@torch.library.custom_op("loadkit_test::copy_to", mutates_args=("out",))
def copy_to(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


@torch.library.custom_op("loadkit_test::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x * 2
