"""What is differentiated: log p(y|x) of each sample, for the tasks that transformers has heads for.

A model's outputs are read as a *distribution* over label slots: one slot for a class, one for each token of a text,
two for a span. From it come the rows of an *objective*, a tensor (K, N): the sum over its K rows of the squared
gradients is what sample n adds to the diagonal Fisher (Lodha et al. 2023, equation 1).

- given: log p(y|x) of the sample's own label, K = 1.
- sampled: log p(y|x) of D labels drawn from the model, each divided by sqrt(D), K = D.
- exact: the expectation over y of a C-class softmax. The covariance of its logit gradients, diag(p) - p p^T, has rank
  C - 1, so that K = C - 1 rows suffice.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peft_surgical.batches import Batch
from peft_surgical.layers import unwrap


LABEL_MODES = ("given", "sampled", "exact")
UNITS = ("sequence", "token")

MAX_EXACT_ROWS = 128
"""Backward passes to a batch up to which exact labels are computed."""

IGNORED = -100


class Rows(NamedTuple):
    """What is differentiated for a batch.

    Args:
        values: (K, N). The squared gradients of a sample's K values add up.
        counts: (N,). What each sample adds to the divisor: 1, or its number of labelled tokens.
    """

    values: Tensor
    counts: Tensor


Objective = Callable[[Any, Batch], Rows]


class Distribution(ABC):
    """The distribution of a batch's labels, N samples with S slots.

    Args:
        shape: (N, S).
        rank: K, the rows that `exact_rows` has for each slot.
        device: Where it is.
    """

    shape: torch.Size
    rank: int
    device: torch.device

    @abstractmethod
    def log_prob(self, labels: Tensor) -> Tensor:
        """The log-likelihood of each label, (N, S); 0 for those that are ignored."""

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
    distribution over the classes after k.

    Args:
        logits: (..., C).

    Returns:
        (..., C - 1, C).

    Example:

        >>> logits = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
        >>> f, p = class_factors(logits), logits.softmax(-1)
        >>> torch.allclose(f.T @ f, p.diag() - p[:, None] * p)
        True
    """
    classes = logits.shape[-1]
    log_p = logits.log_softmax(-1)
    log_tail = log_p.flip(-1).logcumsumexp(-1).flip(-1)
    scale = ((log_p + log_tail.roll(-1, -1) - log_tail)[..., :-1] / 2).exp().nan_to_num()
    after = torch.ones(classes, classes, dtype=torch.bool, device=logits.device).triu(1)[:-1]
    q = logits[..., None, :].masked_fill(~after, -math.inf).softmax(-1).nan_to_num()
    return scale[..., None] * (torch.eye(classes, dtype=logits.dtype, device=logits.device)[:-1] - q)


@dataclass
class TaskObjective:
    """The objective of a task.

    Args:
        distribution: Reads a model's outputs.
        labels: Where labels come from: `"given"`, `"sampled"` or `"exact"`.
        unit: `"sequence"`: the labels of a sample are one outcome, their log-likelihoods add up. `"token"`: each label
            is an outcome of its own, and the mean is over labels.
        draws: Labels drawn for each sample, for `"sampled"`.
        seed: Seed of the draws. A sample gets the same ones whatever it shares a batch with.
        slots: Reads the labels of a batch, (N, S), or None where there are none.
        many_classes: Whether the classes are a vocabulary.
    """

    distribution: Callable[[Any, Batch], Distribution]
    labels: str
    unit: str
    draws: int
    seed: int
    slots: Callable[[Batch], Tensor | None]
    many_classes: bool = False

    def __call__(self, outputs: Any, batch: Batch) -> Rows:
        distribution = self.distribution(outputs, batch)
        labels = self.slots(batch)
        if labels is None and (self.labels == "given" or self.many_classes):
            raise ValueError(
                f"labels={self.labels!r} needs labels in the data, and it has the columns {sorted(batch.inputs)}. Add "
                "a column 'labels', or use labels='sampled' or 'exact' for a task with one label to a sample."
            )
        valid = _valid(distribution, labels, batch)
        values = self._values(distribution, labels, valid, batch)  # (K, N, S)
        if self.unit == "token":
            values = values[..., valid.any(0)].permute(2, 0, 1).flatten(0, 1)
            return Rows(values, valid.sum(1))
        if self.labels == "exact":
            values = values[..., valid.any(0)].permute(2, 0, 1).flatten(0, 1)
            return Rows(values, torch.ones(len(batch), device=values.device))
        return Rows(values.sum(-1), torch.ones(len(batch), device=values.device))

    def _values(self, distribution: Distribution, labels: Tensor | None, valid: Tensor, batch: Batch) -> Tensor:
        if self.labels == "exact":
            self._check_exact(distribution, valid)
            return distribution.exact_rows() * valid
        if self.labels == "given":
            assert labels is not None
            return distribution.log_prob(labels)[None] * valid
        uniform = uniform_numbers(self.seed, batch.index, self.draws, valid)
        log_p = [distribution.log_prob(distribution.draw(u)) * valid for u in uniform]
        return torch.stack(log_p) / math.sqrt(self.draws)

    def _check_exact(self, distribution: Distribution, valid: Tensor) -> None:
        advice = "Use labels='sampled' with draws=..., whose mean over many draws is the same."
        if self.many_classes:
            raise ValueError(f"labels='exact' would take a backward pass for each word of the vocabulary. {advice}")
        rows = int(valid.any(0).sum()) * distribution.rank
        if rows > MAX_EXACT_ROWS:
            raise ValueError(
                f"labels='exact' would take {rows} backward passes for each batch; at most {MAX_EXACT_ROWS} are made. "
                f"{advice}"
            )


def uniform_numbers(seed: int, index: Sequence[int], draws: int, valid: Tensor) -> Tensor:
    """Numbers between 0 and 1 that depend on the seed and the sample alone, not on its batch or padding.

    Args:
        seed: The seed.
        index: The number of each sample, N.
        draws: D.
        valid: Which slots need one, (N, S).

    Returns:
        (D, N, S) float64.
    """
    out = torch.full((draws, *valid.shape), 0.5, dtype=torch.float64)
    for n, (sample, used) in enumerate(zip(index, valid.cpu(), strict=True)):
        numbers = random.Random(f"{seed}/{sample}")
        count = draws * int(used.sum())
        drawn = torch.tensor([numbers.random() for _ in range(count)], dtype=torch.float64)
        out[:, n, used] = drawn.view(draws, -1)
    return out.clamp(1e-12, 1 - 1e-12).to(valid.device)


def make_objective(
    model: nn.Module,
    *,
    labels: str = "given",
    unit: str = "sequence",
    draws: int = 1,
    seed: int = 0,
    log_likelihood: Callable[[Any, Mapping[str, Any]], Tensor] | None = None,
) -> Objective:
    """The objective of a model's task.

    Args:
        model: The model; its class tells the task.
        labels: `"given"`, `"sampled"` or `"exact"`.
        unit: `"sequence"` or `"token"`.
        draws: Labels drawn for each sample, for `"sampled"`.
        seed: Seed of the draws.
        log_likelihood: The user's own `(outputs, batch) -> (N,)`, with labels given.

    Returns:
        A function of the model's outputs and the batch.

    Raises:
        ValueError: An option is unknown, or the model's class has no known task.
    """
    if labels not in LABEL_MODES:
        raise ValueError(f"labels={labels!r} is unknown; allowed are {', '.join(map(repr, LABEL_MODES))}.")
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r} is unknown; allowed are {', '.join(map(repr, UNITS))}.")
    if not isinstance(draws, int) or draws < 1 or (draws > 1 and labels != "sampled"):
        raise ValueError(f"draws={draws!r} with labels={labels!r}; allowed are integers from 1 on, with 'sampled'.")
    if log_likelihood is not None:
        if labels != "given" or unit != "sequence":
            raise ValueError(
                f"log_likelihood= says itself what is differentiated, so labels={labels!r} and unit={unit!r} have no "
                "meaning. Leave them out."
            )
        return _UserObjective(log_likelihood)
    read, slots, many = _reader(unwrap(model))
    return TaskObjective(read, labels, unit, draws, seed, slots, many)


@dataclass
class _UserObjective:
    function: Callable[[Any, Mapping[str, Any]], Tensor]

    def __call__(self, outputs: Any, batch: Batch) -> Rows:
        values = self.function(outputs, batch.inputs)
        if not isinstance(values, Tensor) or values.shape != (len(batch),):
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"log_likelihood returned {shape} for a batch of {len(batch)} samples; needed is one log-likelihood "
                "for "
                f"each, of shape ({len(batch)},), not their sum or mean."
            )
        return Rows(values[None], torch.ones_like(values))


# ---- how the outputs of each kind of head are read

_Reader = tuple[Callable[[Any, Batch], Distribution], Callable[[Batch], Tensor | None], bool]


def _reader(model: nn.Module) -> _Reader:
    name = type(model).__name__
    config = getattr(model, "config", None)
    seq2seq = bool(getattr(config, "is_encoder_decoder", False))
    if name.endswith(("ForCausalLM", "LMHeadModel")) or (name.endswith("ForConditionalGeneration") and not seq2seq):
        return _read_causal, _causal_slots, True
    if name.endswith("ForConditionalGeneration") or name.endswith("ForMaskedLM"):
        return _read_tokens, _token_slots, True
    if name.endswith("ForTokenClassification"):
        return _read_tokens, _token_slots, False
    if name.endswith(("ForQuestionAnswering", "ForQuestionAnsweringSimple")):
        return _read_span, _span_slots, False
    if name.endswith("ForMultipleChoice"):
        return _read_classes, _class_slots, False
    if name.endswith(_CLASSIFIERS):
        kind = getattr(config, "problem_type", None)
        if kind == "regression" or (kind is None and getattr(config, "num_labels", 2) == 1):
            return _read_numbers, _number_slots, False
        if kind == "multi_label_classification":
            return _read_yes_or_no, _number_slots, False
        return _read_classes, _class_slots, False
    if config is None:
        return _read_classes, _class_slots, False
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
    return None if start is None or end is None else torch.stack([start.view(-1), end.view(-1)], 1)


def _valid(distribution: Distribution, labels: Tensor | None, batch: Batch) -> Tensor:
    """Which slots have a label, (N, S)."""
    shape = distribution.shape
    if labels is not None:
        return torch.ones_like(labels, dtype=torch.bool) if labels.is_floating_point() else labels != IGNORED
    mask = batch.inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == shape:
        return mask.bool()
    return torch.ones(shape, dtype=torch.bool, device=distribution.device)
