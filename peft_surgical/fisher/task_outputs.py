"""How the outputs and the labels of the tasks are read that transformers has heads for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.label_distributions import IGNORED, Bernoulli, Categorical, Distribution, Gaussian


class TaskReader(NamedTuple):
    """How the outputs and the labels of a task are read.

    Args:
        distribution: Reads a model's outputs.
        labels: Reads the labels of a batch, (N, S), or None where there are none.
        many_classes: Whether the classes are a vocabulary.
    """

    distribution: Callable[[Any, Batch], Distribution]
    labels: Callable[[Batch], Tensor | None]
    many_classes: bool = False


def find_reader(model: nn.Module) -> TaskReader:
    """The reader of a model's task, which the model's class tells. A model without a config is taken for a classifier.

    Raises:
        ValueError: The class has no known task.

    Example:

        >>> from transformers import BertConfig, BertForMaskedLM
        >>> config = BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> find_reader(BertForMaskedLM(config)).many_classes
        True
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    seq2seq = bool(getattr(config, "is_encoder_decoder", False))
    if name.endswith(("ForCausalLM", "LMHeadModel")) or (name.endswith("ForConditionalGeneration") and not seq2seq):
        return TaskReader(_read_causal, _causal_slots, many_classes=True)
    if name.endswith("ForConditionalGeneration") or name.endswith("ForMaskedLM"):
        return TaskReader(_read_tokens, _token_slots, many_classes=True)
    if name.endswith("ForTokenClassification"):
        return TaskReader(_read_tokens, _token_slots)
    if name.endswith(("ForQuestionAnswering", "ForQuestionAnsweringSimple")):
        return TaskReader(_read_span, _span_slots)
    if name.endswith("ForMultipleChoice"):
        return TaskReader(_read_classes, _class_slots)
    if name.endswith(_CLASSIFIERS):
        kind = getattr(config, "problem_type", None)
        if kind == "regression" or (kind is None and getattr(config, "num_labels", 2) == 1):
            return TaskReader(_read_numbers, _number_slots)
        if kind == "multi_label_classification":
            return TaskReader(_read_yes_or_no, _number_slots)
        return TaskReader(_read_classes, _class_slots)
    if config is None:
        return TaskReader(_read_classes, _class_slots)
    raise ValueError(
        f"{name} has no head for a known task, so log p(y|x) is not defined. Use a model with a head, such as "
        "AutoModelForSequenceClassification, or give log_likelihood=, a function (outputs, batch) -> (N,)."
    )


_CLASSIFIERS = ("ForSequenceClassification", "Classification", "ForNextSentencePrediction")


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _logits(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        return _wide(outputs)
    logits = getattr(outputs, "logits", None)
    logits = outputs[0] if logits is None and isinstance(outputs, tuple) else logits
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"The model returns a {type(outputs).__name__} without logits. Give log_likelihood=, a function "
            "(outputs, batch) -> (N,)."
        )
    return _wide(logits)


def _labels(batch: Batch, name: str = "labels") -> Tensor | None:
    labels = batch.inputs.get(name)
    return labels if isinstance(labels, Tensor) else None


def _read_classes(outputs: Any, batch: Batch) -> Distribution:
    logits = _logits(outputs)
    if logits.shape[:-1] != (len(batch),):
        raise ValueError(
            f"The logits have shape {tuple(logits.shape)} for {len(batch)} samples; needed is ({len(batch)}, "
            "classes). "
            "Give log_likelihood=, a function (outputs, batch) -> (N,)."
        )
    return Categorical(logits[:, None])


def _class_slots(batch: Batch) -> Tensor | None:
    labels = _labels(batch, "next_sentence_label") if "next_sentence_label" in batch.inputs else _labels(batch)
    if labels is not None and labels.is_floating_point():
        raise ValueError(
            f"The labels are {labels.dtype} numbers but the model has classes. Use integers, or a model with "
            "num_labels=1 (regression) or problem_type='multi_label_classification'."
        )
    return None if labels is None else labels.view(len(batch), 1)


def _read_numbers(outputs: Any, batch: Batch) -> Distribution:
    return Gaussian(_logits(outputs).view(len(batch), -1))


def _read_yes_or_no(outputs: Any, batch: Batch) -> Distribution:
    return Bernoulli(_logits(outputs))


def _number_slots(batch: Batch) -> Tensor | None:
    labels = _labels(batch)
    return None if labels is None else _wide(labels.view(len(batch), -1))


def _read_tokens(outputs: Any, batch: Batch) -> Distribution:
    return Categorical(_logits(outputs))


def _token_slots(batch: Batch) -> Tensor | None:
    return _labels(batch)


def _read_causal(outputs: Any, batch: Batch) -> Distribution:
    return Categorical(_logits(outputs)[:, :-1])


def _causal_slots(batch: Batch) -> Tensor | None:
    labels = _labels(batch)
    return None if labels is None else labels[:, 1:]


def _read_span(outputs: Any, batch: Batch) -> Distribution:
    logits = torch.stack([_wide(outputs.start_logits), _wide(outputs.end_logits)], 1)
    mask = batch.inputs.get("attention_mask")
    if isinstance(mask, Tensor):  # padding is no answer, or the likelihood would depend on the other samples
        logits = logits.masked_fill(~mask[:, None].bool(), -math.inf)
    return Categorical(logits)


def _span_slots(batch: Batch) -> Tensor | None:
    start, end = _labels(batch, "start_positions"), _labels(batch, "end_positions")
    if start is None or end is None:
        return None
    labels = torch.stack([start.view(-1), end.view(-1)], 1)
    length = batch.inputs["input_ids"].shape[1]
    return labels.where((labels >= 0) & (labels < length), IGNORED)  # an answer that was cut off, as in transformers
