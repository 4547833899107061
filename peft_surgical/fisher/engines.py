"""Two engines: hooks, for all layers in one backward pass, and the plain loop over samples, to check it with."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from peft_surgical.fisher.batches import Batch, token_lengths
from peft_surgical.fisher.entries import Generators
from peft_surgical.fisher.hooks import GradientListener, NotFinite, SamplesInUnequalShares
from peft_surgical.fisher.measure import (
    FisherSums,
    FisherTask,
    Progress,
    Runner,
    SampleLog,
    check_values,
)
from peft_surgical.fisher.owners import find_owners
from peft_surgical.fisher.pending_squares import PendingSquares
from peft_surgical.fisher.plain import NotPlain, plain_units, tokens_of
from peft_surgical.fisher.sample_gradients import DenseGradients
from peft_surgical.fisher.sums import TensorFisher
from peft_surgical.fisher.units import CannotTellSamplesApart, Unit, find_units
from peft_surgical.layers import find_stacks


logger = logging.getLogger(__name__)


class Engine(ABC):
    """Adds up batches, then gives the results layer by layer.

    Args:
        task: What is measured.
        batches: The samples.
    """

    name = ""

    def __init__(self, task: FisherTask, batches: Sequence[Batch]):
        self.task, self.batches = task, batches
        self.runner = Runner(task)
        self.log = SampleLog()
        self.heard = False

    @abstractmethod
    def run(self, progress: Progress) -> None:
        """Go through the batches."""

    @abstractmethod
    def results(self, count: float) -> Iterable[dict[str, TensorFisher]]:
        """For each layer the diagonal Fisher of its parameters.

        Args:
            count: What the sums over all processes are divided by.
        """

    def check(self) -> None:  # noqa: B027  most engines leave nothing
        """Check the gradients of the last batch, as far as that has been left for after the results.

        Raises:
            ValueError: One is not finite.
        """


class _SummingEngine(Engine):
    """An engine with sums for all layers at once."""

    def __init__(self, task: FisherTask, batches: Sequence[Batch]):
        super().__init__(task, batches)
        self.sums = FisherSums(task, task.parameters, Generators(task.seed))
        self.parameters = [p for group in self.sums.parameters for p in group.values()]

    def run(self, progress: Progress) -> None:
        progress.expect(sum(len(batch) for batch in self.batches), " samples")
        for batch in self.batches:
            self.add(batch)
            progress.advance(len(batch))

    @abstractmethod
    def add(self, batch: Batch) -> None:
        """Add a batch."""

    def results(self, count: float) -> Iterable[dict[str, TensorFisher]]:
        return self.sums.results(count)


class HookEngine(_SummingEngine):
    """One forward pass to a batch, and a backward pass for each row of the objective."""

    name = "hooks"

    def __init__(self, task: FisherTask, batches: Sequence[Batch]):
        super().__init__(task, batches)
        self.units = UnitsOnce(task, self.runner, batches, self.parameters)
        self.padding = PaddingLengths(task, self.runner)
        self._unchecked: tuple[Batch, list[Tensor]] | None = None

    def add(self, batch: Batch) -> None:
        try:
            self._add(batch)
        except NotPlain as error:
            self.units.drop_plain(error)
            self.add(batch)
        except (CannotTellSamplesApart, SamplesInUnequalShares) as error:
            logger.info("Samples cannot be told apart in %s: they are taken one at a time.", error)
            for n in range(len(batch)):
                self._add(batch.select(n, n + 1))

    def _add(self, batch: Batch, checked: bool = False) -> None:
        with GradientListener(self.units.find(batch), self.sums.by_id, checked=checked) as listener:
            listener.start(len(batch), *self.padding.find(batch))
            values, counts = self.runner.rows(batch)
            listener.check_calls()
            self.sums.start(len(batch))
            seen = [values.detach()]
            for k, row in enumerate(values):
                keep = k + 1 < len(values)
                torch.autograd.backward(row.sum(), retain_graph=keep)
                seen += listener.take_gradients()
                listener.finish()
                self.sums.finish()
            self.heard = self.heard or listener.heard
        if not checked:
            self.check()  # the batch before this one, so that the device need not wait for Python
            self._unchecked = batch, seen
        self.log.add(batch, counts)

    def check(self) -> None:
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is not None and not all_finite(unchecked[1]):
            self._explain(unchecked[0], unchecked[1][0])

    def _explain(self, batch: Batch, values: Tensor) -> None:
        check_values(values, batch)
        try:
            self._add(batch, checked=True)
        except NotFinite as error:
            raise not_finite_error(error, batch) from None
        raise ValueError("A gradient is not finite. Measure in float32.")


class LoopEngine(_SummingEngine):
    """Plain autograd, one sample at a time."""

    name = "loop"

    def add(self, batch: Batch) -> None:
        for n in range(len(batch)):
            self._add(batch.select(n, n + 1))

    def _add(self, sample: Batch) -> None:
        pending = PendingSquares()
        for p in self.parameters:
            if not p.is_floating_point() or p.is_meta:
                raise ValueError("engine='loop' needs the weights as numbers on a device. Use engine='hooks'.")
            p.requires_grad_()
        values, counts = self.runner.rows(sample)
        check_values(values, sample)
        self.sums.start(1)
        for k, row in enumerate(values):
            grads = torch.autograd.grad(
                row.sum(), self.parameters, retain_graph=k + 1 < len(values), allow_unused=True
            )
            if not all_finite(grads):
                raise ValueError(f"The gradient of sample {sample.index[0]} of the draw is not finite.")
            for p, g in zip(self.parameters, grads, strict=True):
                if g is not None:
                    self.heard = True
                    self.sums.by_id[id(p)].add(DenseGradients(g[None]), 0, pending)
            pending.flush()
            self.sums.finish()
        self.log.add(sample, counts)


class UnitsOnce:
    """The modules to listen to. The model is taken for a plain one until it proves not to be. If they must be looked
    for, then on short samples, for it takes forward passes.

    Args:
        task: What is measured.
        runner: Runs the model.
        batches: The samples.
        parameters: The parameters.
    """

    def __init__(self, task: FisherTask, runner: Runner, batches: Sequence[Batch], parameters: Iterable[nn.Parameter]):
        self.task, self.runner = task, runner
        self.owners = find_owners(task.model, parameters)
        self.plain = plain_units(self.owners)
        self.shortest = min((b for b in batches if len(b) > 1), key=_size, default=None)
        self._found: dict[int, list[Unit]] = {}

    def plain_of(self, batch: Batch) -> list[Unit] | None:
        """The units, where the model is taken for a plain one."""
        if tokens_of(batch) in (0, len(batch)):  # with as many samples as tokens, a dimension could be either
            return None
        return self.plain

    def drop_plain(self, error: NotPlain) -> None:
        """Take the model for a plain one no more."""
        logger.debug("%s does not see all tokens of all samples.", error)
        self.plain = None

    def find(self, batch: Batch) -> list[Unit]:
        """The units for a batch."""
        plain = self.plain_of(batch)
        if plain is not None:
            return plain
        samples = min(len(batch), 2)
        if samples not in self._found:
            example = self.shortest if samples == 2 and self.shortest else batch
            self._found[samples] = find_units(
                self.task.model,
                [layer.module for layer in self.task.layers],
                self.owners,
                lambda n: self.runner.forward(example.select(0, n)),
                samples,
            )
        return self._found[samples]


class PaddingLengths:
    """The lengths of samples, where a kernel can make use of them: on an accelerator.

    Args:
        task: What is measured.
        runner: Runs the model.
    """

    def __init__(self, task: FisherTask, runner: Runner):
        # a decoder has other lengths than the encoder, and an image has none
        seq2seq = getattr(getattr(task.model, "config", None), "is_encoder_decoder", False)
        self.useful = runner.device.type != "cpu" and not seq2seq
        self.task, self.device = task, runner.device

    def find(self, batch: Batch) -> tuple[int, Tensor | None]:
        """The tokens of each sample with padding, and without it, (N,)."""
        lengths = token_lengths(batch) if self.useful else None
        if lengths is None or not self._only_stack:
            return tokens_of(batch), None
        tokens = batch.inputs["attention_mask"].shape[1]
        if bool((lengths == tokens).all()):
            return tokens, None
        return tokens, lengths.to(self.device, torch.int32)

    @cached_property
    def _only_stack(self) -> bool:
        return len(find_stacks(self.task.model)) == 1


def all_finite(gradients: Iterable[Tensor | None]) -> bool:
    """Whether no gradient is NaN or infinite. Waits for the device once."""
    found = [g for g in gradients if g is not None]
    largest = torch._foreach_norm(found, math.inf) if found else ()
    return not largest or bool(torch.isfinite(torch.stack([x.to(largest[0]) for x in largest])).all())


def not_finite_error(error: NotFinite, batch: Batch) -> ValueError:
    """The error for a gradient that is not finite."""
    return ValueError(
        f"The gradient of sample {batch.index[error.sample]} of the draw is not finite at the output of "
        f"{error.module}. Look at its inputs and labels, or measure in float32."
    )


def _size(batch: Batch) -> int:
    return max((v.numel() for v in batch.inputs.values() if isinstance(v, Tensor)), default=0)
