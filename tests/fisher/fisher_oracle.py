"""A slow oracle for the diagonal Fisher: plain autograd, one sample at a time, no code shared with the package.

Everything is written down as in the definition: the gradient of a log-likelihood for each parameter of each layer, its
square, the (weighted) sum over labels and draws, the mean over samples, and last the aggregation to one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn


Terms = Iterable[tuple[float, Tensor]]
"""Weights and scalars: the sample contributes the sum over terms of weight * (gradient of the scalar) ** 2."""


def layer_parameters(layers: Sequence[nn.Module]) -> list[dict[str, nn.Parameter]]:
    """The parameters of each layer; one that several layers share counts for the first."""
    seen: set[int] = set()
    out = []
    for layer in layers:
        own = {name: p for name, p in layer.named_parameters() if id(p) not in seen}
        seen |= {id(p) for p in own.values()}
        out.append(own)
    return out


def sample_squares(
    model: nn.Module,
    layers: Sequence[nn.Module],
    samples: Sequence[dict[str, Tensor]],
    terms: Callable[[object, dict[str, Tensor]], Terms],
) -> list[dict[str, Tensor]]:
    """For each layer and parameter the squared gradients, (samples, *shape), in the model's own precision.

    `samples` are batches of one; `terms(outputs, sample)` gives what is differentiated. Labels are kept from the
    model.
    """
    groups = layer_parameters(layers)
    flat = [p for group in groups for p in group.values()]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for p in model.parameters():
        p.requires_grad_(True)
    model.eval()
    rows: list[list[Tensor]] = []
    for sample in samples:
        outputs = model(**{k: v for k, v in sample.items() if k not in ("labels", "start_positions", "end_positions")})
        total = [torch.zeros_like(p) for p in flat]
        for weight, value in terms(outputs, sample):
            grads = torch.autograd.grad(value, flat, retain_graph=True, allow_unused=True)
            for t, g in zip(total, grads, strict=True):
                if g is not None:
                    t += weight * g**2
        rows.append(total)
    for p in frozen:
        p.requires_grad_(False)
    stacked = iter([torch.stack([row[i] for row in rows]) for i in range(len(flat))])
    return [{name: next(stacked) for name in group} for group in groups]


def score(squares: dict[str, Tensor], aggregation: str, weights: Tensor | None = None, count: float = 0) -> float:
    """One layer's score: the mean of the squares over samples, aggregated.

    `weights` are multiplicities of the samples; `count` divides, their sum by default.
    """
    n = next(iter(squares.values())).shape[0]
    w = torch.ones(n) if weights is None else weights
    divisor = count or float(w.sum())
    diagonal = {k: torch.tensordot(w.to(s), s, dims=1) / divisor for k, s in squares.items()}
    entries = torch.cat([d.flatten() for d in diagonal.values()]).double()
    if aggregation == "frobenius":
        return float((entries**2).sum().sqrt())
    if aggregation == "frobenius_per_tensor":
        return float(sum((d.double() ** 2).sum().sqrt() for d in diagonal.values()))
    if aggregation == "trace":
        return float(entries.sum())
    if aggregation == "mean":
        return float(entries.mean())
    raise AssertionError(aggregation)


def given(outputs, sample) -> Terms:
    """The log-likelihood of a class label."""
    yield 1.0, outputs.logits.log_softmax(-1)[0, sample["labels"][0]]


def exact(outputs, sample) -> Terms:
    """Every class, weighted by its probability: the definition of the expectation over labels."""
    log_p = outputs.logits.log_softmax(-1)[0]
    for c in range(len(log_p)):
        yield float(log_p[c].detach().exp()), log_p[c]


def causal(outputs, sample) -> Terms:
    """The log-likelihood of a text: the sum over its labelled tokens, each predicted from those before it."""
    log_p, labels = outputs.logits.log_softmax(-1)[0], sample["labels"][0]
    yield 1.0, sum(log_p[t - 1, labels[t]] for t in range(1, len(labels)) if labels[t] != -100)


def causal_tokens(outputs, sample) -> Terms:
    """The log-likelihood of each labelled token as a sample of its own."""
    log_p, labels = outputs.logits.log_softmax(-1)[0], sample["labels"][0]
    for t in range(1, len(labels)):
        if labels[t] != -100:
            yield 1.0, log_p[t - 1, labels[t]]


def tokenwise(outputs, sample) -> Terms:
    """The log-likelihood of labels that stand at the position of their logits (masked and seq2seq models, tagging)."""
    log_p, labels = outputs.logits.log_softmax(-1)[0], sample["labels"][0]
    yield 1.0, sum(log_p[t, y] for t, y in enumerate(labels) if y != -100)
