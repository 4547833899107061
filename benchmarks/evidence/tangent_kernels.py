"""Candidate scores by the tangent kernels of layers: how well a kernel predicts rows it has not seen.

The gradients of modules are sketched, for a kernel of all rows to fit into memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.evidence.models import head_names
from benchmarks.evidence.tasks import Rows
from benchmarks.evidence.warm_start import rows_of, same_layers, samples_of, warm_head
from peft_surgical.ranking.scores import LayerScores, ScoreRequest, register_score


SKETCH = 64
"""Gradients are sketched to so many rows and columns."""
RIDGES = torch.logspace(-4, 2, 25, dtype=torch.float64)
"""The ridges that are tried, relative to the mean eigenvalue."""


def sketched_gradients(
    model: nn.Module, modules: Sequence[nn.Linear], rows: Rows, seed: int
) -> dict[nn.Module, Tensor]:
    """Sketched gradients of the outputs by the weights of modules, (outputs, rows, SKETCH^2) for each."""
    generator = torch.Generator().manual_seed(seed)
    device = rows.labels.device
    sides = {m: [_signs(size, generator).to(device) for size in (m.in_features, m.out_features)] for m in modules}
    kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kept[module] = (inputs[0].detach(), output)

    handles = [m.register_forward_hook(keep) for m in modules]
    found: dict[nn.Module, list[Tensor]] = {m: [] for m in modules}
    model.requires_grad_(True)
    try:
        for index in torch.arange(len(rows), device=device).split(16):
            length = int(rows.lengths[index].max())
            inputs = {name: t[index, ..., :length] for name, t in rows.inputs.items()}
            with torch.enable_grad():
                outputs = _outputs(model(**inputs).logits.float(), rows.labels)
            parts: dict[nn.Module, list[Tensor]] = {m: [] for m in modules}
            for column in range(outputs.shape[1]):
                wanted = [kept[m][1] for m in modules]
                gradients = torch.autograd.grad(outputs[:, column].sum(), wanted, retain_graph=True)
                for m, g in zip(modules, gradients, strict=True):
                    x = (kept[m][0] @ sides[m][0]).reshape(len(index), -1, sides[m][0].shape[1])
                    y = (g @ sides[m][1]).reshape(len(index), -1, sides[m][1].shape[1])
                    parts[m].append((y.transpose(1, 2) @ x).flatten(1).detach())
            for m in modules:
                found[m].append(torch.stack(parts[m]))
    finally:
        for handle in handles:
            handle.remove()
    return {m: torch.cat(parts, 1) for m, parts in found.items()}


def _outputs(logits: Tensor, labels: Tensor) -> Tensor:
    two = logits.shape[1] == 2 and not labels.is_floating_point()
    return (logits[:, 1] - logits[:, 0]).unsqueeze(1) if two else logits


def _signs(size: int, generator: torch.Generator) -> Tensor:
    """A random matrix that keeps scalar products on average, (size, at most SKETCH)."""
    if size <= SKETCH:
        return torch.eye(size)
    return (torch.randint(0, 2, (size, SKETCH), generator=generator) * 2 - 1) / SKETCH**0.5


def kernel_of(sketch: Tensor) -> Tensor:
    flat = sketch.double()
    scale = flat.square().mean().sqrt().clamp_min(1e-30)
    return sum(f @ f.T for f in flat) / len(flat) / scale


def targets_of(rows: Rows) -> Tensor:
    if rows.labels.is_floating_point():
        return rows.labels.double().unsqueeze(1)
    one_hot = nn.functional.one_hot(rows.labels).double()
    return one_hot[:, 1:] if one_hot.shape[1] == 2 else one_hot


def leave_one_out(kernel: Tensor, targets: Tensor) -> float:
    """The share of the variance that kernel regression, with the best ridge, leaves unexplained in left-out rows.

    Args:
        kernel: (N, N), positive semi-definite.
        targets: (N, outputs).

    Returns:
        Mean squared leave-one-out residual over the variance of the targets; 1 if nothing can be predicted.
    """
    n = len(kernel)
    centre = torch.eye(n, dtype=kernel.dtype, device=kernel.device) - 1 / n
    values, vectors = torch.linalg.eigh(centre @ kernel @ centre)
    values = values.clamp_min(0)
    centred = targets - targets.mean(0)
    rotated = vectors.T @ centred
    best = math.inf
    for ridge in (RIDGES * float(values.mean())).tolist():
        shrink = values / (values + ridge)
        fitted = vectors @ (shrink[:, None] * rotated)
        leverage = (vectors.square() * shrink).sum(1) + 1 / n
        residual = (centred - fitted) / (1 - leverage)[:, None]
        best = min(best, float(residual.square().mean()))
    return best / float(centred.square().mean())


@register_score("kernel")
def kernel(request: ScoreRequest) -> LayerScores:
    """How well the layer's tangent kernel, with the head's, predicts labels it has not seen.

    Tuning a layer a little is regression on the gradients of the output by its parameters. The leave-one-out error of
    this regression has a closed form, and does not depend on how large the gradients are.
    """
    kernels, head, targets = tangent_kernels(request)
    alone = leave_one_out(head, targets)
    gains = [alone - leave_one_out(head + k, targets) for k in kernels]
    return LayerScores(gains, samples=samples_of(request), record={"head_alone": alone})


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
    return LayerScores(scores, samples=samples_of(request), record={"errors": errors})


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
    groups = [[m for m in layer.modules() if isinstance(m, nn.Linear)] for layer in same_layers(request, model)]
    in_head = [
        m for path, m in model.named_modules() if isinstance(m, nn.Linear) and set(path.split(".")) & set(heads)
    ]
    sketches = sketched_gradients(model, [*sum(groups, []), *in_head], rows, request.seed)
    kernels = [sum(kernel_of(sketches[m]) for m in group) for group in groups]
    return kernels, sum(kernel_of(sketches[m]) for m in in_head), targets_of(rows)
