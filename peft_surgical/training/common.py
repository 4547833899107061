"""What runs of all kinds have in common: how tokenizers and models are loaded, and the Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, TaskType
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, set_seed
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from peft_surgical.distributed import this_process
from peft_surgical.methods.heads import head_names
from peft_surgical.training.job import TrainingJob


class Diverged(ValueError):
    """Training has led to a model whose outputs are no finite numbers."""

    def __init__(self, what: str):
        super().__init__(f"The model's {what} are not finite numbers: training diverged. Lower --learning-rate.")


class JointCheckpoints(Trainer):
    """A Trainer whose checkpoints are complete only when each of the processes has written its part, and that sums up
    the losses of its steps, of this process alone: who shows them now and then has no others to wait for."""

    sum_of_losses: Any = 0.0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.sum_of_losses = self.sum_of_losses + loss.detach()
        return loss

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        this_process().wait_for_everyone()  # the first process writes the last file next


def max_length(job: TrainingJob, tokenizer: Any, model: nn.Module, default: int = 256) -> int:
    """The most tokens that a row may have: what the job says, but no more than the model has positions for."""
    asked = job.max_length or default
    positions = getattr(model.config, "max_position_embeddings", None) or 0
    return min(asked, tokenizer.model_max_length, positions if positions > 0 else asked)


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model; one without a padding token pads with its end-of-text token."""
    allowed = "allowed are a folder with a model and its tokenizer, and a name on the hub such as bert-base-cased"
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        raise ValueError(f"--model {model}: there is no such folder; {allowed}.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        where = "this folder" if Path(model).is_dir() else "the hub, and there is no such folder here"
        raise ValueError(f"--model {model}: no tokenizer could be loaded from {where}; {allowed}. {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def load_classifier(
    model: str, labels: Sequence[str], tokenizer: Any, *, seed: int = 0, dtype: str = "float32"
) -> tuple[nn.Module, list[str]]:
    """Load a base model with a head for a task, which `seed` draws if it is new. No labels are regression.

    With it come the modules that have to be trained and saved with the task: the head, and whatever else the
    checkpoint has no weights for.
    """
    names = dict(enumerate(map(str, labels)))
    options = {"id2label": names, "label2id": {n: i for i, n in names.items()}} if labels else {"num_labels": 1}
    set_seed(seed)
    try:
        loaded, info = AutoModelForSequenceClassification.from_pretrained(
            model,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            problem_type="single_label_classification" if labels else "regression",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model}: no model could be loaded from there: {error}") from error
    if loaded.config.pad_token_id is None:
        loaded.config.pad_token_id = tokenizer.pad_token_id
    new = {*info["missing_keys"], *(key if isinstance(key, str) else key[0] for key in info["mismatched_keys"])}
    head = head_names(loaded, TaskType.SEQ_CLS)
    return loaded, head + [name for name in new_modules(loaded, new) if name not in head]


def load_trained(
    folder: str, base: str, labels: Sequence[str], tokenizer: Any, *, dtype: str = "float32"
) -> nn.Module:
    """Load what `peft-surgical train` saved, ready to predict: an adapter onto its base model, or a whole model."""
    is_adapter = (Path(folder) / "adapter_config.json").exists()
    model, _ = load_classifier(base if is_adapter else folder, labels, tokenizer, dtype=dtype)
    return (PeftModel.from_pretrained(model, folder) if is_adapter else model).eval()


def is_decoder(config: Any) -> bool:
    """Whether a model's type is made to go on with a text: transformers knows it as a causal language model alone."""
    kind, encoders = config.model_type, MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in encoders and not config.is_encoder_decoder


def new_modules(model: nn.Module, keys: Iterable[str]) -> list[str]:
    """The paths of the outermost modules all of whose parameters are new, that is, among the keys.

    Example:

        >>> model = nn.ModuleDict({"body": nn.Linear(1, 1), "head": nn.Sequential(nn.Linear(1, 1))})
        >>> new_modules(model, ["head.0.weight", "head.0.bias", "body.bias"])
        ['head']
    """
    new = set(keys)
    found: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") for outer in found) or not path:
            continue
        parameters = [f"{path}.{name}" for name, _ in module.named_parameters()]
        if parameters and new.issuperset(parameters):
            found.append(path)
    return found


def count_steps(job: TrainingJob, samples: int) -> float:
    """The steps of a job that trains on so many rows; of the last epoch there may be a part."""
    per_step = job.batch_size * job.gradient_accumulation * this_process().num_processes
    return job.max_steps if job.max_steps > 0 else job.epochs * -(-samples // per_step)
