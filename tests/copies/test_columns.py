"""Trained columns of a linear module, against a whole weight whose gradient is cut to these columns."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_surgical.copies.columns import draw_columns, input_dim
from peft_surgical.copies.module import TunedModule


def linear(kind, bias=True):
    torch.manual_seed(0)
    if kind is Conv1D:
        module = Conv1D(5, 7)
        nn.init.normal_(module.bias)
        return module
    return nn.Linear(7, 5, bias=bias)


CASES = [(nn.Linear, True), (nn.Linear, False), (Conv1D, True)]


@pytest.mark.parametrize(("kind", "bias"), CASES)
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7)])
def test_output_and_gradients_are_those_of_the_whole_weight(kind, bias, shape):
    module = linear(kind, bias)
    at = [1, 4, 6]
    tuned = TunedModule(module, "a", ["weight"], columns=at)
    entry = tuned.tuned["a"]
    with torch.no_grad():
        entry.columns.add_(torch.randn_like(entry.columns))
    dim = input_dim(module)
    whole = module.weight.detach().index_copy(dim, torch.tensor(at), entry.columns.detach()).requires_grad_(True)
    x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_(True) for _ in range(2))
    found = tuned(x)
    expected = torch.func.functional_call(module, {"weight": whole}, (y,))
    assert torch.equal(found, expected)
    grad = torch.randn_like(found)
    found.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(entry.columns.grad, whole.grad.index_select(dim, torch.tensor(at)))
    assert module.weight.grad is None
    with torch.no_grad():
        assert torch.equal(tuned(x), expected)
    tuned.merge()
    assert torch.equal(tuned(x), expected)
    tuned.unmerge()
    tuned.enable_adapters(False)
    assert torch.equal(tuned(x), module(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_by_finite_differences_and_autocast(dtype):
    tuned = TunedModule(linear(nn.Linear).to(torch.float64), "a", ["weight"], columns=[0, 5])
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    if dtype is torch.float64:
        columns = tuned.tuned["a"].columns
        assert torch.autograd.gradcheck(lambda x, _: tuned(x), (x, columns))
        return
    tuned, x = tuned.float(), x.detach().float()
    with torch.autocast("cpu", dtype=dtype):
        out = tuned(x)
        assert out.dtype is dtype
        assert torch.equal(out, tuned.base_layer(x))
    out.float().sum().backward()
    assert tuned.tuned["a"].columns.grad.dtype is torch.float32


def test_the_input_is_kept_for_the_trained_columns_alone():
    tuned = TunedModule(nn.Linear(512, 512), "a", ["weight"], columns=[3, 7])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        tuned(torch.randn(9, 512))
    assert not [t for t in kept if tuple(t.shape) == (9, 512)]
    assert [t for t in kept if tuple(t.shape) == (9, 2)]


def test_the_draw_is_a_sorted_choice_that_its_path_and_seed_decide():
    module = nn.Linear(100, 3)
    drawn = draw_columns("a.b", module, 10, 0)
    assert len(drawn) == 10
    assert drawn == sorted(set(drawn))
    assert drawn == draw_columns("a.b", module, 0.1, 0)
    assert drawn not in (draw_columns("a.c", module, 10, 0), draw_columns("a.b", module, 10, 1))
    # of Python's documented generator, so that no version draws others
    assert drawn == [21, 33, 34, 51, 53, 56, 69, 77, 78, 92]
    counts = torch.zeros(100)
    for seed in range(400):
        counts[draw_columns("a.b", module, 10, seed)] += 1
    assert ((counts > 15) & (counts < 70)).all(), "40 are expected of each"
    with pytest.raises(ValueError, match="columns=101 of a.b, which has 100 inputs"):
        draw_columns("a.b", module, 101, 0)


def test_a_module_whose_call_does_more_is_called():
    module = linear(nn.Linear)
    module.register_forward_hook(lambda m, args, out: 2 * out)
    tuned = TunedModule(module, "a", ["weight"], columns=[2])
    with torch.no_grad():
        tuned.tuned["a"].columns.add_(1)
    x = torch.randn(3, 7)
    whole = module.weight.detach().clone()
    whole[:, 2] += 1
    assert torch.equal(tuned(x), 2 * nn.functional.linear(x, whole, module.bias))
