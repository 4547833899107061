from __future__ import annotations

import copy

import pytest
import torch
from peft import get_peft_model
from tiny_models import FAMILIES, SEQ2SEQ, build
from torch import nn
from transformers import Trainer

from peft_surgical import SurgicalConfig, resolve_layers
from peft_surgical.methods.trainer import parameter_groups


def tuned(family, layers=None):
    layers = layers or ({"decoder": [0]} if family in SEQ2SEQ else [0])
    return get_peft_model(build(family), SurgicalConfig(layers=layers))


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_hold_each_trainable_parameter_once_and_none_is_empty(family):
    model = tuned(family)
    groups = parameter_groups(model, lr=1e-3)
    assert all(group["params"] for group in groups)
    ids = [id(p) for group in groups for p in group["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in model.parameters() if p.requires_grad}


class Mixer(nn.Module):
    """Tuned as a whole, for the parameter of its own; only the types of the norms inside say that they are norms."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.ones(4, 4))
        self.first, self.second = nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.batch_norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.batch_norm(self.second(self.first(x)) @ self.mix)


def mixers() -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"mixer": Mixer(), "norm": nn.LayerNorm(4)}) for _ in range(2))
    return model


@pytest.mark.parametrize("family", [*FAMILIES, "norms within"])
def test_trainer_decays_the_same_tensors_as_in_plain_training(family):
    plain = mixers() if family == "norms within" else build(family)
    layers = {"decoder": [0]} if family in SEQ2SEQ else [0]
    inside = {id(p) for layer in resolve_layers(plain, layers) for p in layer.module.parameters()}
    decayed = Trainer.get_decay_parameter_names(None, plain)
    expected = {name for name, p in plain.named_parameters() if id(p) in inside and name in decayed}

    model = get_peft_model(copy.deepcopy(plain), SurgicalConfig(layers=layers))
    decayed = Trainer.get_decay_parameter_names(None, model)
    found = {
        name.removeprefix("base_model.model.").replace(".surgical_params.default", "").replace("|", ".")
        for name, p in model.named_parameters()
        if p.requires_grad and name in decayed
    }
    assert found == expected
    ours = {id(p) for g in parameter_groups(model, lr=1.0) if g["weight_decay"] for p in g["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in ours}
    readable = (name.removeprefix("base_model.model.").replace("|", ".") for name in names)
    assert {name.replace(".surgical_params.default", "") for name in readable} == expected


def test_learning_rates_follow_the_scores_of_the_layers():
    model = get_peft_model(build("bert"), SurgicalConfig(task_type="SEQ_CLS", layers=[1, 3]))
    groups = parameter_groups(model, lr=1e-2, layer_scores=[1.0, 2.0, 0.0, 4.0])
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            expected = 0.5e-2 if ".layer.1." in name else 1e-2
            assert rates[id(parameter)] == pytest.approx(expected)
    torch.optim.AdamW(groups)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0, 2.0], "4 numbers"),
        ([0.0] * 4, "positive"),
        ([-1.0, 1, 1, 1], "0 or more"),
        ({"decoder": [1.0]}, "decoder"),
    ],
)
def test_scores_that_do_not_fit_are_refused(scores, message):
    with pytest.raises(ValueError, match=message):
        parameter_groups(tuned("bert"), lr=1.0, layer_scores=scores)


def test_a_frozen_model_is_refused():
    with pytest.raises(ValueError, match="is_trainable=True"):
        parameter_groups(build("bert").requires_grad_(False), lr=1.0)
