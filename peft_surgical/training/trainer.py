"""The Trainer of transformers, set up for a job, and the metrics it computes (scikit-learn's and scipy's)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from peft_surgical.distributed import shard_by_layer, this_process
from peft_surgical.training.card import CHECKPOINTS
from peft_surgical.training.job import TrainingJob


class JointTrainer(Trainer):
    """A Trainer whose checkpoints are complete only when each of the processes has written its part."""

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        this_process().wait_for_everyone()  # the first process writes the last file next


class EpochLines(TrainerCallback):
    """A line after each epoch: its training loss, and how good the model is on the selection rows.

    Args:
        show: Shows a line.
        metric: What to show of the selection rows.
    """

    def __init__(self, show: Callable[[str], object], metric: str):
        self.show = show
        self.metric = metric
        self.line = ""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.line = f"  epoch {state.epoch:.3g}: training loss {float(logs['loss']):.4f}"
            if args.eval_strategy == "no":
                self.show(self.line)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        value = (metrics or {}).get(f"eval_{self.metric}")
        if value is not None:
            self.show(f"{self.line}, {self.metric} {value:.4f} on the selection rows")


class StepBar(ProgressCallback):
    """The progress bar of transformers, without its lines of raw numbers."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        pass


def make_trainer(model: nn.Module, arguments: TrainingArguments, collator: Any, **options: Any) -> Trainer:
    """A Trainer that computes the metrics of the task and shows nothing by itself.

    Args:
        model: The model.
        arguments: The Trainer's arguments.
        collator: Pads rows into a batch.
        options: More options for the Trainer: data sets and callbacks.

    Returns:
        The Trainer.
    """
    trainer = JointTrainer(
        model=model,
        args=arguments,
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


def training_arguments(job: TrainingJob, model: nn.Module, samples: int, metric: str | None) -> TrainingArguments:
    """The arguments of the Trainer that trains.

    Args:
        job: The job.
        model: The model, made ready to be trained.
        samples: The number of training rows.
        metric: What the best checkpoint is chosen by; None takes the last one.

    Returns:
        The arguments.
    """
    more = shared_arguments(job)
    if metric is not None:
        more |= {
            "eval_strategy": "epoch",
            "load_best_model_at_end": True,
            "metric_for_best_model": f"eval_{metric}",
            "greater_is_better": metric != "loss",
        }
    if job.method != "full":
        # all that is trained takes part in each step, but for experts that get no token
        routed = (p.requires_grad and "expert" in name for name, p in model.named_parameters())
        more["ddp_find_unused_parameters"] = any(routed)
    if job.gradient_checkpointing:
        # not re-entrant: that would need gradients at the bottom of the model, below all layers that are tuned
        more |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    return TrainingArguments(
        output_dir=str(Path(job.output) / CHECKPOINTS),
        num_train_epochs=job.epochs,
        max_steps=job.max_steps,
        gradient_accumulation_steps=job.gradient_accumulation,
        learning_rate=job.peak_learning_rate,
        weight_decay=job.weight_decay,
        warmup_steps=_warmup_steps(job, samples),
        max_grad_norm=job.max_grad_norm,
        save_strategy="epoch",
        save_total_limit=1,
        logging_strategy="epoch",
        **more,
    )


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

    Args:
        outputs: Logits (N, classes), or predicted amounts (N, 1) or (N,).
        targets: Class ids (N,), or amounts (N,) of a floating type.

    Returns:
        For classes: `accuracy`; `f1` of the second class if there are two (as GLUE counts it for MRPC), else the plain
        mean of the F1 of all classes; `matthews`, the Matthews correlation. For amounts: `pearson` and `spearman`
        correlation, 0 where all predictions are equal and none is defined.

    Raises:
        ValueError: The outputs are not all finite.

    Example:

        >>> compute_metrics(np.array([[2.0, 1.0], [0.0, 1.0]]), np.array([0, 1]))
        {'accuracy': 1.0, 'f1': 1.0, 'matthews': 1.0}
    """
    if not np.isfinite(outputs).all():
        raise ValueError("The model's outputs are not finite numbers: training diverged. Lower --learning-rate.")
    if np.issubdtype(targets.dtype, np.floating):
        return _compare_amounts(outputs.reshape(len(targets)), targets)
    return _compare_classes(outputs.argmax(-1), targets, classes=outputs.shape[-1])


def require_metrics() -> None:
    """Make sure that the metrics can be computed, before anything takes time.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    if find_spec("sklearn") is None:
        raise ImportError("The metrics are scikit-learn's, which is not installed: pip install scikit-learn")


def _warmup_steps(job: TrainingJob, samples: int) -> int:
    per_step = job.batch_size * job.gradient_accumulation * this_process().num_processes
    steps = job.max_steps if job.max_steps > 0 else job.epochs * -(-samples // per_step)
    return round(job.warmup * steps)


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
