"""Scores: numbers for layers, by which they are ranked. `register_score` adds one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from peft_surgical.distributed import all_reduce, gather
from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.engine import Runner
from peft_surgical.fisher.guard import independent
from peft_surgical.fisher.measure import FisherMeasurement, layer_fisher
from peft_surgical.fisher.model_state import layer_parameters, untouched
from peft_surgical.fisher.objective import Objective, no_gradient
from peft_surgical.fisher.sums import TensorFisher
from peft_surgical.layers import Layer


@dataclass(frozen=True)
class ScoreRequest:
    """What a score function gets.

    Args:
        model: The base model, without wrappers.
        layers: The layers to score.
        batches: The samples; empty for a score that needs none.
        objective: What to differentiate, a function of the model's outputs and a batch.
        aggregation: How a layer's entries become one number.
        seed: For whatever is random.
        engine: How the Fisher is computed.
        progress: A bar of tqdm, to be told how far it is.
        verify: Whether to check one sample of the Fisher against plain autograd.
    """

    model: nn.Module
    layers: Sequence[Layer]
    batches: Sequence[Batch]
    objective: Objective | None = None
    aggregation: str = "frobenius"
    seed: int = 0
    engine: str = "auto"
    progress: tqdm = field(default_factory=partial(tqdm, disable=True))
    verify: bool = True


@dataclass(frozen=True)
class LayerScores:
    """What a score function returns.

    Args:
        scores: One for each layer.
        contributions: What each sample contributes, (L, N), if that is known: it tells how sure the scores are.
        counts: What each sample adds to the divisor, (N,).
        samples: The number of each sample in the draw.
        record: Whatever else should be remembered.
    """

    scores: list[float]
    contributions: Tensor | None = None
    counts: Tensor | None = None
    samples: list[int] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)


ScoreFunction = Callable[[ScoreRequest], LayerScores]


@dataclass(frozen=True)
class Score:
    """A registered score."""

    function: ScoreFunction
    needs_data: bool
    definition: str  # one line


SCORES: dict[str, Score] = {}


def register_score(name: str, *, needs_data: bool = True) -> Callable[[ScoreFunction], ScoreFunction]:
    """Register a function as a score for `rank_layers(score=name)`.

    Args:
        name: The name.
        needs_data: Whether it looks at samples.

    Returns:
        A decorator. The first line of the function's docstring becomes the score's definition in rankings.

    Raises:
        ValueError: The name is taken.

    Example:

        >>> @register_score("my_score", needs_data=False)
        ... def my_score(request):
        ...     "The middle layers first."
        ...     last = len(request.layers) - 1
        ...     return LayerScores([-abs(i - last / 2) for i in range(last + 1)])
        >>> SCORES.pop("my_score").definition
        'The middle layers first.'
    """

    def register(function: ScoreFunction) -> ScoreFunction:
        if name in SCORES:
            raise ValueError(f"There is a score {name!r} already. Give yours another name.")
        definition = (function.__doc__ or name).strip().splitlines()[0]
        SCORES[name] = Score(function, needs_data, definition)
        return function

    return register


def find_score(name: str) -> Score:
    """The score of that name; a `ValueError` if there is none."""
    if name not in SCORES:
        raise ValueError(
            f"score={name!r} is unknown; allowed are {', '.join(map(repr, sorted(SCORES)))}. "
            "Add your own with register_score."
        )
    return SCORES[name]


@register_score("fisher")
def fisher(request: ScoreRequest) -> LayerScores:
    """Diagonal of the Fisher information of log p(y|x), aggregated over the layer's entries.

    Lodha et al. 2023, "On Surgical Fine-tuning for Language Encoders", section 3.1, equation 1.
    """
    r = request
    assert r.objective is not None
    measurement = layer_fisher(
        r.model, r.layers, r.batches, r.objective, diagonal=r.aggregation.startswith("frobenius"),
        engine=r.engine, seed=r.seed, progress=r.progress, verify=r.verify,
    )  # fmt: skip
    return aggregate(measurement, r.aggregation)


@register_score("last", needs_data=False)
def last(request: ScoreRequest) -> LayerScores:
    """The last layers first (Lee et al. 2019, "What Would Elsa Do? Freezing Layers During Transformer
    Fine-Tuning")."""
    return LayerScores([float(i) for i in range(len(request.layers))])


@register_score("first", needs_data=False)
def first(request: ScoreRequest) -> LayerScores:
    """The first layers first, as Lee et al. 2023 find best for shifts of the input ("Surgical Fine-Tuning", ICLR)."""
    return LayerScores([float(-i) for i in range(len(request.layers))])


@register_score("alternate", needs_data=False)
def alternate(request: ScoreRequest) -> LayerScores:
    """Every other layer, counted from the second, then the rest, as `layers="alternate:5"` has them."""
    return LayerScores([float(i % 2) - i / len(request.layers) for i in range(len(request.layers))])


@register_score("random", needs_data=False)
def random(request: ScoreRequest) -> LayerScores:
    """A random order, the control that Sung et al. 2021 compare the Fisher mask with."""
    generator = torch.Generator().manual_seed(request.seed)
    return LayerScores(torch.rand(len(request.layers), generator=generator).tolist())


@register_score("grad_norm")
def grad_norm(request: ScoreRequest) -> LayerScores:
    """Norm of the mean gradient of the log-likelihood over the layer's entries (the numerator of Lee et al. 2023's
    RGN)."""
    return LayerScores([norm for norm, _ in _mean_gradient_norms(request)], samples=_samples(request))


@register_score("rgn")
def relative_gradient_norm(request: ScoreRequest) -> LayerScores:
    """Relative gradient norm: norm of the layer's mean gradient over the norm of its weights.

    Lee et al. 2023, "Surgical Fine-Tuning Improves Adaptation to Distribution Shifts", section 4.1 (Auto-RGN).
    """
    pairs = _mean_gradient_norms(request)
    return LayerScores([norm / weight if weight else 0.0 for norm, weight in pairs], samples=_samples(request))


@register_score("snr", needs_data=False)
def signal_to_noise(request: ScoreRequest) -> LayerScores:
    """Signal-to-noise ratio of the layer's weight matrices, the mean over them; needs no data.

    Hartford et al. 2024, "Spectrum: Targeted Training on Signal to Noise Ratio": the sum of the singular values above
    the Marchenko-Pastur edge, over the sum of the others, over the largest one. The edge is sigma (1 + sqrt(m /
    n)) for an n by m matrix with m <= n, with sigma taken from the interquartile range of the singular values.
    """
    scores = []
    request.progress.unit = " layers"
    request.progress.reset(len(request.layers))
    for group in layer_parameters(request.layers):
        matrices = [p.detach() for p in group.values() if p.dim() >= 2]
        if not matrices:
            raise ValueError("score='snr' needs weight matrices, and a layer has none.")
        ratios = [r for m in matrices for r in _signal_to_noise(m)]
        scores.append(sum(ratios) / len(ratios))
        request.progress.update()
    return LayerScores(scores)


def _signal_to_noise(weight: Tensor) -> list[float]:
    """The ratio of a matrix, or of each of a stack of matrices."""
    if weight.dim() > 3 or not weight.is_floating_point():
        weight = weight.flatten(1)
    if weight.dim() == 3:
        return [ratio for matrix in weight for ratio in _signal_to_noise(matrix)]
    singular = torch.linalg.svdvals(weight.to(torch.promote_types(weight.dtype, torch.float32)))
    quartiles = torch.quantile(singular, torch.tensor([0.25, 0.75], dtype=singular.dtype, device=singular.device))
    sigma = (quartiles[1] - quartiles[0]) / 1.349
    edge = sigma * (1 + (min(weight.shape) / max(weight.shape)) ** 0.5)
    above = singular[:-1] > edge  # the smallest is always noise: with none, Spectrum's code divides by nothing
    signal, noise = singular[:-1][above].sum(), singular[:-1][~above].sum() + singular[-1]
    largest = singular[0].clamp_min(torch.finfo(singular.dtype).tiny)
    return [float(signal / noise.clamp_min(torch.finfo(singular.dtype).eps * largest) / largest)]


def _samples(request: ScoreRequest) -> list[int]:
    return [i for part in gather([i for batch in request.batches for i in batch.index]) for i in part]


def _mean_gradient_norms(request: ScoreRequest) -> list[tuple[float, float]]:
    """For each layer the norm of the gradient of the mean log-likelihood, and the norm of the weights."""
    assert request.objective is not None
    groups, runner = layer_parameters(request.layers), Runner(request.model, request.objective)
    parameters = [p for group in groups for p in group.values()]
    total = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
    divisor = torch.zeros((), dtype=torch.float64)
    request.progress.reset(sum(len(batch) for batch in request.batches))
    with untouched(request.model, request.seed):
        batches = independent(runner, request.batches, parameters) if request.verify else request.batches
        for p in parameters:
            p.requires_grad_()
        for batch in batches:
            values, counts = runner.checked_rows(batch)
            grads = torch.autograd.grad(values.sum(), parameters, allow_unused=True)
            for t, g in zip(total, grads, strict=True):
                if g is not None:
                    t += g
            divisor += counts.sum().cpu()
            request.progress.update(len(batch))
    count = float(all_reduce(divisor))
    sums = iter([all_reduce(t) / count for t in total])
    norms = [(_norm([next(sums) for _ in group]), _norm([p.detach() for p in group.values()])) for group in groups]
    if not any(norm for norm, _ in norms):
        raise ValueError(no_gradient(request.model, request.objective))
    return norms


def _norm(tensors: Sequence[Tensor]) -> float:
    return sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors) ** 0.5


def aggregate(measurement: FisherMeasurement, aggregation: str) -> LayerScores:
    """One number for each layer, see `rank_layers` for what it is, and what each sample contributes to it."""
    pairs = [_aggregate_layer(list(layer.values()), aggregation) for layer in measurement.layers]
    return LayerScores(
        [score for score, _ in pairs],
        torch.stack([contributions for _, contributions in pairs]),
        measurement.counts,
        measurement.samples,
        {"engine": measurement.engine, "passes": measurement.passes},
    )


AGGREGATIONS = ("frobenius", "frobenius_per_tensor", "trace", "mean")


def _aggregate_layer(tensors: Sequence[TensorFisher], aggregation: str) -> tuple[float, Tensor]:
    contributions = torch.stack([t.contributions for t in tensors])
    if aggregation == "frobenius":
        norm = sum(t.norm**2 for t in tensors) ** 0.5
        # |F| = sum_t <F_t, F_t> / |F|, and a tensor's contributions add up to <F_t, F_t> / |F_t|
        factors = torch.tensor([t.norm / norm if norm else 0 for t in tensors], dtype=torch.float64)
        return norm, factors @ contributions
    if aggregation == "frobenius_per_tensor":
        return sum(t.norm for t in tensors), contributions.sum(0)
    divisor = sum(t.size for t in tensors) if aggregation == "mean" else 1
    return sum(t.trace for t in tensors) / divisor, contributions.sum(0) / divisor
