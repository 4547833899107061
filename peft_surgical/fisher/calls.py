"""The calls of a model's modules in trial runs, and which dimensions of their tensors run over samples."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from peft_surgical.compat import tree_flatten


UNKNOWN = -1
"""The dimension of an argument that is not always a tensor, like a mask that is left out where there is no padding."""


@dataclass
class CallLayout:
    """Which dimension of the tensors of one call runs over samples; None: the tensor belongs to all of them."""

    inputs: list[int | None]  # for each flattened argument
    outputs: list[int | None]  # for each floating-point tensor returned
    complete: bool = True  # every output belongs to single samples, or can be expanded to (its first dimension is 1)


@dataclass
class _Trace:
    """What is kept of a tensor."""

    shape: torch.Size
    floating: bool
    values: Tensor | None  # some of them, in the run on one sample


@dataclass
class Call:
    """One call of a module."""

    inputs: list[_Trace | None]
    outputs: list[_Trace | None]
    single: bool  # one tensor, and nothing else, was returned
    layout: CallLayout | None = None  # how it tells samples apart, as far as it does


Calls = dict[nn.Module, list[Call]]


class OwnHook(partial):
    """A forward hook of this package, known by its type where an interrupt left it behind."""


def record_calls(modules: Collection[nn.Module], run: Callable[[], Any], before: Calls | None = None) -> Calls:
    """Run a model and note the calls of some of its modules, in order. `before` are the calls of a run on one sample:
    in this run, on two, it is then noted how they are told apart."""
    recorder = _Recorder(before)
    handles = [m.register_forward_hook(OwnHook(recorder.note), with_kwargs=True) for m in modules]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    recorder.compare()
    return recorder.calls


_VALUES = 2048
"""Values of a tensor that are compared."""


class _Recorder:
    """Notes calls. Whether values are alike is looked at in the end, for each look waits for the device."""

    def __init__(self, before: Calls | None):
        self.calls: Calls = {}
        self.before = before
        self._unsure: list[tuple[Call, list[Tensor]]] = []

    def note(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        mine = self.calls.setdefault(module, [])
        if not kwargs and all(isinstance(x, Tensor) for x in args):  # nearly always; flattening takes long
            inputs = list(args)
        else:
            inputs = tree_flatten((args, kwargs))[0]
        outputs = float_tensors(output)
        traces = [self._trace(x) for x in inputs], [self._trace(x) for x in outputs]
        call = Call(*traces, isinstance(output, Tensor))
        earlier = self.before.get(module, []) if self.before is not None else []
        if len(mine) < len(earlier):
            self._compare_later(call, earlier[len(mine)], inputs, outputs)
        mine.append(call)

    def _trace(self, x: Any) -> _Trace | None:
        if not isinstance(x, Tensor):
            return None
        return _Trace(x.shape, x.is_floating_point(), _some(x).clone() if self.before is None else None)

    def _compare_later(self, call: Call, one: Call, inputs: list[Any], outputs: list[Tensor]) -> None:
        """Tell the call's layout by the shapes, and note the values that it depends on."""
        if len(one.inputs) != len(inputs) or len(one.outputs) != len(outputs):
            return
        alike: list[Tensor] = []
        axes: list[int | None] = []
        pairs = [
            *zip(one.inputs, call.inputs, inputs, strict=True),
            *zip(one.outputs, call.outputs, outputs, strict=True),
        ]
        for old, new, x in pairs:
            axis = _doubled(old, new)
            if axis == _SEVERAL:
                return
            axes.append(axis)
            if axis is not None and axis != UNKNOWN and old and x.numel():
                assert old.values is not None
                alike.append(_alike(old.values, _some(x.narrow(axis, 0, old.shape[axis]))))
        axes, out_axes = axes[: len(inputs)], axes[len(inputs) :]
        expandable = (axis is not None or x.shape[:1] == (1,) for axis, x in zip(out_axes, outputs, strict=True))
        complete = any(axis is not None for axis in out_axes) and all(expandable)
        call.layout = CallLayout(axes, out_axes, complete)
        self._unsure.append((call, alike))

    def compare(self) -> None:
        """Take back the layouts of calls whose values have another order than the shapes say."""
        for call, alike in self._unsure:
            if not all(alike):
                call.layout = None


def _some(x: Tensor) -> Tensor:
    flat = x.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _VALUES)]


_SEVERAL = -2


def _doubled(one: _Trace | None, two: _Trace | None) -> int | None:
    """The dimension along which `two` has room for what `one` holds, and as much again; None: they are as large.
    `UNKNOWN` where one is no tensor, `_SEVERAL` where it is not one dimension that doubles."""
    if one is None or two is None:
        return UNKNOWN
    if one.shape == two.shape:
        return None
    if len(one.shape) != len(two.shape):
        return _SEVERAL
    differing = [i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    axis = differing[0]
    return axis if len(differing) == 1 and two.shape[axis] == 2 * one.shape[axis] else _SEVERAL


def _alike(one: Tensor, two: Tensor) -> Tensor:
    """Whether values are the same, but for what the size of a batch may change: only their order matters here."""
    if not one.is_floating_point():
        return (one == two).all()
    one, two = one.float(), two.float()
    size = one.abs().nan_to_num(nan=0, posinf=0)
    near = (two - one).abs() <= 0.05 * (size.amax() + size)
    return (near | (one == two) | (one.isnan() & two.isnan())).all()


def float_tensors(tree: Any) -> list[Tensor]:
    """The floating-point tensors in nested tuples, lists, dicts and model outputs, in order."""
    leaves = [tree] if isinstance(tree, Tensor) else tree_flatten(tree)[0]
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def samples_first(x: Tensor, axis: int | None, samples: int) -> Tensor:
    """(N, ...): each entry has the shape that the module would see in a batch of one sample (whose axis is None)."""
    if axis is None:
        assert samples == 1
        return x[None]
    if axis == 0 and len(x) == samples:  # the same, and faster
        return x[:, None]
    return x.unflatten(axis, (samples, -1)).movedim(axis, 0)


def sample_axis(x: Any, axis: int | None, samples: int) -> int | None:
    """The dimension of an argument that runs over samples, if it has one."""
    if not isinstance(x, Tensor) or axis is None:
        return None
    if axis == UNKNOWN:
        return 0 if samples > 1 and x.shape[:1] == (samples,) else None
    return axis
