"""Training for the benchmarks: several models of one task in step, so that small runs fill a GPU.

All models of a group see the same batches at the same time. On a GPU one step of the whole group is a CUDA graph, with
a branch for each model: no time goes to launching kernels, and the branches run side by side. Everywhere else, and for
the first batch of each length, the same steps run one after the other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks.evidence.tasks import PAD_TO, Rows, Task, score
from peft_surgical.copies.module import TunedModule


WEIGHT_DECAY, WARM_UP, CLIP, PATIENCE = 0.01, 0.06, 1.0, 3
GRAPHS = "NO_GRAPHS" not in os.environ
QUANTILES = (0.25, 0.5, 0.75, 0.9, 1.0)
"""Batches are padded to one of a few lengths: these quantiles of the rows' own."""


class Trainee:
    """A model in training.

    Args:
        model: The model; what requires a gradient is trained.
        rate: Peak learning rate.
        optimizer: Its class.
    """

    def __init__(self, model: nn.Module, rate: float, optimizer: type = torch.optim.AdamW):
        self.model, self.peak = model, rate
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if on_gpu else None
        self.loss_sum = torch.zeros((), device=self.device)
        # a learning rate in a tensor can change without a new graph
        start = torch.zeros((), device=self.device)
        options = {"weight_decay": WEIGHT_DECAY, "fused": True, "capturable": on_gpu}
        self.optimizer = optimizer(self.parameters, lr=start, **options)
        self.best: Best | None = None
        self.history: list[dict[str, float]] = []

    def begin_step(self, number: int, share: float) -> bool:
        """Called before each step, with its number from 0; whether other parameters are trained from it on."""
        self.set_rate(share)
        return False

    def step(self, inputs: dict[str, Tensor], labels: Tensor) -> None:
        """Forward, backward and update."""
        loss = task_loss(logits_of(self.model, inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += loss.detach()

    def set_rate(self, share: float) -> None:
        """Set the learning rate to a share of its peak."""
        for group in self.optimizer.param_groups:
            group["lr"].fill_(self.peak * share)

    def observe(self, task: Task, rows: Rows, steps: int) -> None:
        """Measure on held-out rows after an epoch, and remember the weights if they are the best so far."""
        logits = predict(self.model, rows)
        measured = score(task, logits, rows)
        loss = float(task_loss(logits, rows.labels))
        trained = float(self.loss_sum) / steps
        self.loss_sum.zero_()
        self.history.append({"train_loss": trained, "loss": loss, task.metric: measured[task.metric]})
        rank = (measured[task.metric], -loss if math.isfinite(loss) else -math.inf)
        if self.best is None or rank > self.best.rank:
            weights = [p.detach().clone() for p in self.parameters]
            self.best = Best(rank, len(self.history), weights)

    @property
    def finished(self) -> bool:
        """Whether no epoch was better for a while."""
        return self.best is not None and len(self.history) - self.best.epoch >= PATIENCE

    def restore(self) -> None:
        """Go back to the best weights."""
        assert self.best is not None
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self.best.weights, strict=True):
                parameter.copy_(value)


@dataclass
class Best:
    """The best epoch so far.

    Args:
        rank: Held-out metric, then minus the loss: the larger the better.
        epoch: Its number, from 1.
        weights: The trained parameters.
    """

    rank: tuple[float, float]
    epoch: int
    weights: list[Tensor] = field(repr=False)


def halve_frozen(model: nn.Module) -> nn.Module:
    """Keep what autocast rounds to bfloat16 in every step rounded: the weights of linear modules that are frozen."""
    for parent in model.modules():
        for child in parent.children():
            frozen = not any(p.requires_grad for p in child.parameters())
            tied = child is getattr(model, "lm_head", None)
            if type(child) is nn.Linear and not tied and frozen and not isinstance(parent, TunedModule):
                child.to(torch.bfloat16)
    return model


def logits_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Run a model under bfloat16 autocast; float32 logits, (rows, outputs)."""
    device = next(iter(inputs.values())).device.type
    with torch.autocast(device, torch.bfloat16):
        return model(**inputs).logits.float()


def task_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of classes, squared error of amounts, or minus the log-likelihood of a token of documents."""
    if labels.dim() == 2:
        return logits.sum() / labels.sum() if reduction == "mean" else (logits / labels)[:, 0]
    if labels.is_floating_point():
        return nn.functional.mse_loss(logits[:, 0], labels, reduction=reduction)
    return nn.functional.cross_entropy(logits, labels, reduction=reduction)


def predict(model: nn.Module, rows: Rows, batch: int = 256) -> Tensor:
    """What a model says of rows, without dropout, (rows, outputs)."""
    was_training = model.training
    model.eval()
    order = rows.lengths.argsort(descending=True)
    parts = []
    with torch.no_grad():
        for index in order.split(batch):
            parts.append(logits_of(model, cut(rows, index, _round_up(int(rows.lengths[index[0]])))))
    model.train(was_training)
    return torch.cat(parts)[order.argsort()]


def train(
    trainees: Sequence[Trainee], rows: Rows, *, batch: int, epochs: int, seed: int, graphs: bool | None = None
) -> Iterator[int]:
    """Train models in step with warm-up and linear decay.

    Args:
        trainees: The models, all on the device of the rows.
        rows: The rows to train on.
        batch: Rows in a batch.
        epochs: How often each row is seen.
        seed: Draws the batches and the dropout.
        graphs: Whether to use CUDA graphs; by default on a GPU.

    Yields:
        The number of steps of an epoch, after each epoch. Stop iterating to stop training.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    lengths = batch_lengths(rows)
    per_epoch = math.ceil(len(rows) / batch)
    together = Together(trainees, GRAPHS and rows.labels.is_cuda if graphs is None else graphs)
    done, lengths_of_rows = 0, rows.lengths.cpu()
    try:
        for _ in range(epochs):
            for trainee in trainees:
                trainee.model.train()
            for index, length in draw_batches(lengths_of_rows, batch, lengths, generator):
                if any([trainee.begin_step(done, schedule(done + 1, epochs * per_epoch)) for trainee in trainees]):
                    together.close()  # its graphs are of those before
                done += 1
                index = index.to(rows.labels.device, non_blocking=True)
                together.step(cut(rows, index, length), rows.labels[index])
            yield per_epoch
    finally:
        together.close()


def fit(trainees: Sequence[Trainee], task: Task, rows: Rows, held_out: Rows, *, seed: int, graphs: bool | None = None):
    """Train until no model gets better on the held-out rows; each ends with its best weights."""
    for steps in train(trainees, rows, batch=task.batch, epochs=task.epochs, seed=seed, graphs=graphs):
        for trainee in trainees:
            if not trainee.finished:  # what a model does after its own end does not count
                trainee.observe(task, held_out, steps)
        if all(trainee.finished for trainee in trainees):
            break
    for trainee in trainees:
        trainee.restore()


def schedule(step: int, steps: int) -> float:
    """The share of the peak learning rate in a step, counted from 1: linear up, then linear down to 0."""
    warm_up = max(1, round(WARM_UP * steps))
    if step <= warm_up:
        return step / warm_up
    return max(0.0, (steps - step + 1) / (steps - warm_up + 1))


def batch_lengths(rows: Rows) -> list[int]:
    """The few lengths that batches are padded to."""
    longest = rows.lengths.float().cpu().quantile(torch.tensor(QUANTILES))
    return sorted({_round_up(math.ceil(length)) for length in longest.tolist()})


def draw_batches(
    lengths: Tensor, batch: int, allowed: Sequence[int], generator: torch.Generator
) -> Iterator[tuple[Tensor, int]]:
    """The batches of an epoch, in each rows of like length; the last one is filled up with rows of the first.

    Args:
        lengths: How many tokens each row needs, on the CPU.
        batch: Rows in a batch.
        allowed: The lengths that a batch may have, ascending.
        generator: Draws the order.

    Yields:
        The rows, and the length that they are padded to.
    """
    order = torch.randperm(len(lengths), generator=generator)
    missing = -len(order) % batch
    order = torch.cat([order, order.repeat(math.ceil(missing / len(order)))[:missing]])
    pools = [pool[lengths[pool].argsort(stable=True)] for pool in order.split(8 * batch)]
    batches = torch.cat(pools).split(batch)
    for number in torch.randperm(len(batches), generator=generator).tolist():
        longest = int(lengths[batches[number]].max())
        yield batches[number], next(length for length in allowed if length >= longest)


def cut(rows: Rows, index: Tensor, length: int) -> dict[str, Tensor]:
    """The inputs of some rows without the padding beyond a length."""
    return {name: t[index, ..., :length] for name, t in rows.inputs.items()}


def _round_up(length: int) -> int:
    return -(-length // PAD_TO) * PAD_TO


class Together:
    """One step of all models, as a CUDA graph for each length of batches where that is possible."""

    def __init__(self, trainees: Sequence[Trainee], graphs: bool):
        self.trainees, self.graphs = trainees, graphs
        self.static: dict[tuple[int, ...], tuple[dict[str, Tensor], Tensor]] = {}
        self.captured: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}

    def step(self, inputs: dict[str, Tensor], labels: Tensor) -> None:
        if not self.graphs:
            for trainee in self.trainees:
                trainee.step(inputs, labels)
            return
        shape = tuple(next(iter(inputs.values())).shape)
        if shape not in self.static:  # a graph may only be captured of kernels that ran before
            self.static[shape] = (inputs, labels)
            self._branches(shape)
            return
        static_inputs, static_labels = self.static[shape]
        for name, tensor in inputs.items():
            static_inputs[name].copy_(tensor)
        static_labels.copy_(labels)
        if shape not in self.captured:
            self.captured[shape] = self._capture(shape)
        self.captured[shape].replay()

    def close(self) -> None:
        """Give back the memory of the graphs, also to other processes."""
        if self.captured:
            torch.cuda.synchronize()
            self.captured.clear()
            self.static.clear()
            torch.cuda.empty_cache()

    def _capture(self, shape: tuple[int, ...]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.captured.values())).pool() if self.captured else None
        with torch.cuda.graph(graph, pool=pool):
            self._branches(shape)
        return graph

    def _branches(self, shape: tuple[int, ...]) -> None:
        """A step of each model on its own stream."""
        inputs, labels = self.static[shape]
        here = torch.cuda.current_stream()
        for trainee in self.trainees:
            assert trainee.stream is not None
            trainee.stream.wait_stream(here)
            with torch.cuda.stream(trainee.stream):
                trainee.step(inputs, labels)
        for trainee in self.trainees:
            assert trainee.stream is not None
            here.wait_stream(trainee.stream)
