"""Candidate scores that tune layers for a while and look at the loss of rows that were kept aside."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.evidence.methods import adapt, layers_name
from benchmarks.evidence.tasks import Rows
from benchmarks.evidence.training import Trainee, halve_frozen, predict, task_loss
from benchmarks.evidence.warm_start import BATCH, rows_of, same_layers, samples_of, split, train_for, warm_head
from peft_surgical.ranking.scores import LayerScores, ScoreRequest, register_score


LAYER_RATE, FULL_RATE = 1e-4, 5e-5
PROBE_STEPS = 150
TOKENS_IN_STEP = 32_000
"""Models are trained in step as long as their batches hold no more tokens than this together."""


@register_score("probe")
def probe(request: ScoreRequest) -> LayerScores:
    """Loss on unseen rows after tuning the layer alone for 150 steps, all layers on the same batches; smoothed."""
    fitted, unseen = split(rows_of(request))
    start = warm_head(request.model, fitted, request.seed)
    names = [layers_name([i]) for i in range(len(request.layers))]
    losses = _losses_after_tuning(request, start, names, fitted, unseen)  # (layers, rows)
    smooth = _smooth(losses)
    noise = _noise(smooth)
    return LayerScores((-smooth.mean(1)).tolist(), samples=samples_of(request), record={"noise": noise})


@register_score("probe_window")
def probe_window(request: ScoreRequest) -> LayerScores:
    """Loss on unseen rows after tuning 5/12 of the layers for 150 steps, for each run of neighbours; the best run."""
    fitted, unseen = split(rows_of(request))
    start = warm_head(request.model, fitted, request.seed)
    depth = len(request.layers)
    width = max(1, depth * 5 // 12)
    windows = [list(range(first, first + width)) for first in range(depth - width + 1)]
    losses = _losses_after_tuning(request, start, [layers_name(w) for w in windows], fitted, unseen)
    means = _smooth(losses).mean(1)
    best = windows[int(means.argmin())]
    centre = sum(best) / len(best)
    scores = [-abs(i - centre) for i in range(depth)]
    record = {"windows": windows, "losses": losses.mean(1).tolist(), "noise": _noise(losses)}
    return LayerScores(scores, samples=samples_of(request), record=record)


@register_score("rewind")
def rewind(request: ScoreRequest) -> LayerScores:
    """After 150 steps of full tuning, layers are put back one by one, each time the one that does least harm.

    The order in which they go is the ranking, so that layers that can stand in for one another are not all kept. After
    Zhang et al. 2022, "Are All Layers Created Equal?", who put back one layer.
    """
    fitted, unseen = split(rows_of(request))
    model = warm_head(request.model, fitted, request.seed)
    before = [[p.detach().clone() for p in layer.parameters()] for layer in same_layers(request, model)]
    trainee = Trainee(model.requires_grad_(True), FULL_RATE)
    train_for([trainee], fitted, PROBE_STEPS, request.seed)
    layers = same_layers(request, model)
    after = [[p.detach().clone() for p in layer.parameters()] for layer in layers]

    def put(layer: int, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(layers[layer].parameters(), values, strict=True):
                parameter.copy_(value)

    kept, scores, single = list(range(len(layers))), [0.0] * len(layers), []
    while kept:
        losses = []
        for layer in kept:
            put(layer, before[layer])
            losses.append(_mean_loss(model, unseen))
            put(layer, after[layer])
        single = single or list(losses)
        gone = kept.pop(losses.index(min(losses)))
        put(gone, before[gone])
        scores[gone] = float(len(layers) - len(kept))
    return LayerScores(scores, samples=samples_of(request), record={"loss_without": single})


def _losses_after_tuning(
    request: ScoreRequest, start: nn.Module, names: Sequence[str], fitted: Rows, unseen: Rows
) -> Tensor:
    """Losses of the unseen rows for several ways of tuning, (ways, rows)."""
    at_a_time = max(1, TOKENS_IN_STEP // (BATCH * int(fitted.lengths.max())))
    losses = []
    for first in range(0, len(names), at_a_time):
        some = names[first : first + at_a_time]
        trainees = [Trainee(halve_frozen(adapt(copy.deepcopy(start), name)), LAYER_RATE) for name in some]
        train_for(trainees, fitted, PROBE_STEPS, request.seed)
        losses += [task_loss(predict(t.model, unseen), unseen.labels, "none") for t in trainees]
        del trainees  # before the next ones are made
        gc.collect()
    return torch.stack(losses).double().cpu()


def _smooth(values: Tensor) -> Tensor:
    """Mean of neighbours along the first dimension, weights 1, 2, 1."""
    padded = torch.cat([values[:1], values, values[-1:]])
    return (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4


def _noise(losses: Tensor) -> float:
    """Standard error of the difference between two rows of losses, the rows being the same; mean over all pairs."""
    count = losses.shape[1]
    differences = losses[:, None] - losses[None]
    return (
        float(differences.std(-1).sum() / (len(losses) * (len(losses) - 1)) / count**0.5) if len(losses) > 1 else 0.0
    )


def _mean_loss(model: nn.Module, rows: Rows) -> float:
    loss = float(task_loss(predict(model, rows), rows.labels))
    return loss if math.isfinite(loss) else math.inf
