"""From the diagonal Fisher of a layer's parameters to one number for the layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from peft_surgical.fisher.diagonal import FisherMeasurement
from peft_surgical.fisher.sums import TensorFisher


@dataclass(frozen=True)
class LayerScores:
    """What a score function returns.

    Args:
        scores: One for each layer.
        shares: What each sample contributes, (L, N), if that is known: it tells how sure the scores are.
        counts: What each sample adds to the divisor, (N,).
        samples: The number of each sample in the draw.
        record: Whatever else should be remembered.
    """

    scores: list[float]
    shares: Tensor | None = None
    counts: Tensor | None = None
    samples: list[int] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)


def aggregate(measurement: FisherMeasurement, aggregation: str) -> LayerScores:
    """One number for each layer, and what each sample contributes to it.

    Args:
        measurement: The diagonal Fisher.
        aggregation: `"frobenius"`: the norm over all entries of the layer (the paper's text).
            `"frobenius_per_tensor"`: the sum of the norms of its tensors (the paper's code). `"trace"`: the sum over
            all entries. `"mean"`: their mean.
    """
    pairs = [_AGGREGATE[aggregation](list(layer.values())) for layer in measurement.layers]
    return LayerScores(
        [score for score, _ in pairs],
        torch.stack([shares for _, shares in pairs]),
        measurement.counts,
        measurement.samples,
        {"engine": measurement.engine},
    )


def _frobenius(tensors: Sequence[TensorFisher]) -> tuple[float, Tensor]:
    norm = sum(t.norm**2 for t in tensors) ** 0.5
    # |F| = sum_t <F_t, F_t> / |F|, and a tensor's shares add up to <F_t, F_t> / |F_t|
    factors = torch.tensor([t.norm / norm if norm else 0 for t in tensors], dtype=torch.float64)
    return norm, factors @ torch.stack([t.shares for t in tensors])


def _frobenius_per_tensor(tensors: Sequence[TensorFisher]) -> tuple[float, Tensor]:
    return sum(t.norm for t in tensors), torch.stack([t.shares for t in tensors]).sum(0)


def _trace(tensors: Sequence[TensorFisher]) -> tuple[float, Tensor]:
    return sum(t.trace for t in tensors), torch.stack([t.shares for t in tensors]).sum(0)


def _mean(tensors: Sequence[TensorFisher]) -> tuple[float, Tensor]:
    trace, shares = _trace(tensors)
    size = sum(t.size for t in tensors)
    return trace / size, shares / size


_AGGREGATE: dict[str, Callable[[Sequence[TensorFisher]], tuple[float, Tensor]]] = {
    "frobenius": _frobenius,
    "frobenius_per_tensor": _frobenius_per_tensor,
    "trace": _trace,
    "mean": _mean,
}

AGGREGATIONS = tuple(_AGGREGATE)
