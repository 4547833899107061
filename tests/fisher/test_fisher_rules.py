"""Each rule, and the modules without one, against autograd on one sample at a time, with random shapes."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D

from peft_surgical.fisher import recompute
from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.gradients import (
    DenseGradients,
    ProductGradients,
    RowGradients,
    SummedGradients,
    join,
)
from peft_surgical.fisher.measure import layer_fisher
from peft_surgical.fisher.objective import make_objective
from peft_surgical.fisher.rules import RULES, find_rule, gain, register_rule, rms_norm, try_gain
from peft_surgical.fisher.squares import SquareQueue
from peft_surgical.fisher.sums import new_sum
from peft_surgical.layers import Layer


sizes = st.integers(1, 6)


def per_sample(module: nn.Module, x: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of each sample, by autograd. x and g have the samples in front."""
    rows = []
    for one, grad in zip(x, g, strict=True):
        names, parameters = zip(*module.named_parameters(), strict=True)
        rows.append(torch.autograd.grad(module(one), parameters, grad.contiguous()))
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)}


def check(module: nn.Module, x: torch.Tensor, tolerance: float = 1e-9) -> None:
    """The rule's gradients are those of autograd, in every form in which they are used."""
    module = module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
        shape = torch.stack([module(one) for one in x]).shape
    g = torch.randn(shape, dtype=torch.float64)
    rule = find_rule(module)
    assert rule is not None
    found = rule(module, x, g)
    for name, expected in per_sample(module, x, g).items():
        gradients = found[name]
        assert gradients.samples == len(x)
        assert tuple(gradients.shape) == tuple(expected.shape[1:])
        close(gradients.dense(0, len(x)).view_as(expected), expected, tolerance)
        close(gradients.squared_norms(), expected.flatten(1).square().sum(1), tolerance)
        out, queue = new_sum(gradients), SquareQueue()
        gradients.add_squares(out, queue)
        queue.flush()
        close(out.flatten(), expected.square().sum(0).flatten(), tolerance)
        index = torch.randint(expected[0].numel(), (5,))
        close(gradients.at(*places(index, out)), expected.flatten(1)[:, index], tolerance)


def places(index: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of entries; a vector is one row."""
    return index // total.shape[-1], index % total.shape[-1]


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(n=sizes, m=sizes, t=sizes, i=sizes, o=sizes, bias=st.booleans(), tokens=st.booleans())
def test_linear(n, m, t, i, o, bias, tokens):
    check(nn.Linear(i, o, bias=bias), data(n, m, t, i) if tokens else data(n, m, i))


@settings(max_examples=15, deadline=None)
@given(n=sizes, t=sizes, i=sizes, o=sizes)
def test_transposed_linear(n, t, i, o):
    check(Conv1D(o, i), data(n, 1, t, i))


@settings(max_examples=15, deadline=None)
@given(n=sizes, t=sizes, w=st.integers(2, 6), rows=st.booleans(), bias=st.booleans())
def test_layer_norm(n, t, w, rows, bias):
    shape = (2, w) if rows else (w,)
    check(nn.LayerNorm(shape, bias=bias), data(n, 1, t, *shape))


@settings(max_examples=15, deadline=None)
@given(n=sizes, t=sizes, w=st.integers(2, 6), cls=st.sampled_from([LlamaRMSNorm, T5LayerNorm, nn.RMSNorm]))
def test_root_mean_square_norms(n, t, w, cls):
    module = cls(w)
    assert find_rule(module) is (gain if cls is nn.RMSNorm else rms_norm)  # whose epsilon depends on the type
    check(module, data(n, 1, t, w), tolerance=1e-5)  # those of transformers compute in float32


def test_the_norm_of_gemma_adds_one_to_its_weight():
    assert find_rule(Gemma3RMSNorm(5)) is rms_norm
    check(Gemma3RMSNorm(5), data(3, 1, 4, 5), tolerance=1e-5)


class WrongEpsilon(LlamaRMSNorm):
    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 3 * self.variance_epsilon).rsqrt()


class NormOverTokens(LlamaRMSNorm):
    def forward(self, x):
        return self.weight * x * (x.square().mean(-2, keepdim=True) + self.variance_epsilon).rsqrt()


@pytest.mark.parametrize("cls", [WrongEpsilon, NormOverTokens])
def test_gains_of_another_normalisation_are_no_root_mean_square_norms(cls):
    assert find_rule(cls(5)) is gain
    check(cls(5), data(3, 1, 4, 5) * 1e-3)


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lambda1 = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.lambda1


class Shift(Scale):
    def forward(self, x):
        return x + self.lambda1


class Power(Scale):
    def forward(self, x):
        return x * self.lambda1**2


class Mixing(Scale):
    def forward(self, x):
        return x * self.lambda1.flip(0)


@pytest.mark.parametrize("cls", [Scale, Shift])
def test_layer_scales_and_shifts_are_recognized(cls):
    assert find_rule(cls(4)) is gain
    check(cls(4), data(3, 1, 2, 4))


class Switched(nn.Module):
    """Divides by what its mode says, and counts how often."""

    calls = 0

    def __init__(self, width, mode, epsilon=0.1):
        super().__init__()
        self.weight, self.mode, self.eps = nn.Parameter(torch.ones(width)), mode, epsilon

    def forward(self, x):
        Switched.calls += 1
        size = {"rms": x.square().mean(-1, keepdim=True), "mean": x.abs().mean(-1, keepdim=True), "one": 1 + 0 * x}
        return self.weight * x * (size[self.mode] + self.eps).rsqrt()


def is_tried(module) -> bool:
    """Whether finding a module's rule runs it."""
    calls = Switched.calls
    find_rule(module)
    return Switched.calls > calls


def test_of_modules_that_compute_the_same_one_is_tried_out():
    rules = [find_rule(Switched(5, mode)) for mode in ("rms", "mean", "one")]
    assert rules == [rms_norm, gain, gain]
    calls = Switched.calls
    assert [find_rule(Switched(5, mode)) for mode in ("rms", "mean", "one")] == rules
    assert Switched.calls == calls


@pytest.mark.parametrize(
    "other",
    [
        lambda: Switched(6, "rms"),
        lambda: Switched(5, "rms", epsilon=0.2),
        lambda: Switched(5, "rms").eval(),
        lambda: Switched(5, "rms").double(),
        lambda: type("Heir", (Switched,), {})(5, "rms"),
    ],
)
def test_modules_that_may_compute_something_else_are_tried_out(other):
    find_rule(Switched(5, "rms"))
    assert is_tried(other())


@pytest.mark.parametrize("held", [nn.Buffer, torch.Tensor, list])
def test_modules_that_hold_more_than_numbers_are_tried_out_each_by_itself(held):
    for _ in "ab":
        module = Switched(5, "rms")
        module.more = held(torch.ones(2))
        assert is_tried(module)
        assert find_rule(module) is rms_norm


@pytest.mark.parametrize("held", [nn.Parameter(torch.ones(2)), nn.Linear(2, 2)])
def test_modules_with_other_weights_are_not_taken_for_like_ones_without(held):
    assert find_rule(Switched(5, "rms")) is rms_norm
    module = Switched(5, "rms")
    module.more = held
    assert find_rule(module) is None


@pytest.mark.parametrize("module", [nn.Linear(3, 4, bias=False), nn.Conv1d(3, 4, 2, bias=False)])
def test_nothing_is_computed_for_a_bias_that_is_not_there(module):
    x = torch.randn(2, 5, 3) if isinstance(module, nn.Linear) else torch.randn(2, 5, 3, 4)
    out = module(x) if isinstance(module, nn.Linear) else module(x.flatten(0, 1)).unflatten(0, (2, 5))
    rule = find_rule(module)
    assert rule is not None
    assert set(rule(module, x, torch.ones_like(out))) == {"weight"}


@pytest.mark.parametrize("module", [Power(4), Mixing(4), nn.PReLU(4), nn.Bilinear(4, 4, 4)])
def test_other_modules_are_not_taken_for_scales(module):
    assert try_gain(module) is None
    assert find_rule(module) is None


@settings(max_examples=15, deadline=None)
@given(n=sizes, t=sizes, v=st.integers(2, 9), w=sizes, padding=st.booleans())
def test_embedding(n, t, v, w, padding):
    ids = torch.randint(v, (n, 1, t))
    module = nn.Embedding(v, w, padding_idx=0 if padding else None)
    check(module, ids)


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 3),
    m=st.integers(1, 2),
    groups=st.integers(1, 2),
    k=st.integers(1, 3),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 1),
    mode=st.sampled_from(["zeros", "circular", "replicate"]),
)
def test_convolutions(n, m, groups, k, stride, dilation, padding, mode):
    options = {"stride": stride, "dilation": dilation, "padding": padding, "groups": groups, "padding_mode": mode}
    check(nn.Conv1d(2 * groups, 4, k, **options), data(n, m, 2 * groups, 9))
    check(nn.Conv2d(2 * groups, 4, (k, 1), **options), data(n, m, 2 * groups, 7, 6))


def test_patches_of_an_image_with_same_padding():
    check(nn.Conv2d(3, 4, 3, padding="same"), data(2, 1, 3, 5, 5))


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 4), t=sizes, o=st.integers(1, 5), i=st.integers(1, 5), kinds=st.data())
def test_uses_of_a_parameter_add_up_before_they_are_squared(n, t, o, i, kinds):
    def term(kind):
        if kind == "product":
            return ProductGradients(data(n, t, o), data(n, t, i))
        if kind == "rows":
            return RowGradients(torch.randint(o, (n, t)), data(n, t, i), o)
        return DenseGradients(data(n, o, i))

    names = kinds.draw(st.lists(st.sampled_from(["product", "rows", "dense"]), min_size=1, max_size=3))
    terms = [term(name) for name in names]
    total = sum(one.dense(0, n) for one in terms)
    joined = join(terms)
    close(joined.dense(0, n), total, 1e-9)
    close(joined.squared_norms(), total.flatten(1).square().sum(1), 1e-9)
    out, queue = new_sum(joined), SquareQueue()
    joined.add_squares(out, queue)
    queue.flush()
    close(out, total.square().sum(0), 1e-9)
    index = torch.randint(o * i, (4,))
    close(joined.at(*places(index, out)), total.flatten(1)[:, index], 1e-9)
    assert isinstance(joined, SummedGradients) == (len(set(names)) > 1 or names.count("rows") > 1)


# ---- modules without a rule


class Model(nn.Module):
    """Layers between an input and a mean over tokens."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean(tuple(range(1, x.dim() - 1)))


def compare(model: nn.Module, x: torch.Tensor, engine: str = "hooks", tolerance: float = 1e-9) -> None:
    """The engine's norms are those of the plain loop."""
    model = model.double()
    batch = Batch({"x": x, "labels": torch.arange(len(x)) % 2}, tuple(range(len(x))))
    layers = [Layer("layers", n, f"layers.{n}", m) for n, m in enumerate(model.layers)]
    found, plain = (
        layer_fisher(model, layers, [batch], make_objective(model), engine=one) for one in (engine, "loop")
    )
    for a, b in zip(found.layers, plain.layers, strict=True):
        scale = max(t.norm for t in b.values())
        for name, tensor in b.items():
            assert abs(a[name].norm - tensor.norm) <= tolerance * scale, name


class Attention(nn.Module):
    """Reads the weight of a child that it never calls, as `nn.MultiheadAttention` does."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        return x + self.inner(x, x, x, need_weights=False)[0]


class Bare(nn.Module):
    """Owns a parameter that is used together with a table that all samples share."""

    def __init__(self, width):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(width, width) * 0.5)
        self.table = nn.Embedding(3, width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        shared = self.linear(self.table(torch.arange(x.shape[1]) % 3))
        return torch.einsum("ntw,wv->ntv", x, self.matrix).tanh() + self.linear(x) * shared


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x):
        return x + self.gru(x)[0]


class TimeFirst(nn.Module):
    """Samples run along the second dimension."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(self.linear(x.transpose(0, 1)).tanh()).transpose(0, 1)


class Twice(nn.Module):
    """Calls a module twice, once with samples flattened into the tokens."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(self.linear(x.flatten(0, 1)).tanh().view_as(x))


@pytest.mark.parametrize("engine", ["hooks", "layer_major"])
@pytest.mark.parametrize("cls", [Attention, Bare, Recurrent, TimeFirst, Twice, Power, Mixing])
def test_modules_without_a_rule_equal_the_loop(cls, engine):
    compare(Model(cls(4), cls(4)), data(5, 3, 4), engine)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_module_that_is_called_twice_in_ways_that_differ(samples):
    compare(Model(Bare(4)), data(samples, 3, 4))  # as many samples as tokens, and a single one


def test_what_cannot_be_vmapped_goes_one_sample_at_a_time_and_says_so(caplog):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return x @ self.matrix if x.sum() > 0 else x @ self.matrix.T  # the sum of a batch tells nothing

    class PerSample(Branching):
        def forward(self, x):
            return torch.cat([Branching.forward(self, one[None]) for one in x])

    recompute._not_vmappable.clear()
    with caplog.at_level(logging.INFO, logger="peft_surgical"):
        compare(Model(PerSample()), data(4, 3, 4))
    assert "PerSample has no rule" in caplog.text
    assert "one at a time" in caplog.text


def test_a_module_that_keeps_what_its_last_call_computed():
    class Recurrent(nn.Module):
        """As in RecurrentGemma: the block around it clears the state, and its size is that of the batch."""

        def __init__(self):
            super().__init__()
            self.gate, self.state = nn.Parameter(torch.rand(4)), None

        def forward(self, x):
            for token in x.unbind(1):
                self.state = token if self.state is None else self.gate * self.state + token
            return self.state[:, None]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Recurrent()

        def forward(self, x):
            self.inner.state = None
            return self.inner(x)

    compare(Model(Block()), data(5, 3, 4))


def test_samples_that_cannot_be_told_apart_go_through_the_model_one_at_a_time(caplog):
    class Sorted(nn.Module):
        """All tokens of all samples in the order of their first feature: nothing in it has samples in a row."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            flat = x.flatten(0, 1)
            order = flat[:, 0].argsort()
            return self.linear(flat[order])[order.argsort()].view_as(x)

    class Whole(Model):
        """Even the layers see samples in another order, and the model returns what belongs to pairs of samples."""

        def forward(self, x):
            order = x[:, 0, 0].argsort()
            out = super().forward(x[order])[order.argsort()]
            return out, out @ out.T

    compare(Model(Sorted()), data(5, 3, 4))
    x = data(5, 3, 4)
    x[0, 0, 0], x[1, 0, 0] = 2, -2
    with caplog.at_level(logging.INFO, logger="peft_surgical"):
        compare(Whole(Sorted()), x)
    assert "taken one at a time" in caplog.text


def test_a_subclass_that_computes_otherwise_does_not_get_the_rule_of_its_parent():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Same(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 0

    compare(Model(Doubled(4, 4), Same(4, 4)), data(5, 3, 4))


def test_of_a_class_with_settings_each_module_is_tried_by_itself():
    class Scaled(nn.Linear):
        def __init__(self, factor):
            super().__init__(4, 4)
            self.factor = factor

        def forward(self, x):
            return self.factor * super().forward(x)

    compare(Model(Scaled(1), Scaled(3)), data(5, 3, 4))  # the rule of its parent is right for the first alone


class Number(nn.Module):
    """Owns a single number, without dimensions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.scale


class NumberOut(nn.Module):
    """A child returns a single number that all samples share."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return self.scale.exp()

    def __init__(self):
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), self.Inner()

    def forward(self, x):
        return self.linear(x) * self.inner(x)


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("cls", [Number, NumberOut])
def test_a_parameter_without_dimensions_is_measured(cls, samples):
    model, x = Model(cls(), cls()).double(), data(samples, 3, 4)
    compare(model, x)
    batch = Batch({"x": x, "labels": torch.arange(samples) % 2}, tuple(range(samples)))
    layers = [Layer("layers", n, f"layers.{n}", m) for n, m in enumerate(model.layers)]
    objective = make_objective(model)
    traces = [
        [
            t.trace
            for one in layer_fisher(model, layers, [batch], objective, engine=e, diagonal=d).layers
            for t in one.values()
        ]
        for e, d in (("loop", True), ("loop", False), ("hooks", False))
    ]
    assert traces[1] == pytest.approx(traces[0], rel=1e-9)
    assert traces[2] == pytest.approx(traces[0], rel=1e-9)


def test_a_registered_rule_is_used():
    class Own(Power):
        pass

    calls = []

    @register_rule(Own)
    def own(module, inputs, grad_output):
        calls.append(inputs.shape)
        g = 2 * module.lambda1 * (inputs * grad_output).flatten(1, -2).sum(1)
        return {"lambda1": DenseGradients(g)}

    try:
        compare(Model(Own(4)), data(5, 3, 4))
    finally:
        del RULES[Own]
    assert calls == [(5, 1, 3, 4)]


def test_a_packed_weight_is_measured_by_what_its_output_is_linear_in():
    class Packed(nn.Module):
        """A linear map whose weight is integers and a scale, in buffers."""

        def __init__(self, weight):
            super().__init__()
            self.out_features, self.in_features = weight.shape
            self.scale = weight.abs().max() / 127
            self.register_buffer("qweight", (weight / self.scale).round().to(torch.int8))

        def forward(self, x):
            return x @ (self.qweight.to(x) * self.scale).T

    class Quantised(nn.Linear):
        """The same as a parameter of integers."""

        def __init__(self, weight):
            super().__init__(*weight.shape[::-1], bias=False)
            self.scale = weight.abs().max() / 127
            self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

        def forward(self, x):
            return x @ (self.weight.to(x) * self.scale).T

    weights = torch.randn(2, 4, 4)

    def norms(make):
        layers = [nn.Sequential(make(weight), nn.Tanh()) for weight in weights]
        model = Model(*layers)
        batch = Batch({"x": torch.linspace(-1, 1, 60).view(5, 3, 4), "labels": torch.arange(5) % 2}, tuple(range(5)))
        places = [Layer("layers", n, f"layers.{n}", m) for n, m in enumerate(layers)]
        return [
            [t.norm for one in measured.layers for t in one.values()]
            for measured in (
                layer_fisher(model, places, [batch], make_objective(model), engine=engine)
                for engine in ("hooks", "layer_major")
            )
        ]

    def dequantised(weight):
        module = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            scale = weight.abs().max() / 127
            module.weight.copy_((weight / scale).round() * scale)
        return module

    expected = norms(dequantised)
    for found in (norms(Packed), norms(Quantised)):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[1], rel=1e-5)
