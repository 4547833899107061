"""What a job would cost: counted in its model and measured in a few of its real training steps."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from peft_surgical.distributed import this_process
from peft_surgical.methods.trainer import CHOICES
from peft_surgical.ranking.plots import plot_parts
from peft_surgical.training.evaluation import precision_restored
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.memory import (
    Memory,
    PeakOnCPU,
    eight_bit_states,
    file_sizes,
    held_by,
    let_go,
    memory_of,
    nbytes,
    states_of,
)
from peft_surgical.training.methods import AUTO
from peft_surgical.training.run import TrainingRun


TIMED_STEPS = 4
TIMED_SECONDS = 60.0  # no further step is begun after these
CHECKPOINTING = "--gradient-checkpointing"


@dataclass(frozen=True)
class Plan:
    """What a job would cost.

    Args:
        layers: The layers with anything that is trained, by stack.
        trained: The number of trained parameters.
        parameters: The number of the base model's parameters.
        files: Bytes of the tensors in the saved file: as `"values"`, and the most that `peft-surgical convert` makes
            of them.
        memory: In a step on the longest rows; before steps without activations, and with the states of AdamW.
        layer: Bytes of one tuned layer's trained weights, the mean over them; None where no whole layers are tuned.
        device: What it is measured on.
        limit: Bytes that the device has.
        batch: Rows of the batch that was measured, and tokens of the longest; None before steps.
        needs: The options without which the job does not fit the device; None if it does not fit with them.
        smaller: The memory with other options, by how these are written.
        seconds: Of the training steps of an epoch, without the selection rows; None before steps.
        choices: With `layers="auto"` the plan of each. The rest is that of the one that takes most memory, but the
            seconds are those of all.
    """

    layers: dict[str, list[int]]
    trained: int
    parameters: int
    files: dict[str, int]
    memory: Memory
    layer: int | None
    device: str
    limit: int
    batch: tuple[int, int] | None = None
    needs: str | None = ""
    smaller: dict[str, Memory] = field(default_factory=dict)
    seconds: float | None = None
    choices: dict[str, Plan] = field(default_factory=dict)

    def plot(self, path: str) -> None:
        """Draw the memory by its parts, of this job and of what would need less. Needs matplotlib."""
        jobs = {name: one.memory for name, one in self.choices.items()} or {self.needs or "as asked": self.memory}
        jobs |= self.smaller
        parts = ("weights", "copies", "gradients", "optimizer", "activations")
        bars = {name: {part: getattr(memory, part) or 0 for part in parts} for name, memory in jobs.items()}
        peaks = [memory.total for memory in jobs.values()]
        plot_parts(path, bars, peaks, self.limit, title=f"Memory in training on {self.device}")


def plan_before_steps(run: TrainingRun) -> Plan:
    """What can be told of a run whose model is adapted, before it takes a step."""
    device = this_process().device
    is_cuda = device.type == "cuda"
    layers = [row.bytes for row in run.report.rows if row.index is not None]
    has_layers = layers and run.job.method in ("surgical", "last")
    return Plan(
        layers=run.tuned_layers,
        trained=run.report.parameters,
        parameters=run.total_parameters,
        files=file_sizes(run.model),
        memory=memory_of(run.model, is_rounded=run.job.stochastic_rounding),
        layer=sum(layers) // len(layers) if has_layers else None,
        device=torch.cuda.get_device_name(device) if is_cuda else "this machine",
        limit=torch.cuda.mem_get_info(device)[1] if is_cuda else psutil.virtual_memory().total,
    )


@precision_restored()
def plan(job: TrainingJob, begin: Callable[[TrainingRun], object] = lambda run: None) -> Plan:
    """Measure a few real training steps of a job: on its longest rows for memory, on some of its rows for time.

    Args:
        job: The job. Its output folder is not written to.
        begin: Called before the steps, with the run of the job, whose data and model are loaded.

    Returns:
        What the job would cost; of a job that does not fit the device, what the first does that fits of: gradient
        checkpointing, half the batch, both, a quarter, ...

    Raises:
        ValueError: As `TrainingRun` does; or there are several processes.
    """
    if this_process().num_processes > 1:
        raise ValueError("plan measures one device: start it without accelerate launch.")
    if job.layers == AUTO:
        return _plan_choices(job, begin)
    with tempfile.TemporaryDirectory() as folder:
        # of one batch each, of which nothing is told or kept
        alone: Any = dict.fromkeys(("log_every", "report_to", "early_stopping", "push_to_hub"))
        alone["gradient_accumulation"] = 1
        run = TrainingRun(dataclasses.replace(job, output=folder, **alone))
        begin(run)
        if run.ranking is None:
            run.rank(progress=False)
        run.adapt()
        known = plan_before_steps(run)
        trainer: Any = run.make_trainer()
        asked = rows = min(job.batch_size, len(trainer.train_dataset))
        can_checkpoint = trainer.model.supports_gradient_checkpointing and not job.gradient_checkpointing
        while rows:
            for checkpointing in (False, True)[: 1 + can_checkpoint]:
                steps = _Steps(job, trainer, rows, can_checkpoint, checkpointing)
                try:
                    steps.take()
                except torch.OutOfMemoryError:
                    let_go(run.model)
                    continue
                needs = [f"--batch-size {rows}"] * (rows < asked) + [CHECKPOINTING] * checkpointing
                return steps.plan(known, " ".join(needs))
            rows //= 2
    return dataclasses.replace(known, needs=None)


def _plan_choices(job: TrainingJob, begin: Callable[[TrainingRun], object]) -> Plan:
    """The plan of a job with `layers="auto"`; `begin` is called with the run of the first choice."""
    plans: dict[str, Plan] = {}
    for choice in CHOICES:
        found = plan(dataclasses.replace(job, layers=choice), begin if not plans else lambda run: None)
        gc.collect()
        if all(found.layers != other.layers for other in plans.values()):
            plans[choice] = found
    largest = max(plans.values(), key=lambda one: (one.needs is None, one.memory.total))
    seconds = [one.seconds for one in plans.values() if one.seconds is not None]
    return dataclasses.replace(largest, seconds=sum(seconds) if len(seconds) == len(plans) else None, choices=plans)


class _Steps(TrainerCallback):
    """Real steps of a trainer on batches of our choice: the longest rows twice, first to make the optimizer's states;
    half of them; the longest with gradient checkpointing; then some rows at random, for the time."""

    def __init__(self, job: TrainingJob, trainer: Any, rows: int, can_checkpoint: bool, checkpointing: bool):
        self.job, self.trainer, self.model, self.rows = job, trainer, trainer.model, rows
        self.checkpointing, self.is_cuda = checkpointing, this_process().device.type == "cuda"
        lengths = [len(ids) for ids in trainer.train_dataset["input_ids"][:]]
        longest = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)[:rows]
        self.tokens = lengths[longest[0]]
        self.batches = [("first", longest), ("as asked", longest)]
        if rows > 1:
            self.batches.append((f"--batch-size {rows // 2}", longest[: rows // 2]))
        if can_checkpoint and not checkpointing:
            self.batches.append((CHECKPOINTING, longest))
        draw = random.Random(job.seed)
        self.batches += [("time", draw.sample(range(len(lengths)), rows)) for _ in range(TIMED_STEPS)]
        self.watching = contextlib.ExitStack()
        self.found: dict[str, Memory] = {}
        self.seconds: list[tuple[float, float]] = []

    def take(self) -> None:
        """Take the steps, on a trainer that is left as it was."""
        trainer, rows = self.trainer, [batch for _, batch in self.batches]
        trainer.get_train_dataloader = lambda: DataLoader(
            trainer.train_dataset, batch_sampler=rows, collate_fn=trainer.data_collator
        )
        trainer.args.max_steps, trainer.args.save_strategy = len(rows), "no"
        trainer.compute_loss = self._counting(type(trainer).compute_loss.__get__(trainer))
        self._set_checkpointing(self.checkpointing)
        trainer.add_callback(self)
        try:
            with self.watching:
                trainer.train()
        finally:
            trainer.remove_callback(self)

    def plan(self, known: Plan, needs: str) -> Plan:
        """What is known before steps, with what they showed."""
        batches = -(-len(self.trainer.train_dataset) // self.rows)
        updates = -(-batches // self.job.gradient_accumulation)
        seconds = [sum(times) / len(times) for times in zip(*self.seconds, strict=True)]
        memory, smaller = self.found.pop("as asked"), self.found
        if self.is_cuda and self.job.optim is None:
            states = eight_bit_states(self.model)
            less = memory.total - memory.optimizer + states
            smaller["--optim adamw_bnb_8bit"] = dataclasses.replace(memory, optimizer=states, peak=less)
        return dataclasses.replace(
            known,
            memory=memory,
            batch=(self.rows, self.tokens),
            needs=needs,
            smaller=smaller,
            seconds=batches * seconds[0] + updates * seconds[1],
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = self.ended = self._now()

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        name = self.batches[state.global_step][0]
        if name == CHECKPOINTING:
            self._set_checkpointing(True)
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        elif name not in ("first", "time"):
            held = [*held_by(self.model), *states_of(optimizer)]
            self.counter = self.watching.enter_context(PeakOnCPU(held))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.updates_at = self._now()
        self.gradients = memory_of(self.model, optimizer).gradients
        self.peak_of_passes = self._peak()

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        name, now = self.batches[state.global_step - 1][0], self._now()
        self.watching.close()
        if name == "time":
            self.seconds.append((self.updates_at - self.ended, now - self.updates_at))
            control.should_training_stop |= now - self.begun > TIMED_SECONDS
        elif name != "first":
            self.found[name] = self._memory(optimizer)
        if name == CHECKPOINTING:
            self._set_checkpointing(False)
        self.ended = self._now()

    def _memory(self, optimizer: Any) -> Memory:
        # the gradients of the batches before are there as well, where several make a step
        before = self.gradients if self.job.gradient_accumulation > 1 else 0
        peak = max(self.peak_of_passes + before, self._peak())
        memory = memory_of(self.model, optimizer)
        return dataclasses.replace(memory, gradients=self.gradients, activations=self.kept, peak=peak)

    def _peak(self) -> int:
        if self.is_cuda:
            return torch.cuda.max_memory_allocated()
        return self.counter.peak if hasattr(self, "counter") else 0

    def _counting(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """A trainer's `compute_loss` that counts the bytes that autograd keeps for the backward pass."""

        def counting(*args: Any, **kwargs: Any) -> Any:
            held = {tensor.untyped_storage().data_ptr() for tensor in held_by(self.model)}
            kept: list[torch.Tensor] = []

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                if tensor.untyped_storage().data_ptr() not in held:
                    kept.append(tensor.detach())
                return tensor.detach()

            with saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = compute_loss(*args, **kwargs)
            self.kept = nbytes(kept)
            kept.clear()  # autograd holds `keep` until the last node is done
            return loss

        return counting

    def _set_checkpointing(self, wanted: bool) -> None:
        new_name = "activation_checkpointing"  # of transformers 5.24
        name = new_name if hasattr(self.model, f"{new_name}_enable") else "gradient_checkpointing"
        if wanted:
            getattr(self.model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})
        else:
            getattr(self.model, f"{name}_disable")()

    def _now(self) -> float:
        if self.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
