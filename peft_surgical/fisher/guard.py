"""Checks of each measurement: the log-likelihood against the model's own loss, and what one sample adds to the
diagonal, measured with hooks in its batch, against plain autograd on the sample alone.

It looks at one module of each kind, and sees what no rule can know: that a rule does not fit a class, that a module
writes to what a hook has kept, that a sample's value depends on its padding or on the other samples of its batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.gradients import SampleGradients
from peft_surgical.fisher.listen import GradientListener
from peft_surgical.fisher.objective import Rows, TaskObjective, row_gradients
from peft_surgical.fisher.squares import widen
from peft_surgical.fisher.targets import HookTarget, Targets
from peft_surgical.fisher.tasks import IGNORED, NEXT_TOKENS, TOKENS, NoLikelihood


logger = logging.getLogger(__name__)

TOLERANCE = {torch.bfloat16: 0.25, torch.float16: 0.25}
"""How far a gradient may be off, as a part of its norm; in other types 1 %."""


Squares = Mapping[int, Tensor]
"""What a sample adds to the diagonal, by the `id` of the parameter."""


_ANOTHER = "by itself the gradient of sample {} of the draw is another"
_RANDOM = "The model's outputs are random in evaluation mode too, so that its gradients are as well."


class SampleSquares:
    """Takes the place of a parameter's sum, passes everything on to it, and keeps what one sample of the batch
    adds."""

    def __init__(self, sample: int, into: Any = None):
        self.sample, self.into = sample, into
        self.squares = torch.zeros(())

    def add(self, gradients: SampleGradients, first: int, queue: Any) -> None:
        """Add the squared gradients of samples from number `first` on."""
        n = self.sample - first
        if 0 <= n < gradients.samples:
            squares = widen(gradients.dense(n, n + 1)[0]).detach().square()
            self.squares = self.squares.to(squares.device) + squares
        if self.into is not None:
            self.into.add(gradients, first, queue)


class DependsOnBatch(Exception):
    """What a sample adds to the diagonal depends on its padding or on the other samples of its batch."""


class Guard:
    """Checks one sample, that with the most padding, on the smallest module of each kind."""

    def __init__(self, runner: Any, targets: Targets, batches: Sequence[Batch]):
        self.runner, self.targets = runner, targets
        self.sample = _most_padded(batches)
        self._checked: set[Hashable] = set()

    def watch(self, batch: Batch, targets: Sequence[HookTarget], sums: Mapping[int, Any]) -> dict[int, SampleSquares]:
        """What is to take the place of some sums while the batch runs; nothing if the sample is not in the batch."""
        if self.sample not in batch.index:
            return {}
        kinds: dict[Hashable, HookTarget] = {}
        for target in targets:
            known = all(p.is_floating_point() and not p.is_meta for p in target.parameters.values())
            kind = _kind(target)
            if known and kind not in self._checked and (kind not in kinds or target.size <= kinds[kind].size):
                kinds[kind] = target
        self._watched = list(kinds.values())
        number = batch.index.index(self.sample)
        return {id(p): SampleSquares(number, sums[id(p)]) for t in self._watched for p in t.parameters.values()}

    def check(self, batch: Batch, watches: Mapping[int, SampleSquares]) -> None:
        """Compare what was found while the batch ran; raises `DependsOnBatch`, or a `ValueError` where the gradient at
        a module is not that of plain autograd."""
        assert self.sample is not None
        alone, rows, repeated = _by_itself(self.runner, batch, self.sample)
        parameters = list({id(p): p for target in self._watched for p in target.parameters.values()}.values())
        found = {key: watch.squares for key, watch in watches.items()}
        expected = autograd_squares(rows, parameters)
        wrong = self._find_wrong(found, expected)
        if wrong is not None and self._find_wrong(autograd_squares(rows, parameters), expected):
            logger.warning(_RANDOM)
        elif wrong is not None and self._find_wrong(found, of_copies := autograd_squares(repeated, parameters)):
            by_hooks = self._listen(alone, rows, parameters)
            wrong_alone = self._find_wrong(by_hooks, expected)
            if wrong_alone is None or self._find_wrong(by_hooks, of_copies) is None:
                raise DependsOnBatch(f"{_ANOTHER.format(self.sample)}, in {wrong}")
            raise ValueError(
                f"The gradient of sample {self.sample} of the draw is not that of autograd, in {wrong_alone}. "
                "Use engine='loop', and please report this model; verify=False leaves out this check."
            )
        self._checked |= {_kind(target) for target in self._watched}

    def _listen(self, alone: Batch, rows: Callable[[], Rows], parameters: Sequence[nn.Parameter]) -> Squares:
        watches = {id(p): SampleSquares(0) for p in parameters}
        with GradientListener(self.targets.find(alone, watches, usual=False), watches, 1) as listener:
            for _ in listener.backward_passes(rows().values):
                pass
        return {key: watch.squares for key, watch in watches.items()}

    def _find_wrong(self, found: Squares, expected: Squares) -> str | None:
        """The module whose gradients are off the most, and by which part of their norm; None if all are right.

        A gradient may be zero but for rounding (a key's bias moves no softmax), hence the norm of the whole module's.
        """
        worst, name, allowed = 0.0, None, 0.0
        largest = max(float(e.sum()) for e in expected.values()) ** 0.5
        for target in self._watched:
            keys = [id(p) for p in target.parameters.values()]
            norm = sum(float(expected[key].sum()) for key in keys) ** 0.5 + 1e-5 * largest
            off = max(float((found[key].sqrt() - expected[key].sqrt()).norm()) for key in keys) / (norm or 1)
            if off >= worst:
                worst, allowed = off, _tolerance(target.parameters.values())
                name = f"{target.name} ({type(target.module).__name__}; {off:.1%} of its norm)"
        logger.debug("What is off the most by plain autograd: %s.", name)
        return name if worst > allowed else None


def one_at_a_time(runner: Any, batches: Sequence[Batch], reason: object) -> list[Batch]:
    """The samples by themselves, since those of a batch depend on one another; a `ValueError` where only the user can
    tell whether that means anything."""
    if not isinstance(runner.objective, TaskObjective):
        raise ValueError(
            f"log_likelihood= of a sample depends on the rest of its batch: {reason}. Change it, or give "
            "batch_size=1 if it means something for one sample."
        )
    logger.warning("Samples are taken one at a time, which is slow: %s.", reason)
    return [runner.alone(batch, n) for batch in batches for n in range(len(batch))]


def independent(runner: Any, batches: Sequence[Batch], parameters: Sequence[nn.Parameter]) -> Sequence[Batch]:
    """The batches; or, if in its batch the sample with the most padding has another gradient than by itself, the
    samples one at a time."""
    sample = _most_padded(batches)
    batch = next((b for b in batches if sample in b.index), None)
    if batch is None or sample is None:
        return batches
    number = batch.index.index(sample)

    def in_batch() -> Rows:
        values, counts = runner.rows(batch)
        return Rows(values[:, number : number + 1], counts[number : number + 1])

    found = autograd_squares(in_batch, parameters)
    _, *by_itself = _by_itself(runner, batch, sample)

    def is_off(rows: Callable[[], Rows]) -> bool:
        expected = autograd_squares(rows, parameters)
        off = sum(float((found[key].sqrt() - e.sqrt()).square().sum()) for key, e in expected.items())
        return off**0.5 > _tolerance(parameters) * sum(float(e.sum()) for e in expected.values()) ** 0.5

    if not all(map(is_off, by_itself)):
        return batches
    if is_off(in_batch):
        logger.warning(_RANDOM)
        return batches
    return one_at_a_time(runner, batches, _ANOTHER.format(sample))


def _most_padded(batches: Sequence[Batch]) -> int | None:
    samples = [(hidden, len(b) > 1, n) for b in batches for hidden, n in zip(_padding(b), b.index, strict=True)]
    return max(samples)[-1] if samples else None


def _by_itself(runner: Any, batch: Batch, sample: int) -> tuple[Batch, Callable[[], Rows], Callable[[], Rows]]:
    """A sample of a batch without the others, its rows, and the same from a batch of its copies."""
    alone, objective = runner.alone(batch, batch.index.index(sample)), runner.objective
    if isinstance(objective, TaskObjective):
        objective = objective.with_labels_of(sample)

    def rows() -> Rows:
        return runner.rows(alone, objective)

    def repeated() -> Rows:  # for PyTorch's batch normalisation may get the gradient wrong for a batch of one
        times = 2 if len(batch) > 3 else 5  # not as many as in the batch, whose number is to make no difference
        again = objective.repeated(times) if isinstance(objective, TaskObjective) else objective
        values, counts = runner.rows(alone.repeated(times), again)
        return Rows(values[:, :1], counts[:1])

    return alone, rows, repeated


def _tolerance(parameters: Iterable[nn.Parameter]) -> float:
    return TOLERANCE.get(next(iter(parameters)).dtype, 0.01)


def _kind(target: HookTarget) -> Hashable:
    layouts = tuple((tuple(layout.inputs), tuple(layout.outputs)) for layout in target.layouts)
    dims = tuple((name, p.dim()) for name, p in target.parameters.items())
    options = tuple((k, v) for k, v in vars(target.module).items() if isinstance(v, (str, bool)) and k != "training")
    return type(target.module), target.rule, layouts, dims, options


def _padding(batch: Batch) -> list[int]:
    """The number of hidden tokens of each sample."""
    mask = batch.inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != len(batch):
        return [0] * len(batch)
    return (mask == 0).sum(1).tolist()


def autograd_squares(rows: Callable[[], Rows], parameters: Sequence[nn.Parameter]) -> Squares:
    """What a sample adds to the diagonal, by plain autograd: the squared gradients of `rows`, which are of a batch of
    one, summed over them, by the `id` of the parameter."""
    total = {id(p): torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters}
    try:
        for p in parameters:
            p.requires_grad_()
        for grads in row_gradients(rows().values, parameters):
            for p, g in zip(parameters, grads, strict=True):
                if g is not None:
                    total[id(p)] += g.to(total[id(p)].dtype).square()
    finally:
        for p in parameters:
            p.requires_grad_(False)
    return total


def agree_with_loss(runner: Any, batches: Sequence[Batch]) -> TaskObjective:
    """The objective of a task, read as the model's own loss reads labels; a `ValueError` where the loss is another one
    than the log-likelihood of the labels.

    Most decoders predict the next token from each, but in some (BART's, XLM) labels stand at their own logits, and the
    class's name does not tell which. So one sample shows it, whose loss the model computes too.
    """
    objective: TaskObjective = runner.objective
    sample = min((runner.alone(b, n) for b in batches[-1:] for n in range(len(b))), key=_size, default=None)
    if sample is None:
        return objective
    sample = sample.to(runner.device)
    if objective.ignore_index != IGNORED and isinstance(labels := sample.inputs.get("labels"), Tensor):
        inputs = {**sample.inputs, "labels": labels.masked_fill(labels == objective.ignore_index, IGNORED)}
        sample = Batch(inputs, sample.index)
    with torch.no_grad():
        try:
            outputs = runner.forward(sample, labels=True)
            loss = float(outputs.loss)
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:  # there is no loss
            logger.debug("The model's own loss cannot be compared: %s", error)
            return objective
        others = [
            replace(objective, reader=r) for r in (NEXT_TOKENS, TOKENS) if objective.reader in (NEXT_TOKENS, TOKENS)
        ]
        ours = [(o, o.mean_loss(outputs, sample)) for o in (objective, *others)]
    if not math.isfinite(ours[0][1]) or getattr(outputs, "aux_loss", None) is not None:
        return objective
    off = {id(o): abs(found - loss) / max(abs(loss), 1e-6) for o, found in ours}
    best = min((o for o, _ in ours), key=lambda o: off[id(o)])
    if off[id(best)] > 0.02:
        raise NoLikelihood(
            f"{type(runner.model).__name__} computes a loss of {loss:.4f} for a sample whose labels have a negative "
            f"log-likelihood of {ours[0][1]:.4f} on average: its loss is another one. Give log_likelihood=, a "
            "function (outputs, batch) -> (N,), or 'loss' for the model's own, a sample at a time; verify=False takes "
            "the likelihood as it is."
        )
    if best.reader is not objective.reader:
        logger.info("Where the labels stand was told from the loss of %s.", type(runner.model).__name__)
    return best


def _size(batch: Batch) -> int:
    return sum(v.numel() for v in batch.inputs.values() if isinstance(v, Tensor))
