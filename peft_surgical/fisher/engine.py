"""The engines: hooks, for many layers in one backward pass, and a loop over samples by plain autograd."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from peft_surgical.distributed import gather, on_all_ranks
from peft_surgical.fisher.batches import LABELS, Batch, forward_names, model_inputs, padded_right, token_lengths
from peft_surgical.fisher.gradients import DenseGradients
from peft_surgical.fisher.guard import DependsOnBatch, Guard, one_at_a_time
from peft_surgical.fisher.listen import GradientListener, NotFinite, Unusual
from peft_surgical.fisher.model_state import layer_parameters
from peft_surgical.fisher.objective import (
    LossObjective,
    Objective,
    Rows,
    TaskObjective,
    all_finite,
    check_values,
    no_gradient,
    row_gradients,
)
from peft_surgical.fisher.squares import SquareQueue
from peft_surgical.fisher.sums import LayerSums, TensorFisher
from peft_surgical.fisher.targets import CannotTellSamplesApart, Targets
from peft_surgical.layers import Layer, find_stacks


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FisherTask:
    """What is to be measured."""

    model: nn.Module
    layers: Sequence[Layer]
    objective: Objective
    diagonal: bool = True  # for its norm; else only its trace
    contributions: bool = True  # an estimate, from the seed, of what each sample adds to the norm
    seed: int = 0
    verify: bool = True  # one sample on some modules, against plain autograd

    @cached_property
    def parameters(self) -> list[dict[str, nn.Parameter]]:
        """The parameters of each layer, by name. An offloaded module has others after each call."""
        return layer_parameters(self.layers)


class Runner:
    """Runs a model on batches."""

    def __init__(self, model: nn.Module, objective: Objective):
        self.model, self.objective, self.names = model, objective, forward_names(model)
        self.device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))

    def forward(self, batch: Batch, labels: bool = False) -> Any:
        """The model's outputs, with its own loss if labels are given to it."""
        batch = batch.to(self.device)
        own = {k: v for k, v in batch.inputs.items() if labels and k in LABELS and k in (self.names or ())}
        return self.model(**model_inputs(self.model, batch, self.names) | own)

    def rows(self, batch: Batch, objective: Objective | None = None) -> Rows:
        """What is to be differentiated, whether it depends on the layers or not."""
        batch, objective = batch.to(self.device), objective or self.objective
        return objective(None if isinstance(objective, LossObjective) else self.forward(batch), batch)

    def alone(self, batch: Batch, n: int) -> Batch:
        """Sample number n of a batch by itself, without padding."""
        if isinstance(self.objective, LossObjective):
            return batch
        return padded_right(batch.select(n, n + 1), self.names)

    def checked_rows(self, batch: Batch) -> Rows:
        """The same, where it is finite and depends on the layers; else a `ValueError`."""
        rows = self.rows(batch)
        check_values(rows.values, batch)
        if not rows.values.requires_grad:
            raise ValueError(no_gradient(self.model, self.objective))
        return rows


class Engine(ABC):
    """Goes through the samples, once for each group of layers. Then `samples` are the numbers of the samples of all
    processes in the draw, and `counts` what each of them adds to the divisor, (N,) float64."""

    name = ""

    def __init__(self, task: FisherTask, batches: Sequence[Batch]):
        self.task, self.batches, self.runner = task, batches, Runner(task.model, task.objective)
        self.samples: list[int] = []
        self.counts = torch.zeros(0, dtype=torch.float64)

    def measure(self, groups: Sequence[Sequence[int]], progress: tqdm) -> list[dict[str, TensorFisher]]:
        """For each layer the diagonal Fisher of its parameters, the mean over the samples of all processes. Each group
        of layers, by their numbers, takes a pass over the samples."""
        progress.reset(len(groups) * sum(len(batch) for batch in self.batches))
        generator = torch.Generator().manual_seed(self.task.seed) if self.task.contributions else None
        found: dict[int, dict[str, TensorFisher]] = {}
        for group in groups:
            sums = LayerSums([self.task.parameters[n] for n in group], self.task.diagonal, generator)
            on_all_ranks(partial(self._go_through, sums, progress))
            self._gather_samples()
            found |= zip(group, sums.results(float(self.counts.sum())), strict=True)
            on_all_ranks(self.check)
        return [found[number] for number in range(len(found))]

    def _go_through(self, sums: LayerSums, progress: tqdm) -> None:
        self._seen: list[tuple[Batch, Tensor]] = []
        for batch in self.batches:
            self.add(batch, sums)
            progress.update(len(batch))

    def _gather_samples(self) -> None:
        index = [number for batch, _ in self._seen for number in batch.index]
        counts = [count for _, counts in self._seen for count in counts.tolist()]
        parts = gather((index, counts))
        self.samples = [number for index, _ in parts for number in index]
        self.counts = torch.tensor([count for _, counts in parts for count in counts], dtype=torch.float64)
        if not self.samples:
            raise ValueError("There are no samples. Give data that are not empty.")

    @abstractmethod
    def add(self, batch: Batch, sums: LayerSums) -> None:
        """Add a batch to the sums, and note its samples."""

    def check(self) -> None:  # noqa: B027  a loop leaves nothing
        """Check that the gradients of the last batch are finite, which may wait for the results."""


class HookEngine(Engine):
    """One forward pass to a batch, and a backward pass for each row of the objective."""

    name = "hooks"

    def __init__(self, task: FisherTask, batches: Sequence[Batch]):
        super().__init__(task, batches)
        layers, parameters = [layer.module for layer in task.layers], [p for g in task.parameters for p in g.values()]
        self.targets = Targets(task.model, layers, parameters, self.runner.forward, batches)
        if not isinstance(task.objective, TaskObjective):  # a function of the user's own, which sees no copies
            self.targets.usual = None
        # a decoder has other lengths than the encoder, and an image has none
        seq2seq = getattr(getattr(task.model, "config", None), "is_encoder_decoder", False)
        self._has_lengths = self.runner.device.type != "cpu" and not seq2seq and len(find_stacks(task.model)) == 1
        self.guard = Guard(self.runner, self.targets, batches) if task.verify else None
        self._unchecked: tuple[Batch, LayerSums, list[Tensor]] | None = None

    def _go_through(self, sums: LayerSums, progress: tqdm) -> None:
        try:
            super()._go_through(sums, progress)
        except DependsOnBatch as reason:
            self.batches = one_at_a_time(self.runner, self.batches, reason)
            self._unchecked = None
            sums.clear()
            super()._go_through(sums, progress)

    def add(self, batch: Batch, sums: LayerSums) -> None:
        try:
            self._add(batch, sums)
        except CannotTellSamplesApart as error:
            logger.info("Samples cannot be told apart in %s: they are taken one at a time.", error)
            for n in range(len(batch)):
                self._add(self.runner.alone(batch, n), sums)

    def _add(self, batch: Batch, sums: LayerSums, checked: bool = False) -> None:
        try:
            self._listen(batch, sums, checked)
        except Unusual as reason:
            logger.debug("The modules to listen to are searched for: %s.", reason)
            self.targets.usual = None
            if not self._seen:
                sums.clear()
            self._listen(batch, sums, checked)

    def _listen(self, batch: Batch, sums: LayerSums, checked: bool) -> None:
        if not self._seen:
            self._proved = len(batch) > 1
        usual = bool(self.targets.usual) and (self._proved or len(batch) == 1)
        copied = usual and not self._seen and len(batch) > 1
        targets = self.targets.find(batch, sums.by_id, usual)
        watched = self.guard.watch(batch, targets, sums.by_id) if self.guard and not checked else {}
        places = {**sums.by_id, **watched}
        size = (len(batch), *self._lengths(batch))
        with GradientListener(targets, places, *size, checked=checked, usual=usual, copied=copied) as listener:
            values, counts = self.runner.rows(batch.with_copy() if copied else batch)
            listener.check_usual()
            if copied:
                values, counts = values[:, :-1], counts[:-1]
            sums.start(len(batch))
            seen = [values.detach()]
            for gradients in listener.backward_passes(values):
                seen += gradients
                sums.finish()
        if self.guard and watched:
            self.guard.check(batch, watched)
        if not checked:
            self.check()  # the batch before this one, so that the device need not wait for Python
            self._unchecked = batch, sums, seen
            self._seen.append((batch, counts))

    def _lengths(self, batch: Batch) -> tuple[int, Tensor | None]:
        """The tokens of each sample with padding, and without it, (N,), where a kernel can skip it."""
        lengths = token_lengths(batch) if self._has_lengths else None
        if lengths is None:
            return 0, None
        return batch.inputs["attention_mask"].shape[1], lengths.to(self.runner.device, torch.int32)

    def check(self) -> None:
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is not None and not all_finite(unchecked[2]):
            self._explain(*unchecked)

    def _explain(self, batch: Batch, sums: LayerSums, seen: Sequence[Tensor]) -> None:
        check_values(seen[0], batch)
        try:
            self._add(batch, sums, checked=True)
        except NotFinite as error:
            raise ValueError(
                f"The gradient of sample {batch.index[error.sample]} of the draw is not finite at the output of "
                f"{error.module}. Look at its inputs and labels, or measure in float32."
            ) from None
        raise ValueError("A gradient is not finite. Measure in float32.")


class LoopEngine(Engine):
    """Plain autograd, one sample at a time."""

    name = "loop"

    def add(self, batch: Batch, sums: LayerSums) -> None:
        queue, parameters = SquareQueue(), [p for group in sums.parameters for p in group.values()]
        for p in parameters:
            if not p.is_floating_point() or p.is_meta:
                raise ValueError(
                    "Plain autograd (engine='loop', or a loss of one's own) needs weights as numbers on a device."
                )
            p.requires_grad_()
        for n in range(len(batch)):
            sample = self.runner.alone(batch, n)
            values, counts = self.runner.checked_rows(sample)
            sums.start(1)
            for grads in row_gradients(values, parameters):
                if not all_finite(grads):
                    raise ValueError(f"The gradient of sample {sample.index[0]} of the draw is not finite.")
                for p, g in zip(parameters, grads, strict=True):
                    if g is not None:
                        sums.by_id[id(p)].add(DenseGradients(g[None]), 0, queue)
                queue.flush()
                sums.finish()
            self._seen.append((sample, counts))
