"""Load a base model and its tokenizer for a task, and a model that was trained for one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, TaskType
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

from peft_surgical.methods.heads import head_names


ADAPTER_FILE = "adapter_config.json"


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model; one without a padding token pads with its end-of-text token.

    Raises:
        ValueError: There is no such tokenizer.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model}: no tokenizer could be loaded from there: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def load_classifier(
    model: str, labels: Sequence[str], tokenizer: Any, *, seed: int = 0, dtype: str = "float32"
) -> tuple[nn.Module, list[str]]:
    """Load a base model with a head for a task.

    Args:
        model: A folder or a name on the hub.
        labels: Names of the classes; none for regression.
        tokenizer: The tokenizer, which tells the padding token.
        seed: Seed of a new head.
        dtype: Type of the weights, or `"auto"` for the type that they are stored in.

    Returns:
        The model, and the modules that belong to the task: the head, and whatever else the checkpoint has no weights
        for. They have to be trained and saved with the task.

    Raises:
        ValueError: There is no such model.
    """
    names = {str(name): i for i, name in enumerate(labels)}
    options = {"id2label": {i: n for n, i in names.items()}, "label2id": names} if labels else {"num_labels": 1}
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
    """Load what `peft-surgical train` saved: an adapter onto its base model, or a whole model.

    Args:
        folder: The folder that was written.
        base: The base model, a folder or a name on the hub.
        labels: Names of the classes; none for regression.
        tokenizer: The tokenizer.
        dtype: Type of the base's weights.

    Returns:
        The model, ready to predict.
    """
    if not (Path(folder) / ADAPTER_FILE).exists():
        return load_classifier(folder, labels, tokenizer, dtype=dtype)[0].eval()
    model, _ = load_classifier(base, labels, tokenizer, dtype=dtype)
    return PeftModel.from_pretrained(model, folder).eval()


def new_modules(model: nn.Module, keys: Iterable[str]) -> list[str]:
    """The outermost modules all of whose parameters are new.

    Args:
        model: A model.
        keys: The names of its parameters that the checkpoint had no values for.

    Returns:
        Paths of modules, in the order of the model.

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
