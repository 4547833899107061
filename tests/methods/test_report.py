"""How far down the report says that the backward pass goes, against the gradients that really arrive."""

from __future__ import annotations

import pytest
import torch
from adapters import METHODS, make_config
from peft import get_peft_model
from tiny_models import batch, build, hidden_states
from torch import nn

from peft_surgical import SurgicalConfig, find_stacks


def reached(model: nn.Module, family: str) -> dict[str, int | None]:
    """The lowest layer of each stack whose output gets a gradient, in a real backward pass."""
    outputs: dict[tuple[str, int], torch.Tensor] = {}
    for stack in find_stacks(model).values():
        for layer in stack.layers:
            layer.module.register_forward_hook(
                lambda module, args, out, key=(stack.name, layer.index): outputs.__setitem__(key, hidden_states(out))
            )
    model.train()
    inputs = batch(family)
    loss = model(**inputs).loss
    wanted = {key: out for key, out in outputs.items() if out.requires_grad}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    found = {key for key, grad in zip(wanted, grads, strict=True) if grad is not None}
    return {
        name: min((index for stack_name, index in found if stack_name == name), default=None)
        for name in find_stacks(model)
    }


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bert", {"layers": [2, 3]}),
        ("bert", {"layers": [3], "modules_to_save": ["word_embeddings"]}),
        ("bert", {"layers": [3], "extra_modules": ["bert.embeddings.LayerNorm"]}),
        ("llama", {"layers": [1]}),
        ("llama", {"layers": [3], "extra_modules": ["model.embed_tokens"]}),
        ("llama", {"layers": [3], "trainable_token_indices": [5]}),
        ("t5", {"layers": {"decoder": [2]}}),
        ("t5", {"layers": {"encoder": [3]}}),
        ("t5", {"layers": {"encoder": [1], "decoder": [3]}}),
    ],
)
def test_the_report_says_how_far_the_backward_pass_goes(family, options):
    task = {"bert": "SEQ_CLS", "llama": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}[family]
    model = get_peft_model(build(family), SurgicalConfig(task_type=task, **options))
    report = model.base_model.tuning_report()
    assert {name: report.lowest_layer(name) for name in find_stacks(model)} == reached(model, family)


@pytest.mark.parametrize("method", METHODS)
def test_both_methods_report_the_lowest_layer(method):
    model = get_peft_model(build("bert"), make_config(method, "bert", [1, 3]))
    assert model.base_model.tuning_report().lowest_layer("encoder") == 1 == reached(model, "bert")["encoder"]
