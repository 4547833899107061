"""The parameters of layers, and the modules to listen to so that each of them gets the gradients of single samples.

Usually that is each module that owns a parameter. It is not where the module is never called (its parent reads the
weight), where its output does not tell samples apart (a relative position bias that all samples share), or where its
rows belong to samples in no fixed order (experts that get some of the tokens). Then the parent takes its place, or the
parent's parent, and is computed again for each sample. To find out, the model is run on one sample and on two: the
dimension that doubles is the one that runs over samples.

That takes longer than a backward pass, so it is first assumed that all is as usual, and checked in the first batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.calls import UNKNOWN, Call, CallLayout, record_calls
from peft_surgical.fisher.model_state import Owner, find_owners
from peft_surgical.fisher.rules import Rule, find_rule


logger = logging.getLogger(__name__)


class CannotTellSamplesApart(Exception):
    """No module around a parameter has outputs that belong to single samples."""


@dataclass
class HookTarget:
    """A module to listen to, and the parameters that it answers for."""

    name: str  # its path in the model
    module: nn.Module
    parameters: dict[str, nn.Parameter]  # by their name in the module
    rule: Rule | None  # None if it has to be computed again for each sample
    layouts: list[CallLayout]  # of each call in a forward pass; empty where every batch is a single sample

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters.values())


def kind_of(target: HookTarget) -> Hashable:
    """The same for two targets whose gradients are computed in the same way."""
    layouts = tuple((tuple(layout.inputs), tuple(layout.outputs)) for layout in target.layouts)
    dims = tuple((name, p.dim()) for name, p in target.parameters.items())
    options = tuple((k, v) for k, v in vars(target.module).items() if isinstance(v, (str, bool)) and k != "training")
    return type(target.module), target.rule, layouts, dims, options


def smallest_of_each_kind(targets: Iterable[HookTarget]) -> dict[Hashable, HookTarget]:
    """By kind the smallest target whose parameters are numbers on a device; of equal ones the last, since the way back
    to it from the loss is the shortest."""
    found: dict[Hashable, HookTarget] = {}
    for target in targets:
        kind = kind_of(target)
        if all(p.is_floating_point() and not p.is_meta for p in target.parameters.values()):
            if kind not in found or target.size <= found[kind].size:
                found[kind] = target
    return found


class Targets:
    """The modules to listen to: the usual ones, or those that are found on the shortest samples.

    `usual` is each owner of parameters by itself. A batch with a copy of a sample shows whether it has the samples in
    front (`GradientListener`). None where it cannot be so: an owner has no rule, or is one of several experts.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        parameters: Iterable[nn.Parameter],
        run: Callable[[Batch], Any],
        batches: Iterable[Batch],
    ):
        self.model, self.run = model, run
        self.experts = _experts(layers)
        self.owners = find_owners(model, parameters)
        self.shortest = min((b for b in batches if len(b) > 1), key=_size, default=None)
        self.usual = self._usual()
        self._found: dict[int, list[HookTarget]] = {}

    def _usual(self) -> list[HookTarget] | None:
        targets = []
        for path, module, own in self.owners:
            rule = find_rule(module)
            if rule is None or module in self.experts:
                return None
            targets.append(HookTarget(path, module, own, rule, [CallLayout([0], [0])]))
        return targets

    def find(self, batch: Batch, wanted: Collection[int], usual: bool) -> list[HookTarget]:
        """The modules to listen to in a batch for the parameters with these `id`s."""
        narrowed = []
        for target in self.usual if usual and self.usual else self._search(batch):
            own = {name: p for name, p in target.parameters.items() if id(p) in wanted}
            if own:
                narrowed.append(target if len(own) == len(target.parameters) else replace(target, parameters=own))
        return narrowed

    def _search(self, batch: Batch) -> list[HookTarget]:
        samples = min(len(batch), 2)
        if samples not in self._found:
            example = self.shortest if samples == 2 and self.shortest else batch
            runs = [partial(self.run, example.select(0, number)) for number in (1, 2)[:samples]]
            self._found[samples] = _Search(self.model, self.experts, self.owners, runs).targets()
        return self._found[samples]


def _size(batch: Batch) -> int:
    return max((v.numel() for v in batch.inputs.values() if isinstance(v, Tensor)), default=0)


_Targets = dict[nn.Module, HookTarget]


class _Search:
    """Finds the modules to listen to, by runs on one sample, and on two unless every batch is a single sample.

    A parameter that several modules own has a target in each of them.
    """

    def __init__(
        self,
        model: nn.Module,
        experts: Collection[nn.Module],
        owners: Sequence[Owner],
        runs: Sequence[Callable[[], Any]],
    ):
        self.experts, self.owners = experts, owners
        self.one = record_calls([*model.modules()], runs[0])
        self.two = record_calls([*model.modules()], runs[1], self.one) if len(runs) > 1 else None
        self.names = {module: name for name, module in model.named_modules()}
        self.parents: dict[nn.Module, tuple[nn.Module, str]] = {}
        for parent in self.names:
            for name, child in parent.named_children():
                self.parents.setdefault(child, (parent, name))

    def targets(self) -> list[HookTarget]:
        targets: _Targets = {}
        for _, module, parameters in self.owners:
            self._place(module, dict(parameters), targets)
        _count_once(targets)
        return [target for target in targets.values() if target.parameters]

    def _place(self, module: nn.Module, parameters: dict[str, nn.Parameter], targets: _Targets) -> None:
        """Let the module answer for the parameters, or else the nearest one around it that can."""
        layouts, owner = self._layouts(module), module
        rule = self._rule(module) if layouts is not None else None
        while layouts is None or not (rule or all(layout.complete for layout in layouts)):
            if module not in self.parents:
                raise CannotTellSamplesApart(self.names[owner])
            module, child = self.parents[module]
            parameters = {f"{child}.{name}": p for name, p in parameters.items()}
            layouts, rule = self._layouts(module), None
        target = targets.setdefault(module, HookTarget(self.names[module], module, {}, rule, layouts))
        target.parameters |= parameters
        target.rule = target.rule and rule
        if target.rule is None:
            logger.debug("%s is computed again for each sample, for %s.", target.name, list(parameters))

    def _layouts(self, module: nn.Module) -> list[CallLayout] | None:
        """How the module's calls tell samples apart; None if it is not called, or in a way that is not understood."""
        one = self.one.get(module, [])
        if self.two is None:
            return [] if one else None
        two = self.two.get(module, [])
        if not two or len(one) != len(two):
            return None
        layouts = [call.layout for call in two if call.layout]
        if len(layouts) != len(two) or (module in self.experts and not all(map(_samples_in_front, two))):
            return None
        return layouts

    def _rule(self, module: nn.Module) -> Rule | None:
        calls = (self.one if self.two is None else self.two)[module]
        if not all(call.single and call.inputs and call.inputs[0] and not any(call.inputs[1:]) for call in calls):
            return None  # a rule knows one input: a gate beside it would be overlooked
        layouts = self._layouts(module) or []
        if any(axis in (None, UNKNOWN) for layout in layouts for axis in (layout.inputs[0], layout.outputs[0])):
            return None
        return find_rule(module)


def _samples_in_front(call: Call) -> bool:
    """Whether a call sees whole samples along the first dimension, rather than rows, which may have been chosen."""
    assert call.layout is not None
    pairs = zip(call.inputs, call.layout.inputs, strict=True)
    axes = [(len(x.shape), axis) for x, axis in pairs if x and x.floating]
    return all(dims > 2 and axis in (0, None) for dims, axis in axes)


def _experts(layers: Iterable[nn.Module]) -> set[nn.Module]:
    """The modules in lists of like modules, each of which may get other rows."""
    lists = [m for layer in layers for m in layer.modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict))]
    alike = [m for m in lists if len(m) > 1 and len({type(child) for child in m.children()}) == 1]
    return {m for several in alike for m in several.modules() if m is not several}


def _count_once(targets: _Targets) -> None:
    """A module that is computed again sees all uses of a parameter in it: targets inside must not count them too."""
    for outer in targets.values():
        if outer.rule is not None:
            continue
        seen = {id(p) for p in outer.parameters.values()}
        for module in outer.module.modules():
            if module is not outer.module and module in targets:
                inner = targets[module].parameters
                targets[module].parameters = {k: p for k, p in inner.items() if id(p) not in seen}
