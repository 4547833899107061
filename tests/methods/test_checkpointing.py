"""Gradient checkpointing changes no gradient, and the backward pass stops at the lowest trained layer."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import transformers
from adapters import METHODS, TASKS, make_config, shake
from peft import get_peft_model, prepare_model_for_kbit_training
from tiny_models import batch, build
from torch import nn

from peft_surgical import SurgicalConfig, find_stacks


# in transformers 4 a layer's hooks run inside its re-entrant checkpoint, where nothing has a graph
GRAPH_IS_VISIBLE = int(transformers.__version__.partition(".")[0]) >= 5


def make(method, family, layers, before=None, **options):
    torch.manual_seed(0)  # LoRA starts at random
    base = build(family)
    if before is not None:
        base.gradient_checkpointing_enable(before)
    return shake(get_peft_model(base, make_config(method, family, layers, **options)), "default").train()


def gradients(model: nn.Module, family: str) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)  # for dropout
    model(**batch(family)).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def layers_with_a_graph(model: nn.Module, family: str) -> list[int]:
    """The layers whose output requires a gradient: the backward pass goes through these."""
    found: list[int] = []
    handles = []
    stack = find_stacks(model)["decoder" if family == "t5" else next(iter(find_stacks(model)))]
    for layer in stack.layers:

        def note(module, args, output, index=layer.index):
            hidden = output[0] if isinstance(output, tuple) else output
            found.extend([index] if hidden.grad_fn is not None else [])  # a hook may make a leaf of it later

        handles.append(layer.module.register_forward_hook(note, prepend=True))
    model(**batch(family))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("layers", [(2, 3), (0, 1)])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("method", "family"), [(m, f) for m in METHODS for f in TASKS])
def test_gradients_are_those_without_checkpointing(method, family, reentrant, when, layers):
    wanted = gradients(make(method, family, layers), family)
    options = {"use_reentrant": reentrant}
    model = make(method, family, layers, before=options if when == "before" else None)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if when == "after":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
    found = gradients(model, family)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
    if GRAPH_IS_VISIBLE or not reentrant:
        assert layers_with_a_graph(model, family) == list(range(layers[0], 4))


@pytest.mark.parametrize("method", METHODS)
def test_a_hook_on_the_embeddings_that_is_not_needed_is_removed(method):
    model = make(method, "llama", [2, 3])
    model.enable_input_require_grads()
    assert layers_with_a_graph(model, "llama") == [2, 3]
    prepared = prepare_model_for_kbit_training(build("llama"), gradient_checkpointing_kwargs={"use_reentrant": False})
    model = get_peft_model(prepared, make_config(method, "llama", [3]))
    assert layers_with_a_graph(model.train(), "llama") == [3]


def test_the_start_follows_the_active_adapter():
    model = make("SURGICAL", "bert", [3], before={"use_reentrant": True})
    model.add_adapter("low", make_config("SURGICAL", "bert", [1]))
    model.add_adapter("lowest", make_config("SURGICAL", "bert", [0]))
    shake(shake(model, "low"), "lowest").train()
    layers = model.get_base_model().bert.encoder.layer
    for adapter, lowest in [("default", 3), ("low", 1), ("lowest", 0), ("default", 3)]:
        model.set_adapter(adapter)
        if GRAPH_IS_VISIBLE:
            assert layers_with_a_graph(model, "bert") == list(range(lowest, 4))
        assert all(f".{adapter}." in name for name in gradients(model, "bert"))
        assert [layer.gradient_checkpointing for layer in layers] == [i >= lowest for i in range(4)]


def test_evaluation_and_copies_are_not_touched():
    model = make("SURGICAL", "bert", [2], before={"use_reentrant": True})
    wanted = gradients(model, "bert")
    with torch.inference_mode():
        assert not model.eval()(**batch("bert")).logits.requires_grad
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = gradients(twin.train(), "bert")
        assert found.keys() == wanted.keys()


def test_a_model_without_layers_keeps_its_hooks():
    class Toy(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.linear = nn.Embedding(5, 4), nn.Linear(4, 2)

        def forward(self, ids):
            return self.linear(self.embedding(ids))

    toy = Toy()

    def make_inputs_require_grads(module, args, output):
        output.requires_grad_(True)

    toy.embedding.register_forward_hook(make_inputs_require_grads)
    model = get_peft_model(toy, SurgicalConfig(target_modules=["linear"])).train()
    model(torch.tensor([[1, 2]]))
    assert len(toy.embedding._forward_hooks) == 1


# ---- what is trained is what was declared


def warnings_of_a_step(model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(**batch("bert"))
    return [str(w.message) for w in caught if "train" in str(w.message)]


@pytest.mark.parametrize("method", METHODS)
def test_training_as_declared_is_silent(method):
    model = make(method, "bert", [2, 3])
    assert warnings_of_a_step(model) == []
    model.set_requires_grad("default", False)  # by PEFT's own function
    assert warnings_of_a_step(model) == []
    model.set_adapter("default")
    assert warnings_of_a_step(model) == []
    model.set_adapter("default", inference_mode=True)
    assert warnings_of_a_step(model) == []
    assert warnings_of_a_step(model.eval()) == []


def test_a_second_adapter_does_not_hide_that_the_first_is_frozen():
    model = make("SURGICAL", "bert", [2])
    frozen = make_config("SURGICAL", "bert", [1])
    frozen.inference_mode = True
    model.add_adapter("other", frozen)
    model.train().requires_grad_(False)
    assert len(warnings_of_a_step(model)) == 1


@pytest.mark.parametrize("method", METHODS)
def test_training_that_would_do_nothing_is_warned_of_once(method):
    model = make(method, "bert", [2, 3])
    declared = sum(p.requires_grad for p in model.parameters())
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # the wrong order: it freezes everything
    (message,) = warnings_of_a_step(model.train())
    assert message.startswith(f"{declared} of the {declared} tensors")
    assert warnings_of_a_step(model) == []


@pytest.mark.parametrize("method", METHODS)
def test_training_the_base_is_warned_of_by_name(method):
    model = make(method, "bert", [2, 3])
    model.get_base_model().bert.pooler.dense.bias.requires_grad_(True)
    (message,) = warnings_of_a_step(model)
    assert message.startswith("1 tensors of the base model are trained, e.g. bert.pooler.dense.bias")
