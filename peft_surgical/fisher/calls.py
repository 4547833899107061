"""The calls of modules: noted in trial runs, to tell which dimensions run over samples; and computed again by sample.

A module without a rule is computed again for each sample by itself. It is small, its inputs are known, and so is the
gradient at its outputs: `vmap` over the samples of a vector-Jacobian product is all that is needed. Where a module
cannot be vmapped (its control flow depends on data, as in a mixture of experts), samples go one at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


logger = logging.getLogger(__name__)

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


_CHUNK_ELEMENTS = 2**24
"""Entries of per-sample gradients that exist at a time."""


@dataclass
class LocalCall:
    """One call of a module, as recorded in the forward and the backward pass.

    Args:
        inputs: The flattened arguments; tensors and whatever else was passed.
        input_axes: For each, the dimension that runs over the samples, or None if it belongs to all of them.
        spec: How to put the arguments together again.
        output_axes: The dimension that runs over the samples, for each floating-point tensor that was returned.
        gradients: The gradients at those tensors, as far as there are any.
    """

    inputs: list[Any]
    input_axes: list[int | None]
    spec: TreeSpec
    output_axes: list[int | None]
    gradients: dict[int, Tensor] = field(default_factory=dict)


def local_gradients(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], calls: Sequence[LocalCall], samples: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The gradients of a module's parameters for each sample, some samples at a time.

    Args:
        module: The module.
        parameters: The parameters that are asked for, by their name in the module.
        calls: Its calls in one forward pass.
        samples: How many samples were in the batch, N.

    Yields:
        The number of the first sample, and for each parameter (samples, *shape).
    """
    values = {name: p.detach() for name, p in parameters.items()}
    if any(v.is_meta or not v.is_floating_point() for v in values.values()):
        raise ValueError(
            f"{type(module).__name__} has no rule for its gradients, and its weights are offloaded or quantised, so "
            "that it cannot be computed again for each sample. Load it whole, or add a rule with "
            "peft_surgical.fisher.register_rule."
        )
    step = max(1, _CHUNK_ELEMENTS // max(1, sum(v.numel() for v in values.values())))
    for first in range(0, samples, step):
        chunk = slice(first, min(first + step, samples))
        yield first, _chunk_gradients(module, values, calls, samples, chunk)


def _chunk_gradients(
    module: nn.Module, values: dict[str, Tensor], calls: Sequence[LocalCall], samples: int, chunk: slice
) -> dict[str, Tensor]:
    if type(module) not in _not_vmappable:
        try:
            return _vmapped(module, values, calls, samples, chunk)
        except Exception as error:  # noqa: BLE001  vmap refuses in many ways
            _not_vmappable.add(type(module))
            reason = str(error).strip().splitlines()
            logger.info(
                "%s has no rule for its gradients and cannot be vmapped (%s): its samples are taken one at a time.",
                type(module).__name__,
                reason[0] if reason else type(error).__name__,
            )
    rows = [_single(module, values, calls, samples, n) for n in range(samples)[chunk]]
    return {name: torch.stack([row[name] for row in rows]) for name in values}


_not_vmappable: set[type[nn.Module]] = set()


def _vmapped(
    module: nn.Module, values: dict[str, Tensor], calls: Sequence[LocalCall], samples: int, chunk: slice
) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for call in calls:
        inputs = [
            x if axis is None else samples_first(x, axis, samples)[chunk]
            for x, axis in zip(call.inputs, call.input_axes, strict=True)
        ]
        which = list(call.gradients)
        grads = [samples_first(call.gradients[i], call.output_axes[i] or 0, samples)[chunk] for i in which]
        split = [i for i, axis in enumerate(call.input_axes) if axis is not None]

        def one_sample(sliced, grads, call=call, inputs=inputs, split=split, which=which):
            own = list(inputs)
            for i, x in zip(split, sliced, strict=True):
                own[i] = x
            pullback = vjp(lambda v: tuple(_outputs(module, v, own, call.spec)[i] for i in which), values)[1]
            return pullback(tuple(grads))[0]

        result = vmap(one_sample)([inputs[i] for i in split], grads)
        total = {name: total[name] + g if name in total else g for name, g in result.items()}
    return total


def _single(
    module: nn.Module, values: dict[str, Tensor], calls: Sequence[LocalCall], samples: int, n: int
) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(v) for name, v in values.items()}
    leaves = {name: v.detach().requires_grad_() for name, v in values.items()}
    for call in calls:
        own = [
            x if axis is None else samples_first(x, axis, samples)[n]
            for x, axis in zip(call.inputs, call.input_axes, strict=True)
        ]
        with torch.enable_grad():
            outputs = _outputs(module, leaves, own, call.spec)
        pairs = [
            (outputs[i], samples_first(g, call.output_axes[i] or 0, samples)[n])
            for i, g in call.gradients.items()
            if outputs[i].requires_grad
        ]
        if not pairs:
            continue
        results = torch.autograd.grad(
            [out for out, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True
        )
        for name, g in zip(leaves, results, strict=True):
            if g is not None:
                total[name] += g
    return total


def _outputs(module: nn.Module, values: Mapping[str, Tensor], inputs: list[Any], spec: TreeSpec) -> list[Tensor]:
    args, kwargs = tree_unflatten(inputs, spec)
    return float_tensors(functional_call(module, dict(values), args, kwargs))


def float_tensors(tree: Any) -> list[Tensor]:
    """The floating-point tensors in nested tuples, lists, dicts and model outputs, in order."""
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor) and x.is_floating_point()]


def samples_first(x: Tensor, axis: int | None, samples: int) -> Tensor:
    """(N, ...): each entry has the shape that the module would see in a batch of one sample (whose axis is None)."""
    if axis is None:
        assert samples == 1
        return x[None]
    return x.unflatten(axis, (samples, -1)).movedim(axis, 0)


def sample_axis(x: Any, axis: int | None, samples: int) -> int | None:
    """The dimension of an argument that runs over samples, if it has one."""
    if not isinstance(x, Tensor) or axis is None:
        return None
    if axis == UNKNOWN:
        return 0 if samples > 1 and x.shape[:1] == (samples,) else None
    return axis
