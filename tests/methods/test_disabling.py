"""`disable_adapter` gives back exactly what it found: which tensors are trainable, and which adapters are active."""

from __future__ import annotations

import pytest
import torch
from adapters import METHODS, add, base_outputs, make, outputs, save
from peft import PeftModel
from tiny_models import build


def flags(model) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def loaded(method: str, family: str, folder, **options):
    model = PeftModel.from_pretrained(build(family), folder, **options)
    return add(model, method, family, [0, 2], name="second")


STATES = {
    "for inference": lambda model: None,
    "one trained": lambda model: model.set_adapter("second"),
    "frozen by hand": lambda model: model.requires_grad_(False),
    "frozen by peft": lambda model: model.set_requires_grad("second", False),
    "all by hand": lambda model: model.requires_grad_(True),
    "a mixture": lambda model: [p.requires_grad_(i % 3 == 0) for i, p in enumerate(model.parameters())],
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("method", METHODS)
def test_the_context_restores_what_it_found(method, family, state, tmp_path):
    model = loaded(method, family, save(make(method, family, [1, 3]), tmp_path))
    STATES[state](model)
    before, active = flags(model), list(model.active_adapters)
    expected, plain = outputs(model, family), base_outputs(family)
    with model.disable_adapter():
        assert torch.equal(outputs(model, family), plain)
        with model.disable_adapter():
            assert torch.equal(outputs(model, family), plain)
    assert flags(model) == before
    with pytest.raises(KeyError, match="inside"), model.disable_adapter():
        raise KeyError("inside")
    assert flags(model) == before
    assert model.active_adapters == active
    assert torch.equal(outputs(model, family), expected)


@pytest.mark.parametrize("method", METHODS)
def test_layers_that_are_disabled_and_enabled_by_hand_too(method, tmp_path):
    model = loaded(method, "bert", save(make(method, "bert", [1, 3]), tmp_path))
    before = flags(model)
    for _ in range(2):
        model.base_model.disable_adapter_layers()
        model.base_model.disable_adapter_layers()
        model.base_model.enable_adapter_layers()
        assert flags(model) == before


@pytest.mark.parametrize("method", METHODS)
def test_what_is_set_while_they_are_disabled_holds(method, tmp_path):
    model = loaded(method, "bert", save(make(method, "bert", [1, 3]), tmp_path))
    with model.disable_adapter():
        model.set_adapter("second")
    assert model.active_adapters == ["second"]
    assert any(flag for name, flag in flags(model).items() if ".second." in name)
    assert not any(flag for name, flag in flags(model).items() if ".default." in name)
