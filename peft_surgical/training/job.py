"""What one run of training is asked to do: a record that is checked, saved and read again.

Each option is declared once, here; the command line is built from it. So nothing heavy is imported.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from peft_surgical.training.methods import METHODS
from peft_surgical.training.options import (
    CAUSAL_LM,
    LABELLED,
    METRICS,
    Option,
    check_metric,
    check_options,
    methods_with,
    options_of,
    write_text,
)


JOB_FILE = "job.json"
CONFIG_FILE = "run.yaml"
OWN_PLACES = ("output", "push_to_hub")  # where another run would write over this one


_MODEL, _DATA, _METHOD, _RANKING, _CHOICE, _TRAINING, _RUN = (
    partial(Option, panel=panel)
    for panel in ("Model", "Data", "Method", "Ranking", "Choosing and measuring", "Training", "The run")
)
_METHODS = "; ".join(f"{name}: {method.about}" for name, method in METHODS.items())
_RATES = ", ".join(f"{name} {method.rates}" for name, method in METHODS.items())
_LANGUAGE = partial(Option, panel="Language models", kinds=(CAUSAL_LM,))
_METRICS = "; ".join(", ".join(names) for names in METRICS.values())


@dataclass(frozen=True)
class TrainingJob:
    """What one run of training is asked to do. Each field is an option of `peft-surgical train`.

    Beside each field stands what it means, as `peft-surgical train --help` shows it.

    Raises:
        ValueError: An option has a value that is not allowed, or two options contradict each other.

    Example:

        >>> job = TrainingJob(model="m", data="d", output="o", method="last", top_k=3)
        >>> job.learning_rate_for(decoder=False), job.learning_rate_for(decoder=True)
        (0.0001, 5e-05)
    """

    model: Annotated[str, Option("Base model: a folder, or a name on the hub.")]
    data: Annotated[
        str,
        Option(
            "Labelled text, or text for a language model: a .parquet, .csv, .tsv or .jsonl file, a folder with one "
            "such file per split, or the name of a data set on the hub."
        ),
    ]
    output: Annotated[str, Option("The folder to write.")]
    method: Annotated[str, Option(f"What to train. {_METHODS}.", choices=METHODS)] = "surgical"
    top_k: Annotated[
        int | None,
        Option("How many layers to tune. Default: 40 % of them for surgical, a quarter for last.", positive=True),
    ] = None
    layers: Annotated[
        str | tuple[int | str, ...] | None,
        Option(
            "The layers to tune: 3,5,-1 or 4-9 or spread:5, middle:5, last:25%; or auto: layers at equal distances, "
            "every other and the middle ones in turn, and what is best on held-out rows is kept. Default: layers at "
            "equal distances."
        ),
    ] = None
    rotate_every: Annotated[
        int | None,
        _METHOD(
            "Train the layers in turns of so many steps, a few at a time. Default of --layers: all.", positive=True
        ),
    ] = None
    rotate_layers: Annotated[int, _METHOD("How many layers a turn trains.", positive=True)] = 2
    preset: Annotated[str | None, _METHOD("A SPAFIT model of the paper, such as SPAFIT-4-9-II.")] = None
    n1: Annotated[
        int | float | None,
        _METHOD("SPAFIT: the last frozen layer, or the fraction of the depth up to it. Default: 0.2."),
    ] = None
    n2: Annotated[
        int | float | None,
        _METHOD("SPAFIT: the last layer whose bias terms are trained, or a fraction. Default: 0.4."),
    ] = None
    group_2: Annotated[
        str, _METHOD("SPAFIT: what is trained in the middle: bitfit, or norm for models without bias terms.")
    ] = "bitfit"
    target_modules: Annotated[
        tuple[str, ...],
        _METHOD(
            "A module of the layers that alone is tuned, e.g. self_attn; with SPAFIT one that gets LoRA, on models "
            "whose attention is not known by name. May be repeated.",
            names=("--target-module",),
        ),
    ] = ()
    columns: Annotated[
        int | None, _METHOD("How many input columns of each linear module to train. Default: 32.", positive=True)
    ] = None
    lora_r: Annotated[int | None, _METHOD("Rank of LoRA. Default: lora 8, spafit 64.", positive=True)] = None
    lora_alpha: Annotated[int | None, _METHOD("Scale of LoRA. Default: lora 16, spafit 128.", positive=True)] = None
    lora_dropout: Annotated[float | None, _METHOD("Dropout in LoRA. Default: lora 0.1, spafit 0.", fraction=True)] = (
        None
    )
    ranking: Annotated[str | None, _RANKING("A saved ranking to use in place of a new one.")] = None
    samples: Annotated[int, _RANKING("Training rows to rank the layers on.", positive=True)] = 100
    score: Annotated[
        str | None,
        _RANKING(
            "What the layers are ranked by: fisher, or another registered score. `train` ranks where it is given."
        ),
    ] = None
    fisher_labels: Annotated[
        str,
        _RANKING("Labels the Fisher information is taken at: given, sampled (drawn from the model), or exact (all)."),
    ] = "given"
    aggregation: Annotated[
        str,
        _RANKING("How a layer's Fisher information becomes one number: frobenius, frobenius_per_tensor, trace, mean."),
    ] = "frobenius"
    head_seeds: Annotated[
        int,
        _RANKING(
            "Average the ranking over this many newly initialised heads, and tell how far the order depends on them; "
            "0: the head that training starts with.",
            kinds=LABELLED,
            not_negative=True,
        ),
    ] = 0
    stack: Annotated[str | None, _RANKING("Which stack of layers, for models with several (encoder, decoder).")] = None
    subset: Annotated[str | None, _DATA("Which of the subsets of a data set on the hub.")] = None
    encoding: Annotated[str, _DATA("How csv files are encoded.")] = "utf-8"
    text_columns: Annotated[
        tuple[str, ...],
        _DATA("Column with the text; twice for two texts. Found if not given.", names=("--text-column",)),
    ] = ()
    label_column: Annotated[str | None, _DATA("Column with the label. Found if not given.", kinds=LABELLED)] = None
    task: Annotated[
        str | None,
        _DATA(f"{', '.join(METRICS)}. Inferred from the columns and labels if not given.", choices=METRICS),
    ] = None
    max_length: Annotated[
        int | None, Option("Texts are cut to this many tokens. Default: 256, language models 1024.", positive=True)
    ] = None
    max_train_samples: Annotated[int | None, _DATA("Train on this many rows, a random draw.", positive=True)] = None
    eval_split: Annotated[
        str | None,
        _CHOICE(
            "The split that the final numbers are measured on. Default: validation, else test, else a part cut off "
            "the training rows."
        ),
    ] = None
    select_on: Annotated[
        str,
        _CHOICE(
            "What the best checkpoint is chosen on: held-out (a part of the training rows), none (take the last "
            "checkpoint), or the name of a split."
        ),
    ] = "held-out"
    held_out: Annotated[float, _CHOICE("The part of the training rows to hold out.", fraction=True)] = 0.1
    metric: Annotated[str | None, _CHOICE(f"The metric to choose by: {_METRICS}; or loss. Default: the first.")] = None
    early_stopping: Annotated[
        int | None, _CHOICE("Stop when so many epochs in a row have not been better than the best.", positive=True)
    ] = None
    epochs: Annotated[float, Option("Passes over the training rows.", positive=True)] = 10
    max_steps: Annotated[int, _TRAINING("The most optimizer steps; -1: as many as the epochs need.")] = -1
    batch_size: Annotated[int, Option("Rows per batch and device.", positive=True)] = 16
    gradient_accumulation: Annotated[int, _TRAINING("Batches per optimizer step.", positive=True)] = 1
    learning_rate: Annotated[
        float | None, Option(f"Default by method: {_RATES}.", names=("--learning-rate", "--lr"), positive=True)
    ] = None
    weight_decay: Annotated[float, _TRAINING("Weight decay of AdamW.", not_negative=True)] = 0.01
    warmup: Annotated[float, _TRAINING("The part of the steps in which the learning rate rises.", fraction=True)] = (
        0.06
    )
    optim: Annotated[
        str | None,
        _TRAINING("Another optimizer of transformers than AdamW, such as adamw_bnb_8bit (of bitsandbytes, on a GPU)."),
    ] = None
    max_grad_norm: Annotated[float, _TRAINING("Gradients are cut to this norm; 0: no limit.", not_negative=True)] = 1.0
    bf16: Annotated[bool, _TRAINING("Compute in bfloat16 where safe.")] = False
    fp16: Annotated[bool, _TRAINING("Compute in float16 where safe.")] = False
    gradient_checkpointing: Annotated[bool, _TRAINING("Less memory, more time.")] = False
    dtype: Annotated[
        str,
        _MODEL(
            "Load the base in float32, bfloat16, float16, or auto.",
            choices=("float32", "bfloat16", "float16", "auto"),
        ),
    ] = "float32"
    stochastic_rounding: Annotated[
        bool,
        _TRAINING(
            "Train in the base's bfloat16, without float32 copies: half their memory. Steps are rounded at random, so "
            "that small ones are not lost. With --dtype bfloat16."
        ),
    ] = False
    packing: Annotated[bool, _LANGUAGE("Train on rows put together up to --max-length, without padding.")] = False
    assistant_only_loss: Annotated[
        bool, _LANGUAGE("Learn the assistant's words in a chat alone, not those of the user.")
    ] = False
    chat_template: Annotated[
        str | None, _LANGUAGE("A Jinja file with the chat template, for a tokenizer that has none.")
    ] = None
    load_in_4bit: Annotated[bool, _LANGUAGE("Load the base in 4 bits (NF4, with bitsandbytes).")] = False
    dequantize: Annotated[
        bool, _LANGUAGE("Tune layers of a quantised base in the type that it was quantised from.")
    ] = False
    seed: Annotated[int, _RUN("Seed of the new head and of all draws.", not_negative=True)] = 0
    keep_checkpoints: Annotated[bool, _RUN("Keep the checkpoints after the run, to train longer later.")] = False
    log_every: Annotated[
        int | None,
        _RUN(
            "Show and report the loss every so many steps. Default: each epoch, and in a file or pipe twice a minute.",
            positive=True,
        ),
    ] = None
    report_to: Annotated[
        str | None, _RUN("A service that Trainer reports to: tensorboard, wandb, or another that is installed.")
    ] = None
    push_to_hub: Annotated[
        str | None, _RUN("After training, upload what is saved to this repository of the hub: NAME or OWNER/NAME.")
    ] = None

    def __post_init__(self) -> None:
        check_options(self)

    def learning_rate_for(self, decoder: bool) -> float:
        """The peak learning rate: the one given, else the method's own, on a decoder or on another model."""
        method = METHODS[self.method]
        own = method.decoder_rate if decoder else None
        return next(rate for rate in (self.learning_rate, own, method.learning_rate) if rate is not None)

    @property
    def about(self) -> str:
        """What is trained, in a few words."""
        about, modules = METHODS[self.method].about, " and ".join(self.target_modules)
        return about.replace("weights of", f"weights of {modules} in") if modules else about

    @property
    def method_options(self) -> dict[str, Any]:
        """The fields that only some methods understand, and this one does."""
        return {name: getattr(self, name) for name in METHODS[self.method].options}

    @property
    def needs_ranking(self) -> bool:
        """Whether layers are chosen by a ranking."""
        return bool(self.ranking or self.score)

    def metric_for(self, kind: str) -> str:
        """The metric that the best checkpoint of a kind of task is chosen by, if the one given is of that kind."""
        check_metric(self.metric, [kind], f"for {kind} ")
        return self.metric or METRICS[kind][0]

    def save(self, folder: str | Path, rows: Any = None) -> None:
        """Write the job into a folder, as `job.json`, with what its rows are known by, and what can be run again
        elsewhere as `run.yaml`."""
        import yaml

        fields = dataclasses.asdict(self)
        write_text(Path(folder) / JOB_FILE, json.dumps({**fields, "rows": rows}, indent=2) + "\n")
        given = {name: value for name, value in fields.items() if value not in (None, ()) and name not in OWN_PLACES}
        given = {name: [*value] if isinstance(value, tuple) else value for name, value in given.items()}
        about = f"# peft-surgical train --config {CONFIG_FILE} --output FOLDER\n"
        write_text(Path(folder) / CONFIG_FILE, about + yaml.safe_dump(given, sort_keys=False, default_flow_style=None))

    @classmethod
    def load(cls, folder: str | Path) -> TrainingJob:
        """Read the job that wrote a folder.

        Raises:
            ValueError: The folder holds no job.
        """
        file = Path(folder) / JOB_FILE
        if not Path(folder).is_dir():
            raise ValueError(f"There is no folder {folder}.")
        if not file.exists():
            raise ValueError(f"{folder} was not written by `peft-surgical train`: it holds no {JOB_FILE}.")
        saved = json.loads(file.read_text(encoding="utf-8"))
        saved.pop("rows", None)
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
        if fields.get("method") not in methods_with("score"):
            fields.pop("score", None)  # the default of version 0.1.0
        return cls(**fields)


JOB_OPTIONS = options_of(TrainingJob)
"""The type of each field of `TrainingJob` and its option, by the field's name."""
