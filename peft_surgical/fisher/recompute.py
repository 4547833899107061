"""Gradients of single samples for modules without a rule: the module is computed again, for each sample by itself.

The module is small, its inputs are known, and so is the gradient at its outputs: `vmap` over the samples of a
vector-Jacobian product is all that is needed. Where a module cannot be vmapped (its control flow depends on data, as
in a mixture of experts), samples go one at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from peft_surgical.compat import TreeSpec, tree_unflatten
from peft_surgical.fisher.calls import float_tensors, samples_first


logger = logging.getLogger(__name__)

_CHUNK_ELEMENTS = 2**24
"""Entries of per-sample gradients that exist at a time."""


@dataclass
class LocalCall:
    """One call of a module. An axis is the dimension that runs over the samples; None: it belongs to all of them."""

    inputs: list[Any]  # the flattened arguments
    input_axes: list[int | None]
    spec: TreeSpec  # how to put the arguments together again
    output_axes: list[int | None]  # for each floating-point tensor that was returned
    versions: list[int] = field(default_factory=list)  # how often each argument had been written to
    state: dict[str, Any] = field(default_factory=dict)  # what the module had kept from calls before, by attribute
    gradients: dict[int, Tensor] = field(default_factory=dict)  # at the outputs, as far as there are any


def local_gradients(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], calls: Sequence[LocalCall], samples: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The gradients of a module's parameters for each sample, from its calls in one forward pass.

    Some samples at a time: the number of the first one, and (samples, *shape) for each parameter.
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
        grads = [samples_first(call.gradients[i], call.output_axes[i], samples)[chunk] for i in which]
        axes = [None if axis is None else 0 for axis in call.input_axes]

        def one_sample(own, grads, call=call, which=which):  # type: ignore[no-untyped-def]
            pullback = vjp(lambda v: tuple(_outputs(module, v, own, call)[i] for i in which), values)[1]
            return pullback(tuple(grads))[0]

        result = vmap(one_sample, in_dims=(axes, 0))(inputs, grads)
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
            outputs = _outputs(module, leaves, own, call)
        pairs = [
            (outputs[i], samples_first(g, call.output_axes[i], samples)[n])
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


def _outputs(module: nn.Module, values: Mapping[str, Tensor], inputs: list[Any], call: LocalCall) -> list[Tensor]:
    args, kwargs = tree_unflatten(inputs, call.spec)
    kept_now = {name: vars(module).get(name) for name in call.state}
    vars(module).update(call.state)
    try:
        return float_tensors(functional_call(module, dict(values), args, kwargs))
    finally:
        vars(module).update(kept_now)


def kept_tensors(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that may be what it keeps from one call to the next, as RecurrentGemma's do."""
    own = vars(module).items()
    return {name: value for name, value in own if value is None or type(value) is Tensor}
