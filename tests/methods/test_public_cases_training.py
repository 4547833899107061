"""Kinds of fault that users report of training with adapters; each test has the id of its kind in the name."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from adapters import METHODS, add, make, make_config, outputs, save, shake
from peft import PeftModel, get_peft_model
from tiny_models import batch, build
from torch import nn

from peft_surgical import SurgicalConfig, rank_layers
from peft_surgical.methods.trainer import parameter_groups


methods = pytest.mark.parametrize("method", METHODS)


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def step(model: nn.Module, family: str = "bert", **options) -> None:
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
    model(**batch(family)).loss.backward()
    optimizer.step()
    model.zero_grad()
    model.eval()


@methods
@pytest.mark.parametrize("is_trainable", [True, False])
def test_G2_loading_or_activating_one_adapter_leaves_the_flags_of_others(method, is_trainable, tmp_path):
    path = save(make(method, "bert", [2, 3]), tmp_path)
    model = make(method, "bert", [1, 2], name="one")
    of_one = {name for name, _ in model.named_parameters() if ".one." in name}
    assert trained(model) == of_one
    model.load_adapter(path, adapter_name="two", is_trainable=is_trainable)
    of_two = {name for name, _ in model.named_parameters() if ".two." in name}
    assert trained(model) == of_one | (of_two if is_trainable else set())
    model.set_adapter("two")
    assert trained(model) == of_two
    model.set_adapter("one", inference_mode=True)
    assert trained(model) == set()
    model.set_adapter("one")
    assert trained(model) == of_one


@methods
@pytest.mark.filterwarnings("ignore:Adapter two was active")
def test_G3_deleting_the_active_adapter_leaves_one_that_trains_and_no_tensor(method):
    model = make(method, "bert", [1, 2], name="one")
    add(model, method, "bert", [2, 3], name="two")
    model.set_adapter("two")
    step(model)
    tensors = [weakref.ref(p) for name, p in model.named_parameters() if ".two." in name]
    assert tensors
    model.delete_adapter("two")
    gc.collect()
    assert all(ref() is None for ref in tensors)
    assert model.active_adapters == ["one"]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert trained(model) == {name for name in before if ".one." in name}
    step(model)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == trained(model)


@methods
def test_G4_going_on_from_a_loaded_adapter_trains_what_was_trained(method, tmp_path):
    model = make(method, "bert", [1, 2])
    path = save(model, tmp_path)
    again = PeftModel.from_pretrained(build("bert"), path, is_trainable=True)
    assert trained(again) == trained(model)
    before = {name: p.detach().clone() for name, p in again.named_parameters()}
    step(again)
    assert {name for name, p in again.named_parameters() if not torch.equal(p, before[name])} == trained(again)
    frozen = PeftModel.from_pretrained(build("bert"), path)
    assert not trained(frozen)
    with pytest.warns(UserWarning, match="'default' was loaded for inference.*is_trainable=True"):
        frozen.train()(**batch("bert"))


# G5, gradients under both kinds of checkpointing: test_checkpointing.py
def test_G5_is_tested_where_checkpointing_is():
    import test_checkpointing

    assert test_checkpointing.test_gradients_are_those_without_checkpointing


@methods
@pytest.mark.parametrize("reentrant", [True, False])
def test_G6_checkpointing_changes_no_flag(method, reentrant):
    model = make(method, "bert", [1, 2])
    before = trained(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()(**batch("bert")).loss.backward()
    assert trained(model) == before
    model.gradient_checkpointing_disable()
    model(**batch("bert")).loss.backward()
    assert trained(model) == before
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@methods
def test_G7_new_modules_take_the_mode_of_their_model(method):
    options = {"lora_dropout": 0.5} if method == "STRATIFIED" else {}
    model = get_peft_model(build("bert").eval(), make_config(method, "bert", [1, 2], **options))
    assert not any(module.training for module in model.get_base_model().modules())
    shake(model, "default").eval()
    assert torch.equal(outputs(model, "bert"), outputs(model, "bert"))
    model.add_adapter("more", make_config(method, "bert", [3], **options))
    assert not any(module.training for module in model.get_base_model().modules())
    model.train()
    assert all(module.training for module in model.modules())
    model.add_adapter("last", make_config(method, "bert", [0], **options))
    assert all(module.training for module in model.modules())


@methods
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_G8_weight_decay_does_not_reach_what_is_frozen(family, method):
    model = make(method, family, [1, 2]).train()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    moving = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)  # all of them, by mistake
    for _ in range(10):
        model(**batch(family)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    assert not any(torch.equal(after[name], value) for name, value in moving.items())


# D3, D6, D9 and D11 need several processes: tests/distributed/test_distributed_engines.py


@methods
@pytest.mark.parametrize("autocast", [True, False])
def test_D4_one_dtype_in_every_layer_unless_masters_are_asked_for(method, autocast):
    base = build("llama").to(torch.bfloat16)
    model = get_peft_model(base, make_config(method, "llama", [1, 2]), autocast_adapter_dtype=autocast)
    for index, layer in enumerate(model.get_base_model().model.layers):
        masters = {torch.float32} if autocast and index in (1, 2) else set()
        assert {p.dtype for p in layer.parameters()} == {torch.bfloat16} | masters


@methods
def test_D7_a_checkpoint_without_the_frozen_weights_is_enough_but_for_a_trained_one(method):
    model = make(method, "bert", [1, 2])
    state = {name: value for name, value in model.state_dict().items() if ".default." in name}
    other = make(method, "bert", [1, 2], seed=5)
    result = other.load_state_dict(state, strict=False)
    assert not result.unexpected_keys
    assert torch.equal(outputs(other, "bert"), outputs(model, "bert"))
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    adapter = get_peft_model_state_dict(model)
    set_peft_model_state_dict(other, adapter)
    missing = next(name for name in adapter if "layer.1" in name)
    before = outputs(other, "bert")
    with pytest.raises(ValueError, match="lacks the tensor.*layer.1"):
        set_peft_model_state_dict(other, {name: value for name, value in adapter.items() if name != missing})
    assert torch.equal(outputs(other, "bert"), before)


@methods
def test_D8_groups_for_the_optimizer_hold_what_is_trained_and_none_is_empty(method):
    for family in ("bert", "llama"):
        model = make(method, family, [1, 2])
        groups = parameter_groups(model, lr=1e-3)
        assert all(group["params"] for group in groups)
        ids = [id(p) for group in groups for p in group["params"]]
        assert len(ids) == len(set(ids))
        assert set(ids) == {id(p) for p in model.parameters() if p.requires_grad}


def test_D10_layers_without_values_are_refused_by_name():
    model = build("bert")
    model.bert.encoder.layer[1].to("meta")
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\..*meta"):
        get_peft_model(model, SurgicalConfig(layers=[1]))
    get_peft_model(copy.deepcopy(model), SurgicalConfig(layers=[2]))
    data = [{"input_ids": torch.tensor([5, 6]), "labels": torch.tensor(0)}]
    with pytest.raises(ValueError, match=r"encoder\.layer\.1"):
        rank_layers(model, data, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.training is False


@methods
def test_whole_weights_that_were_rounded_on_a_quantised_base_are_told(method):
    """As TRL's trainers round them; `training/test_trainers.py` shows it on a base in 4 bits."""
    model = make(method, "llama", [1, 2]).train()
    model(**batch("llama"))  # nothing to tell
    model.get_base_model().is_quantized = True
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16() if parameter.requires_grad else parameter.data
    model.set_adapter("default")  # looks again
    with pytest.warns(UserWarning, match="bfloat16, where small steps are lost"):
        model(**batch("llama"))
