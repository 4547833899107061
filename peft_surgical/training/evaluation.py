"""The job behind `peft-surgical evaluate`: measure what was trained, on its own evaluation rows or on other data."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import DataCollatorWithPadding, TrainingArguments

from peft_surgical.training.card import METRICS_FILE
from peft_surgical.training.data import Task, find_split, read_splits, split_rows
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.prepare import load_tokenizer, load_trained, max_length
from peft_surgical.training.tasks import encode, make_task
from peft_surgical.training.trainer import compute_metrics, make_trainer, require_metrics, shared_arguments


@dataclass(frozen=True)
class Evaluation:
    """What a trained model makes of labelled rows.

    Args:
        rows: What the rows are, in words.
        metrics: The metrics by name.
        data: The rows, as `Task` has them.
        labels: Names of the classes; none for regression.
        outputs: Logits (N, classes), or predicted amounts (N, 1).
    """

    rows: str
    metrics: dict[str, float]
    data: Dataset
    labels: tuple[str, ...]
    outputs: np.ndarray

    @property
    def predictions(self) -> list[Any]:
        """The predicted class name, or amount, of each row."""
        if self.labels:
            return [self.labels[i] for i in self.outputs.argmax(-1)]
        return self.outputs.reshape(len(self.data)).tolist()

    def table(self) -> Dataset:
        """The rows with their text, label and prediction, to look at or to write to a file."""
        given = self.data["labels"][:]
        columns = {c: self.data[c][:] for c in self.data.column_names if c != "labels"}
        columns["label"] = [self.labels[i] for i in given] if self.labels else given
        return Dataset.from_dict({**columns, "prediction": self.predictions})


def evaluate(
    folder: str | Path,
    *,
    model: str | None = None,
    data: str | None = None,
    subset: str | None = None,
    split: str | None = None,
    batch_size: int | None = None,
) -> Evaluation:
    """Measure what `peft-surgical train` saved.

    Args:
        folder: The folder that training wrote.
        model: The base model, if it lies elsewhere now.
        data: Other data to measure on; the data of the training if not given.
        subset: Which of the subsets of a data set on the hub.
        split: The split to measure on. Without: the evaluation rows of the training, or in other data the validation
            split, else the test split, else the only one.
        batch_size: Rows per step and device; twice that of the training if not given.

    Returns:
        The metrics and the predictions.

    Raises:
        ValueError: The folder is not that of a finished run, or the data do not fit it.
    """
    require_metrics()
    job = TrainingJob.load(folder)
    file = Path(folder) / METRICS_FILE
    if not file.exists():
        raise ValueError(f"{folder} holds no finished run: it has no {METRICS_FILE}. Finish it with train --resume.")
    trained = json.loads(file.read_text(encoding="utf-8"))["task"]
    job = dataclasses.replace(job, model=model or job.model)
    rows, name, task = _choose_rows(job, trained, data, subset, split)
    tokenizer = load_tokenizer(job.model)
    loaded = load_trained(str(folder), job.model, task.labels, tokenizer, dtype=job.dtype)
    arguments = shared_arguments(job)
    if batch_size is not None:
        arguments["per_device_eval_batch_size"] = batch_size
    trainer = make_trainer(
        loaded,
        TrainingArguments(output_dir=str(folder), **arguments),
        DataCollatorWithPadding(tokenizer),
    )
    result = trainer.predict(encode(rows, tokenizer, max_length(job, tokenizer, loaded)))
    outputs = np.asarray(result.predictions)
    return Evaluation(name, compute_metrics(outputs, result.label_ids), rows, task.labels, outputs)


def _choose_rows(
    job: TrainingJob, trained: dict[str, Any], data: str | None, subset: str | None, split: str | None
) -> tuple[Dataset, str, Task]:
    splits = read_splits(data or job.data, subset=subset if data else job.subset, encoding=job.encoding)
    columns = next(iter(splits.values())).column_names
    named = [*trained["text_columns"], trained["label_column"]]
    known = set(named) <= set(columns)
    task = make_task(
        splits,
        text_columns=trained["text_columns"] if known else (),
        label_column=trained["label_column"] if known else None,
        kind=trained["kind"],
        labels=trained["labels"],
    )
    if len(task.text_columns) != len(trained["text_columns"]):
        raise ValueError(
            f"The model was trained on the columns {trained['text_columns']} and the data has {[*task.text_columns]}."
        )
    if split is None and data is None:
        parts = split_rows(
            task, eval_split=job.eval_split, select_on=job.select_on, held_out=job.held_out, seed=job.seed
        )
        return parts.evaluation, parts.evaluation_name, task
    split = split or find_split(task.splits, "validation") or find_split(task.splits, "test")
    if split is None and len(task.splits) > 1:
        raise ValueError(f"The data has the splits {[*task.splits]}. Choose one with --split.")
    split = split or next(iter(task.splits))
    return task.split(split), f"the {split} split", task
