"""One run of training on transformers' Trainer: rank, tune, choose, measure and save."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peft import get_peft_model
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback, set_seed

from peft_surgical.distributed import this_process
from peft_surgical.layers import unwrap
from peft_surgical.methods.report import tuning_report
from peft_surgical.methods.rotate import RotateLayers
from peft_surgical.methods.rounding import round_stochastically
from peft_surgical.ranking.rank import LayerRanking
from peft_surgical.training.auto import try_layers
from peft_surgical.training.card import METRICS_FILE, RANKING_FILE, check_folder, check_rows, push, write_model_card
from peft_surgical.training.checkpoints import (
    CHECKPOINTS,
    checkpoint_folders,
    is_at_end,
    newest_checkpoint,
    remove_checkpoints,
)
from peft_surgical.training.common import count_steps, is_decoder
from peft_surgical.training.data import describe_rows
from peft_surgical.training.evaluation import majority, make_trainer, precision_restored, shared_arguments
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.methods import AUTO, METHODS
from peft_surgical.training.options import CAUSAL_LM, LOWER_IS_BETTER, write_text
from peft_surgical.training.prepare import prepare, rank
from peft_surgical.training.progress import LossOfEpochs, ProgressLines, make_results


class TrainingRun:
    """One run of a job, step by step: `rank`, `adapt`, `fit`, `finish`. `train` takes all of them.

    A run that is resumed and was finished already has its results as `finished`, and no steps to take. The callbacks
    go to the Trainer, to show progress.
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
        self.finished = check_folder(job, resume=resume, overwrite=overwrite)
        if self.finished is not None:
            return
        self.prepared = prepare(job)
        self.is_language = self.prepared.task.kind == CAUSAL_LM
        self.metric = job.metric_for(self.prepared.task.kind)
        self.learning_rate = job.learning_rate_for(self.is_language or is_decoder(self.prepared.model.config))
        METHODS[job.method].check(job.method_options, self.prepared.model)
        self.total_parameters = sum(p.numel() for p in self.prepared.model.parameters())
        self.majority = majority(self.prepared.parts.evaluation, self.prepared.task.labels)
        self.ranking: LayerRanking | None = None
        self.tried: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        rows = describe_rows(self.prepared.task, self.prepared.parts)
        if resume:
            check_rows(self.folder, rows)
        if this_process().is_main_process:
            if overwrite:
                shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / METRICS_FILE).unlink(missing_ok=True)  # of a run that is to be longer
            job.save(self.folder, rows)
        this_process().wait_for_everyone()
        self.checkpoint = newest_checkpoint(self.folder / CHECKPOINTS) if resume else None

    def rank(self, *, progress: bool = True) -> LayerRanking | None:
        """Rank the layers, if the method needs a ranking, or read the one that the job names; it is kept in the job's
        folder."""
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

    def adapt(self) -> nn.Module:
        """Make the model ready to be trained by the job's method; `rank` comes before."""
        job, model = self.job, self.prepared.model
        if self.is_language:
            set_seed(job.seed)  # as TRL does before it makes an adapter
        task_type = "CAUSAL_LM" if self.is_language else "SEQ_CLS"
        shared = {"task_type": task_type, "modules_to_save": self.prepared.head}
        config = METHODS[job.method].configure(model, job.method_options, self.ranking, shared)
        if config is not None:
            model = get_peft_model(model, config, autocast_adapter_dtype=not job.stochastic_rounding)
        dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
        if job.stochastic_rounding and "bfloat16" not in dtypes:
            raise ValueError(
                f"--stochastic-rounding is for values in bfloat16; those that are trained are in {', '.join(dtypes)}. "
                "Add --dtype bfloat16, or drop it."
            )
        self.model = model
        self.report = tuning_report(unwrap(model))  # before the weights are sharded
        return self.model

    @property
    def tuned_layers(self) -> dict[str, list[int]]:
        """The layers with anything that is trained, by stack."""
        layers: dict[str, list[int]] = {}
        for row in self.report.rows:
            if row.index is not None:
                layers.setdefault(row.stack, []).append(row.index)
        return layers

    @precision_restored()
    def fit(self, begin: Callable[[TrainingRun], object] = lambda run: None) -> None:
        """Train, with a checkpoint after each epoch, and end with the best one. `begin` is called with the run before
        it trains; with `layers="auto"` with the run of each choice."""
        if self.job.layers == AUTO:
            try_layers(self, begin)
            return
        begin(self)
        started = time.perf_counter()
        if not hasattr(self, "model"):
            self.adapt()
        self.trainer = self.make_trainer(self.metric if self.prepared.parts.selection else None)
        if self.checkpoint and is_at_end(self.checkpoint, count_steps(self.job, len(self.trainer.train_dataset))):
            self.trainer.args.num_train_epochs, self.trainer.args.max_steps = 0, -1
        self.trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
        self.seconds["train"] = time.perf_counter() - started

    def finish(self) -> dict[str, Any]:
        """Measure on the evaluation rows, save the model, its card and `metrics.json`, and give what this holds."""
        started = time.perf_counter()
        evaluation = self.prepared.encode(self.prepared.parts.evaluation)
        measured = self.trainer.evaluate(evaluation, metric_key_prefix="final")
        self.seconds["evaluate"] = time.perf_counter() - started
        beside: dict[str, Any] = {}
        if self.is_language:
            from peft_surgical.training.language import measure_beside

            beside = measure_beside(self, evaluation)
        beside |= {"tried": self.tried} if self.tried else {}
        self.trainer.save_model(str(self.folder))
        results = make_results(self, measured, beside)
        if self.trainer.is_world_process_zero():
            if self.job.method == "full":
                self.prepared.tokenizer.save_pretrained(self.folder)
            (self.folder / "training_args.bin").unlink(missing_ok=True)
            write_model_card(self, results)
            write_text(self.folder / METRICS_FILE, json.dumps(results, indent=2) + "\n")
            for place in [] if self.job.keep_checkpoints else checkpoint_folders(self.folder):
                remove_checkpoints(place)
        this_process().wait_for_everyone()
        return results

    def make_trainer(self, metric: str | None = None) -> Any:
        """The Trainer of the adapted model, which chooses its best checkpoint by a metric if there is one."""
        prepared, selection = self.prepared, self.prepared.parts.selection
        arguments = training_arguments(self.job, self.model, metric, self.learning_rate)
        callbacks = [*self.callbacks, LossOfEpochs()]
        if metric is not None and self.job.early_stopping is not None:
            callbacks.append(EarlyStoppingCallback(self.job.early_stopping))
        if self.job.rotate_every is not None:
            callbacks.append(RotateLayers(self.job.rotate_layers, self.job.rotate_every, seed=self.job.seed))
        options = {"eval_dataset": selection and prepared.encode(selection), "callbacks": callbacks}
        if self.is_language:
            from peft_surgical.training.language import make_language_trainer

            trainer: Any = make_language_trainer(
                self.job, self.model, prepared.tokenizer, arguments, prepared.train, **options
            )
        else:
            trainer = make_trainer(self.model, arguments, prepared.collator, train_dataset=prepared.train, **options)
        for callback in self.callbacks:
            if isinstance(callback, ProgressLines):
                callback.trainer = trainer
        if self.job.stochastic_rounding:
            optimizer, kwargs = trainer.get_optimizer_cls_and_kwargs(trainer.args, self.model)
            trainer.optimizer_cls_and_kwargs = round_stochastically(optimizer, self.job.seed), kwargs
        trainer.args.warmup_steps = round(self.job.warmup * count_steps(self.job, len(trainer.train_dataset)))
        return trainer


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
    if run.finished is None:
        run.rank()
        run.fit()
    results = run.finished or run.finish()
    push(job)
    return results


def training_arguments(job: TrainingJob, model: nn.Module, metric: str | None, rate: float) -> dict[str, Any]:
    """The arguments of the Trainer that trains `model`; without a metric the last checkpoint is taken."""
    more = shared_arguments(job)
    if metric is not None:
        more |= {
            "eval_strategy": "epoch",
            "load_best_model_at_end": True,
            "metric_for_best_model": f"eval_{metric}",
            "greater_is_better": metric not in LOWER_IS_BETTER,
        }
    if job.method != "full":
        # all that is trained takes part in each step, but for experts that get no token
        routed = (p.requires_grad and "expert" in name for name, p in model.named_parameters())
        more["ddp_find_unused_parameters"] = any(routed)
    if job.gradient_checkpointing:
        # not re-entrant: that would need gradients at the bottom of the model, below all layers that are tuned
        more |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    return {
        "output_dir": str(Path(job.output) / CHECKPOINTS),
        "num_train_epochs": job.epochs,
        "max_steps": job.max_steps,
        "gradient_accumulation_steps": job.gradient_accumulation,
        "learning_rate": rate,
        "weight_decay": job.weight_decay,
        "max_grad_norm": job.max_grad_norm,
        "save_strategy": "epoch",
        "save_total_limit": 1 + job.keep_checkpoints,  # with one, Trainer deletes the last at the end for the best
        "logging_strategy": "steps" if job.log_every else "epoch",
        "logging_steps": job.log_every or 500,
        "restore_callback_states_from_checkpoint": job.early_stopping is not None,
        **({"optim": job.optim} if job.optim else {}),
        **more,
    }
