"""What a job starts from: checked options, rows, a tokenizer, and a base model."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import DataCollatorWithPadding
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.training_args import OptimizerNames

from peft_surgical.compat import install
from peft_surgical.distributed import this_process
from peft_surgical.fisher.objective import LABEL_MODES
from peft_surgical.ranking.rank import LayerRanking, rank_layers
from peft_surgical.ranking.scores import AGGREGATIONS, find_score
from peft_surgical.training.card import check_login, make_repository
from peft_surgical.training.common import load_classifier, load_tokenizer, max_length
from peft_surgical.training.data import Parts, Task, read_splits, split_rows
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.methods import AUTO, METHODS
from peft_surgical.training.options import CAUSAL_LM, check_kind, flag
from peft_surgical.training.tasks import encode, make_task


@dataclass
class Prepared:
    """What a job starts from."""

    task: Task
    parts: Parts  # its rows by use, as text
    train: Dataset  # the training rows as the trainer takes them
    encode: Callable[[Dataset], Dataset]  # puts rows of the task so: as token ids, or for TRL, which does that itself
    tokenizer: Any
    model: nn.Module  # the base with a head for the task, on the device that it will run on
    head: list[str] | None = None  # the modules of the model that belong to the task
    collator: DataCollatorWithPadding | None = None  # pads rows into a batch; for a language model TRL does


def prepare(job: TrainingJob) -> Prepared:
    """Read the data and load the model of a job, whose options are checked first."""
    _check_options(job)
    with this_process().main_process_first():
        task = make_task(
            read_splits(job.data, subset=job.subset, encoding=job.encoding),
            text_columns=job.text_columns,
            label_column=job.label_column,
            kind=job.task,
        )
        check_kind(job, task.kind)
        parts = split_rows(task, job)
    if job.layers == AUTO and parts.optimistic:
        raise ValueError(
            f"--layers auto would choose on the rows of --select-on {job.select_on}, which are measured on at the "
            "end. Drop it, or measure on others with --eval-split."
        )
    if job.push_to_hub is not None and this_process().is_main_process:
        make_repository(job.push_to_hub)
    if task.kind == CAUSAL_LM:
        require_trl()
        from peft_surgical.training import language

        tokenizer = language.load_language_tokenizer(job, task)
        put = partial(language.rows_for, tokenizer, task)
        return Prepared(task, parts, put(parts.train), put, tokenizer, language.load_language_model(job))
    require_metrics()
    tokenizer = load_tokenizer(job.model)
    model, head = load_classifier(job.model, task.labels, tokenizer, seed=job.seed, dtype=job.dtype)
    put = partial(encode, tokenizer=tokenizer, max_length=max_length(job, tokenizer, model))
    model.to(this_process().device)
    collator = DataCollatorWithPadding(tokenizer)
    return Prepared(task, parts, put(parts.train), put, tokenizer, model, head, collator)


def _check_options(job: TrainingJob) -> None:
    """Check what the job itself could not without loading libraries."""
    METHODS[job.method].check(job.method_options, None)
    if job.score is not None:
        find_score(job.score)
    for name, allowed in (("fisher_labels", LABEL_MODES), ("aggregation", AGGREGATIONS)):
        if getattr(job, name) not in allowed:
            raise ValueError(f"{flag(name)} {getattr(job, name)}: allowed are {', '.join(allowed)}.")
    if job.ranking is not None:
        try:
            LayerRanking.load(job.ranking)
        except (OSError, ValueError) as error:
            made = "`peft-surgical rank --output FILE` writes one"
            raise ValueError(f"--ranking {job.ranking} names no saved ranking; {made}: {error}") from error
    if job.chat_template is not None and not Path(job.chat_template).is_file():
        raise ValueError(f"--chat-template {job.chat_template}: there is no such file.")
    services = ("none", "all", *INTEGRATION_TO_CALLBACK)
    if job.report_to is not None and job.report_to not in services:
        raise ValueError(f"--report-to {job.report_to}: allowed are {', '.join(services)}.")
    if job.report_to not in (None, "none", "all", *get_available_reporting_integrations()):
        advice = f": {install(job.report_to)}" if job.report_to in ("tensorboard", "wandb") else ""
        raise ValueError(f"--report-to {job.report_to}: it is not installed{advice}.")
    if job.push_to_hub is not None:
        check_login(job.push_to_hub)
    if job.optim is not None:
        _check_optimizer(job.optim)
    try:
        codecs.lookup(job.encoding)
    except LookupError as error:
        raise ValueError(f"--encoding: {error}, such as utf-8 or latin-1.") from None
    if job.fp16 and this_process().device.type == "cpu":
        raise ValueError("--fp16 needs a GPU. Drop it, or use --bf16.")


def _check_optimizer(name: str) -> None:
    allowed = [optimizer.value for optimizer in OptimizerNames]
    if name not in allowed:
        raise ValueError(f"--optim {name}: transformers has none of this name; allowed are {', '.join(allowed)}.")
    if "bnb" in name or ("8bit" in name and "torch" not in name):  # adamw_torch_8bit is of torchao
        if find_spec("bitsandbytes") is None:
            raise ImportError(f"--optim {name} is of bitsandbytes, which is not installed: pip install bitsandbytes")
        if this_process().device.type == "cpu":
            raise ValueError(f"--optim {name} needs a GPU. Drop it.")


def require_metrics() -> None:
    """Make sure that the metrics can be computed, before anything takes time."""
    if find_spec("sklearn") is None:
        raise ImportError("The metrics are scikit-learn's, which is not installed: pip install scikit-learn")


def require_trl() -> None:
    """Make sure that language models can be trained, before anything takes time."""
    if find_spec("trl") is None:
        raise ImportError('Language models are trained with TRL, which is not installed: pip install "trl>=1.16"')


def rank(prepared: Prepared, job: TrainingJob, *, progress: bool = True) -> LayerRanking:
    """Rank the layers of a job's model on its training rows; the ranking is the same on all processes."""
    train, collator = prepared.train, prepared.collator
    if prepared.task.kind == CAUSAL_LM:
        from peft_surgical.training.language import encode_language

        train, collator = encode_language(job, prepared.model, prepared.tokenizer, train)
    return rank_layers(
        prepared.model,
        train,
        num_samples=job.samples,
        score=job.score or "fisher",
        labels=job.fisher_labels,
        aggregation=job.aggregation,
        batch_size=job.batch_size,
        data_collator=collator,
        head_seeds=job.head_seeds,
        seed=job.seed,
        stack=job.stack,
        progress=progress,
    )
