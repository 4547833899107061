"""Everything that ranking, training and evaluation start from: the task, its parts, the tokenizer and the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import nn
from transformers import DataCollatorWithPadding

from peft_surgical.ranking.rank import LayerRanking, rank_layers
from peft_surgical.training.held_out import Parts, divide
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.loading import load_classifier, load_tokenizer
from peft_surgical.training.processes import this_process
from peft_surgical.training.splits import read_splits
from peft_surgical.training.tasks import Task, encode, make_task


@dataclass
class Prepared:
    """What a job starts from.

    Args:
        task: The task.
        parts: Its rows by use, as text.
        train: The training rows as token ids.
        tokenizer: The base's tokenizer.
        model: The base model with a head for the task, on the device that it will run on.
        head: The modules of the model that belong to the task.
        collator: Pads rows into a batch.
    """

    task: Task
    parts: Parts
    train: Dataset
    tokenizer: Any
    model: nn.Module
    head: list[str]
    collator: DataCollatorWithPadding


def prepare(job: TrainingJob) -> Prepared:
    """Read the data and load the model of a job.

    Args:
        job: The job.

    Returns:
        What the job starts from.

    Raises:
        ValueError: The data or the model cannot be read or do not fit together.
    """
    with this_process().main_process_first():
        task, parts = read_task(job)
    tokenizer = load_tokenizer(job.model)
    model, head = load_classifier(job.model, task.labels, tokenizer, seed=job.seed, dtype=job.dtype)
    train = encode(parts.train, tokenizer, max_length(job, tokenizer, model))
    model.to(this_process().device)
    return Prepared(task, parts, train, tokenizer, model, head, DataCollatorWithPadding(tokenizer))


def read_task(job: TrainingJob) -> tuple[Task, Parts]:
    """Read the labelled rows of a job, and divide them by use."""
    task = make_task(
        read_splits(job.data, subset=job.subset, encoding=job.encoding),
        text_columns=job.text_columns,
        label_column=job.label_column,
        kind=job.task,
    )
    parts = divide(
        task,
        eval_split=job.eval_split,
        select_on=job.select_on,
        held_out=job.held_out,
        max_train_samples=job.max_train_samples,
        seed=job.seed,
    )
    return task, parts


def max_length(job: TrainingJob, tokenizer: Any, model: nn.Module) -> int:
    """The most tokens that a row may have: what the job says, but no more than the model has positions for."""
    positions = getattr(model.config, "max_position_embeddings", None) or 0
    return min(job.max_length, tokenizer.model_max_length, positions if positions > 0 else job.max_length)


def rank(prepared: Prepared, job: TrainingJob, *, progress: bool = True) -> LayerRanking:
    """Rank the layers of a job's model on its training rows.

    Args:
        prepared: What the job starts from.
        job: The job.
        progress: Whether to show progress.

    Returns:
        The ranking. All processes of a run with several get that of the first.
    """
    state = this_process()
    ranking = rank_layers(
        prepared.model,
        prepared.train,
        num_samples=job.samples,
        score=job.score,
        labels=job.fisher_labels,
        aggregation=job.aggregation,
        batch_size=job.batch_size,
        data_collator=prepared.collator,
        head_seeds=job.head_seeds,
        seed=job.seed,
        stack=job.stack,
        progress=progress and state.is_main_process,
    )
    return broadcast_object_list([ranking])[0]
