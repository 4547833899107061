"""Measuring: the metrics (scikit-learn's and scipy's), the Trainer that computes them, and the job of `evaluate`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from torch import nn
from transformers import DataCollatorWithPadding, PrinterCallback, Trainer, TrainingArguments

from peft_surgical.distributed import shard_by_layer, this_process
from peft_surgical.training.card import METRICS_FILE
from peft_surgical.training.common import Diverged, JointCheckpoints, load_tokenizer, load_trained, max_length
from peft_surgical.training.data import Task, find_split, read_splits, split_rows
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.options import CAUSAL_LM
from peft_surgical.training.prepare import require_metrics, require_trl
from peft_surgical.training.tasks import encode, make_task


@dataclass(frozen=True)
class Evaluation:
    """What a trained model makes of the rows of a task.

    Args:
        rows: What the rows are, in words.
        metrics: The metrics by name.
        data: The rows, as `Task` has them.
        labels: Names of the classes; none for regression and language models.
        outputs: Logits (N, classes), or predicted amounts (N, 1). Of a language model the sum of -log p over a row's
            tokens, in nats, and the number of these tokens (N, 2).
    """

    rows: str
    metrics: dict[str, float]
    data: Dataset
    labels: tuple[str, ...]
    outputs: np.ndarray

    @property
    def predictions(self) -> list[Any]:
        """The predicted class name or amount of each row; of a language model its loss per token."""
        if self.labels:
            return [self.labels[i] for i in self.outputs.argmax(-1)]
        if "labels" not in self.data.column_names:
            return (self.outputs[:, 0] / self.outputs[:, 1]).tolist()
        return self.outputs.reshape(len(self.data)).tolist()

    def table(self) -> Dataset:
        """The rows with their text, label and prediction, or loss and tokens, to look at or to write to a file."""
        if "labels" not in self.data.column_names:
            counts = {"loss": self.predictions, "tokens": self.outputs[:, 1].astype(int).tolist()}
            return concatenate_datasets([self.data, Dataset.from_dict(counts)], axis=1)
        given = self.data["labels"][:]
        columns = {c: self.data[c][:] for c in self.data.column_names if c != "labels"}
        columns["label"] = [self.labels[i] for i in given] if self.labels else given
        return Dataset.from_dict({**columns, "prediction": self.predictions})


@contextmanager
def precision_restored() -> Iterator[None]:
    """Let a run in bfloat16 not make all later ones be so: transformers 4 notes it in the environment."""
    name = "ACCELERATE_MIXED_PRECISION"
    before = os.environ.get(name)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ.update({} if before is None else {name: before})


@precision_restored()
def evaluate(
    folder: str | Path,
    *,
    model: str | None = None,
    data: str | None = None,
    subset: str | None = None,
    split: str | None = None,
    batch_size: int | None = None,
    text_columns: Sequence[str] = (),
    label_column: str | None = None,
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
        text_columns: The columns with the text, where other data call them otherwise; found if not given.
        label_column: The column with the label, likewise.

    Returns:
        The metrics and the predictions.

    Raises:
        ValueError: The folder is not that of a finished run, or the data do not fit it.
    """
    job, trained = read_run(folder)
    job = dataclasses.replace(job, model=model or job.model)
    is_language = trained["kind"] == CAUSAL_LM
    for option, value in (("--batch-size", batch_size), ("--label-column", label_column)):
        if is_language and value is not None:
            raise ValueError(
                f"{option} has no meaning here: a language model's rows have no labels and are measured one by one."
            )
    (require_trl if is_language else require_metrics)()
    rows, name, task = _choose_rows(job, trained, data, subset, split, text_columns, label_column)
    arguments = {"output_dir": str(folder), **shared_arguments(job)}
    if is_language:
        from peft_surgical.training.language import evaluate_language

        metrics, rows, outputs = evaluate_language(folder, job, task, rows, arguments)
        return Evaluation(name, metrics, rows, (), outputs)
    tokenizer = load_tokenizer(job.model)
    loaded = load_trained(str(folder), job.model, task.labels, tokenizer, dtype=job.dtype)
    if batch_size is not None:
        arguments["per_device_eval_batch_size"] = batch_size
    trainer = make_trainer(loaded, arguments, DataCollatorWithPadding(tokenizer))
    result = trainer.predict(encode(rows, tokenizer, max_length(job, tokenizer, loaded)))
    outputs = np.asarray(result.predictions)
    return Evaluation(name, compute_metrics(outputs, result.label_ids), rows, task.labels, outputs)


def read_run(folder: str | Path) -> tuple[TrainingJob, dict[str, Any]]:
    """The job of a finished run, and what `metrics.json` says of its task."""
    job = TrainingJob.load(folder)
    file = Path(folder) / METRICS_FILE
    if not file.exists():
        raise ValueError(f"{folder} holds no finished run: it has no {METRICS_FILE}. Finish it with train --resume.")
    return job, json.loads(file.read_text(encoding="utf-8"))["task"]


def make_trainer(model: nn.Module, arguments: Mapping[str, Any], collator: Any, **options: Any) -> Trainer:
    """A Trainer that computes the metrics of the task and shows nothing by itself; `options` go to it."""
    trainer = JointCheckpoints(
        model=model,
        args=TrainingArguments(**arguments),
        data_collator=partial(collator),  # not the collator itself, of which Trainer would save the tokenizer
        compute_metrics=lambda p: compute_metrics(p.predictions, p.label_ids),
        # encoder-decoder models return more than logits
        preprocess_logits_for_metrics=lambda out, _: out[0] if isinstance(out, tuple) else out,
        **options,
    )
    # a classifier's loss is the mean over its batch and ignores the count of items that Trainer passes; Trainer, which
    # takes any model with **kwargs for one that divides by it, would multiply the loss by the number of processes and
    # of accumulated batches
    trainer.model_accepts_loss_kwargs = False
    trainer.remove_callback(PrinterCallback)
    shard_by_layer(trainer.accelerator, model)
    return trainer


def shared_arguments(job: TrainingJob) -> dict[str, Any]:
    """The arguments of the Trainer that training and evaluation share."""
    return {
        "per_device_train_batch_size": job.batch_size,
        "per_device_eval_batch_size": 2 * job.batch_size,
        "seed": job.seed,
        "data_seed": job.seed,
        "bf16": job.bf16,
        "fp16": job.fp16,
        "report_to": [job.report_to] if job.report_to else [],
        "label_names": ["labels"],
        "use_cpu": this_process().device.type == "cpu",
        "disable_tqdm": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }


def compute_metrics(outputs: Any, targets: Any) -> dict[str, float]:
    """Compare a model's outputs with the labels.

    Of logits (N, classes) and class ids (N,): `accuracy`; `f1` of the second class if there are two (as GLUE counts it
    for MRPC), else the plain mean of the F1 of all classes; `matthews`, the Matthews correlation. Of predicted amounts
    (N, 1) or (N,) and amounts (N,): `pearson` and `spearman` correlation, 0 where all are equal and none is defined.

    Example:

        >>> compute_metrics(np.array([[2.0, 1.0], [0.0, 1.0]]), np.array([0, 1]))
        {'accuracy': 1.0, 'f1': 1.0, 'matthews': 1.0}
    """
    if not np.isfinite(outputs).all():
        raise Diverged("outputs")
    if np.issubdtype(targets.dtype, np.floating):
        return _compare_amounts(outputs.reshape(len(targets)), targets)
    return _compare_classes(outputs.argmax(-1), targets, classes=outputs.shape[-1])


def majority(data: Dataset, labels: Sequence[str]) -> dict[str, Any] | None:
    """The most frequent class, its share of the rows, and the metrics of always saying it; None for regression.

    Example:

        >>> majority(Dataset.from_dict({"labels": [1, 1, 1, 0]}), ["bad", "good"])["share"]
        0.75
    """
    if not labels:
        return None
    targets = np.asarray(data["labels"][:])
    counts = np.bincount(targets, minlength=len(labels))
    best = int(counts.argmax())
    metrics = _compare_classes(np.full_like(targets, best), targets, len(labels))
    return {"label": labels[best], "share": float(counts[best] / len(targets)), **metrics}


def _choose_rows(
    job: TrainingJob,
    trained: dict[str, Any],
    data: str | None,
    subset: str | None,
    split: str | None,
    text_columns: Sequence[str],
    label_column: str | None,
) -> tuple[Dataset, str, Task]:
    splits = read_splits(data or job.data, subset=subset if data else job.subset, encoding=job.encoding)
    columns = next(iter(splits.values())).column_names
    named: dict[str, Any] = {"text_columns": text_columns, "label_column": label_column}
    if not text_columns and {*trained["text_columns"]} <= {*columns}:  # other data may call them otherwise
        named["text_columns"] = trained["text_columns"]
    if label_column is None and trained["label_column"] in columns:
        named["label_column"] = trained["label_column"]
    try:
        task = make_task(splits, kind=trained["kind"], labels=trained["labels"], **named)
    except ValueError as error:
        needed = {"--text-column": [] if text_columns else trained["text_columns"]}
        needed["--label-column"] = [trained["label_column"]] if trained["label_column"] and not label_column else []
        lacking = {option: [c for c in names if c not in columns] for option, names in needed.items()}
        if data is None or not any(lacking.values()):
            raise
        raise ValueError(
            f"--data {data}: the run was trained on the columns {sum(needed.values(), [])}, and the data has "
            f"{columns}. Name its own with {' and '.join(o for o, names in lacking.items() if names)}."
        ) from error
    if task.kind != CAUSAL_LM and len(task.text_columns) != len(trained["text_columns"]):
        raise ValueError(
            f"The model was trained on the columns {trained['text_columns']} and the data has {[*task.text_columns]}."
        )
    if split is None and data is None:
        parts = split_rows(task, job)
        return parts.evaluation, parts.evaluation_name, task
    split = split or find_split(task.splits, "validation") or find_split(task.splits, "test")
    if split is None and len(task.splits) > 1:
        raise ValueError(f"The data has the splits {[*task.splits]}. Choose one with --split.")
    split = split or next(iter(task.splits))
    return task.split(split), f"the {split} split", task


def _compare_classes(predicted: np.ndarray, targets: np.ndarray, classes: int) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    average = "binary" if classes == 2 else "macro"
    return {
        "accuracy": float(accuracy_score(targets, predicted)),
        "f1": float(f1_score(targets, predicted, average=average, zero_division=0.0)),
        "matthews": float(matthews_corrcoef(targets, predicted)),
    }


def _compare_amounts(predicted: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    from scipy.stats import pearsonr, spearmanr

    if np.ptp(predicted) == 0 or np.ptp(targets) == 0:
        return {"pearson": 0.0, "spearman": 0.0}
    return {
        "pearson": float(pearsonr(predicted, targets).statistic),
        "spearman": float(spearmanr(predicted, targets).statistic),
    }
