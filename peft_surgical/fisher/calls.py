"""The calls of a model's modules in trial runs, and which dimensions of their tensors run over samples."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from peft_surgical.fisher.local import float_tensors


UNKNOWN = -1


@dataclass
class CallLayout:
    """Which dimension of the tensors of one call runs over samples; None: the tensor belongs to all of them.

    Args:
        inputs: For each flattened argument. `UNKNOWN` if it is not always a tensor, like a mask that is left out where
            there is no padding.
        outputs: For each floating-point tensor returned.
        complete: Whether every output belongs to single samples, or could be expanded to (its first dimension is 1).
    """

    inputs: list[int | None]
    outputs: list[int | None]
    complete: bool = True


@dataclass
class _Trace:
    """What is kept of a tensor: its shape, and some of its values."""

    shape: torch.Size
    values: Tensor


@dataclass
class Call:
    """One call of a module."""

    inputs: list[_Trace | None]
    outputs: list[_Trace]
    single: bool
    """Whether one tensor, and nothing else, was returned."""
    layout: CallLayout | None
    """How it tells samples apart, as far as it does."""
    tensors: tuple[list[Any], Any, Tensor] | None = None
    """The arguments, their structure and the output, where all of them are kept."""


Calls = dict[nn.Module, list[Call]]


def record_calls(
    model: nn.Module, run: Callable[[], Any], whole: Collection[nn.Module], before: Calls | None = None
) -> Calls:
    """Run a model and note the calls of its modules.

    Args:
        model: The model.
        run: Runs it.
        whole: Modules of whose first call all tensors are kept.
        before: The calls of a run on one sample. In this run, on two, it is then noted how they are told apart.

    Returns:
        The calls of each module, in order.
    """
    calls: Calls = {}

    def note(module, args, kwargs, output):
        inputs, spec = tree_flatten((args, kwargs))
        outputs, mine = float_tensors(output), calls.setdefault(module, [])
        earlier = before.get(module, []) if before is not None else []
        layout = _call_layout(earlier[len(mine)], inputs, outputs) if len(mine) < len(earlier) else None
        tensors = (inputs, spec, output) if module in whole and not mine else None
        traces = [_trace(x) if isinstance(x, Tensor) else None for x in inputs]
        mine.append(Call(traces, [_trace(x) for x in outputs], isinstance(output, Tensor), layout, tensors))

    handles = [m.register_forward_hook(note, with_kwargs=True) for m in model.modules()]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


_VALUES = 2048
"""Values of a tensor that are compared."""


def _trace(x: Tensor) -> _Trace:
    flat = x.detach().reshape(-1)
    return _Trace(x.shape, flat[:: max(1, flat.numel() // _VALUES)].clone())


def _call_layout(one: Call, inputs: list[Any], outputs: list[Tensor]) -> CallLayout | None:
    if len(one.inputs) != len(inputs) or len(one.outputs) != len(outputs):
        return None
    try:
        axes = [_axis(a, b) for a, b in zip(one.inputs, inputs, strict=True)]
        out_axes = [_axis(a, b) for a, b in zip(one.outputs, outputs, strict=True)]
    except _NoAxis:
        return None
    expandable = (axis is not None or x.shape[:1] == (1,) for axis, x in zip(out_axes, outputs, strict=True))
    return CallLayout(axes, out_axes, any(axis is not None for axis in out_axes) and all(expandable))


class _NoAxis(Exception):
    pass


def _axis(one: _Trace | None, two: Any) -> int | None:
    """The dimension along which `two` holds what `one` holds, and as much again."""
    if one is None or not isinstance(two, Tensor):
        return UNKNOWN
    if one.shape == two.shape:
        return None
    if len(one.shape) != two.dim():
        raise _NoAxis
    differing = [i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    axis = differing[0]
    if len(differing) != 1 or two.shape[axis] != 2 * one.shape[axis]:
        raise _NoAxis
    if not _alike(one.values, _trace(two.narrow(axis, 0, one.shape[axis])).values):
        raise _NoAxis
    return axis


def _alike(one: Tensor, two: Tensor) -> bool:
    """Whether values are the same, but for what the size of a batch may change: only their order matters here."""
    if not one.is_floating_point():
        return torch.equal(one, two)
    scale = float(one.abs().nan_to_num(posinf=0).max()) if one.numel() else 0.0
    return torch.allclose(two, one, rtol=0.05, atol=0.05 * scale, equal_nan=True)
