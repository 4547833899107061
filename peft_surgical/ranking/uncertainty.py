"""How sure an order of layers is: samples drawn anew, and halves of the samples compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


REPLICATES = 1000
SPLITS = 100
LEVEL = 0.95


@dataclass(frozen=True)
class Uncertainty:
    """How sure the scores of layers are; see `LayerRanking`. There are no halves of fewer than two samples."""

    intervals: list[tuple[float, float]]
    top_probability: list[list[float]]
    split_half_tau: float | None


def estimate_uncertainty(contributions: Tensor, counts: Tensor, seed: int = 0) -> Uncertainty:
    """Draw samples anew, with replacement, and score the layers on each draw (the bootstrap).

    The scores of a draw are linear in the samples' multiplicities: exactly so for the trace and the mean, and to first
    order for the norms (`sums.py`). A layer's score is the sum of its samples' contributions, (L, N), divided by that
    of their counts, (N,).
    """
    generator = torch.Generator().manual_seed(seed)
    contributions, counts = contributions.double().cpu(), counts.double().cpu()
    scores = _resampled(contributions, counts, generator)
    tail = (1 - LEVEL) / 2
    low, high = torch.quantile(scores, torch.tensor([tail, 1 - tail], dtype=scores.dtype), dim=0)
    ranks = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    top = (ranks[:, :, None] < torch.arange(1, len(contributions) + 1)).double().mean(0)
    intervals = list(zip(low.tolist(), high.tolist(), strict=True))
    return Uncertainty(intervals, top.tolist(), _split_half(contributions, counts, generator))


def kendall_tau(first: Sequence[float] | Tensor, second: Sequence[float] | Tensor) -> float:
    """Kendall's rank correlation (tau-a): 1 for the same order, -1 for the opposite one, 0 on average by chance."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (first, second))
    return float(_kendall_taus(a[None], b[None]))


def _kendall_taus(first: Tensor, second: Tensor) -> Tensor:
    """For pairs of rows of scores, (S, L), their tau, (S,)."""
    layers = first.shape[1]
    if layers < 2:
        return torch.ones(len(first), dtype=torch.float64)
    agreement = [(x[:, :, None] - x[:, None]).sign() for x in (first, second)]
    return (agreement[0] * agreement[1]).sum((1, 2)) / (layers * (layers - 1))


def _resampled(contributions: Tensor, counts: Tensor, generator: torch.Generator) -> Tensor:
    """Scores, (replicates, L)."""
    samples = len(counts)
    drawn = torch.randint(samples, (REPLICATES, samples), generator=generator)
    weights = torch.zeros(REPLICATES, samples, dtype=contributions.dtype).scatter_add_(
        1, drawn, torch.ones_like(drawn).double()
    )
    return (weights @ contributions.T) / (weights @ counts).clamp_min(1e-300)[:, None]


def _split_half(contributions: Tensor, counts: Tensor, generator: torch.Generator) -> float | None:
    samples = len(counts)
    if samples < 2:
        return None
    order = torch.rand(SPLITS, samples, generator=generator).argsort(1)
    first = (order < samples // 2).to(contributions.dtype)
    scores = [half @ contributions.T / (half @ counts).clamp_min(1e-300)[:, None] for half in (first, 1 - first)]
    return float(_kendall_taus(*scores).mean())
