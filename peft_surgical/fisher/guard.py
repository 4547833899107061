"""Checks of each measurement: the log-likelihood against the model's own loss, and what one sample adds to the
diagonal, measured with hooks in its batch, against plain autograd on the sample alone. Both look at the same sample,
so that it usually goes through the model by itself only once.

It looks at one module of each kind, and sees what no rule can know: that a rule does not fit a class, that a module
writes to what a hook has kept, that a sample's value depends on its padding or on the other samples of its batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.gradients import SampleGradients
from peft_surgical.fisher.listen import GradientListener
from peft_surgical.fisher.model_state import layer_parameters
from peft_surgical.fisher.objective import Rows, TaskObjective, row_gradients
from peft_surgical.fisher.squares import widen
from peft_surgical.fisher.sums import on_host
from peft_surgical.fisher.targets import HookTarget, Targets, kind_of, smallest_of_each_kind
from peft_surgical.fisher.tasks import IGNORED, NEXT_TOKENS, TOKENS, NoLikelihood
from peft_surgical.layers import Layer


logger = logging.getLogger(__name__)

TOLERANCE = {torch.bfloat16: 0.25, torch.float16: 0.25}
"""How far a gradient may be off, as a part of its norm; in other types 1 %."""


_FAILURES = (TypeError, ValueError, RuntimeError, LookupError, AttributeError)
"""What a model may raise that is called in another way than it will be."""

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
            self.squares = squares + self.squares
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
        kinds = smallest_of_each_kind(targets)
        self._watched = [target for kind, target in kinds.items() if kind not in self._checked]
        number = batch.index.index(self.sample)
        return {id(p): SampleSquares(number, sums[id(p)]) for t in self._watched for p in t.parameters.values()}

    def check(self, batch: Batch, watches: Mapping[int, SampleSquares]) -> None:
        """Compare what was found while the batch ran; raises `DependsOnBatch`, or a `ValueError` where the gradient at
        a module is not that of plain autograd."""
        found = {key: watch.squares for key, watch in watches.items()}
        alone = getattr(self.runner.objective, "alone", {}).pop(self.sample, {})
        if not found.keys() <= alone.keys() or self._find_wrong(found, alone):
            self._look_closer(batch, found)
        self._checked |= {kind_of(target) for target in self._watched}

    def _look_closer(self, batch: Batch, found: Squares) -> None:
        assert self.sample is not None
        alone, rows, repeated = _by_itself(self.runner, batch, self.sample)
        parameters = _parameters_of(self._watched)
        expected = autograd_squares(rows, parameters)
        wrong = self._find_wrong(found, expected)
        if wrong is not None and self._find_wrong(autograd_squares(rows, parameters), expected):
            logger.warning(_RANDOM)
        elif wrong is not None and self._find_wrong(found, of_copies := autograd_squares(repeated, parameters)):
            by_hooks = self._listen(alone, rows, parameters)
            wrong_alone = self._find_wrong(by_hooks, expected)
            if len(batch) > 1 and (wrong_alone is None or self._find_wrong(by_hooks, of_copies) is None):
                raise DependsOnBatch(f"{_ANOTHER.format(self.sample)}, in {wrong}")
            raise ValueError(
                f"The gradient of sample {self.sample} of the draw is not that of autograd, in {wrong_alone or wrong}."
                " Use engine='loop', and please report this model; verify=False leaves out this check."
            )

    def _listen(self, alone: Batch, rows: Callable[[], Rows], parameters: Sequence[nn.Parameter]) -> Squares:
        watches = {id(p): SampleSquares(0) for p in parameters}
        with GradientListener(self.targets.find(alone, watches, usual=False), watches, 1) as listener:
            for _ in listener.backward_passes(rows().values):
                pass
        return {key: watch.squares for key, watch in watches.items()}

    def _find_wrong(self, found: Squares, expected: Squares) -> str | None:
        """The module whose gradients are off the most, and by which part of their norm; None if all are right.

        A gradient may be zero but for rounding (a key's bias moves no softmax), hence the norm of the whole module's;
        and a whole module's is rounding where it is smaller than the last digit of the largest.
        """
        worst, name, allowed = 0.0, None, 0.0
        by_hooks, by_autograd = (torch._foreach_sqrt([squares[key] for key in found]) for squares in (found, expected))
        off_by = torch._foreach_norm(torch._foreach_sub(by_hooks, by_autograd))
        numbers = on_host([*torch._foreach_norm(by_autograd), *off_by]).view(2, -1).tolist()
        norms, errors = (dict(zip(found, row, strict=True)) for row in numbers)
        for target in self._watched:
            keys = [id(p) for p in target.parameters.values()]
            rounding = max(1e-5, torch.finfo(next(iter(target.parameters.values())).dtype).eps)
            norm = math.hypot(*(norms[key] for key in keys)) + rounding * max(norms.values())
            off = max(errors[key] for key in keys) / (norm or 1)
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


def _parameters_of(targets: Iterable[HookTarget]) -> list[nn.Parameter]:
    return list({id(p): p for target in targets for p in target.parameters.values()}.values())


def _tolerance(parameters: Iterable[nn.Parameter]) -> float:
    return TOLERANCE.get(next(iter(parameters)).dtype, 0.01)


def _padding(batch: Batch) -> list[int]:
    """The number of hidden tokens of each sample."""
    mask = batch.inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != len(batch):
        return [0] * len(batch)
    return (mask == 0).sum(1).tolist()


def autograd_squares(rows: Callable[[], Rows], parameters: Sequence[nn.Parameter]) -> Squares:
    """What a sample adds to the diagonal, by plain autograd: the squared gradients of `rows`, which are of a batch of
    one, summed over them, by the `id` of the parameter."""
    total = {id(p): torch.zeros(()) for p in parameters}
    try:
        for p in parameters:
            p.requires_grad_()
        for grads in row_gradients(rows().values, parameters):
            for p, g in zip(parameters, grads, strict=True):
                if g is not None:
                    total[id(p)] = widen(g).square() + total[id(p)]
    finally:
        for p in parameters:
            p.requires_grad_(False)
    return total


def agree_with_loss(runner: Any, batches: Sequence[Batch], last: Layer) -> TaskObjective:
    """The objective of a task, read as the model's own loss reads labels; a `ValueError` where the loss is another one
    than the log-likelihood of the labels.

    Most decoders predict the next token from each, but in some (BART's, XLM) labels stand at their own logits, and the
    class's name does not tell which. So one sample shows it, whose loss the model computes too. What it adds to the
    diagonal of some modules of the last layer is kept, so that the guard need not run the model on it once more. To be
    called in `untouched`, for these then require a gradient.
    """
    objective: TaskObjective = runner.objective
    sample = _most_padded(batches)
    batch = next((b for b in batches if sample in b.index), None)
    if batch is None or sample is None:
        return objective
    alone = runner.alone(batch, batch.index.index(sample)).to(runner.device)
    if objective.ignore_index != IGNORED and isinstance(labels := alone.inputs.get("labels"), Tensor):
        inputs = {**alone.inputs, "labels": labels.masked_fill(labels == objective.ignore_index, IGNORED)}
        alone = Batch(inputs, alone.index)

    (parameters,) = layer_parameters([last])
    targets = Targets(last.module, [last.module], parameters.values(), runner.forward, ()).usual
    watched = _parameters_of(smallest_of_each_kind(targets or ()).values())
    for p in watched:
        p.requires_grad_()
    try:
        outputs = runner.forward(alone, labels=True)
    except _FAILURES as error:
        logger.debug("The model does not run on one sample with its labels: %s", error)
        return objective
    objective = _read_as_loss(objective, outputs, alone, type(runner.model).__name__)
    with suppress(*_FAILURES):  # with labels the outputs may be others, which cannot be read
        objective.alone[sample] = autograd_squares(lambda: objective(outputs, alone), watched)
    return objective


@torch.no_grad()
def _read_as_loss(objective: TaskObjective, outputs: Any, sample: Batch, model: str) -> TaskObjective:
    try:
        loss = float(outputs.loss.detach())
    except (AttributeError, RuntimeError) as error:
        logger.debug("There is no loss of the model's own to compare with: %s", error)
        return objective
    readers = [r for r in (NEXT_TOKENS, TOKENS) if objective.reader in (NEXT_TOKENS, TOKENS)]
    others = [replace(objective, reader=r) for r in readers if r is not objective.reader]
    ours = [(o, o.mean_loss(outputs, sample)) for o in (objective, *others)]
    if not math.isfinite(ours[0][1]) or getattr(outputs, "aux_loss", None) is not None:
        return objective
    off = {id(o): abs(found - loss) / max(abs(loss), 1e-6) for o, found in ours}
    best = min((o for o, _ in ours), key=lambda o: off[id(o)])
    if off[id(best)] > 0.02:
        raise NoLikelihood(
            f"{model} computes a loss of {loss:.4f} for a sample whose labels have a negative log-likelihood of "
            f"{ours[0][1]:.4f} on average: its loss is another one. Give log_likelihood=, a function (outputs, batch) "
            "-> (N,), or 'loss' for the model's own, a sample at a time; verify=False takes the likelihood as it is."
        )
    if best.reader is not objective.reader:
        logger.info("Where the labels stand was told from the loss of %s.", model)
    return best
