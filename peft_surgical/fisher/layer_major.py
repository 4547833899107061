"""The layer-major engine: exact, with memory for one layer at a time.

Going batch by batch needs a sum the size of all layers, for the norm of a mean is no mean of norms. So go layer by
layer instead. The forward pass runs inside the layers without a graph and keeps only their inputs. What is between and
after them keeps its graph. From the gradients at the outputs of the last layer the layers are then taken from the last
to the first: each is computed again for every batch, differentiated, reduced to its result and dropped. That is one
more forward pass than the other engine makes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from peft_surgical.distributed import on_all_ranks
from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.engines import Engine, PaddingLengths, UnitsOnce, all_finite, not_finite_error
from peft_surgical.fisher.entries import Generators
from peft_surgical.fisher.hooks import GradientListener, NotFinite
from peft_surgical.fisher.input_store import InputStore, Kept
from peft_surgical.fisher.local import float_tensors
from peft_surgical.fisher.measure import FisherSums, FisherTask, Progress, check_values
from peft_surgical.fisher.plain import NotPlain, checking_plain, tokens_of
from peft_surgical.fisher.sums import TensorFisher
from peft_surgical.fisher.units import CannotTellSamplesApart, Unit


logger = logging.getLogger(__name__)


@dataclass
class _LayerCall:
    """One layer's call in the forward pass of a batch."""

    inputs: list[Any]
    """The flattened arguments, tensors as they are kept."""
    spec: TreeSpec
    sources: dict[int, int | Tensor]
    """The arguments through which gradients flow on: a layer's output, by number, or a tensor computed from some."""
    outputs: list[int] = field(default_factory=list)
    """The numbers of the layer's floating-point outputs."""


@dataclass
class _Pass:
    """What is kept of a batch."""

    batch: Batch
    counts: Tensor = field(default_factory=lambda: torch.zeros(0))
    """What each sample adds to the divisor."""
    calls: dict[int, _LayerCall] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    """The outputs of the layers, by number. Empty if every layer takes the last one's output as it is."""
    constants: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    """What several layers get alike (masks, positions), by `id`, with the way it is kept."""
    gradients: list[dict[int, Tensor]] = field(default_factory=list)
    """For each row of the objective the gradients found so far, by the number of the output."""


class LayerMajorEngine(Engine):
    """One layer at a time.

    Args:
        task: What is measured.
        batches: The samples.
        keep_inputs: Where the layers' inputs are kept, one of `KEEP`.
    """

    name = "layer_major"

    def __init__(self, task: FisherTask, batches: Sequence[Batch], keep_inputs: str = "device"):
        super().__init__(task, batches)
        self.parameters = task.parameters
        flat = [p for group in self.parameters for p in group.values()]
        self.units = UnitsOnce(task, self.runner, batches, flat)
        self._inside: dict[tuple[int, int], list[Unit]] = {}
        self.padding = PaddingLengths(task, self.runner)
        self.generators = Generators(task.seed)
        self.store = InputStore(keep_inputs)
        self.passes: list[_Pass] = []
        self.progress = Progress()
        self._numbers = count()

    def run(self, progress: Progress) -> None:
        self.progress = progress
        progress.expect(sum(len(b) for b in self.batches) * (1 + len(self.task.layers)), " samples x layers")
        for batch in self.batches:
            for kept in self._forward_checked(batch):
                self.passes.append(kept)
                self.log.add(kept.batch, kept.counts)
            progress.advance(len(batch))

    def results(self, count: float) -> list[dict[str, TensorFisher]]:
        found = {}
        for number in reversed(range(len(self.task.layers))):
            sums = FisherSums(self.task, [self.parameters[number]], self.generators)
            on_all_ranks(partial(self._differentiate, number, sums))
            (found[number],) = sums.results(count)
        return [found[number] for number in range(len(self.task.layers))]

    # ---- forward

    def _forward_checked(self, batch: Batch) -> list[_Pass]:
        """Run the model on a batch, or on its samples one at a time if units cannot tell them apart."""
        plain = self.units.plain_of(batch)
        if plain is not None:
            try:
                with checking_plain(plain, (len(batch), tokens_of(batch))):
                    return [self._forward(batch)]
            except NotPlain as error:
                self.units.drop_plain(error)
        parts = [batch]
        try:
            self.units.find(batch)
        except CannotTellSamplesApart as error:
            logger.info("Samples cannot be told apart in %s: they are taken one at a time.", error)
            parts = [batch.select(n, n + 1) for n in range(len(batch))]
        return [self._forward(part) for part in parts]

    def _forward(self, batch: Batch) -> _Pass:
        kept, handles = _Pass(batch), []
        for number, layer in enumerate(self.task.layers):
            before, after = partial(self._before, kept, number), partial(self._after, kept, number)
            handles.append(layer.module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(layer.module.register_forward_hook(after))
        try:
            values, counts = self.runner.rows(batch)
        finally:
            for handle in handles:
                handle.remove()
            torch.set_grad_enabled(True)
        check_values(values, batch)
        kept.counts = counts
        for row in values:
            grads = torch.autograd.grad(row.sum(), list(kept.outputs.values()), retain_graph=True, allow_unused=True)
            found = {n: g for n, g in zip(kept.outputs, grads, strict=True) if g is not None}
            self.heard = self.heard or bool(found)
            kept.gradients.append(found)
        kept.constants.clear()
        if all(isinstance(source, int) for call in kept.calls.values() for source in call.sources.values()):
            kept.outputs.clear()  # nothing is computed from them between the layers, so that their numbers are enough
        return kept

    def _before(self, kept: _Pass, number: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if number in kept.calls:
            raise ValueError(
                f"{self.task.layers[number].path} is called more than once in a forward pass, which the layer-major "
                "engine cannot handle. Use engine='hooks'."
            )
        flat, spec = tree_flatten((args, kwargs))
        known = {id(x): n for n, x in kept.outputs.items()}
        sources = {i: known.get(id(x), x) for i, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad}
        inputs = [self._keep(kept, x) if isinstance(x, Tensor) else x for x in flat]
        kept.calls[number] = _LayerCall(inputs, spec, sources)
        torch.set_grad_enabled(False)

    def _after(self, kept: _Pass, number: int, module: nn.Module, args: tuple, output: Any) -> Any:
        torch.set_grad_enabled(True)
        leaves, spec = tree_flatten(output)
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor) and x.is_floating_point():
                if x.dim() > 1 and len(x) == 1:  # shared by the samples; expanded, so that each sends back its own
                    x = x.expand(len(kept.batch), *x.shape[1:])
                leaves[i] = x.detach().requires_grad_()
                output_number = next(self._numbers)
                kept.outputs[output_number] = leaves[i]
                kept.calls[number].outputs.append(output_number)
        return tree_unflatten(leaves, spec)

    def _keep(self, kept: _Pass, x: Tensor) -> Any:
        if x.requires_grad:
            return self.store.put(x.detach())
        if id(x) not in kept.constants:
            kept.constants[id(x)] = (x, self.store.put(x))
        return kept.constants[id(x)][1]

    # ---- backward

    def _differentiate(self, number: int, sums: FisherSums) -> None:
        """Add what one layer gets from all batches, and find the gradients at its inputs."""
        for kept in self.passes:
            call = kept.calls.pop(number, None)
            if call is not None:
                try:
                    self._differentiate_pass(number, kept, call, sums)
                except NotFinite as error:
                    raise not_finite_error(self._traced(error, number, kept, call, sums), kept.batch) from None
            self.progress.advance(len(kept.batch))

    def _traced(self, error: NotFinite, number: int, kept: _Pass, call: _LayerCall, sums: FisherSums) -> NotFinite:
        """An error that names a layer, traced to a module in it."""
        try:
            self._differentiate_pass(number, kept, call, sums, checked=True)
        except NotFinite as closer:
            return closer
        return error

    def _differentiate_pass(
        self, number: int, kept: _Pass, call: _LayerCall, sums: FisherSums, checked: bool = False
    ) -> None:
        samples, module = len(kept.batch), self.task.layers[number].module
        units = self._units_of(number, kept.batch)
        inputs = [self.store.get(x) if isinstance(x, Kept) else x for x in call.inputs]
        flowing = {i: inputs[i].detach().requires_grad_() for i in call.sources}
        inputs = [flowing.get(i, x) for i, x in enumerate(inputs)]
        args, kwargs = tree_unflatten(inputs, call.spec)
        with GradientListener(units, sums.by_id, checked=checked) as listener:
            listener.start(samples, *self.padding.find(kept.batch))
            outputs = dict(zip(call.outputs, float_tensors(module(*args, **kwargs)), strict=True))
            sums.start(samples)
            for k, gradients in enumerate(kept.gradients):
                arrived = {n: gradients.pop(n) for n in outputs if n in gradients}
                arrived = {n: g for n, g in arrived.items() if outputs[n].requires_grad}
                if not arrived:
                    continue
                grads = torch.autograd.grad(
                    [outputs[n] for n in arrived],
                    [*flowing.values(), *listener.anchors],
                    [_fit(g, outputs[n]) for n, g in arrived.items()],
                    retain_graph=k + 1 < len(kept.gradients),
                    allow_unused=True,
                )
                if not all_finite(grads):
                    gradients |= arrived
                    raise NotFinite(_first_bad(grads, samples), self.task.layers[number].path)
                listener.finish()
                sums.finish()
                for source, g in zip(call.sources.values(), grads, strict=False):
                    _pass_on(kept, gradients, source, g)

    def _units_of(self, number: int, batch: Batch) -> list[Unit]:
        found = self.units.find(batch)
        key = number, id(found)
        if key not in self._inside:
            self._inside[key] = self._units_inside(number, found)
        return self._inside[key]

    def _units_inside(self, number: int, found: Sequence[Unit]) -> list[Unit]:
        inside = set(self.task.layers[number].module.modules())
        mine = {id(p) for p in self.parameters[number].values()}
        units = []
        for unit in found:
            belongs = {id(p) in mine for p in unit.parameters.values()}
            if belongs != {unit.module in inside}:
                raise ValueError(
                    f"A parameter of {unit.name} is used in several layers, which the layer-major engine cannot "
                    "handle. Use engine='hooks'."
                )
            if unit.module in inside:
                units.append(unit)
        return units


def _pass_on(kept: _Pass, gradients: dict[int, Tensor], source: int | Tensor, gradient: Tensor | None) -> None:
    """Add the gradient at a layer's input to the gradients at the outputs that it came from."""
    if gradient is None:
        return
    if isinstance(source, int):
        found = {source: gradient}
    else:
        grads = torch.autograd.grad(
            source, list(kept.outputs.values()), gradient, retain_graph=True, allow_unused=True
        )
        found = {n: g for n, g in zip(kept.outputs, grads, strict=True) if g is not None}
    for n, g in found.items():
        gradients[n] = gradients[n] + g if n in gradients else g


def _fit(gradient: Tensor, output: Tensor) -> Tensor:
    """The gradient of an output that was expanded over the samples, where no unit inside the layer has done so."""
    return gradient if gradient.shape == output.shape else gradient.sum(0, keepdim=True)


def _first_bad(gradients: Iterable[Tensor | None], samples: int) -> int:
    """The first sample with a gradient that is not finite, as far as that can be told."""
    for g in gradients:
        if g is not None and len(g) == samples:
            bad = ~torch.isfinite(g.flatten(1)).all(1)
            if bad.any():
                return int(bad.nonzero()[0])
    return 0
