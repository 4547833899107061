"""Choices of layers from the literature against slow computations, one sample at a time and without padding."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tiny_models import build
from torch import nn

from benchmarks.evidence import literature, methods
from peft_surgical.ranking.rank import rank_layers


@pytest.fixture(scope="module", params=["bert", "llama"])
def case(request):
    """A model, samples of many lengths, and what goes into each layer and out of the last, for each sample."""
    decoder = request.param == "llama"
    model = build(request.param, bare=False).eval()
    generator = torch.Generator().manual_seed(1)
    data = []
    for number in range(11):
        ids = torch.randint(3, 90, (3 + number,), generator=generator)
        ids[0] = ids[0] if decoder else 2  # an encoder's first token is the same in all samples
        labels = torch.full_like(ids, -100)
        labels[-1] = ids[-1]
        data.append({"input_ids": ids, "labels": labels if decoder else torch.tensor(number % 2)})
    plain = copy.deepcopy(model)
    if decoder:
        plain.model.norm = nn.Identity()  # transformers gives the last state after it

    def states(row: dict) -> list[np.ndarray]:
        found = plain(input_ids=row["input_ids"][None], output_hidden_states=True).hidden_states
        return [state[0].detach().double().numpy() for state in found]

    return model, data, [states(row) for row in data], -1 if decoder else 0


def scores(case, name: str, batch_size: int) -> list[float]:
    model, data, *_ = case
    options = {"num_samples": len(data), "batch_size": batch_size, "progress": False}
    return rank_layers(model, data, score=name, **options).scores


@pytest.mark.parametrize("batch_size", [1, 4])
def test_cka_is_that_of_kernel_matrices(case, batch_size):
    *_, states, place = case
    n = len(states)
    centre = np.eye(n) - 1 / n

    def kernel(layer: int) -> np.ndarray:
        tokens = np.array([of_sample[layer][place] for of_sample in states])
        return centre @ tokens @ tokens.T @ centre

    def alignment(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.trace(a @ b) / np.sqrt(np.trace(a @ a) * np.trace(b @ b)))

    expected = [1 - alignment(kernel(i), kernel(i + 1)) for i in range(4)]
    if place == 0:
        expected[0] = 0.0  # it is not defined
    assert scores(case, "cka", batch_size) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_prism_is_the_mean_similarity_with_other_layers(case, batch_size):
    *_, states, place = case

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    expected = [
        np.mean([cosine(s[i + 1][place], s[j + 1][place]) for s in states for j in range(4) if j != i])
        for i in range(4)
    ]
    assert scores(case, "prism", batch_size) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_resnorm_is_what_least_squares_explains_of_the_gradient(case, batch_size):
    model, data, states, place = case
    expected = []
    for number in range(4):
        residuals = []
        for row in data:
            kept = []
            layer = (model.model.layers if place else model.bert.encoder.layer)[number]
            handle = layer.register_forward_hook(lambda _, __, out, kept=kept: kept.append(out))
            logits = model(input_ids=row["input_ids"][None]).logits[0]
            handle.remove()
            out = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
            of_answer, answer = (logits[-2], row["labels"][-1]) if place else (logits, row["labels"])
            chance = of_answer.log_softmax(-1)[answer]
            residuals.append(torch.autograd.grad(chance, out)[0].reshape(-1, out.shape[-1]).double().numpy())
        x, g = np.concatenate([s[number] for s in states]), np.concatenate(residuals)
        assert len(x) > x.shape[1]  # else all would be explained
        expected.append(np.linalg.norm(x @ np.linalg.lstsq(x, g, rcond=1e-6)[0]))
    assert scores(case, "resnorm", batch_size) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_outliers_are_counted_over_all_maps_of_a_layer(case, batch_size, monkeypatch):
    model, data, _, place = case
    monkeypatch.setattr(literature, "OUTLIER", 1.5)
    given: dict[nn.Module, list[np.ndarray]] = {}
    forward = nn.Linear.forward
    with monkeypatch.context() as patched:
        patched.setattr(
            nn.Linear,
            "forward",
            lambda m, x: (given.setdefault(m, []).append(x.detach().double().numpy()), forward(m, x))[1],
        )
        for row in data:
            model(input_ids=row["input_ids"][None])
    expected = []
    for layer in model.model.layers if place else model.bert.encoder.layer:
        found = []
        for module in (m for m in layer.modules() if isinstance(m, nn.Linear)):
            inputs = np.concatenate([x.reshape(-1, x.shape[-1]) for x in given[module]])
            for row in module.weight.detach().double().numpy():
                found += [abs(w) * np.sqrt(sum(inputs[:, j] ** 2)) for j, w in enumerate(row)]
        mean = sum(found) / len(found)
        expected.append(sum(value > 1.5 * mean for value in found) / len(found))
    assert scores(case, "outliers", batch_size) == pytest.approx(expected, abs=1e-9)
    assert 0 < expected[0] < 1


def test_prism_tunes_the_best_of_each_block():
    orders = {"prism": [11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 0, 1]}
    assert methods.resolve("prism:5", orders) == "layers-0.3.6.8.11"
    assert methods.resolve("prism:4", orders) == "layers-2.5.8.11"
