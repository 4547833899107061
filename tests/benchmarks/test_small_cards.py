"""The benchmark of small cards: what it computes from a shape is what a model and its optimizer hold."""

from __future__ import annotations

import pytest
import torch
from tiny_models import build

from benchmarks.step import small_cards
from benchmarks.step.small_card_methods import METHODS, SHAPES, compute, tuned_layers
from peft_surgical import resolve_layers


CPU, TOKENS = torch.device("cpu"), 8
SHAPE = SHAPES["tiny"]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_what_is_computed_is_what_is_held(method):
    if method.bits < 16 or method.optimizer != "AdamW":
        pytest.importorskip("bitsandbytes")
    found, expected = small_cards.measure(SHAPE, method, CPU, TOKENS), compute(SHAPE, method, TOKENS)
    tuned = 0 if method.is_lora else len(tuned_layers(SHAPE["num_hidden_layers"]))
    matrices = 4 * SHAPE["hidden_size"] ** 2 + 3 * SHAPE["hidden_size"] * SHAPE["intermediate_size"]
    expected["weights"] += tuned * matrices * 2  # on a CPU they stay
    if method.bits == 4:  # each linear map has the tables of its codes
        expected["weights"] += 7 * (SHAPE["num_hidden_layers"] - tuned) * (16 + 256) * 4
    for part in ("trained", "copies", "gradients"):
        assert found[part] == expected[part], part
    # scales in 8 bits are no parameters; small tensors have states of 32 bits
    assert found["weights"] == pytest.approx(expected["weights"], rel=0.1 if method.bits == 8 else 0.01)
    assert found["optimizer"] == pytest.approx(expected["optimizer"], rel=0.2 if "8bit" in method.optimizer else 1e-3)


def test_layers_are_those_of_spread():
    depth = 7
    model = build("llama", num_hidden_layers=depth)
    assert [layer.index for layer in resolve_layers(model, "spread:5")] == tuned_layers(depth)


def test_rows_that_were_not_measured_are_computed():
    measured = {
        **compute(SHAPE, METHODS[0], TOKENS),
        "shape": "tiny",
        "method": METHODS[0].name,
        "peak_bytes": 3e9,
        "seconds": [0.5],
        "fits": False,
    }
    record = {"device": "a card", "tokens": TOKENS, "limit_gb": 24.0, "shapes": ["tiny"], "rows": [measured]}
    first, second = small_cards.table(record).splitlines()[-len(METHODS) :][:2]
    assert first.endswith("| 3.0 | 500 | does not fit |")
    assert second.endswith("| computed |  |  |")


def test_a_method_that_does_not_fit_is_measured_without_a_limit(monkeypatch):
    calls = []

    def measure(*given):
        calls.append(given)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        return {"peak_bytes": 1}

    monkeypatch.setattr(small_cards, "measure", measure)
    assert small_cards.try_method(SHAPE, METHODS[0], CPU, TOKENS, 24.0) == {"peak_bytes": 1, "fits": False}
