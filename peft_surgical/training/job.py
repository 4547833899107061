"""What one run of training is asked to do, as a record that is checked, saved and read again."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peft_surgical.training.methods import METHODS
from peft_surgical.training.metrics import METRICS
from peft_surgical.training.spafit import make_config


JOB_FILE = "job.json"


@dataclass(frozen=True)
class TrainingJob:
    """What one run of training is asked to do.

    Args:
        model: The base model, a folder or a name on the hub.
        data: The labelled text, see `read_splits`.
        output: The folder to write.
        method: One of `METHODS`.
        subset: Which of the subsets of a data set on the hub.
        encoding: How csv files are encoded.
        text_columns: The one or two columns with text; found if not given.
        label_column: The column with labels; found if not given.
        task: `"classification"` or `"regression"`; told from the labels if not given.
        eval_split: The split that the final numbers are measured on. Without: the validation split, else the test
            split, else a part of the training rows cut off first.
        select_on: What the best checkpoint is chosen on: `"held-out"`, a part of the training rows; `"none"`, the last
            checkpoint is taken and all training rows are trained on; or the name of a split.
        held_out: The fraction of the training rows to cut off, for `select_on="held-out"` and for a missing split.
        metric: The metric that the best checkpoint is chosen by; the first of the kind of task if not given.
        top_k: How many layers to tune.
        layers: The layers to tune, in place of a ranking; see `resolve_layers`.
        stack: The stack of layers, for models with several.
        ranking: A file with a ranking made before, in place of a new one.
        samples: The number of training rows that the layers are ranked on.
        score: The score that the layers are ranked by.
        fisher_labels: Labels that the Fisher information is taken at: `"given"`, `"sampled"` or `"exact"`.
        aggregation: How a layer's Fisher information becomes one number.
        head_seeds: Average the ranking over so many freshly drawn heads; 0 takes the head that training starts with.
        preset: For `"spafit"`, one of the paper's models, such as `"SPAFIT-4-9-II"`.
        n1: For `"spafit"`, the last layer of group 1, or the fraction of the depth where it ends; 0.2 if not given.
        n2: Likewise for group 2; 0.4 if not given.
        group_2: What is trained in group 2: `"bitfit"`, or `"norm"` for models without bias terms.
        target_modules: For `"spafit"`, the modules with LoRA, on models whose attention is not known by name.
        lora_r: Rank of LoRA; 8 for `"lora"`, 64 for `"spafit"` if not given.
        lora_alpha: Scale of LoRA, over its rank; 16 or 128 if not given.
        lora_dropout: Dropout in LoRA; 0.1 or 0 if not given.
        epochs: Passes over the training rows.
        max_steps: The most optimizer steps; -1 for as many as the epochs need.
        batch_size: Rows per step and device.
        gradient_accumulation: Batches per optimizer step.
        learning_rate: The largest learning rate; the method's own if not given.
        weight_decay: Weight decay of AdamW.
        warmup: The fraction of all steps over which the learning rate rises; it falls linearly after.
        max_grad_norm: Gradients are scaled down to this norm.
        max_length: The most tokens of a row.
        max_train_samples: The most training rows to use, a random draw.
        seed: Seed of the new head, of all draws and of dropout.
        dtype: Type that the base's weights are loaded in.
        bf16: Compute in bfloat16 where that is safe.
        fp16: Compute in float16 where that is safe.
        gradient_checkpointing: Save memory by computing activations twice.
        keep_checkpoints: Keep the checkpoints after the run.
        report_to: A service that Trainer reports to, such as `"tensorboard"`; none if not given.

    Raises:
        ValueError: An option has a value that it cannot have, or two options contradict each other.

    Example:

        >>> job = TrainingJob(model="m", data="d", output="o", method="last", top_k=3)
        >>> job.peak_learning_rate
        5e-05
    """

    model: str
    data: str
    output: str
    method: str = "surgical"
    subset: str | None = None
    encoding: str = "utf-8"
    text_columns: tuple[str, ...] = ()
    label_column: str | None = None
    task: Literal["classification", "regression"] | None = None
    eval_split: str | None = None
    select_on: str = "held-out"
    held_out: float = 0.1
    metric: str | None = None
    top_k: int | None = None
    layers: str | tuple[int | str, ...] | None = None
    stack: str | None = None
    ranking: str | None = None
    samples: int = 100
    score: str = "fisher"
    fisher_labels: str = "given"
    aggregation: str = "frobenius"
    head_seeds: int = 0
    preset: str | None = None
    n1: int | float | None = None
    n2: int | float | None = None
    group_2: str = "bitfit"
    target_modules: tuple[str, ...] = ()
    lora_r: int | None = None
    lora_alpha: int | None = None
    lora_dropout: float | None = None
    epochs: float = 10
    max_steps: int = -1
    batch_size: int = 16
    gradient_accumulation: int = 1
    learning_rate: float | None = None
    weight_decay: float = 0.01
    warmup: float = 0.06
    max_grad_norm: float = 1.0
    max_length: int = 256
    max_train_samples: int | None = None
    seed: int = 0
    dtype: str = "float32"
    bf16: bool = False
    fp16: bool = False
    gradient_checkpointing: bool = False
    keep_checkpoints: bool = False
    report_to: str | None = None

    def __post_init__(self) -> None:
        _check_one_of("method", self.method, METHODS)
        if self.task is not None:
            _check_one_of("task", self.task, METRICS)
        if self.metric is not None:
            allowed = {name for kind, names in METRICS.items() if self.task in (None, kind) for name in names}
            _check_one_of("metric", self.metric, sorted(allowed) + ["loss"])
        _check_one_of("dtype", self.dtype, ("float32", "bfloat16", "float16", "auto"))
        for name in ("held_out", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{_option(name)} {getattr(self, name)} is no fraction; allowed are 0 to below 1.")
        for name in ("epochs", "batch_size", "gradient_accumulation", "max_length", "samples", "lora_r"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{_option(name)} {value} must be above 0.")
        self._refuse_contradictions()

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate given, else the method's own."""
        return self.learning_rate if self.learning_rate is not None else METHODS[self.method].learning_rate

    @property
    def needs_ranking(self) -> bool:
        """Whether layers are chosen by a ranking."""
        return METHODS[self.method].ranks(self)

    def save(self, folder: str | Path) -> None:
        """Write the job into a folder, as `job.json`."""
        text = json.dumps(dataclasses.asdict(self), indent=2)
        (Path(folder) / JOB_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> TrainingJob:
        """Read the job that wrote a folder.

        Raises:
            ValueError: The folder holds no job.
        """
        file = Path(folder) / JOB_FILE
        if not file.exists():
            raise ValueError(f"{folder} was not written by `peft-surgical train`: it holds no {JOB_FILE}.")
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for name, value in fields.items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return cls(**fields)

    def _refuse_contradictions(self) -> None:
        if self.layers is not None:
            for name in ("top_k", "ranking"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--layers {self.layers} and {_option(name)} both choose the layers. Drop one.")
        if self.method == "spafit":
            chosen = [name for name in ("preset", "n1", "n2", "ranking") if getattr(self, name) is not None]
            if len(chosen) > 1 and chosen != ["n1", "n2"]:
                options = " and ".join(f"{_option(name)} {getattr(self, name)}" for name in chosen)
                raise ValueError(f"{options} choose the groups of layers in different ways. Give one of them.")
            if self.ranking is None:
                make_config(self)
        if self.bf16 and self.fp16:
            raise ValueError("--bf16 and --fp16 both choose a type to compute in. Drop one.")
        own = METHODS[self.method].options
        for field in dataclasses.fields(self):
            users = [name for name, method in METHODS.items() if field.name in method.options]
            if users and field.name not in own and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{_option(field.name)} has no meaning with --method {self.method}; "
                    f"it goes with {', '.join(users)}."
                )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_one_of(name: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise ValueError(f"{_option(name)} {value}: allowed are {', '.join(allowed)}.")
