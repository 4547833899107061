"""`LayerRanking`: a score for each layer, and how sure it is over samples that are drawn anew."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peft_surgical.layers import choose_stack
from peft_surgical.ranking.plots import plot_scores


sys.modules.setdefault("peft_surgical.ranking.layer_ranking", sys.modules[__name__])  # where pickles of 0.1.0 look

_FORMAT = "peft_surgical.LayerRanking"
_VERSION = 1

_REPLICATES, _SPLITS = 1000, 100
_LEVEL = 0.95
_TAU = "1: the same order, 0: no more alike than by chance"


@dataclass(frozen=True)
class LayerRanking:
    """A score for each layer of a stack, how sure the scores are, and how they were measured. Plain data.

    Args:
        stack: Name of the stack.
        scores: One for each layer; the highest is ranked first.
        intervals: 95 % bootstrap interval of each score, if the score allows one.
        top_probability: For each layer the probability that it is among the best 1, 2, 3, ...
        split_half_tau: Kendall's tau between the orders that two halves of the samples give, on average.
        head_tau: The same between the orders that two freshly initialized heads give.
        record: How it was measured: score, its definition, samples, seed, model.

    Example:

        >>> ranking = LayerRanking(stack="encoder", scores=[0.1, 0.7, 0.4])
        >>> ranking.order
        [1, 2, 0]
        >>> ranking.top(2)
        [1, 2]
        >>> LayerRanking.from_dict(ranking.to_dict()) == ranking
        True
    """

    stack: str
    scores: list[float]
    intervals: list[tuple[float, float]] | None = None
    top_probability: list[list[float]] | None = None
    split_half_tau: float | None = None
    head_tau: float | None = None
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def order(self) -> list[int]:
        """All layers, best first. Of equal ones the later comes first."""
        return sorted(range(len(self.scores)), key=lambda i: (self.scores[i], i), reverse=True)

    def top(self, k: int) -> list[int]:
        """The k best layers, best first.

        Raises:
            ValueError: k is not between 1 and the number of layers.
        """
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= len(self.scores):
            raise ValueError(f"top({k!r}): allowed are integers from 1 to {len(self.scores)}, the number of layers.")
        return self.order[:k]

    def check_model(self, model: torch.nn.Module, name: str = "The ranking") -> None:
        """A `ValueError`, with this name, if the model has another number of layers than were ranked."""
        stack = choose_stack(model, self.stack or None)
        if len(self.scores) != len(stack):
            raise ValueError(
                f"{name} ranks {len(self.scores)} layers; {stack.name or 'the model'} has {len(stack)}. It is of "
                "another model: rank this one."
            )

    def probability(self, layer: int, k: int) -> float | None:
        """The probability that a layer is among the best k; None if it was not estimated."""
        return None if self.top_probability is None else self.top_probability[layer][k - 1]

    def to_dict(self) -> dict[str, Any]:
        """The ranking as what JSON can hold."""
        return {"format": _FORMAT, "version": _VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerRanking:
        """A ranking from what `to_dict` gave.

        Raises:
            ValueError: This is not a ranking, or one of a later version.
        """
        if data.get("format") != _FORMAT or not isinstance(data.get("scores"), list):
            raise ValueError(
                f"This is not a ranking: it has the keys {sorted(data)}. LayerRanking.save writes rankings."
            )
        if data.get("version") != _VERSION:
            raise ValueError(
                f"The ranking has version {data.get('version')!r}; this peft_surgical reads version {_VERSION}. "
                "Update peft_surgical, or rank again."
            )
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        if values.get("intervals") is not None:
            values["intervals"] = [(low, high) for low, high in values["intervals"]]
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ranking to a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerRanking:
        """Read a ranking from a JSON file.

        Raises:
            ValueError: The file holds no ranking.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls.from_dict(data if isinstance(data, dict) else {})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the scores with their intervals and ranks.

        Args:
            path: Where to write; the ending says the format.

        Raises:
            ImportError: matplotlib is not there.
        """
        title = f"Layers of {self.stack}{self._source()}"
        plot_scores(path, self.scores, self.intervals, self.order, title=title, label=self._score_name())

    def __str__(self) -> str:
        shown = [k for k in (1, 2, 3, 5, 8) if k < len(self.scores)] if self.top_probability else []
        header = f"{'rank':>4}  {'layer':>5}  {'score':>10}"
        header += f"  {'95 % interval':>23}" if self.intervals else ""
        header += "".join(f"  {f'in top {k}':>8}" for k in shown)
        lines = [self._title(), "", header]
        for rank, layer in enumerate(self.order, 1):
            line = f"{rank:>4}  {layer:>5}  {self.scores[layer]:>10.4g}"
            if self.intervals:
                low, high = self.intervals[layer]
                line += f"  {low:>10.4g} - {high:>10.4g}"
            for k in shown:
                line += f"  {100 * (self.probability(layer, k) or 0):>6.0f} %"
            lines.append(line)
        if self.split_half_tau is not None:
            tau = f"{self.split_half_tau:.2f}"
            lines += ["", f"Two halves of the samples agree on the order with Kendall's tau {tau} ({_TAU})."]
        if self.head_tau is not None:
            heads = self.record.get("head_seeds", "several")
            tau = f"{self.head_tau:.2f}"
            lines += ["", f"{heads} newly initialised heads agree on the order with Kendall's tau {tau} ({_TAU})."]
        if self.intervals:
            lines += ["", "A certain order is not a better choice of layers to tune: see docs/results.md."]
        return "\n".join(lines)

    def _score_name(self) -> str:
        r = self.record
        details = [f"{r['labels']} labels", r["aggregation"]] if r.get("score") == "fisher" else []
        return str(r.get("score", "score")) + (f" ({', '.join(details)})" if details else "")

    def _title(self) -> str:
        return f"{self._score_name()} of the {len(self.scores)} layers of {self.stack}{self._source()}"

    def _source(self) -> str:
        model = self.record.get("model", {}).get("class")
        samples = self.record.get("num_samples")
        return (f" in {model}" if model else "") + (f", {samples} samples" if samples else "")


def as_ranking(ranking: Any) -> LayerRanking:
    """A ranking, from itself, the path of a saved one, or its record; a `TypeError` if it is none of these."""
    if isinstance(ranking, (str, os.PathLike)):
        return LayerRanking.load(ranking)
    if isinstance(ranking, Mapping):
        return LayerRanking.from_dict(dict(ranking))
    if isinstance(ranking, LayerRanking):
        return ranking
    raise TypeError(
        f"ranking is a {type(ranking).__name__}; allowed are a LayerRanking, the path of a saved one, or its "
        "to_dict()."
    )


def estimate_uncertainty(contributions: Tensor, counts: Tensor, seed: int = 0) -> dict[str, Any]:
    """What a `LayerRanking` says of how sure it is, from samples drawn anew, with replacement (the bootstrap).

    The scores of a draw are linear in the samples' multiplicities: exactly so for the trace and the mean, and to first
    order for the norms (`sums.py`). A layer's score is the sum of its samples' contributions, (L, N), divided by that
    of their counts, (N,).
    """
    generator = torch.Generator().manual_seed(seed)
    contributions, counts = contributions.double().cpu(), counts.double().cpu()
    scores = _resampled(contributions, counts, generator)
    tail = (1 - _LEVEL) / 2
    low, high = torch.quantile(scores, torch.tensor([tail, 1 - tail], dtype=scores.dtype), dim=0)
    ranks = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    top = (ranks[:, :, None] < torch.arange(1, len(contributions) + 1)).double().mean(0)
    intervals = list(zip(low.tolist(), high.tolist(), strict=True))
    halves = _split_half(contributions, counts, generator)
    return {"intervals": intervals, "top_probability": top.tolist(), "split_half_tau": halves}


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
    drawn = torch.randint(samples, (_REPLICATES, samples), generator=generator)
    weights = torch.zeros(_REPLICATES, samples, dtype=contributions.dtype).scatter_add_(
        1, drawn, torch.ones_like(drawn).double()
    )
    return (weights @ contributions.T) / (weights @ counts).clamp_min(1e-300)[:, None]


def _split_half(contributions: Tensor, counts: Tensor, generator: torch.Generator) -> float | None:
    samples = len(counts)
    if samples < 2:
        return None
    order = torch.rand(_SPLITS, samples, generator=generator).argsort(1)
    first = (order < samples // 2).to(contributions.dtype)
    scores = [half @ contributions.T / (half @ counts).clamp_min(1e-300)[:, None] for half in (first, 1 - first)]
    return float(_kendall_taus(*scores).mean())
