"""What is not finite or not there is refused, with the sample and the module named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.measure import layer_fisher
from peft_surgical.fisher.objective import make_objective
from peft_surgical.layers import Layer


ENGINES = pytest.mark.parametrize("engine", ["hooks", "layer_major", "loop"])


class Root(nn.Module):
    """Has no finite slope at 0."""

    def forward(self, x):
        return x.abs().sqrt()


class Model(nn.Module):
    """Three layers, of which the middle one sends back what is not finite, for samples of zeros."""

    def __init__(self, middle: type[nn.Module] = Root):
        super().__init__()
        activations = (nn.Identity, middle, nn.Identity)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3, bias=False), a()) for a in activations)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def measure(model, x, engine, **options):
    batch = Batch({"x": x, "labels": torch.arange(len(x)) % 3}, tuple(range(7, 7 + len(x))))
    layers = [Layer("layers", i, f"layers.{i}", m) for i, m in enumerate(model.layers)]
    return layer_fisher(model, layers, [batch], make_objective(model), engine=engine, **options)


def samples(bad: float):
    x = torch.randn(4, 3)
    x[2] = bad
    return x


@pytest.mark.parametrize("diagonal", [True, False])
@ENGINES
def test_a_gradient_that_is_not_finite_is_traced_to_its_sample_and_module(engine, diagonal):
    where = "" if engine == "loop" else r" at the output of layers\.1\.0"
    with pytest.raises(ValueError, match=rf"gradient of sample 9 of the draw is not finite{where}\."):
        measure(Model(), samples(0.0), engine, diagonal=diagonal)


@pytest.mark.parametrize("place", [0, 1, 2])
@ENGINES
def test_it_is_traced_in_whichever_batch_it_is(engine, place):
    model, x = Model(), torch.randn(6, 3)
    x[2 * place + 1] = 0
    batches = [Batch({"x": x[i : i + 2], "labels": torch.arange(2)}, (i, i + 1)) for i in (0, 2, 4)]
    layers = [Layer("layers", i, f"layers.{i}", m) for i, m in enumerate(model.layers)]
    with pytest.raises(ValueError, match=f"gradient of sample {2 * place + 1} of the draw is not finite"):
        layer_fisher(model, layers, batches, make_objective(model), engine=engine)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@ENGINES
def test_a_log_likelihood_that_is_not_finite_is_traced_to_its_sample(engine, bad):
    with pytest.raises(ValueError, match="log-likelihood of sample 9 of the draw is not finite"):
        measure(Model(nn.Identity), samples(bad), engine)


@ENGINES
def test_squares_that_overflow_are_refused(engine):
    model = Model(nn.Identity)
    with torch.no_grad():
        model.layers[0][0].weight.mul_(1e-20)
        model.layers[1][0].weight.mul_(1e20)
    with pytest.raises(ValueError, match=r"squared gradients of layers\.0\.0\.weight overflow"):
        measure(model, samples(1.0), engine)


@ENGINES
def test_layers_that_get_no_gradient_are_refused(engine):
    class Cut(Model):
        def forward(self, x):
            return super().forward(x).detach() * 2

    with pytest.raises(ValueError, match="No layer gets a gradient"):
        measure(Cut(nn.Identity), samples(1.0), engine)


@ENGINES
def test_after_an_error_the_model_is_measured_as_before(engine):
    model, x = Model(nn.Identity), samples(1.0)
    before = measure(model, x, engine).layers
    with pytest.raises(ValueError, match="not finite"):
        measure(model, samples(float("nan")), engine)
    for one, other in zip(before, measure(model, x, engine).layers, strict=True):
        assert {k: t.norm for k, t in one.items()} == {k: t.norm for k, t in other.items()}
