"""One run of training on transformers' Trainer: rank, tune, choose, measure and save."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import TrainerCallback

from peft_surgical.distributed import this_process
from peft_surgical.layers import choose_stack, find_stacks
from peft_surgical.ranking.rank import LayerRanking
from peft_surgical.training.card import (
    CHECKPOINTS,
    METRICS_FILE,
    RANKING_FILE,
    check_folder,
    make_results,
    newest_checkpoint,
    open_folder,
    write_json,
    write_model_card,
)
from peft_surgical.training.job import METRICS, TrainingJob
from peft_surgical.training.methods import METHODS
from peft_surgical.training.prepare import max_length, prepare, rank
from peft_surgical.training.tasks import encode
from peft_surgical.training.trainer import make_trainer, require_metrics, training_arguments


class TrainingRun:
    """One run of a job, step by step: `rank`, `fit`, `finish`. `train` takes all of them.

    Args:
        job: What to do.
        resume: Go on from the newest complete checkpoint in the job's folder, if there is one.
        overwrite: Empty the job's folder first.
        callbacks: Callbacks for the Trainer, to show progress.

    Raises:
        ValueError: The job's folder is not empty, or holds another job; or the data or the model cannot be read.
    """

    def __init__(
        self,
        job: TrainingJob,
        *,
        resume: bool = False,
        overwrite: bool = False,
        callbacks: Sequence[TrainerCallback] = (),
    ):
        self.job = job
        self.folder = Path(job.output)
        self.callbacks = callbacks
        self.resume = resume
        method = METHODS[job.method]
        method.check(job.method_options, None)
        require_metrics()
        check_folder(job, resume=resume, overwrite=overwrite)
        self.prepared = prepare(job)
        self.metric = job.metric or METRICS[self.prepared.task.kind][0]
        allowed = (*METRICS[self.prepared.task.kind], "loss")
        if self.metric not in allowed:
            raise ValueError(
                f"--metric {self.metric}: for {self.prepared.task.kind} allowed are {', '.join(allowed)}."
            )
        _check_top_k(job, self.prepared.model)
        method.check(job.method_options, self.prepared.model)
        self.total_parameters = sum(p.numel() for p in self.prepared.model.parameters())
        self.ranking: LayerRanking | None = None
        self.seconds: dict[str, float] = {}
        if this_process().is_main_process:
            open_folder(job, overwrite=overwrite)
        this_process().wait_for_everyone()

    def rank(self, *, progress: bool = True) -> LayerRanking | None:
        """Rank the layers, read the ranking the job names, or none where the method needs none.

        Args:
            progress: Whether to show progress.

        Returns:
            The ranking, also kept in the job's folder.
        """
        if not self.job.needs_ranking:
            return None
        file = self.folder / RANKING_FILE
        started = time.perf_counter()
        if self.job.ranking or (self.resume and file.exists()):
            self.ranking = LayerRanking.load(self.job.ranking or str(file))
        else:
            self.ranking = rank(self.prepared, self.job, progress=progress)
            self.seconds["rank"] = time.perf_counter() - started
        this_process().wait_for_everyone()  # none may find the file before it is written by the first
        if this_process().is_main_process:
            self.ranking.save(str(file))
        return self.ranking

    def fit(self) -> None:
        """Train, with a checkpoint after each epoch, and end with the best one."""
        started = time.perf_counter()
        prepared = self.prepared
        adapt = METHODS[self.job.method].adapt
        self.model = adapt(prepared.model, self.job.method_options, self.ranking, prepared.head)
        self.tuned_layers = tuned_layers(self.model)
        # before the weights are sharded
        self.trained_parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.trainer = make_trainer(
            self.model,
            training_arguments(
                self.job, self.model, len(prepared.train), self.metric if prepared.parts.selection else None
            ),
            prepared.collator,
            train_dataset=prepared.train,
            eval_dataset=self._encode(prepared.parts.selection),
            callbacks=[*self.callbacks],
        )
        checkpoint = newest_checkpoint(self.folder / CHECKPOINTS) if self.resume else None
        self.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        self.seconds["train"] = time.perf_counter() - started

    def finish(self) -> dict[str, Any]:
        """Measure on the evaluation rows, save the model, `metrics.json` and the model card.

        Returns:
            What is in `metrics.json`.
        """
        started = time.perf_counter()
        evaluation = self._encode(self.prepared.parts.evaluation)
        measured = self.trainer.evaluate(evaluation, metric_key_prefix="final")
        self.seconds["evaluate"] = time.perf_counter() - started
        self.trainer.save_model(str(self.folder))
        results = make_results(
            self.job,
            self.prepared.task,
            self.prepared.parts,
            self.trainer.state,
            self.metric,
            measured,
            layers=self.tuned_layers,
            parameters={"total": self.total_parameters, "trained": self.trained_parameters},
            seconds={name: round(value, 2) for name, value in self.seconds.items()},
        )
        if self.trainer.is_world_process_zero():
            if self.job.method == "full":
                self.prepared.tokenizer.save_pretrained(self.folder)
            (self.folder / "training_args.bin").unlink(missing_ok=True)
            write_model_card(self.folder, self.job, self.prepared.parts, results, self.ranking)
            write_json(self.folder / METRICS_FILE, results)
            if not self.job.keep_checkpoints:
                shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)
        this_process().wait_for_everyone()
        return results

    def _encode(self, rows: Dataset | None) -> Dataset | None:
        length = max_length(self.job, self.prepared.tokenizer, self.prepared.model)
        return None if rows is None else encode(rows, self.prepared.tokenizer, length)


def train(job: TrainingJob, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Run a job: rank the layers if need be, tune, choose the best checkpoint, measure and save.

    Args:
        job: What to do.
        resume: Go on from the newest complete checkpoint in the job's folder, if there is one.
        overwrite: Empty the job's folder first.

    Returns:
        The content of `metrics.json`.

    Raises:
        ValueError: See `TrainingRun`.
    """
    run = TrainingRun(job, resume=resume, overwrite=overwrite)
    run.rank()
    run.fit()
    return run.finish()


def _check_top_k(job: TrainingJob, model: nn.Module) -> None:
    if job.top_k is not None:
        stack = choose_stack(model, job.stack)
        if not 1 <= job.top_k <= len(stack):
            raise ValueError(
                f"--top-k {job.top_k}: {stack.name} has {len(stack)} layers; allowed are 1 to {len(stack)}."
            )


def tuned_layers(model: nn.Module) -> dict[str, list[int]]:
    """The layers with anything that is trained, by stack."""
    stacks = {
        stack.name: [layer.index for layer in stack.layers if any(p.requires_grad for p in layer.module.parameters())]
        for stack in find_stacks(model).values()
    }
    return {name: layers for name, layers in stacks.items() if layers}
