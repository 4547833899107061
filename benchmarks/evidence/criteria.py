"""Candidate scores for choosing layers, beyond those of the library, for `rank_layers(score=...)`.

    python -m benchmarks.evidence.criteria models/mpnet data rte  # all scores on one task, with their cost

Importing this registers them. None looks at validation data. Those that need a trained head first train it alone on
the samples they are given (`num_samples=`); a third of these is kept aside where a loss on unseen rows is wanted.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.evidence import (
    probes,  # noqa: F401 - registers its scores
    tangent_kernels,  # noqa: F401
)
from benchmarks.evidence.literature import LITERATURE
from benchmarks.evidence.training import task_loss
from benchmarks.evidence.warm_start import rows_of, same_layers, samples_of, warm_head
from peft_surgical.ranking.scores import LayerScores, ScoreRequest, register_score


@register_score("middle", needs_data=False)
def middle(request: ScoreRequest) -> LayerScores:
    """The middle layers first, which a first probe found best on average."""
    return LayerScores(nearness_to_middle(len(request.layers)))


def nearness_to_middle(depth: int) -> list[float]:
    """How near each of so many layers is to the middle; of two that are as near, the lower one a little more."""
    return [-abs(i - (depth - 1) / 2 + 0.25) for i in range(depth)]


@register_score("published_code")
def published_code(request: ScoreRequest) -> LayerScores:
    """The squared gradient of a raw logit on one sample, padding attended to: what the code of Lodha et al. computes.

    Their loop makes a new iterator for each of its 100 steps, so it sees the first sample a hundred times; it
    differentiates the logit of the gold class, not log p; it passes no attention mask; a layer's score is the sum over
    its tensors of the norms of the diagonals.
    """
    rows = rows_of(request)
    model = copy.deepcopy(request.model).eval().requires_grad_(True)
    inputs = {"input_ids": rows.inputs["input_ids"][:1]}
    with torch.enable_grad():
        logits = model(**inputs).logits[0]
        value = logits[0] if rows.labels.is_floating_point() else logits[rows.labels[0]]
        value.backward()
    scores = []
    for layer in same_layers(request, model):
        scores.append(sum(float(p.grad.square().norm()) for p in layer.parameters() if p.grad is not None))
    return LayerScores(scores, samples=[0])


# ---- the gradient's moments with a trained head


@register_score("fisher_warm")
def fisher_warm(request: ScoreRequest) -> LayerScores:
    """The empirical Fisher as in "fisher", after the head was trained alone."""
    return LayerScores([float(square.norm()) for _, square, _ in _moments(request)], samples=samples_of(request))


@register_score("fisher_relative")
def fisher_relative(request: ScoreRequest) -> LayerScores:
    """The Fisher of relative changes of the weights, sum of F w^2 over the layer, after the head was trained alone."""
    scores = [float((square * weight.square()).sum()) for _, square, weight in _moments(request)]
    return LayerScores(scores, samples=samples_of(request))


@register_score("coherence")
def coherence(request: ScoreRequest) -> LayerScores:
    """How far the samples' gradients agree, |mean g|^2 without its bias over mean |g|^2, after the head was trained.

    The gain of a first-order step over its curvature, with the Fisher for the curvature: the signal-to-noise ratio of
    the gradient (Liu et al. 2020, "Understanding Why Neural Networks Generalize Well Through GSNR of Parameters").
    """
    n = len(rows_of(request))
    scores = []
    for mean, square, _ in _moments(request):
        power = float(square.sum())
        scores.append((n * float(mean.square().sum()) / power - 1) / (n - 1) if power else 0.0)
    return LayerScores(scores, samples=samples_of(request))


def _moments(request: ScoreRequest) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each layer the mean of the samples' gradients, of their squares, and the weights; all flat."""
    rows = rows_of(request)
    model = warm_head(request.model, rows, request.seed).eval()
    layers = same_layers(request, model)
    groups = [list(layer.parameters()) for layer in layers]
    parameters = [p.requires_grad_(True) for group in groups for p in group]
    mean = [torch.zeros_like(p) for p in parameters]
    square = [torch.zeros_like(p) for p in parameters]
    with torch.enable_grad():
        for row in range(len(rows)):
            inputs = {name: t[row : row + 1, ..., : int(rows.lengths[row])] for name, t in rows.inputs.items()}
            loss = task_loss(model(**inputs).logits.float(), rows.labels[row : row + 1])
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            used = [(m, s, g) for m, s, g in zip(mean, square, gradients, strict=True) if g is not None]
            torch._foreach_add_([m for m, _, _ in used], [g for _, _, g in used], alpha=1 / len(rows))
            grads = [g for _, _, g in used]
            torch._foreach_addcmul_([s for _, s, _ in used], grads, grads, value=1 / len(rows))
    flat, start = [], 0
    for group in groups:
        part = slice(start, start + len(group))
        flat.append(tuple(torch.cat([t.detach().flatten() for t in ts[part]]) for ts in (mean, square, parameters)))
        start += len(group)
    return flat


SAMPLES = dict.fromkeys(("probe", "probe_window", "rewind", "resnorm"), 1500) | dict.fromkeys(
    ("kernel", "kernel_greedy"), 600
)
"""How many samples a score gets; 100 if it is not named."""


def main() -> None:
    """Print all scores on one task."""
    from transformers import AutoTokenizer

    from benchmarks.evidence import models, tasks
    from peft_surgical.ranking.rank import rank_layers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("task", choices=tasks.TASKS)
    parser.add_argument("--scores", nargs="+", default=["fisher", "grad_norm", "rgn", "snr", *CRITERIA])
    options = parser.parse_args()
    task = tasks.TASKS[options.task]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = tasks.load(options.task, AutoTokenizer.from_pretrained(options.model), options.data).train
    model = models.load(options.model, task.outputs, choices=task.choices, device=device)
    for score in options.scores:
        began = time.perf_counter()
        ranking = rank_layers(model, rows.features(), score=score, num_samples=SAMPLES.get(score, 100), progress=False)
        print(f"{score:16} {time.perf_counter() - began:7.1f} s  {ranking.order}")


CHEAP = ("middle", "alternate", "published_code", *LITERATURE)
COSTLY = (
    "fisher_warm",
    "fisher_relative",
    "coherence",
    "kernel",
    "kernel_greedy",
    "rewind",
    "probe",
    "probe_window",
)
"""Measured with the first seed only; the other seeds train what it chose."""
CRITERIA = (*CHEAP, *COSTLY)
"""The scores of this file and of those that it imports."""


if __name__ == "__main__":
    main()
