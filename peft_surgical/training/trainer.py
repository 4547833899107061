"""The Trainer of transformers, set up for a job."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments

from peft_surgical.distributed import shard_by_layer
from peft_surgical.training.folder import CHECKPOINTS
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.metrics import compute_metrics
from peft_surgical.training.processes import runs_on_cpu, this_process


class JointTrainer(Trainer):
    """A Trainer whose checkpoints are complete only when each of the processes has written its part."""

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        this_process().wait_for_everyone()  # the first process writes the last file next


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
        "use_cpu": runs_on_cpu(),
        "disable_tqdm": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }


def _warmup_steps(job: TrainingJob, samples: int) -> int:
    per_step = job.batch_size * job.gradient_accumulation * this_process().num_processes
    steps = job.max_steps if job.max_steps > 0 else job.epochs * -(-samples // per_step)
    return round(job.warmup * steps)
