"""Listen to a model's forward and backward pass, and add up the squared gradients of single samples.

Each unit (`units.py`) keeps its inputs in the forward pass and gets the gradient at its output in the backward
pass. Its rule turns the two into gradients of single samples, which are squared, added up and dropped at once.

No parameter requires a gradient meanwhile. The backward pass ends at the *anchors*: the outputs of units before which
nothing is wanted. So autograd computes no weight gradient, and nothing below the lowest unit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from peft_surgical.fisher.calls import CallLayout
from peft_surgical.fisher.kernel import on_cpu
from peft_surgical.fisher.local import LocalCall, local_gradients
from peft_surgical.fisher.pending_squares import PendingSquares
from peft_surgical.fisher.plain import NotPlain, check_plain, first_input
from peft_surgical.fisher.sample_gradients import DenseGradients, ProductGradients, SampleGradients, join
from peft_surgical.fisher.units import Unit, sample_axis, samples_first


logger = logging.getLogger(__name__)


_TOGETHER = 2**23
"""Entries of the parameters whose gradients are taken up together on an accelerator: Python is faster in one go. On a
CPU they are taken up at once, while they are in the cache."""


class SamplesInUnequalShares(Exception):
    """A tensor's samples cannot be told apart because its size is no multiple of their number."""


class Sink(Protocol):
    """Where the gradients of one parameter go."""

    def add(self, gradients: SampleGradients, first: int, pending: PendingSquares) -> None:
        """Take the gradients of the samples from number `first` on. They may change after `pending.flush()`."""


@dataclass
class _Use:
    """What a unit's call kept for the backward pass."""

    unit: Unit
    layout: CallLayout | None
    x: Tensor
    version: int


class GradientListener:
    """A context in which the units of a model are listened to.

    Args:
        units: The units.
        sinks: Where the gradients of each parameter go, by the parameter's `id`.
        checked: Raise at the first gradient that is not finite, and name the sample and the module.
    """

    def __init__(self, units: Sequence[Unit], sinks: Mapping[int, Sink], *, checked: bool = False):
        self.units, self.sinks, self.checked = units, sinks, checked
        owners = Counter(id(p) for unit in units for p in unit.parameters.values())
        self._tied = {key for key, count in owners.items() if count > 1}
        self.anchors: list[Tensor] = []
        self._pending = PendingSquares()
        self._handles: list[Any] = []
        self._paused = False
        self.start(1)

    def __enter__(self) -> GradientListener:
        for unit in self.units:
            hook = partial(self._on_forward, unit)
            self._handles.append(unit.module.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.start(1)

    def start(self, samples: int, tokens: int = 0, lengths: Tensor | None = None) -> None:
        """Get ready for a forward pass.

        Args:
            samples: Number of samples in the batch.
            tokens: Tokens of each sample, padding included; 0 if it has none.
            lengths: Tokens of each sample, (N,), if those after them are padding and so have no gradient. Where a
                module sees `tokens` tokens, they are skipped.
        """
        self.samples, self.tokens, self.lengths = samples, tokens, lengths
        self.anchors.clear()
        self._calls: dict[int, int] = {}
        self._local: dict[int, list[LocalCall]] = {}
        self._units: dict[int, Unit] = {}
        self._waiting: dict[int, list[SampleGradients]] = {}
        self._arrived: list[tuple[_Use, Tensor]] = []
        self._entries = 0
        self.heard = False

    def check_calls(self) -> None:
        """Check after a forward pass that each plain unit has been called.

        Raises:
            NotPlain: One has not: something else reads its parameters, or nothing does.
        """
        for unit in self.units:
            if unit.plain and id(unit.module) not in self._calls:
                raise NotPlain(unit.name)

    def take_gradients(self) -> list[Tensor]:
        """The gradients at the anchors, after which these are free for another backward pass."""
        found = [anchor.grad for anchor in self.anchors if anchor.grad is not None]
        for anchor in self.anchors:
            anchor.grad = None
        return found

    def finish(self) -> None:
        """Finish a backward pass."""
        with torch.no_grad():
            self._take_arrived()
        self._paused = True
        try:
            for key, calls in self._local.items():
                self._finish_local(self._units[key], calls)
            for key, waiting in self._waiting.items():
                self.sinks[key].add(join(waiting), 0, self._pending)
            self._waiting.clear()
            self._pending.flush()
        finally:
            self._paused = False

    # ---- forward

    def _on_forward(self, unit: Unit, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if self._paused:
            return None
        number = self._calls.get(id(module), 0)
        self._calls[id(module)] = number + 1
        layout = unit.layouts[min(number, len(unit.layouts) - 1)] if self.samples > 1 else None
        if unit.rule:
            return self._listen(unit, layout, args, kwargs, output)
        return self._record(unit, layout, args, kwargs, output)

    def _listen(self, unit: Unit, layout: CallLayout | None, args: tuple, kwargs: dict, output: Tensor) -> Any:
        x = first_input(args, kwargs)
        if unit.plain:
            check_plain(unit, (self.samples, self.tokens), x, output)
        elif layout is not None:
            self._check_size(unit, x, layout.inputs[0])
        x, out = x.detach(), self._with_gradient(output)
        out.register_hook(partial(self._on_gradient, _Use(unit, layout, x, x._version)))
        return out if out is not output else None

    def _record(self, unit: Unit, layout: CallLayout | None, args: tuple, kwargs: dict, output: Any) -> Any:
        inputs, spec = tree_flatten((args, kwargs))
        inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        leaves, out_spec = tree_flatten(output)
        floats = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
        axes: list[int | None] = [None] * len(inputs)
        out_axes: list[int | None] = [None] * len(floats)
        if layout is not None:
            axes = [sample_axis(x, axis, self.samples) for x, axis in zip(inputs, layout.inputs, strict=True)]
            out_axes = list(layout.outputs)
            for x, axis in zip(inputs, axes, strict=True):
                self._check_size(unit, x, axis)
        calls = self._local.setdefault(id(unit), [])
        self._units[id(unit)] = unit
        call = LocalCall(inputs, axes, spec, out_axes)
        calls.append(call)
        for k, i in enumerate(floats):
            if layout is not None and out_axes[k] is None:
                out_axes[k] = 0  # shared by the samples; expanded, so that each sends back a gradient of its own
                leaves[i] = leaves[i].expand(self.samples, *leaves[i].shape[1:])
            # one output may be computed from another (a router's scores from its logits): a view of each gets only the
            # gradient that comes from outside
            leaves[i] = self._with_gradient(leaves[i].view_as(leaves[i]))
            leaves[i].register_hook(partial(self._on_local_gradient, unit, call, k))
        return tree_unflatten(leaves, out_spec)

    def _with_gradient(self, output: Tensor) -> Tensor:
        if output.requires_grad:
            return output
        anchor = output.detach().requires_grad_()
        self.anchors.append(anchor)
        return anchor.clone()  # which may be written to, unlike a leaf

    def _check_size(self, unit: Unit, x: Any, axis: int | None) -> None:
        if axis is not None and x.shape[axis] % self.samples:
            raise SamplesInUnequalShares(unit.name)

    # ---- backward

    def _on_gradient(self, use: _Use, gradient: Tensor) -> None:
        self.heard = True
        self._arrived.append((use, gradient))
        self._entries += use.unit.size
        if self._entries >= _TOGETHER or self.checked or on_cpu(gradient):
            self._take_arrived()

    def _take_arrived(self) -> None:
        arrived, self._arrived, self._entries = self._arrived, [], 0
        self._paused = True  # a rule may call the module
        try:
            for use, gradient in arrived:
                self._apply_rule(use, gradient)
        finally:
            self._paused = False

    def _apply_rule(self, use: _Use, g: Tensor) -> None:
        unit, layout, x = use.unit, use.layout, use.x
        if x._version != use.version:
            raise RuntimeError(
                f"The input of {unit.name} was written to in place after it was used, so that the gradient of its "
                "weight cannot be found. Use engine='loop'."
            )
        if not unit.plain:
            x = samples_first(x, layout.inputs[0] if layout else None, self.samples)
            g = samples_first(g, layout.outputs[0] if layout else None, self.samples)
        if self.checked:
            self._check_finite(unit, g)
        gradients = unit.rule(unit.module, x, g) if unit.rule else {}
        once = self._calls[id(unit.module)] == 1
        for name, parameter in unit.parameters.items():
            self._collect(parameter, gradients[name], once)

    def _on_local_gradient(self, unit: Unit, call: LocalCall, number: int, gradient: Tensor) -> None:
        self.heard = True
        if self.checked:
            self._check_finite(unit, samples_first(gradient, call.output_axes[number], self.samples))
        call.gradients[number] = gradient

    def _collect(self, parameter: nn.Parameter, gradients: SampleGradients, once: bool) -> None:
        key = id(parameter)
        if not once or key in self._tied:
            self._waiting.setdefault(key, []).append(gradients)
            return
        if isinstance(gradients, ProductGradients) and gradients.left.shape[1] == self.tokens:
            gradients.lengths = self.lengths
        self.sinks[key].add(gradients, 0, self._pending)

    def _finish_local(self, unit: Unit, calls: list[LocalCall]) -> None:
        calls = [call for call in calls if call.gradients]
        if not calls:
            return
        with torch.no_grad():
            parts: dict[str, list[Tensor]] = {name: [] for name in unit.parameters}
            for first, gradients in local_gradients(unit.module, unit.parameters, calls, self.samples):
                for name, parameter in unit.parameters.items():
                    if id(parameter) in self._tied:
                        parts[name].append(gradients[name])
                    else:
                        self.sinks[id(parameter)].add(DenseGradients(gradients[name]), first, self._pending)
            for name, tensors in parts.items():
                if tensors:
                    waiting = self._waiting.setdefault(id(unit.parameters[name]), [])
                    waiting.append(DenseGradients(torch.cat(tensors)))
        for call in calls:
            call.gradients.clear()

    def _check_finite(self, unit: Unit, g: Tensor) -> None:
        bad = ~torch.isfinite(g.flatten(1)).all(1)
        if bad.any():
            raise NotFinite(int(bad.nonzero()[0]), unit.name)


class NotFinite(Exception):
    """A gradient is NaN or infinite.

    Args:
        sample: Number of the sample in the batch.
        module: Path of the module at whose output it was first seen.
    """

    def __init__(self, sample: int, module: str):
        super().__init__(f"sample {sample}, {module}")
        self.sample, self.module = sample, module
