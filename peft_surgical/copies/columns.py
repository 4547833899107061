"""Some input columns of a linear module's weight, trained in place of the whole: nothing is added to the forward pass.

PaCA (Woo et al. 2025, section 3), S2FT (Yang et al. 2024). The output is that of the whole weight with the trained
columns in it, bit for bit; the backward pass computes their gradient alone, and keeps of the input what it needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from peft_surgical.copies.compute import has_hooks
from peft_surgical.copies.tensors import TunedTensors


def input_dim(linear: nn.Module) -> int:
    """The dimension of a linear module's weight that its inputs count in."""
    return 0 if isinstance(linear, Conv1D) else 1


def draw_columns(path: str, linear: nn.Module, columns: int | float, seed: int) -> list[int]:
    """The input columns of a linear module that are trained: always the same for its path and a seed.

    Args:
        path: The module's path in the model.
        linear: The module.
        columns: How many, or their share.
        seed: Of the draw.

    Raises:
        ValueError: There are not so many.
    """
    weight: Any = linear.weight
    inputs = weight.shape[input_dim(linear)]
    count = max(1, round(columns * inputs)) if isinstance(columns, float) else columns
    if count > inputs:
        raise ValueError(f"columns={columns} of {path}, which has {inputs} inputs. Choose fewer, or a share below 1.")
    draw = random.Random(f"{seed} {path}")  # Python promises that these numbers stay the same in all its versions
    ranks = [draw.random() for _ in range(inputs)]
    return sorted(sorted(range(inputs), key=ranks.__getitem__)[:count])


class ColumnTensors(TunedTensors):
    """One adapter's columns of a linear module's weight; asked for the weight it gives the whole one."""

    columns_at: torch.Tensor

    def __init__(
        self,
        linear: nn.Module,
        weight: torch.Tensor,
        index: Sequence[int],
        original: Callable[[str], torch.Tensor],
    ):
        self.dim, self._original = input_dim(linear), original
        at = torch.tensor(index, device=weight.device)
        super().__init__({"weight": nn.Parameter(weight.detach().index_select(self.dim, at))})
        self.register_buffer("columns_at", at, persistent=False)

    @property
    def columns(self) -> nn.Parameter:
        """The trained columns: of shape (outputs, columns), or (columns, outputs) of a `Conv1D`."""
        return super().__getitem__("weight")  # type: ignore[return-value]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.put_into(self._original(name), self.columns)

    def put(self, name: str, value: torch.Tensor) -> None:
        self.columns.data = self.take_from(value, name)

    def put_into(self, base: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """The whole weight, in the columns' dtype: the base's with them in it."""
        return base.to(columns.dtype).index_copy(self.dim, self.columns_at, columns)

    def take_from(self, whole: torch.Tensor, name: str) -> torch.Tensor:
        """The columns in a whole weight, which must be the base's but for them."""
        columns = whole.index_select(self.dim, self.columns_at.to(whole.device))
        base = self._original("weight").to(whole.device, whole.dtype)
        if not torch.equal(base.index_copy(self.dim, self.columns_at.to(whole.device), columns), whole):
            raise ValueError(
                f"{name} differs from the base in other columns than the {columns.shape[self.dim]} that are trained "
                "here. Load the adapter with its own config, or for inference (is_trainable=False)."
            )
        return columns


def column_output(base: Any, entry: ColumnTensors, x: torch.Tensor) -> torch.Tensor | None:
    """The output of a linear module with trained columns; None if the module has to be called for it."""
    if type(base) not in (nn.Linear, Conv1D) or has_hooks(base) or base._parameters.get("weight") is None:
        return None
    weight, bias = base.weight, base.bias
    if torch.is_autocast_enabled(x.device.type):  # as it does for a linear module
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return _Linear.apply(x, weight, entry.columns, entry.columns_at, bias, entry.dim)


class _Linear(torch.autograd.Function):
    """x W' + b, where W' is W with the columns put in: gradients of x, the columns and b."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, columns: Any, at: Any, bias: Any, dim: int) -> torch.Tensor:
        columns = columns.to(weight.dtype)
        ctx.save_for_backward(x.index_select(-1, at), weight, columns, at)
        ctx.dim = dim
        whole = weight.index_copy(dim, at, columns)
        if dim == 0:  # as transformers' Conv1D computes
            return torch.addmm(bias, x.reshape(-1, x.size(-1)), whole).view(*x.shape[:-1], -1)
        return F.linear(x, whole, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        x, weight, columns, at = ctx.saved_tensors
        if ctx.dim == 1:
            weight, columns = weight.t(), columns.t()
        x, rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        of_x = of_columns = None
        if ctx.needs_input_grad[0]:
            of_x = grad.matmul(weight.t()).index_copy_(-1, at, grad.matmul(columns.t()))
        if ctx.needs_input_grad[2]:
            of_columns = x.t().mm(rows) if ctx.dim == 0 else rows.t().mm(x)
        return of_x, None, of_columns, None, rows.sum(0) if ctx.needs_input_grad[4] else None, None
