"""Listen to a model's forward and backward pass, and add up the squared gradients of single samples.

Each target (`targets.py`) keeps its inputs in the forward pass and gets the gradient at its output in the backward
pass. Its rule turns the two into gradients of single samples, which are squared, added up and dropped at once.

No parameter requires a gradient meanwhile. The backward pass ends at the *anchors*: the outputs of targets before
which nothing is wanted. So autograd computes no weight gradient, and nothing below the lowest target.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from peft_surgical.compat import tree_flatten, tree_unflatten
from peft_surgical.fisher.calls import CallLayout, OwnHook, sample_axis, samples_first
from peft_surgical.fisher.gradients import DenseGradients, ProductGradients, SampleGradients, join
from peft_surgical.fisher.recompute import LocalCall, kept_tensors, local_gradients
from peft_surgical.fisher.squares import SquareQueue, on_cpu
from peft_surgical.fisher.targets import CannotTellSamplesApart, HookTarget


logger = logging.getLogger(__name__)


_TOGETHER = 2**23
"""Entries of the parameters whose gradients are taken up together on an accelerator: Python is faster in one go. On a
CPU they are taken up at once, while they are in the cache."""


class Unusual(Exception):
    """A module does not see samples in a row, or is not called."""


@dataclass
class _Use:
    """What a target's call kept for the backward pass."""

    target: HookTarget
    layout: CallLayout | None
    x: Tensor
    version: int


class GradientListener:
    """A context in which the targets of a model are listened to while it runs on a batch of samples.

    Args:
        sums: The sum of each parameter, to which its gradients are added, by the parameter's `id`.
        tokens: Tokens of each sample, padding included; 0 if it has none.
        lengths: Tokens of each sample, (N,), if those after them are padding and so have no gradient. Where a module
            sees `tokens` tokens, they are skipped.
        checked: Raise at the first gradient that is not finite, and name the sample and the module.
        usual: The targets are `Targets.usual`: see in each call whether it has the samples in front.
        copied: One sample more is in the batch, a copy, which is left out of what is differentiated.
    """

    def __init__(
        self,
        targets: Sequence[HookTarget],
        sums: Mapping[int, Any],
        samples: int,
        tokens: int = 0,
        lengths: Tensor | None = None,
        *,
        checked: bool = False,
        usual: bool = False,
        copied: bool = False,
    ):
        self.targets, self.sums, self.samples, self.tokens, self.lengths = targets, sums, samples, tokens, lengths
        self.checked, self.usual, self.copied = checked, usual, copied
        owners = Counter(id(p) for target in targets for p in target.parameters.values())
        self._tied = {key for key, count in owners.items() if count > 1}
        self.anchors: list[Tensor] = []
        self._calls: dict[int, int] = {}
        self._local: dict[int, tuple[HookTarget, list[LocalCall]]] = {}
        self._states: dict[int, dict[str, Any]] = {}
        self._waiting: dict[int, list[SampleGradients]] = {}
        self._arrived: list[tuple[_Use, Tensor]] = []
        self._entries = 0
        self._of_copy: list[Tensor] = []
        self._queue = SquareQueue()
        self._handles: list[Any] = []
        self._paused = False

    def __enter__(self) -> GradientListener:
        for t in self.targets:
            self._handles.append(t.module.register_forward_hook(OwnHook(self._on_forward, t), with_kwargs=True))
            if not t.rule:
                self._handles.append(t.module.register_forward_pre_hook(OwnHook(self._before_forward)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for kept in (self.anchors, self._local, self._waiting, self._arrived):
            kept.clear()

    def check_usual(self) -> None:
        """Check after the forward pass that each target was called, and after the backward pass that nothing but the
        copy's own value depends on the rows of the copy; raises `Unusual`. This is what makes rows the rows of a
        sample."""
        if self.usual and len(self._calls) < len(self.targets):
            raise Unusual("not every module is called")
        if self._of_copy and any(torch.stack([found.to(self._of_copy[0]) for found in self._of_copy]).tolist()):
            raise Unusual("a module sees something else than samples in a row")
        self._of_copy.clear()

    def backward_passes(self, values: Tensor) -> Iterator[list[Tensor]]:
        """A backward pass for each row of an objective. After each come the gradients at the anchors."""
        # of some groups of layers nothing depends, as of those above the one that is read
        for k, row in enumerate(values if values.requires_grad else ()):
            torch.autograd.backward(row.sum(), retain_graph=k + 1 < len(values))
            found = [anchor.grad for anchor in self.anchors if anchor.grad is not None]
            for anchor in self.anchors:
                anchor.grad = None
            self._finish()
            self.check_usual()
            yield found

    def _finish(self) -> None:
        with torch.no_grad():
            self._take_arrived()
        self._paused = True
        try:
            for target, calls in self._local.values():
                self._finish_local(target, calls)
            for key, waiting in self._waiting.items():
                self.sums[key].add(join(waiting), 0, self._queue)
            self._waiting.clear()
            self._queue.flush()
        finally:
            self._paused = False

    def _before_forward(self, module: nn.Module, args: tuple) -> None:
        self._states[id(module)] = kept_tensors(module)

    def _on_forward(self, target: HookTarget, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if self._paused or not torch.is_grad_enabled():  # a part of the model without gradients, as a choice of tokens
            return None
        number = self._calls.get(id(module), 0)
        self._calls[id(module)] = number + 1
        layout = target.layouts[min(number, len(target.layouts) - 1)] if self.samples > 1 else None
        if target.rule:
            return self._listen(target, layout, args, kwargs, output)
        return self._record(target, layout, args, kwargs, output)

    def _listen(self, target: HookTarget, layout: CallLayout | None, args: tuple, kwargs: dict, output: Tensor) -> Any:
        x = args[0] if args else tree_flatten(kwargs)[0][0]
        if self.usual:
            if len(args) + len(kwargs) > 1 and sum(isinstance(a, Tensor) for a in (*args, *kwargs.values())) > 1:
                raise Unusual(f"{target.name} has several inputs")
            self._check_usual(target, x, output)
        elif layout is not None:
            self._check_size(target, x, layout.inputs[0])
        x, out = x.detach(), self._with_gradient(output)
        out.register_hook(partial(self._on_gradient, _Use(target, layout, x, x._version)))
        return out if out is not output else None

    def _record(self, target: HookTarget, layout: CallLayout | None, args: tuple, kwargs: dict, output: Any) -> Any:
        inputs, spec = tree_flatten((args, kwargs))
        versions = [x._version if isinstance(x, Tensor) else 0 for x in inputs]
        inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        leaves, out_spec = tree_flatten(output)
        floats = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
        axes: list[int | None] = [None] * len(inputs)
        out_axes: list[int | None] = [None] * len(floats)
        if layout is not None:
            axes = [sample_axis(x, axis, self.samples) for x, axis in zip(inputs, layout.inputs, strict=True)]
            out_axes = list(layout.outputs)
            for x, axis in zip(inputs, axes, strict=True):
                self._check_size(target, x, axis)
        call = LocalCall(inputs, axes, spec, out_axes, versions, self._states[id(target.module)])
        self._local.setdefault(id(target), (target, []))[1].append(call)
        for k, i in enumerate(floats):
            if layout is not None and out_axes[k] is None:
                out_axes[k] = 0  # shared by the samples; expanded, so that each sends back a gradient of its own
                leaves[i] = leaves[i].expand(self.samples, *leaves[i].shape[1:])
            # one output may be computed from another (a router's scores from its logits), or be written to in place: a
            # copy gets the gradient that comes from outside, and stays
            leaves[i] = self._with_gradient(leaves[i], copy=True)
            leaves[i].register_hook(partial(self._on_local_gradient, target, call, k))
        return tree_unflatten(leaves, out_spec)

    def _with_gradient(self, output: Tensor, copy: bool = False) -> Tensor:
        if output.requires_grad:
            return output.clone() if copy else output
        anchor = output.detach().requires_grad_()
        self.anchors.append(anchor)
        return anchor.clone()  # which may be written to, unlike a leaf

    def _check_usual(self, target: HookTarget, *tensors: Any) -> None:
        rows = self.samples + self.copied
        for x in tensors:
            # of two dimensions the first may be that of rows that were chosen, as many as samples by chance
            usual = isinstance(x, Tensor) and (
                self.samples == 1 or (x.dim() > 2 and x.shape[0] == rows and rows not in x.shape[1:-1])
            )
            if not usual:
                raise Unusual(target.name)

    def _check_size(self, target: HookTarget, x: Any, axis: int | None) -> None:
        if axis is not None and x.shape[axis] % self.samples:
            raise CannotTellSamplesApart(target.name)

    def _on_gradient(self, use: _Use, gradient: Tensor | None) -> None:
        if gradient is None:
            reason = "what follows has no backward pass, as quantised layers made ready for inference"
            raise ValueError(f"No gradient comes back to {use.target.name}: {reason}. Load the model anew.")
        self._arrived.append((use, gradient))
        self._entries += use.target.size
        if self._entries >= _TOGETHER or self.checked or on_cpu(gradient):
            self._take_arrived()

    def _take_arrived(self) -> None:
        arrived, self._arrived, self._entries = self._arrived, [], 0
        if self.copied and arrived:
            rows = [gradient[-1].flatten() for _, gradient in arrived]
            self._of_copy.append(torch.cat([row.to(rows[0].device) for row in rows]).any())
        self._paused = True  # a rule may call the module
        try:
            for use, gradient in arrived:
                self._apply_rule(use, gradient)
        finally:
            self._paused = False

    def _apply_rule(self, use: _Use, g: Tensor) -> None:
        target, layout, x = use.target, use.layout, use.x
        _check_version(target, x, use.version)
        if self.copied:
            x, g = x[:-1], g[:-1]
        x = samples_first(x, layout.inputs[0] if layout else None, self.samples)
        g = samples_first(g, layout.outputs[0] if layout else None, self.samples)
        if self.checked:
            self._check_finite(target, g)
        gradients = target.rule(target.module, x, g) if target.rule else {}
        once = self._calls[id(target.module)] == 1
        for name, parameter in target.parameters.items():
            self._collect(parameter, gradients[name], once)

    def _on_local_gradient(self, target: HookTarget, call: LocalCall, number: int, gradient: Tensor) -> None:
        if self.checked:
            self._check_finite(target, samples_first(gradient, call.output_axes[number], self.samples))
        call.gradients[number] = gradient

    def _collect(self, parameter: nn.Parameter, gradients: SampleGradients, once: bool) -> None:
        key = id(parameter)
        if not once or key in self._tied:
            self._waiting.setdefault(key, []).append(gradients)
            return
        if isinstance(gradients, ProductGradients) and gradients.left.shape[1] == self.tokens:
            gradients.lengths = self.lengths
        self.sums[key].add(gradients, 0, self._queue)

    def _finish_local(self, target: HookTarget, calls: list[LocalCall]) -> None:
        calls = [call for call in calls if call.gradients]
        if not calls:
            return
        for call in calls:
            for x, version in zip(call.inputs, call.versions, strict=True):
                _check_version(target, x, version)
        with torch.no_grad():
            parts: dict[str, list[Tensor]] = {name: [] for name in target.parameters}
            for first, gradients in local_gradients(target.module, target.parameters, calls, self.samples):
                for name, parameter in target.parameters.items():
                    if id(parameter) in self._tied:
                        parts[name].append(gradients[name])
                    else:
                        self.sums[id(parameter)].add(DenseGradients(gradients[name]), first, self._queue)
            for name, tensors in parts.items():
                if tensors:
                    waiting = self._waiting.setdefault(id(target.parameters[name]), [])
                    waiting.append(DenseGradients(torch.cat(tensors)))
        for call in calls:
            call.gradients.clear()

    def _check_finite(self, target: HookTarget, g: Tensor) -> None:
        bad = ~torch.isfinite(g.flatten(1)).all(1)
        if bad.any():
            raise NotFinite(int(bad.nonzero()[0]), target.name)


class NotFinite(Exception):
    """The gradient of a sample, by its number in the batch, is NaN or infinite at the output of a module."""

    def __init__(self, sample: int, module: str):
        super().__init__(f"sample {sample}, {module}")
        self.sample, self.module = sample, module


def _check_version(target: HookTarget, x: Any, version: int) -> None:
    if isinstance(x, Tensor) and x._version != version:
        raise RuntimeError(f"The input of {target.name} was written to in place after its use. Use engine='loop'.")
