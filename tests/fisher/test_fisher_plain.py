"""Plain models are measured without a trial run of the model, others are found out and measured as exactly."""

from __future__ import annotations

import fisher_oracle as oracle
import pytest
import torch
from tiny_models import CAUSAL, batch, build
from torch import nn

from peft_surgical.fisher import engines as fisher_engines
from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.diagonal import layer_fisher
from peft_surgical.fisher.log_likelihood import make_objective
from peft_surgical.fisher.owners import find_owners
from peft_surgical.fisher.plain import plain_units
from peft_surgical.layers import choose_stack


@pytest.fixture
def trials(monkeypatch):
    """How many samples were in each trial run."""
    sizes = []
    find = fisher_engines.find_units

    def counted(model, layers, owners, run, samples):
        return find(model, layers, owners, lambda n: sizes.append(n) or run(n), samples)

    monkeypatch.setattr(fisher_engines, "find_units", counted)
    return sizes


def compare(model, inputs, terms=oracle.given, engine="hooks"):
    """The scores of the layers, with the oracle's."""
    model, stack = model.double(), choose_stack(model)
    batch = Batch(inputs, tuple(range(len(inputs["labels"]))))
    found = layer_fisher(model, stack.layers, [batch], make_objective(model), engine=engine)
    samples = [{k: v[n : n + 1] for k, v in inputs.items()} for n in range(len(inputs["labels"]))]
    wanted = oracle.sample_squares(model, [layer.module for layer in stack.layers], samples, terms)
    for tensors, squares in zip(found.layers, wanted, strict=True):
        for name, square in squares.items():
            scale = max(float(s.mean(0).norm()) for s in squares.values())
            assert abs(tensors[name].norm - float(square.mean(0).norm())) < 1e-9 * scale, name


ENGINES = pytest.mark.parametrize("engine", ["hooks", "layer_major"])


@ENGINES
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "qwen3", "modernbert", "albert"])
def test_plain_models_are_measured_without_a_trial(family, engine, trials):
    if (family, engine) == ("albert", "layer_major"):
        pytest.skip("its one layer is called many times, which that engine refuses")
    terms = oracle.causal if family in CAUSAL else oracle.given
    compare(build(family), batch(family, n=4, length=7), terms, engine)
    assert not trials


def test_with_as_many_samples_as_tokens_a_trial_tells_them_apart(trials):
    compare(build("bert"), batch("bert", n=6, length=6))
    assert trials == [1, 2]


class Block(nn.Module):
    """A layer that can be other than plain in several ways."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.inner, self.outer = kind, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if self.kind == "tokens first":
            return x + self.outer(self.inner(x.transpose(0, 1)).relu()).transpose(0, 1)
        if self.kind == "read by its parent":
            return x + self.outer(nn.functional.linear(x, self.inner.weight, self.inner.bias).relu())
        if self.kind == "flat":
            return x + self.outer(self.inner(x.flatten(0, 1)).relu()).view_as(x)
        return x + self.outer(self.inner(x).relu())


class Model(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)
        self.layers = nn.ModuleList(Block(kind) for _ in range(3))

    def forward(self, input_ids):
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return type("Output", (), {"logits": self.head(x.mean(1))})


@ENGINES
@pytest.mark.parametrize("kind", ["plain", "tokens first", "read by its parent", "flat"])
def test_models_that_prove_not_to_be_plain_are_measured_all_the_same(kind, engine, trials):
    inputs = {"input_ids": torch.randint(9, (5, 3)), "labels": torch.randint(3, (5,))}
    compare(Model(kind), inputs, engine=engine)
    assert bool(trials) == (kind != "plain")


def test_a_model_with_a_module_that_has_no_rule_is_not_plain():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.ones(3, 3))

    model = nn.Sequential(nn.Linear(3, 3), Own())
    assert plain_units(find_owners(model, model.parameters())) is None
    assert [unit.name for unit in plain_units(find_owners(model, model[0].parameters()))] == ["0"]


def test_a_linear_map_with_its_own_forward_is_not_plain():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = Doubled(3, 3)
    assert plain_units(find_owners(model, Doubled(3, 3).parameters())) == []
    assert plain_units(find_owners(model, model.parameters())) is None
