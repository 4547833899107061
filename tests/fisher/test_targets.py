"""Which modules are listened to: found by short runs of the model, in models of any make, and measured exactly."""

from __future__ import annotations

import logging

import fisher_oracle as oracle
import pytest
import torch
from tiny_models import CAUSAL, batch, build
from torch import nn

from peft_surgical.fisher import targets as fisher_targets
from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.measure import layer_fisher
from peft_surgical.fisher.objective import make_objective
from peft_surgical.layers import choose_stack


def compare(model, inputs, terms=oracle.given, engine="hooks"):
    """The norms of all parameters are those of the oracle."""
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
@pytest.mark.parametrize(("samples", "tokens"), [(4, 7), (6, 6)])
def test_usual_models_are_measured_exactly(family, samples, tokens, engine):
    terms = oracle.causal if family in CAUSAL else oracle.given
    compare(build(family), batch(family, n=samples, length=tokens), terms, engine)


class Block(nn.Module):
    """A layer whose maps see samples and tokens in several ways."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.inner, self.outer = kind, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if self.kind == "tokens first":
            return x + self.outer(self.inner(x.transpose(0, 1)).relu()).transpose(0, 1)
        if self.kind == "tokens first and flat":
            y = self.inner(x.transpose(0, 1).reshape(-1, x.shape[-1])).relu()
            return x + self.outer(y).view(x.shape[1], x.shape[0], -1).transpose(0, 1)
        if self.kind == "read by its parent":
            return x + self.outer(nn.functional.linear(x, self.inner.weight, self.inner.bias).relu())
        if self.kind == "pieces of several samples":
            y = self.inner(x.transpose(0, 1).reshape(x.shape)).relu()
            return x + self.outer(y).view(x.shape[1], x.shape[0], -1).transpose(0, 1)
        if self.kind == "other samples":
            return x + self.outer(self.inner(x).relu()) * x.mean(0)
        if self.kind == "flat":
            return x + self.outer(self.inner(x.flatten(0, 1)).relu()).view_as(x)
        return x + self.outer(self.inner(x).relu())


class Model(nn.Module):
    """Blocks between an embedding table and a head."""

    def __init__(self, make, width: int = 4):
        super().__init__()
        self.table, self.head = nn.Embedding(9, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, input_ids):
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return type("Output", (), {"logits": self.head(x.mean(1))})


def ids(samples, tokens):
    return {"input_ids": torch.randint(9, (samples, tokens)), "labels": torch.randint(3, (samples,))}


UNUSUAL = ["tokens first", "tokens first and flat", "read by its parent", "flat", "pieces of several samples"]


@ENGINES
@pytest.mark.parametrize(("samples", "tokens"), [(5, 3), (4, 4), (3, 4)])
@pytest.mark.parametrize("kind", ["usual", *UNUSUAL])
def test_models_of_any_make_are_measured_exactly(kind, samples, tokens, engine):
    compare(Model(lambda: Block(kind)), ids(samples, tokens), engine=engine)


@pytest.fixture
def searches(monkeypatch):
    """The sizes of the batches that the model runs on to find the modules to listen to."""
    sizes = []
    record = fisher_targets.record_calls

    def counted(modules, run, before=None):
        sizes.append(1 if before is None else 2)
        return record(modules, run, before)

    monkeypatch.setattr(fisher_targets, "record_calls", counted)
    return sizes


@ENGINES
def test_of_usual_models_no_module_is_searched_for(engine, searches):
    compare(build("bert"), batch("bert", n=4, length=7), engine=engine)
    assert not searches


@ENGINES
@pytest.mark.parametrize("kind", UNUSUAL)
def test_else_the_model_runs_on_one_sample_and_on_two_however_many_passes_follow(kind, engine, searches):
    compare(Model(lambda: Block(kind)), ids(5, 3), engine=engine)
    assert searches == [1, 2]


def test_samples_that_depend_on_each_other_are_taken_one_at_a_time(caplog):
    with caplog.at_level(logging.INFO, logger="peft_surgical"):
        compare(Model(lambda: Block("other samples")), ids(5, 3))
    assert "taken one at a time" in caplog.text


@ENGINES
@pytest.mark.parametrize("kind", ["usual", "flat"])
def test_batches_of_several_samples_and_of_one(kind, engine):
    model = Model(lambda: Block(kind)).double()
    layers = choose_stack(model).layers
    whole = Batch(ids(5, 3), tuple(range(5)))
    found = [
        [t.norm for tensors in layer_fisher(model, layers, batches, make_objective(model), engine=one).layers
         for t in tensors.values()]
        for one, batches in (
            ("loop", [whole]),
            (engine, [whole.select(0, 4), whole.select(4, 5)]),
            (engine, [whole.select(0, 1), whole.select(1, 5)]),
        )
    ]  # fmt: skip
    assert found[1] == pytest.approx(found[0], rel=1e-9)
    assert found[2] == pytest.approx(found[0], rel=1e-9)


class Gain(nn.Module):
    """An expert that owns a vector only."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(width))

    def forward(self, x):
        return self.weight * x.tanh()


class Norm(nn.LayerNorm):
    """An expert that is a normalisation, with weights that differ."""

    def __init__(self, width):
        super().__init__(width)
        nn.init.normal_(self.weight, 1, 0.3)
        nn.init.normal_(self.bias, 0, 0.3)


class Gated(nn.Module):
    """An expert of several maps."""

    def __init__(self, width):
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(self.up(x) * self.gate(x).sigmoid())


class Routed(nn.Module):
    """Gives each token to one of several experts, by the number that the token began with."""

    def __init__(self, make, experts, width, container, extra):
        super().__init__()
        made = [make(width) for _ in range(experts)]
        self.experts = container({str(n): e for n, e in enumerate(made)} if container is nn.ModuleDict else made)
        self.extra = extra

    def forward(self, x, ids):
        experts = list(self.experts.values() if isinstance(self.experts, nn.ModuleDict) else self.experts)
        flat, choice = x.flatten(0, 1), ids.flatten() % len(experts)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(experts):
            rows = (choice == number).nonzero()[:, 0]
            found = expert(flat[rows][None])[0] if self.extra else expert(flat[rows])
            out = out.index_add(0, rows, found)
        return x + out.view_as(x)


class RoutedModel(Model):
    def forward(self, input_ids):
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x, input_ids)
        return type("Output", (), {"logits": self.head(x.mean(1))})


EXPERTS = {
    "linear": lambda width: nn.Linear(width, width),
    "no bias": lambda width: nn.Linear(width, width, bias=False),
    "gain": Gain,
    "norm": Norm,
    "gated": Gated,
}
ROUTES = {
    # the first expert sees as many rows as there are samples, though not one of each
    "one": [[0, 0, 1, 2], [1, 2, 1, 1], [2, 0, 1, 2]],
    # each does
    "all": [[0, 0, 1, 2], [1, 3, 1, 3], [2, 0, 3, 2]],
    # as many samples as tokens, which is the width too
    "square": [[0, 0, 1, 2], [1, 3, 1, 3], [2, 0, 3, 2], [0, 1, 2, 3]],
    # of each of two samples an expert sees alike many, so that a trial on these may mislead
    "alike": [[0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 0]],
    # a single row of each of the first two
    "single": [[0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]],
}


@ENGINES
@pytest.mark.parametrize("extra", [False, True], ids=["rows", "one row of rows"])
@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_get_the_rows_that_are_routed_to_them(kind, route, container, extra, engine):
    routes = torch.tensor(ROUTES[route])
    count = int(routes.max()) + 1
    assert routes.shape[1] == 4  # the width: the shapes alone tell tokens from features no more
    model = RoutedModel(lambda: Routed(EXPERTS[kind], count, 4, container, extra))
    inputs = {"input_ids": routes + count * (torch.arange(routes.numel()).view_as(routes) % 2)}
    compare(model, inputs | {"labels": torch.arange(len(routes)) % 3}, engine=engine)
