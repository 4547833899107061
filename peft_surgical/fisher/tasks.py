"""How a task's outputs and labels are read: as a distribution over labels, of N samples with S label slots each.

A slot is a class for a classifier, a token for a language model, the start or the end for a span.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peft_surgical.fisher.batches import Batch, forward_names
from peft_surgical.fisher.squares import widen


IGNORED = -100
"""The label of a slot without one."""


class NoLikelihood(ValueError):
    """A task's log p(y|x) is not known, or is not what the model's own loss is made of."""


class Distribution(ABC):
    """The distribution of a batch's labels, N samples with S slots."""

    shape: torch.Size  # (N, S)
    rank: int  # K, the rows that `exact_rows` has for each slot
    device: torch.device

    @abstractmethod
    def log_prob(self, labels: Tensor) -> Tensor:
        """The log-likelihood of each label, (N, S); 0 for those that are ignored."""

    def mean_loss(self, labels: Tensor, valid: Tensor) -> float:
        """What the models of transformers call the loss of these labels, of those that are valid, (N, S)."""
        return -float((self.log_prob(labels) * valid).sum() / valid.sum())

    @abstractmethod
    def draw(self, uniform: Tensor) -> Tensor:
        """Labels, (N, S), from numbers between 0 and 1, (N, S)."""

    @abstractmethod
    def exact_rows(self) -> Tensor:
        """Values, (K, N, S): the squared gradients of a slot's K values add up to the expectation over its labels."""


class Categorical(Distribution):
    """A class for each slot; logits are (N, S, C)."""

    def __init__(self, logits: Tensor):
        self.logits = logits
        self.shape, self.rank, self.device = logits.shape[:2], logits.shape[2] - 1, logits.device

    def log_prob(self, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(self.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return -losses.view(labels.shape)

    def draw(self, uniform: Tensor) -> Tensor:
        cumulated = self.logits.detach().double().softmax(-1).cumsum(-1)
        return (cumulated < uniform[..., None] * cumulated[..., -1:]).sum(-1).clamp_max(self.logits.shape[-1] - 1)

    def exact_rows(self) -> Tensor:
        possible = self.logits.masked_fill(self.logits.isneginf(), 0)
        return torch.einsum("nskc,nsc->kns", class_factors(self.logits.detach()), possible)


class Gaussian(Distribution):
    """A number for each slot, with variance 1; means are (N, S)."""

    def __init__(self, mean: Tensor):
        self.mean, self.shape, self.rank, self.device = mean, mean.shape, 1, mean.device

    def log_prob(self, labels: Tensor) -> Tensor:
        return -0.5 * (labels.to(self.mean.dtype) - self.mean).square() - 0.5 * math.log(2 * math.pi)

    def mean_loss(self, labels: Tensor, valid: Tensor) -> float:
        return 2 * super().mean_loss(labels, valid) - math.log(2 * math.pi)  # the mean square

    def draw(self, uniform: Tensor) -> Tensor:
        return self.mean.detach() + torch.special.ndtri(uniform).to(self.mean.dtype)

    def exact_rows(self) -> Tensor:
        return self.mean[None]


class Bernoulli(Distribution):
    """Yes or no for each slot; logits are (N, S)."""

    def __init__(self, logits: Tensor):
        self.logits, self.shape, self.rank, self.device = logits, logits.shape, 1, logits.device

    def log_prob(self, labels: Tensor) -> Tensor:
        labels = labels.to(self.logits.dtype)
        return -F.binary_cross_entropy_with_logits(self.logits, labels, reduction="none")

    def draw(self, uniform: Tensor) -> Tensor:
        return (uniform < self.logits.detach().double().sigmoid()).to(self.logits.dtype)

    def exact_rows(self) -> Tensor:
        p = self.logits.detach().sigmoid()
        return ((p * (1 - p)).sqrt() * self.logits)[None]


def class_factors(logits: Tensor) -> Tensor:
    """Factors of the covariance of a softmax: diag(p) - p p^T = sum_k f_k f_k^T with C - 1 vectors f_k.

    f_k = sqrt(p_k t_{k+1} / t_k) (e_k - sum_{j>k} q_j e_j), with t_k = p_k + ... + p_C and q_j = p_j / t_{k+1} the
    distribution over the classes after k. Of logits (..., C) they are (..., C - 1, C).
    """
    classes = logits.shape[-1]
    log_p = logits.log_softmax(-1)
    log_tail = log_p.flip(-1).logcumsumexp(-1).flip(-1)
    scale = ((log_p + log_tail.roll(-1, -1) - log_tail)[..., :-1] / 2).exp().nan_to_num()
    after = torch.ones(classes, classes, dtype=torch.bool, device=logits.device).triu(1)[:-1]
    q = logits[..., None, :].masked_fill(~after, -math.inf).softmax(-1).nan_to_num()
    return scale[..., None] * (torch.eye(classes, dtype=logits.dtype, device=logits.device)[:-1] - q)


class TaskReader(NamedTuple):
    """How the outputs and the labels of a task are read."""

    distribution: Callable[[Any, Batch], Distribution]
    labels: Callable[[Batch], Tensor | None]  # (N, S), or None where there are none
    many_classes: bool = False  # a vocabulary
    shown: Callable[[Batch], Tensor | None] = lambda batch: None
    """The slots that the attention mask does not hide, (N, S), or None where it says nothing. A label at a hidden one
    does not count."""


def find_reader(model: nn.Module) -> TaskReader:
    """The reader of a model's task, which the model's class tells. A model without a config is taken for a
    classifier."""
    name, config = type(model).__name__, getattr(model, "config", None)
    seq2seq = "decoder_input_ids" in (forward_names(model) or ())
    if name.endswith(("ForCausalLM", "LMHeadModel")) or (name.endswith("ForConditionalGeneration") and not seq2seq):
        return NEXT_TOKENS
    if name.endswith(("ForConditionalGeneration", "EncoderDecoderModel")):
        return TaskReader(
            _read_tokens, _labels, many_classes=True, shown=partial(_shown, name="decoder_attention_mask")
        )
    if name.endswith("ForMaskedLM"):
        return TOKENS
    if name.endswith("ForTokenClassification"):
        return TaskReader(_read_tokens, _labels, shown=_shown)
    if name.endswith(("ForQuestionAnswering", "ForQuestionAnsweringSimple")):
        return TaskReader(_read_span, _span_slots)
    if name.endswith("ForMultipleChoice"):
        return TaskReader(_read_classes, _class_slots)
    if name.endswith(("Classification", "ForNextSentencePrediction")):
        kind = getattr(config, "problem_type", None)
        if kind == "regression" or (kind is None and getattr(config, "num_labels", 2) == 1):
            return TaskReader(_read_numbers, _number_slots)
        if kind == "multi_label_classification":
            return TaskReader(lambda outputs, batch: Bernoulli(_logits(outputs)), _number_slots)
        return TaskReader(_read_classes, _class_slots)
    if config is None:
        return TaskReader(_read_classes, _class_slots)
    raise NoLikelihood(
        f"{name} has no head for a known task, so log p(y|x) is not defined. Use a model with a head, such as "
        "AutoModelForSequenceClassification, or give log_likelihood=, a function (outputs, batch) -> (N,)."
    )


def _logits(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        return widen(outputs)
    logits = getattr(outputs, "logits", None)
    logits = outputs[0] if logits is None and isinstance(outputs, tuple) else logits
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"The model returns a {type(outputs).__name__} without logits. Give log_likelihood=, a function "
            "(outputs, batch) -> (N,)."
        )
    return widen(logits)


def _labels(batch: Batch, name: str = "labels") -> Tensor | None:
    labels = batch.inputs.get(name)
    return labels if isinstance(labels, Tensor) else None


def _read_classes(outputs: Any, batch: Batch) -> Distribution:
    logits = _logits(outputs)
    if logits.shape[:-1] != (len(batch),):
        raise ValueError(
            f"The logits have shape {tuple(logits.shape)} for {len(batch)} samples; needed is ({len(batch)}, "
            "classes). Give log_likelihood=, a function (outputs, batch) -> (N,), or 'loss' for the model's own."
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


def _number_slots(batch: Batch) -> Tensor | None:
    labels = _labels(batch)
    return None if labels is None else widen(labels.view(len(batch), -1))


def _read_tokens(outputs: Any, batch: Batch) -> Distribution:
    return Categorical(_logits(outputs))


def _read_causal(outputs: Any, batch: Batch) -> Distribution:
    return Categorical(_logits(outputs)[:, :-1])


def _causal_slots(batch: Batch) -> Tensor | None:
    labels = _labels(batch)
    return None if labels is None else labels[:, 1:]


def _shown(batch: Batch, name: str = "attention_mask") -> Tensor | None:
    mask = batch.inputs.get(name)
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _shown_pairs(batch: Batch) -> Tensor | None:
    """A token is predicted from the one before it: what the mask hides is no context, and the first has none."""
    mask = _shown(batch)
    return None if mask is None else mask[:, 1:] & mask[:, :-1]


def _read_span(outputs: Any, batch: Batch) -> Distribution:
    logits = torch.stack([widen(outputs.start_logits), widen(outputs.end_logits)], 1)
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


NEXT_TOKENS = TaskReader(_read_causal, _causal_slots, many_classes=True, shown=_shown_pairs)
"""A language model that predicts each token from those before it."""
TOKENS = TaskReader(_read_tokens, _labels, many_classes=True, shown=_shown)
"""One whose labels stand at their logits."""
