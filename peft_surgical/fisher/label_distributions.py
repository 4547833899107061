"""Distributions of labels, as a model's outputs say: of N samples with S label slots each.

A slot is a class for a classifier, a token for a language model, the start or the end for a span.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F


IGNORED = -100
"""The label of a slot without one."""


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
