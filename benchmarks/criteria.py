"""Candidate scores for choosing layers, beyond those of the library, for `rank_layers(score=...)`.

    python benchmarks/criteria.py models/mpnet ../shared/data rte      # all scores on one task, with their cost

Importing this registers them. None looks at validation data. Those that need a trained head first train it alone on
the samples they are given (`num_samples=`); a third of these is kept aside where a loss on unseen rows is wanted.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from methods import adapt, layers_name
from models import head_names
from tangent_kernels import kernel_of, leave_one_out, sketched_gradients, targets_of
from tasks import PAD_TO, Rows
from torch import Tensor, nn
from training import Trainee, halve_frozen, predict, task_loss, train

from peft_surgical.ranking.scores import LayerScores, ScoreRequest, register_score


BATCH = 32
HEAD_RATE, LAYER_RATE, FULL_RATE = 1e-3, 1e-4, 5e-5
HEAD_STEPS = 100
PROBE_STEPS = 150
TOKENS_IN_STEP = 32_000
"""Models are trained in step as long as their batches hold no more tokens than this together."""


@register_score("middle", needs_data=False)
def middle(request: ScoreRequest) -> LayerScores:
    """The middle layers first, which a first probe found best on average."""
    last = len(request.layers) - 1
    return LayerScores([-abs(i - last / 2 + 0.25) for i in range(last + 1)])


@register_score("alternate", needs_data=False)
def alternate(request: ScoreRequest) -> LayerScores:
    """Every other layer, counted from the second."""
    return LayerScores([float(i % 2) - i / len(request.layers) for i in range(len(request.layers))])


# ---- the published code


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
    for layer in _same_layers(request, model):
        scores.append(sum(float(p.grad.square().norm()) for p in layer.parameters() if p.grad is not None))
    return LayerScores(scores, samples=[0])


# ---- the gradient's moments with a trained head


@register_score("fisher_warm")
def fisher_warm(request: ScoreRequest) -> LayerScores:
    """The empirical Fisher as in "fisher", after the head was trained alone."""
    return LayerScores([float(square.norm()) for _, square, _ in _moments(request)], samples=_samples(request))


@register_score("fisher_relative")
def fisher_relative(request: ScoreRequest) -> LayerScores:
    """The Fisher of relative changes of the weights, sum of F w^2 over the layer, after the head was trained alone."""
    scores = [float((square * weight.square()).sum()) for _, square, weight in _moments(request)]
    return LayerScores(scores, samples=_samples(request))


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
    return LayerScores(scores, samples=_samples(request))


def _moments(request: ScoreRequest) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each layer the mean of the samples' gradients, of their squares, and the weights; all flat."""
    rows = rows_of(request)
    model = warm_head(request.model, rows, request.seed).eval()
    layers = _same_layers(request, model)
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


# ---- tuning for a while


@register_score("probe")
def probe(request: ScoreRequest) -> LayerScores:
    """Loss on unseen rows after tuning the layer alone for 150 steps, all layers on the same batches; smoothed."""
    fitted, unseen = split(rows_of(request))
    start = warm_head(request.model, fitted, request.seed)
    names = [layers_name([i]) for i in range(len(request.layers))]
    losses = _losses_after_tuning(request, start, names, fitted, unseen)  # (layers, rows)
    smooth = _smooth(losses)
    noise = _noise(smooth)
    return LayerScores((-smooth.mean(1)).tolist(), samples=_samples(request), record={"noise": noise})


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
    return LayerScores(scores, samples=_samples(request), record=record)


@register_score("rewind")
def rewind(request: ScoreRequest) -> LayerScores:
    """After 150 steps of full tuning, layers are put back one by one, each time the one that does least harm.

    The order in which they go is the ranking, so that layers that can stand in for one another are not all kept. After
    Zhang et al. 2022, "Are All Layers Created Equal?", who put back one layer.
    """
    fitted, unseen = split(rows_of(request))
    model = warm_head(request.model, fitted, request.seed)
    before = [[p.detach().clone() for p in layer.parameters()] for layer in _same_layers(request, model)]
    trainee = Trainee(model.requires_grad_(True), FULL_RATE)
    _run([trainee], fitted, PROBE_STEPS, request.seed)
    layers = _same_layers(request, model)
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
    return LayerScores(scores, samples=_samples(request), record={"loss_without": single})


def _losses_after_tuning(
    request: ScoreRequest, start: nn.Module, names: Sequence[str], fitted: Rows, unseen: Rows
) -> Tensor:
    """Losses of the unseen rows for several ways of tuning, (ways, rows)."""
    at_a_time = max(1, TOKENS_IN_STEP // (BATCH * int(fitted.lengths.max())))
    losses = []
    for first in range(0, len(names), at_a_time):
        some = names[first : first + at_a_time]
        trainees = [Trainee(halve_frozen(adapt(copy.deepcopy(start), name)), LAYER_RATE) for name in some]
        _run(trainees, fitted, PROBE_STEPS, request.seed)
        losses += [task_loss(predict(t.model, unseen), unseen.labels, "none") for t in trainees]
        del trainees  # before the next ones are made
        gc.collect()
    return torch.stack(losses).double().cpu()


def _run(trainees: Sequence[Trainee], rows: Rows, steps: int, seed: int) -> None:
    epochs = math.ceil(steps / math.ceil(len(rows) / BATCH))
    for _ in train(trainees, rows, batch=BATCH, epochs=epochs, seed=seed):
        pass


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


# ---- the tangent kernel


@register_score("kernel")
def kernel(request: ScoreRequest) -> LayerScores:
    """How well the layer's tangent kernel, with the head's, predicts labels it has not seen.

    Tuning a layer a little is regression on the gradients of the output by its parameters. The leave-one-out error of
    this regression has a closed form, and does not depend on how large the gradients are.
    """
    kernels, head, targets = tangent_kernels(request)
    alone = leave_one_out(head, targets)
    gains = [alone - leave_one_out(head + k, targets) for k in kernels]
    return LayerScores(gains, samples=_samples(request), record={"head_alone": alone})


@register_score("kernel_greedy")
def kernel_greedy(request: ScoreRequest) -> LayerScores:
    """As "kernel", for sets: each time the layer that helps those chosen before the most; for half of the layers."""
    kernels, total, targets = tangent_kernels(request)
    left, scores, errors = list(range(len(kernels))), [0.0] * len(kernels), []
    while len(left) > len(kernels) // 2:
        found = [leave_one_out(total + kernels[i], targets) for i in left]
        errors.append(min(found))
        chosen = found.index(errors[-1])
        for layer, error in zip(left, found, strict=True):
            scores[layer] = -error  # of those that are never chosen, the better the more help at the end
        last = left.pop(chosen)
        scores[last] = float(len(left))
        total = total + kernels[last]
    return LayerScores(scores, samples=_samples(request), record={"errors": errors})


def tangent_kernels(request: ScoreRequest) -> tuple[list[Tensor], Tensor, Tensor]:
    """The tangent kernel of each layer and of the head, and what is to be predicted.

    The gradients of a linear module are sketched by a random matrix on either side, and divided by their root mean
    square, as Adam would. For two classes the difference of the logits is differentiated, else each of them.

    Returns:
        The kernels, (L) x (N, N), and (N, N); the labels, one column for each output, (N, outputs).
    """
    rows = rows_of(request)
    model = warm_head(request.model, rows, request.seed).eval()
    heads = head_names(model)
    groups = [[m for m in layer.modules() if isinstance(m, nn.Linear)] for layer in _same_layers(request, model)]
    in_head = [
        m for path, m in model.named_modules() if isinstance(m, nn.Linear) and set(path.split(".")) & set(heads)
    ]
    sketches = sketched_gradients(model, [*sum(groups, []), *in_head], rows, request.seed)
    kernels = [sum(kernel_of(sketches[m]) for m in group) for group in groups]
    return kernels, sum(kernel_of(sketches[m]) for m in in_head), targets_of(rows)


# ---- what the scores have in common


def rows_of(request: ScoreRequest) -> Rows:
    """The samples of a request as padded tensors, in the order of the draw."""
    pad = getattr(request.model.config, "pad_token_id", 0) or 0
    device = next(request.model.parameters()).device
    longest = max(batch.inputs["input_ids"].shape[-1] for batch in request.batches)
    longest = -(-longest // PAD_TO) * PAD_TO
    parts: dict[str, list[Tensor]] = {}
    for batch in request.batches:
        for name, tensor in batch.inputs.items():
            if name != "labels":
                fill = pad if name == "input_ids" else 0
                tensor = nn.functional.pad(tensor, (0, longest - tensor.shape[-1]), value=fill)
            parts.setdefault(name, []).append(tensor)
    order = torch.tensor([i for batch in request.batches for i in batch.index]).argsort()
    tensors = {name: torch.cat(some)[order].to(device) for name, some in parts.items()}
    labels = tensors.pop("labels")
    needed = tensors["attention_mask"].sum(-1)
    lengths = needed.amax(1) if needed.dim() > 1 else needed
    return Rows(tensors, lengths, labels, torch.arange(len(labels), device=device))


def split(rows: Rows) -> tuple[Rows, Rows]:
    """Two thirds to train on, and a third to measure a loss on."""
    index = torch.arange(len(rows), device=rows.labels.device)
    return rows.take(index[index % 3 != 2]), rows.take(index[index % 3 == 2])


def warm_head(model: nn.Module, rows: Rows, seed: int) -> nn.Module:
    """A copy of a model whose head was trained alone on some rows."""
    model = adapt(copy.deepcopy(model), "head")
    _run([Trainee(model, HEAD_RATE)], rows, HEAD_STEPS, seed)
    return model


def _same_layers(request: ScoreRequest, model: nn.Module) -> list[nn.Module]:
    """The layers of the request in a copy of its model."""
    return [model.get_submodule(layer.path) for layer in request.layers]


def _samples(request: ScoreRequest) -> list[int]:
    return [i for batch in request.batches for i in batch.index]


SAMPLES = dict.fromkeys(("probe", "probe_window", "rewind"), 1500) | dict.fromkeys(("kernel", "kernel_greedy"), 600)
"""How many samples a score gets; 100 if it is not named."""


def main() -> None:
    """Print all scores on one task."""
    import models
    import tasks
    from transformers import AutoTokenizer

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


CHEAP = ("middle", "alternate", "published_code")
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
"""The scores of this file."""


if __name__ == "__main__":
    main()
