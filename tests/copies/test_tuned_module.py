from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from peft_surgical.copies.compute import twin
from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.select import tensor_names
from peft_surgical.copies.variants import TunedInPlace


class Experts(nn.Module):
    """3-D weights that are no `nn.Linear`, used by index."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 8))
        self.down = nn.Parameter(torch.randn(3, 8, 4))

    def forward(self, x):
        return sum(torch.relu(x @ self.up[i]) @ self.down[i] for i in range(3))


class ParentReadsWeight(nn.Module):
    """Uses its child's weight without calling the child, as T5, DeBERTa and MoE routers do."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.linear(x, self.proj.weight, self.proj.bias)


MODULES = {
    "linear": (lambda: nn.Linear(4, 4), lambda: (torch.randn(2, 3, 4),)),
    "linear without bias": (lambda: nn.Linear(4, 4, bias=False), lambda: (torch.randn(2, 3, 4),)),
    "conv1d": (lambda: Conv1D(6, 4), lambda: (torch.randn(2, 3, 4),)),
    "layer norm": (lambda: nn.LayerNorm(4), lambda: (torch.randn(2, 3, 4),)),
    "embedding": (lambda: nn.Embedding(5, 4, padding_idx=0), lambda: (torch.tensor([[0, 1], [4, 2]]),)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), lambda: (torch.randn(2, 3, 5, 5),)),
    "experts": (Experts, lambda: (torch.randn(2, 3, 4),)),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), lambda: (torch.randn(2, 3, 4),) * 3),
    "lstm": (lambda: nn.LSTM(4, 4), lambda: (torch.randn(3, 2, 4),)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), lambda: (torch.randn(2, 4),)),
    "bilinear": (lambda: nn.Bilinear(4, 4, 2), lambda: (torch.randn(2, 4), torch.randn(2, 4))),
}


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("name", MODULES)
def test_computes_as_the_module_would_with_the_adapters_values(name):
    make, inputs = MODULES[name]
    base, x = make(), inputs()
    plain = copy.deepcopy(base)
    tuned = TunedModule(base, "a", tensor_names(base))
    before = {key: value.clone() for key, value in base.state_dict().items()}
    assert torch.equal(first(tuned(*x)), first(plain(*x)))

    with torch.no_grad():
        for key, parameter in plain.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            tuned.tuned["a"][key].copy_(parameter)
    expected = first(plain(*x))
    actual = first(tuned(*x))
    assert torch.equal(actual, expected)

    expected.square().sum().backward()
    actual.square().sum().backward()
    for key, parameter in plain.named_parameters():
        assert torch.equal(tuned.tuned["a"][key].grad, parameter.grad), key
    assert all(p.grad is None for p in base.parameters() if not any(p is q for q in tuned.tuned["a"].parameters()))
    assert all(torch.equal(value, before[key]) for key, value in base.state_dict().items())


@pytest.mark.parametrize("name", MODULES)
def test_merge_equals_the_adapter_and_unmerge_the_base(name):
    make, inputs = MODULES[name]
    base, x = make(), inputs()
    tuned = TunedModule(base, "a", tensor_names(base), init_weights=False).eval()
    before = {key: value.clone() for key, value in base.state_dict().items()}
    with torch.no_grad():
        active, start = first(tuned(*x)), first(base(*x))
        assert not torch.equal(active, start)
        tuned.merge()
        assert torch.equal(first(base(*x)), active)
        assert torch.equal(first(tuned(*x)), active)
        tuned.unmerge()
        assert torch.equal(first(base(*x)), start)
    assert all(torch.equal(value, before[key]) for key, value in base.state_dict().items())


def test_a_parent_that_reads_the_weight_gets_the_active_one():
    parent = ParentReadsWeight()
    x = torch.randn(2, 4)
    start = parent(x)
    parent.proj = TunedModule(parent.proj, "a", ["weight", "bias"], init_weights=False)
    assert not torch.equal(parent(x), start)
    parent(x).sum().backward()
    assert parent.proj.tuned["a"]["weight"].grad is not None
    parent.proj.enable_adapters(False)
    assert torch.equal(parent(x), start)


def test_the_fast_path_of_torchs_encoder_layer_uses_the_active_tensors():
    # in inference nn.TransformerEncoderLayer reads self_attn.out_proj.weight and others instead of calling modules
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    plain = copy.deepcopy(layer)
    x = torch.randn(2, 3, 8)
    for child in ("self_attn", "linear1", "linear2", "norm1", "norm2"):
        base = getattr(layer, child)
        tuned = TunedModule(base, "a", tensor_names(base), init_weights=False)
        setattr(layer, child, tuned)
        with torch.no_grad():
            for name in tensor_names(base):
                plain.get_submodule(child).get_parameter(name).copy_(tuned.tuned["a"][name])
    layer.eval()
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), plain(x))


def test_several_active_adapters_add_their_differences():
    base = nn.Linear(4, 4)
    tuned = TunedModule(base, "a", ["weight", "bias"], init_weights=False)
    tuned.update_layer("b", ["weight"], init_weights=False)
    tuned.set_adapter(["a", "b"])
    a, b = tuned.tuned["a"], tuned.tuned["b"]
    x = torch.randn(3, 4)
    weight = base.weight + (a["weight"] - base.weight) + (b["weight"] - base.weight)
    torch.testing.assert_close(tuned(x), nn.functional.linear(x, weight, a["bias"]))
    tuned.merge()
    torch.testing.assert_close(base.weight, weight)


def test_a_new_adapter_starts_from_the_original_base_also_while_another_is_merged():
    base = nn.Linear(4, 4)
    original = base.weight.detach().clone()
    tuned = TunedModule(base, "a", ["weight"], init_weights=False)
    tuned.merge()
    tuned.update_layer("b", ["weight"])
    assert torch.equal(tuned.tuned["b"]["weight"], original)
    assert not tuned.tuned["b"]["weight"].requires_grad
    assert tuned.tuned["a"]["weight"].requires_grad


def test_safe_merge_refuses_values_that_are_not_finite():
    base = nn.Linear(4, 4)
    tuned = TunedModule(base, "a", ["weight", "bias"])
    before = base.weight.detach().clone()
    with torch.no_grad():
        tuned.tuned["a"]["bias"][1] = float("nan")
    with pytest.raises(ValueError, match="bias"):
        tuned.merge(safe_merge=True)
    assert not tuned.merged
    assert torch.equal(base.weight, before)


def test_batch_norm_statistics_belong_to_the_adapter():
    base = nn.BatchNorm1d(4)
    plain = copy.deepcopy(base)
    tuned = TunedModule(base, "a", tensor_names(base))
    tuned.train()
    for _ in range(3):
        x = torch.randn(8, 4) + 1
        assert torch.equal(tuned(x), plain(x))
    assert torch.equal(tuned.tuned["a"]["running_mean"], plain.running_mean)
    assert tuned.tuned["a"]["num_batches_tracked"] == 3
    assert base.num_batches_tracked == 0
    assert torch.equal(base.running_mean, torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kept_cast_follows_every_write_to_the_copy(dtype):
    base = nn.Linear(4, 4).to(dtype)
    tuned = TunedModule(base, "a", ["weight", "bias"])
    tuned.tuned["a"].float().requires_grad_(False)
    x = torch.randn(2, 4, dtype=dtype)

    def expected():
        return nn.functional.linear(x, tuned.tuned["a"]["weight"].to(dtype), tuned.tuned["a"]["bias"].to(dtype))

    with torch.no_grad():
        assert torch.equal(tuned(x), expected())
        first_cast = tuned.tensors_of(["a"])["weight"]
        assert tuned.tensors_of(["a"])["weight"] is first_cast  # paid for once
        tuned.tuned["a"]["weight"].add_(1)
        assert torch.equal(tuned(x), expected())
        tuned.load_state_dict({**tuned.state_dict(), "surgical_params.a.weight": torch.full((4, 4), 2.0)})
        assert torch.equal(tuned(x), expected())
        tuned.load_state_dict({**tuned.state_dict(), "surgical_params.a.weight": torch.ones(4, 4)}, assign=True)
        assert torch.equal(tuned(x), expected())
    with torch.inference_mode():
        kept = tuned(x)
    y = x.clone().requires_grad_(True)
    tuned(y).sum().backward()  # a tensor that was kept in inference mode could not be saved for this
    assert torch.equal(tuned(y), kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm, nn.Embedding])
def test_writes_through_data_to_what_is_trained_are_seen(dtype, kind):
    """As an average of weights (EMA) is swapped in for evaluation, and as some optimizers write."""
    base = kind(4, 4).to(dtype) if kind is not nn.LayerNorm else kind(4).to(dtype)
    tuned = TunedModule(base, "a", ["weight"])
    tuned.tuned["a"].float()
    x = torch.arange(4) if kind is nn.Embedding else torch.randn(2, 4, dtype=dtype)
    weight = tuned.tuned["a"]["weight"]
    for step in range(3):
        with torch.no_grad():
            tuned(x)
        weight.data.copy_(torch.randn_like(weight) + step)
        expected = TunedModule(base, "a", ["weight"])
        expected.tuned["a"]["weight"].data.copy_(weight.data)
        with torch.no_grad():
            assert torch.equal(tuned(x), expected(x))


def test_no_answer_comes_from_an_adapter_that_was_deleted():
    """Addresses are used again: 300 adapters of one name, one after the other."""
    base = nn.Embedding(4, 4).to(torch.bfloat16)
    tuned = TunedModule(base, "a", ["weight"])
    with torch.no_grad():
        for step in range(300):
            del tuned.tuned["a"]
            tuned.put("a", {"weight": nn.Parameter(torch.full((4, 4), float(step)), requires_grad=False)})
            assert torch.equal(tuned(torch.arange(4)), torch.full((4, 4), float(step), dtype=torch.bfloat16))


def test_copies_made_in_inference_mode_compute():
    base = nn.Embedding(4, 4).to(torch.bfloat16)
    with torch.inference_mode():
        tuned = TunedModule(base, "a", ["weight"], inference_mode=True)
        tuned.tuned["a"].float()
        assert torch.equal(tuned(torch.arange(4)), base.weight)
        tuned.tuned["a"]["weight"].fill_(2)
        assert torch.equal(tuned(torch.arange(4)), torch.full((4, 4), 2, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_to_a_merged_base_leaves_the_adapter_as_it_is(dtype):
    tuned = TunedModule(nn.Linear(4, 4).to(dtype), "a", ["weight", "bias"], init_weights=False)
    own, trained = tuned.base_layer.weight.clone(), tuned.tuned["a"]["weight"].clone()
    tuned.merge()
    assert torch.equal(tuned.base_layer.weight, trained)
    with torch.no_grad():
        tuned.base_layer.weight.add_(1)
    tuned.unmerge()
    assert torch.equal(tuned.tuned["a"]["weight"], trained)
    assert torch.equal(tuned.base_layer.weight, own)


def test_threads_that_run_one_module_at_once_all_get_the_adapters_result():
    base = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    tuned = TunedModule(base, "a", tensor_names(base), init_weights=False).eval()
    x = torch.randn(32, 16)
    expected = tuned(x).detach()
    wrong = []

    def run():
        with torch.no_grad():
            for _ in range(100):
                if not torch.equal(tuned(x), expected):
                    wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.equal(base[0].weight, tuned.base_layer[0].weight)


def test_hooks_of_the_base_still_run():
    base = nn.Linear(4, 4)
    seen = []
    base.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    TunedModule(base, "a", ["weight"])(torch.randn(2, 4))
    assert seen == [(2, 4)]


def test_a_forward_that_accelerate_replaced_on_the_instance_uses_the_adapters_values():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    base = nn.Linear(4, 4)
    add_hook_to_module(base, AlignDevicesHook(execution_device="cpu"))
    tuned = TunedModule(base, "a", ["weight", "bias"], init_weights=False)
    x = torch.randn(2, 4)
    expected = nn.functional.linear(x, tuned.tuned["a"]["weight"], tuned.tuned["a"]["bias"])
    assert torch.equal(tuned(x), expected)


def test_a_copy_is_independent():
    tuned = TunedModule(nn.Linear(4, 4), "a", ["weight", "bias"], init_weights=False)
    other = copy.deepcopy(tuned)
    x = torch.randn(2, 4)
    before = tuned(x)
    assert torch.equal(other(x), before)
    with torch.no_grad():
        other.tuned["a"]["weight"].zero_()
    assert torch.equal(tuned(x), before)
    assert not torch.equal(other(x), before)


def test_parameters_that_are_tied_stay_tied():
    first_layer, second_layer = nn.Linear(4, 4), nn.Linear(4, 4)
    second_layer.weight = first_layer.weight
    shared: dict = {}
    one = TunedModule(first_layer, "a", ["weight", "bias"], shared=shared)
    two = TunedModule(second_layer, "a", ["weight", "bias"], shared=shared)
    assert one.tuned["a"]["weight"] is two.tuned["a"]["weight"]
    assert one.tuned["a"]["bias"] is not two.tuned["a"]["bias"]


def test_a_twin_shares_all_but_the_replaced_tensors():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    new = torch.zeros(2, 2)
    other = twin(module, {"0.weight": new})
    assert other[0].weight is new
    assert other[0].bias is module[0].bias
    assert other[1] is module[1]
    assert module[0].weight is not new
    assert type(other) is nn.Sequential


def test_a_twin_of_a_module_without_the_tensor_is_refused():
    with pytest.raises(AttributeError, match="A BatchNorm1d has no tensor 'scale' .* It has: weight, bias"):
        twin(nn.Sequential(nn.BatchNorm1d(2)), {"0.scale": torch.ones(2)})


class ScaledLayer(nn.Module):
    """A layer that owns a parameter itself, as BEiT's do."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.scale * self.proj(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_layers_own_parameter_is_tuned_without_wrapping_the_layer(use_reentrant):
    layer = ScaledLayer().requires_grad_(False)
    x = torch.randn(2, 4, requires_grad=True)
    start = layer(x)
    owner = TunedInPlace(layer, "a", ["scale"])
    owner.attach()
    assert type(layer) is ScaledLayer
    assert torch.equal(layer(x), start)
    with torch.no_grad():
        owner.tuned["a"]["scale"].mul_(2)
    expected = x + 2 * layer.proj(x)
    assert torch.equal(layer(x), expected)
    layer(x).sum().backward()
    gradient, owner.tuned["a"]["scale"].grad = owner.tuned["a"]["scale"].grad, None
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(owner.tuned["a"]["scale"].grad, gradient)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    owner.merge()
    assert torch.equal(layer(x), expected)
    owner.unmerge()
    owner.detach()
    assert torch.equal(layer(x), start)
    assert list(layer.state_dict()) == list(ScaledLayer().state_dict())


def test_a_merge_that_is_interrupted_leaves_the_base_as_it_was():
    class Interrupted(list):
        def extend(self, names):
            raise KeyboardInterrupt

    layer = TunedModule(nn.Linear(2, 2), "a", ["weight", "bias"], init_weights=False).eval()
    x = torch.ones(1, 2)
    base, tuned = layer.base_layer(x), layer(x)
    layer.merged_adapters = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        layer.merge()
    assert layer.merged_adapters == []
    assert torch.equal(layer.base_layer(x), base)
    assert torch.equal(layer(x), tuned)
