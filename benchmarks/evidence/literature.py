"""Choices of layers that others have published, as scores for `rank_layers(score=...)`; none of them trains anything.

Where a paper's text could not be had, the docstring says what was read and what is our reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.evidence.warm_start import samples_of
from peft_surgical.fisher.engine import Runner
from peft_surgical.fisher.model_state import untouched
from peft_surgical.ranking.scores import LayerScores, ScoreRequest, register_score


LITERATURE = ("cka", "prism", "resnorm", "outliers")
"""The scores of this file."""
CONSTANT = 1e-4
"""A token varies less than this part of its norm where it is the same in all samples, but for rounding."""
RANK_TOLERANCE = 1e-12
"""Directions in which the inputs of a layer have less than this part of the largest second moment are rounding."""
OUTLIER = 5.0
"""M: how many times the mean an outlier has, as in the commands that the authors of OWL give for LLaMA."""

See = Callable[[Tensor, Sequence[tuple[Tensor, Tensor, Tensor | None]]], None]
"""Gets what is no padding, (sequences, tokens), and for each module input, output and the output's gradient."""


@register_score("cka")
def cka(request: ScoreRequest) -> LayerScores:
    """How much a layer changes one token of each sample: 1 - linear CKA of it before and after the layer.

    Ogawa et al. 2026, "Layer-wise LoRA fine-tuning: a similarity metric approach" (arXiv 2602.05988), and their code
    (c2d-usp/Layer-wise-LoRA-with-CKA): the first token of an encoder, the last that is no padding of a decoder, which
    here is the answer; the layers with the highest score are tuned. Their code leaves out the layer that is first by
    this score in an encoder: it is the lowest one, whose first token is the same in all samples before it, so that CKA
    is not defined. It has the score 0 here. Theirs measures the last layer of a decoder after the final norm.
    """
    return LayerScores([1 - linear_cka(a, b) for a, b in pairwise(_tokens(request))], samples=samples_of(request))


def linear_cka(a: Tensor, b: Tensor) -> float:
    """Centered kernel alignment with a linear kernel (Kornblith et al. 2019, section 3); 1 where `a` is constant.

    Args:
        a: (samples, width).
        b: (samples, any width).
    """
    norm = a.norm()
    a, b = a - a.mean(0), b - b.mean(0)
    if a.norm() <= CONSTANT * norm:
        return 1.0
    return float((a.T @ b).square().sum() / ((a.T @ a).norm() * (b.T @ b).norm()))


@register_score("prism")
def prism(request: ScoreRequest) -> LayerScores:
    """Mean cosine similarity of a token after the layer with the same token after all other layers.

    PRiSM (LREC 2026, main 810). Read were its abstract ("the cosine similarity between pre-trained aggregate token
    representations across layers", "a single forward pass", "block-wise highest-scoring layers") and that of a thesis
    on the same (IUB 11348/997: "of the [CLS] token embeddings across all layers"), not the papers. Our reading: the
    score is the mean over samples and over all other layers; the layers are cut into k blocks of equal size, and the
    best of each is tuned (`methods.best_layers`). Of a decoder the token is the last, as for `cka`.
    """
    states = nn.functional.normalize(_tokens(request)[1:], dim=-1)
    similar = torch.einsum("isd,jsd->ij", states, states) / states.shape[1]
    others = max(1, len(similar) - 1)
    return LayerScores(((similar.sum(1) - 1) / others).tolist(), samples=samples_of(request))


@register_score("resnorm")
def resnorm(request: ScoreRequest) -> LayerScores:
    """Norm of the log-likelihood's gradient at a layer's output, projected on what is linear in the layer's input.

    The projected residual norm of Xu et al. 2026, "Understanding and Guiding Layer Placement in Parameter-Efficient
    Fine-Tuning of Large Language Models" (arXiv 2602.04019). Read were its abstract and a summary ("for squared loss
    and linear adapters, the resnorm equals a normalized gradient norm"; "covariance-normalized gradients"), not the
    paper. Our reading: an adapter adds A x to the layer's output, with x its input; with g the gradient there,
    G = sum g x^T and S = sum x x^T over all tokens but padding, it is the root of tr(G S^-1 G^T).
    """
    layers: list[Any] = [layer.module for layer in request.layers]
    products: list[Any] = [0.0] * len(layers)
    moments: list[Any] = [0.0] * len(layers)

    def see(mask: Tensor, seen: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> None:
        for number, (before, _, gradient) in enumerate(seen):
            assert gradient is not None
            x, g = before.detach()[mask].double(), gradient[mask].double()
            products[number] = products[number] + g.T @ x
            moments[number] = moments[number] + x.T @ x

    _go_through(request, layers, see, differentiate=True)
    scores = []
    for product, moment in zip(products, moments, strict=True):
        inverse = torch.linalg.pinv(moment, rtol=RANK_TOLERANCE, hermitian=True)
        scores.append(float((product @ inverse * product).sum()) ** 0.5)
    return LayerScores(scores, samples=samples_of(request))


@register_score("outliers")
def outliers(request: ScoreRequest) -> LayerScores:
    """The share of |W_ij| * ||x_j|| that is over five times its mean in the layer.

    The layerwise outlier distribution of OWL (Yin et al. 2023, arXiv 2310.05175, section 3.2, and their code
    luuyin/OWL), by which OWS (Li et al. 2024, arXiv 2405.18380) samples the layers to tune anew every few steps; here
    the best stay chosen. x_j is input j of a linear map, over all tokens but padding; all maps of a layer count
    together.
    """
    groups = [[m for m in layer.module.modules() if isinstance(m, nn.Linear)] for layer in request.layers]
    maps = [module for group in groups for module in group]
    squares: dict[nn.Module, Any] = dict.fromkeys(maps, 0.0)

    def see(mask: Tensor, seen: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> None:
        for module, (before, *_) in zip(maps, seen, strict=True):
            squares[module] = squares[module] + before[mask].double().square().sum(0)

    _go_through(request, maps, see)
    scores = []
    for group in groups:
        found = torch.cat([(m.weight.detach().abs() * squares[m].sqrt()).flatten() for m in group])
        scores.append(float((found > OUTLIER * found.mean()).double().mean()))
    return LayerScores(scores, samples=samples_of(request))


def _tokens(request: ScoreRequest) -> Tensor:
    """One token of each sequence before the first layer and after each, (layers + 1, sequences, width) in float64."""
    parts: list[Tensor] = []
    of_tokens = request.batches[0].inputs["labels"].dim() > 1  # the labels of a decoder

    def see(mask: Tensor, seen: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> None:
        places = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)
        place = places.argmax(1) if of_tokens else mask.int().argmax(1)
        rows = torch.arange(len(mask), device=mask.device)
        parts.append(torch.stack([states[rows, place] for states in (seen[0][0], *(after for _, after, _ in seen))]))

    _go_through(request, [layer.module for layer in request.layers], see)
    return torch.cat(parts, 1).double()


def _go_through(request: ScoreRequest, modules: Sequence[nn.Module], see: See, differentiate: bool = False) -> None:
    """Show what goes into modules and comes out, batch by batch; with the gradient of the log-likelihood if wanted."""
    assert request.objective is not None
    runner, seen = Runner(request.model, request.objective), {}

    def note(module: nn.Module, given: tuple, named: dict[str, Any], output: Any) -> None:
        seen[module] = (
            given[0] if given else named["hidden_states"],
            output[0] if isinstance(output, tuple) else output,
        )

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    try:
        with untouched(request.model, request.seed):
            for p in modules[0].parameters() if differentiate else ():
                p.requires_grad_()
            for batch in request.batches:
                gradients: Sequence[Tensor | None] = [None] * len(modules)
                if differentiate:
                    values = runner.checked_rows(batch).values
                    gradients = torch.autograd.grad(values.sum(), [seen[module][1] for module in modules])
                else:
                    with torch.no_grad():
                        runner.forward(batch)
                mask = batch.inputs["attention_mask"].flatten(0, -2).bool().to(seen[modules[0]][0].device)
                see(mask, [(*seen[m], g) for m, g in zip(modules, gradients, strict=True)])
    finally:
        for handle in handles:
            handle.remove()
