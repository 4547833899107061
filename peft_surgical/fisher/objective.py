"""What is differentiated: log p(y|x) of each sample, for the tasks that transformers has heads for.

A model's outputs are read (`tasks.py`) as a *distribution* over label slots: one slot for a class, one for each token
of a text, two for a span. From it come the rows of an *objective*, a tensor (K, N): the sum over its K rows of the
squared gradients is what sample n adds to the diagonal Fisher (Lodha et al. 2023, equation 1).

- given: log p(y|x) of the sample's own label, K = 1.
- sampled: log p(y|x) of D labels drawn from the model, each divided by sqrt(D), K = D.
- exact: the expectation over y of a C-class softmax. The covariance of its logit gradients, diag(p) - p p^T, has rank
  C - 1, so that K = C - 1 rows suffice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import set_seed

from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.tasks import IGNORED, Distribution, TaskReader, find_reader
from peft_surgical.layers import find_stacks, unwrap


LABEL_MODES = ("given", "sampled", "exact")
UNITS = ("sequence", "token", "batch")

MAX_EXACT_ROWS = 128
"""Backward passes to a batch up to which exact labels are computed."""


def no_gradient(model: nn.Module, objective: Objective | None = None) -> str:
    """Why no layer gets a gradient, as far as the weights tell."""
    if isinstance(objective, LossObjective) and not objective.of_batches:
        return (
            "No layer gets a gradient from the loss of one sample by itself. If it compares the samples of a batch "
            "with one another (in-batch negatives, as in CLIP or MultipleNegativesRankingLoss), it is nothing on one: "
            "rank by whole batches, with unit='batch'. Else autograd sees no way from it to these layers."
        )
    layers = [layer.module for stack in find_stacks(model).values() for layer in stack.layers]
    inside = {id(p) for layer in layers for p in layer.parameters()}
    outside = [(name, p) for name, p in model.named_parameters() if id(p) not in inside and p.dim() > 1]
    zeros = [name for name, p in outside if not p.is_meta and not p.any()]
    if zeros:
        return f"No layer gets a gradient, since {zeros[-1]} is all zeros. Initialize the head, or train it first."
    return (
        "No layer gets a gradient: what is differentiated does not depend on the layers. Look for a detach() or a "
        "no_grad() between them and the outputs."
    )


class Rows(NamedTuple):
    """What is differentiated for a batch."""

    values: Tensor  # (K, N): the squared gradients of a sample's K values add up
    counts: Tensor  # what each sample adds to the divisor, (N,): 1, or its number of labelled tokens


Objective = Callable[[Any, Batch], Rows]


@dataclass
class TaskObjective:
    """The objective of a task.

    With the unit `"sequence"` the labels of a sample are one outcome, their log-likelihoods add up. With `"token"`
    each label is an outcome of its own, and the mean is over labels.
    """

    reader: TaskReader
    labels: str
    unit: str
    draws: int
    seed: int  # a sample gets the same draws whatever it shares a batch with
    ignore_index: int = IGNORED
    drawn: Tensor | None = None  # takes the place of draws, (D, slots with a label), for a batch of one
    alone: dict[int, Mapping[int, Tensor]] = field(default_factory=dict)
    """What a sample by itself was found to add to the diagonal, by its number and the `id` of the parameter."""

    def __call__(self, outputs: Any, batch: Batch) -> Rows:
        distribution = self.reader.distribution(outputs, batch)
        labels = self._labels(batch)
        if labels is None and (self.labels == "given" or self.reader.many_classes):
            raise ValueError(
                f"labels={self.labels!r} needs labels in the data, and it has the columns {sorted(batch.inputs)}. Add "
                "a column 'labels', or use labels='sampled' or 'exact' for a task with one label to a sample."
            )
        if labels is not None and labels.shape != distribution.shape:
            raise ValueError(
                f"The labels have the shape {tuple(labels.shape)}, the outputs {tuple(distribution.shape)} (classes "
                "aside). Give log_likelihood=, a function (outputs, batch) -> (N,), or 'loss' for the model's own."
            )
        valid = self._valid(distribution, labels, batch)
        values = self._values(distribution, labels, valid, batch)  # (K, N, S)
        counts = valid.sum(1) if self.unit == "token" else torch.ones(len(batch))
        if self.unit == "token" or self.labels == "exact":
            return Rows(values[..., valid.any(0)].permute(2, 0, 1).flatten(0, 1), counts)
        return Rows(values.sum(-1), counts)

    def mean_loss(self, outputs: Any, batch: Batch) -> float:
        """What the model's own loss should be for the batch's labels; NaN if there are none."""
        labels, distribution = self._labels(batch), self.reader.distribution(outputs, batch)
        if labels is None or labels.shape != distribution.shape:
            return math.nan
        return distribution.mean_loss(labels, self._valid(distribution, labels, batch))

    def _labels(self, batch: Batch) -> Tensor | None:
        labels = self.reader.labels(batch)
        if labels is not None and self.ignore_index != IGNORED:
            labels = labels.masked_fill(labels == self.ignore_index, IGNORED)
        return labels

    def _valid(self, distribution: Distribution, labels: Tensor | None, batch: Batch) -> Tensor:
        """Which slots have a label, (N, S)."""
        if labels is None:
            valid = torch.ones(distribution.shape, dtype=torch.bool, device=distribution.device)
        else:
            valid = torch.ones_like(labels, dtype=torch.bool) if labels.is_floating_point() else labels != IGNORED
        shown = self.reader.shown(batch)
        return valid if shown is None or shown.shape != valid.shape else valid & shown

    def _values(self, distribution: Distribution, labels: Tensor | None, valid: Tensor, batch: Batch) -> Tensor:
        if self.labels == "exact":
            self._check_exact(distribution, valid)
            return distribution.exact_rows() * valid
        if self.labels == "given":
            assert labels is not None
            return distribution.log_prob(labels)[None] * valid
        if self.drawn is None:
            uniform = uniform_numbers(self.seed, batch.index, self.draws, valid)
            drawn = torch.stack([distribution.draw(u) for u in uniform])
            self._last = batch, valid, drawn
        else:
            drawn = torch.zeros(self.draws, *valid.shape, dtype=self.drawn.dtype, device=valid.device)
            drawn[:, valid] = self.drawn
        return torch.stack([distribution.log_prob(labels) * valid for labels in drawn]) / math.sqrt(self.draws)

    def with_labels_of(self, sample: int) -> TaskObjective:
        """The objective of a sample by itself, with the labels that were drawn for it in the last batch."""
        if self.labels != "sampled":
            return self
        batch, valid, drawn = self._last
        n = batch.index.index(sample)
        return replace(self, drawn=drawn[:, n, valid[n]])

    def repeated(self, times: int) -> TaskObjective:
        """The objective of a batch of so many copies of that sample."""
        return self if self.drawn is None else replace(self, drawn=self.drawn.repeat(1, times))

    def _check_exact(self, distribution: Distribution, valid: Tensor) -> None:
        advice = "Use labels='sampled' with draws=..., whose mean over many draws is the same."
        if self.reader.many_classes:
            raise ValueError(f"labels='exact' would take a backward pass for each word of the vocabulary. {advice}")
        rows = int(valid.any(0).sum()) * distribution.rank
        if rows > MAX_EXACT_ROWS:
            raise ValueError(
                f"labels='exact' would take {rows} backward passes for each batch; at most {MAX_EXACT_ROWS} are made. "
                f"{advice}"
            )


def uniform_numbers(seed: int, index: Sequence[int], draws: int, valid: Tensor) -> Tensor:
    """Numbers between 0 and 1, (D, N, S) float64, that depend on the seed and the sample's number alone, not on its
    batch or padding. Only the valid slots, (N, S), get one."""
    out = torch.full((draws, *valid.shape), 0.5, dtype=torch.float64)
    for n, (sample, used) in enumerate(zip(index, valid.cpu(), strict=True)):
        numbers = random.Random(f"{seed}/{sample}")
        count = draws * int(used.sum())
        drawn = torch.tensor([numbers.random() for _ in range(count)], dtype=torch.float64)
        out[:, n, used] = drawn.view(draws, -1)
    return out.clamp(1e-12, 1 - 1e-12).to(valid.device)


def make_objective(
    model: nn.Module,
    *,
    labels: str = "given",
    unit: str = "sequence",
    draws: int = 1,
    seed: int = 0,
    log_likelihood: Callable[[Any, Mapping[str, Any]], Tensor] | str | None = None,
    ignore_index: int = IGNORED,
) -> Objective:
    """The objective of the task that a model's class tells, or of the user's own `log_likelihood`."""
    if labels not in LABEL_MODES:
        raise ValueError(f"labels={labels!r} is unknown; allowed are {', '.join(map(repr, LABEL_MODES))}.")
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r} is unknown; allowed are {', '.join(map(repr, UNITS))}.")
    if not isinstance(draws, int) or draws < 1 or (draws > 1 and labels != "sampled"):
        raise ValueError(f"draws={draws!r} with labels={labels!r}; allowed are integers from 1 on, with 'sampled'.")
    if log_likelihood is not None:
        if not callable(log_likelihood):
            raise ValueError(f"log_likelihood={log_likelihood!r}; allowed are a function (outputs, batch) and 'loss'.")
        if labels != "given" or unit != "sequence":
            raise ValueError(
                f"log_likelihood= says itself what is differentiated, so labels={labels!r} and unit={unit!r} have no "
                "meaning. Leave them out."
            )
        return _UserObjective(log_likelihood)
    return TaskObjective(find_reader(unwrap(model)), labels, unit, draws, seed, ignore_index)


@dataclass
class _UserObjective:
    function: Callable[[Any, Mapping[str, Any]], Tensor]

    def __call__(self, outputs: Any, batch: Batch) -> Rows:
        values = self.function(outputs, batch.inputs)
        if not isinstance(values, Tensor) or values.shape != (len(batch),):
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"log_likelihood returned {shape} for a batch of {len(batch)} samples; needed is one log-likelihood "
                f"for each, of shape ({len(batch)},), not their sum or mean."
            )
        return Rows(values[None], torch.ones(len(batch)))


@dataclass
class LossObjective:
    """A loss, the model's own or a trainer's, that is computed for one sample at a time, with random numbers that
    depend on the seed and the sample's number alone."""

    loss: Callable[[Batch], Any]
    model: nn.Module
    seed: int = 0
    of_batches: bool = False  # a sample is a whole batch

    def __call__(self, outputs: None, batch: Batch) -> Rows:
        (sample,) = batch.index
        set_seed(self.seed + sample)
        try:
            loss = self.loss(batch)
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
            raise ValueError(
                f"The loss of sample {sample} of the draw by itself cannot be computed, of the columns "
                f"{sorted(map(str, batch.inputs))}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"The loss of sample {sample} of the draw is {shape}; needed is one number.")
        if loss.is_leaf and loss.requires_grad:
            loss = _written_out(loss, [p for p in self.model.parameters() if p.requires_grad])
        return Rows(-loss.reshape(1, 1), torch.ones(1))


def _written_out(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """A loss that hides the parameters, since its backward pass runs others (GradCache, as in sentence-transformers'
    `Cached...Loss`), as a function of the parameters with the same gradient."""
    kept = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        loss.backward()
        terms = [((p - p.detach()) * p.grad).sum().to(loss) for p in parameters if p.grad is not None]
    finally:
        for p, grad in zip(parameters, kept, strict=True):
            p.grad = grad
    return sum(terms, loss.detach())


def row_gradients(values: Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[Tensor | None, ...]]:
    """The gradients of each row of an objective, by plain autograd; None where it does not depend on a parameter."""
    for k, row in enumerate(values if values.requires_grad else ()):
        yield torch.autograd.grad(row.sum(), parameters, retain_graph=k + 1 < len(values), allow_unused=True)


def check_values(values: Tensor, batch: Batch) -> None:
    """Check that what is differentiated is finite; else a `ValueError` that names the sample."""
    bad = ~torch.isfinite(values.detach()).all(0)
    if bad.any():
        sample = batch.index[int(bad.nonzero()[0])]
        raise ValueError(
            f"The log-likelihood of sample {sample} of the draw is not finite. Look at its inputs and labels, or "
            "measure in float32."
        )


def all_finite(gradients: Iterable[Tensor | None]) -> bool:
    """Whether no gradient is NaN or infinite. Waits for the device once."""
    found = [g for g in gradients if g is not None and g.numel()]
    largest = torch._foreach_norm(found, math.inf) if found else ()
    return not largest or bool(torch.isfinite(torch.stack([x.to(largest[0]) for x in largest])).all())
