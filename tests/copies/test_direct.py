"""Common modules are computed directly with an adapter's tensors; the result is the module's own, bit for bit."""

from __future__ import annotations

import copy
import timeit

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_surgical.copies.compute import DIRECT
from peft_surgical.copies.module import TunedModule
from peft_surgical.methods.stratified.layers import StratifiedModule


MODULES = {
    "linear": lambda: nn.Linear(6, 4),
    "linear without a bias": lambda: nn.Linear(6, 4, bias=False),
    "norm": lambda: nn.LayerNorm(6),
    "norm over two dimensions": lambda: nn.LayerNorm((3, 6)),
    "norm without a bias": lambda: nn.LayerNorm(6, bias=False),
    "conv1d": lambda: Conv1D(4, 6),
}


def tuned(module, names=None, cls=TunedModule):
    names = names or [name for name, _ in module.named_parameters()]
    wrapper = cls(module.requires_grad_(False), "a", names, init_weights=False)
    plain = type(module).__new__(type(module))
    plain.__dict__.update(module.__dict__)
    plain._parameters = {**module._parameters, **{name: wrapper.tuned["a"][name] for name in names}}
    return wrapper, plain


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("names", [None, ["weight"]])
@pytest.mark.parametrize("autocast", [False, True])
def test_outputs_and_gradients_are_the_modules_own(make, names, autocast):
    wrapper, plain = tuned(make(), names)
    x = torch.randn(2, 3, 6, requires_grad=True)
    assert wrapper._direct_output(x) is not None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found, expected = wrapper(x), plain(x)
    assert torch.equal(found, expected)
    parameters = [x, *wrapper.tuned["a"].parameters()]
    direction = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, parameters, direction),
        torch.autograd.grad(expected, parameters, direction),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_copies_of_another_dtype_are_cast(dtype, training):
    wrapper, _ = tuned(nn.Linear(6, 4).to(dtype))
    wrapper.tuned["a"].float()
    plain = nn.Linear(6, 4)
    plain.load_state_dict({name: wrapper.tuned["a"][name].detach() for name in ("weight", "bias")})
    x = torch.randn(2, 6, dtype=dtype)
    with torch.set_grad_enabled(training):
        out = wrapper(x)
    assert torch.equal(out, plain.to(dtype)(x))
    if training:
        out.sum().backward()
        assert wrapper.tuned["a"]["weight"].grad.dtype == torch.float32


def test_an_added_bias_is_computed_directly():
    linear = nn.Linear(6, 4, bias=False)
    wrapper = StratifiedModule(linear, "a", ["bias"], init_weights=False)
    x = torch.randn(2, 6)
    assert torch.equal(wrapper(x), torch.nn.functional.linear(x, linear.weight, wrapper.tuned["a"]["bias"]))


def hooked(register):
    module = nn.Linear(6, 4)
    calls = []
    getattr(module, register)(lambda *args: calls.append(register))
    return module, calls


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_hooks_of_the_module_are_called(register):
    module, calls = hooked(register)
    wrapper = TunedModule(module, "a", ["weight"])
    assert wrapper._direct_output(torch.randn(2, 6)) is None
    wrapper(torch.randn(2, 6, requires_grad=True)).sum().backward()
    assert calls == [register]
    calls.clear()
    module.__dict__.update(nn.Linear(6, 4).__dict__)
    getattr(wrapper, register)(lambda *args: calls.append(register))
    wrapper(torch.randn(2, 6, requires_grad=True)).sum().backward()
    assert calls == [register], "of the wrapper"


def test_a_forward_that_is_replaced_on_the_wrapper_is_called():
    wrapper, _ = tuned(nn.Linear(6, 4))
    wrapper.forward = lambda x: "replaced"  # as accelerate does
    assert wrapper(torch.randn(2, 6)) == "replaced"


@pytest.mark.parametrize("names", [["weight"], ["bias"]])
def test_what_is_left_out_of_the_tables_is_computed_with(names):
    linear = nn.Linear(6, 4)
    wrapper, _ = tuned(linear, ["weight", "bias"])
    x, before = torch.randn(2, 6), linear(torch.ones(2, 6))
    expected = wrapper(x)
    wrapper.leave_out(["weight", "bias"], torch.device("cpu"))
    assert not linear._parameters
    assert torch.equal(wrapper(x), expected)
    wrapper.update_layer("b", names, init_weights=False)
    wrapper.set_adapter(["b"])
    tensors = {"weight": linear.weight, "bias": linear.bias, **{name: wrapper.tuned["b"][name] for name in names}}
    assert torch.equal(wrapper(x), nn.functional.linear(x, **tensors))
    wrapper.take_in()
    assert {*linear._parameters} == {"weight", "bias"}
    assert torch.equal(linear(torch.ones(2, 6)), before)


def test_hooks_for_all_modules_are_called():
    wrapper = TunedModule(nn.Linear(6, 4), "a", ["weight"])
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *rest: seen.append(type(module)))
    try:
        wrapper(torch.randn(2, 6))
    finally:
        handle.remove()
    assert seen == [nn.Linear, TunedModule]


@pytest.mark.parametrize(
    "change",
    [
        lambda wrapper: wrapper.enable_adapters(False),
        lambda wrapper: wrapper.merge(),
        lambda wrapper: wrapper.set_adapter(["b"]),
        lambda wrapper: (wrapper.update_layer("b", ["bias"]), wrapper.set_adapter(["a", "b"])),
        lambda wrapper: setattr(wrapper.base_layer, "forward", nn.Linear(6, 4).forward),
    ],
    ids=["disabled", "merged", "inactive", "several", "replaced forward"],
)
def test_any_other_state_goes_the_other_way(change):
    wrapper, _ = tuned(nn.Linear(6, 4))
    change(wrapper)
    assert wrapper._direct_output(torch.randn(2, 6)) is None


class OddLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def test_subclasses_compute_in_their_own_way():
    wrapper = TunedModule(OddLinear(2, 2), "a", ["weight"])
    x = torch.randn(1, 2)
    assert torch.equal(wrapper(x), wrapper.base_layer(x))


def test_every_direct_way_is_tested():
    assert {type(make()) for make in MODULES.values()} == set(DIRECT)


def test_a_call_costs_little_more_than_the_modules_own():
    # no time is asserted: the number of Python calls is what costs
    wrapper, plain = tuned(nn.Linear(6, 4))
    x = torch.randn(2, 6)
    assert calls_in(lambda: wrapper(x)) <= calls_in(lambda: plain(x)) + 6


def calls_in(function):
    import sys

    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    function()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


if __name__ == "__main__":
    wrapper, plain = tuned(nn.Linear(8, 8))
    x = torch.randn(2, 8)
    for name, module in (("module", plain), ("tuned", wrapper)):
        print(name, min(timeit.repeat(lambda m=module: m(x), number=3000, repeat=7)) / 3000 * 1e6, "us")


class Scaled(nn.Module):
    """Not of a kind whose computation is known."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale, self.offset = nn.Parameter(torch.randn(4)), 2.0, None

    def forward(self, x):
        out = self.scale * x * self.weight if self.training else x * self.weight
        return out if self.offset is None else out + self.offset


def test_a_kept_twin_follows_every_change_of_its_module():
    module = Scaled()
    tuned = TunedModule(module, "a", ["weight"])
    copy_of_weight, x = tuned.tuned["a"]["weight"], torch.randn(3, 4)
    copy_of_weight.data += 1

    def expected():
        return torch.func.functional_call(module, {"weight": copy_of_weight.to(module.weight.dtype)}, (x,))

    def changes():
        yield lambda: tuned.eval()
        yield lambda: tuned.train()
        yield lambda: setattr(module, "scale", 3.0)
        yield lambda: setattr(module, "offset", torch.ones(4))
        yield lambda: module.offset.add_(1)
        yield lambda: module.register_forward_hook(lambda m, args, out: out + m.scale)
        yield lambda: copy_of_weight.data.mul_(2)
        yield lambda: setattr(copy_of_weight, "data", copy_of_weight.data + 1)
        yield lambda: setattr(copy_of_weight, "data", copy_of_weight.data.double())  # float32 copies of half modules
        yield lambda: setattr(copy_of_weight, "data", copy_of_weight.data.float())
        yield lambda: setattr(module, "forward", lambda y: y - tuned.weight)
        yield lambda: delattr(module, "forward")
        yield lambda: setattr(module, "weight", nn.Parameter(module.weight.detach().clone()))
        yield lambda: module.register_buffer("extra", torch.zeros(1))

    seen = [tuned(x)]
    assert torch.equal(seen[0], expected())
    for change in changes():
        change()
        seen.append(tuned(x))
        assert torch.equal(seen[-1], expected())
    assert tuned._kept_twin.get(module, tuned.tuned["a"]) is tuned._kept_twin.get(module, tuned.tuned["a"]) is not None
    other = copy.deepcopy(tuned)
    other.tuned["a"]["weight"].data.zero_()
    assert torch.equal(tuned(x), seen[-1])
    assert not torch.equal(other(x), seen[-1])
    tuned.update_layer("b", ["weight"])
    tuned.set_adapter("b")
    assert not torch.equal(tuned(x), seen[-1])
    tuned.set_adapter("a")
    assert torch.equal(tuned(x), seen[-1])
