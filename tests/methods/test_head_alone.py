"""Strata that are all frozen: the head alone is an adapter like any other."""

from __future__ import annotations

import copy

import pytest
import torch
from adapters import add, base_outputs, make_config, merged_state, outputs, plain, save, shake
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file
from tiny_models import TwoTowers, batch, build
from torch import nn

from peft_surgical import StratifiedConfig
from peft_surgical.bank import DeltaBank
from peft_surgical.convert.convert import export_lora


FROZEN = [{"layers": "all", "tune": "frozen"}]
HEAD = {"base_model.model.classifier.weight", "base_model.model.classifier.bias"}


def head_config(**options) -> StratifiedConfig:
    return StratifiedConfig(task_type="SEQ_CLS", strata=FROZEN, **options)


def head_alone(seed: int = 1, **options) -> PeftModel:
    return shake(get_peft_model(build("bert"), head_config(**options)), "default", seed).eval()


def trained(model: nn.Module) -> set[str]:
    return {name.replace(".modules_to_save.default", "") for name, p in model.named_parameters() if p.requires_grad}


def step(model: nn.Module) -> None:
    torch.manual_seed(0)  # dropout
    model.train()
    model(**batch("bert")).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    model.eval()


def test_the_head_alone_is_trained_as_in_a_frozen_plain_model():
    model, expected = get_peft_model(build("bert"), head_config()).eval(), build("bert")
    assert trained(model) == HEAD
    assert model.tuning_report().parameters == sum(p.numel() for p in expected.classifier.parameters())
    expected.bert.requires_grad_(False)
    for one in (model, expected):
        one(**batch("bert")).loss.backward()
        torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1).step()
    assert torch.equal(outputs(model, "bert"), outputs(expected, "bert"))
    assert not torch.equal(outputs(model, "bert"), base_outputs("bert"))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(reentrant):
    model, expected = head_alone(), head_alone()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for one in (model, expected):
        step(one)
    assert torch.equal(outputs(model, "bert"), outputs(expected, "bert"))


def test_the_file_holds_the_head_and_goes_on_training_where_it_stopped(tmp_path):
    model = head_alone()
    save(model, tmp_path)
    assert set(load_file(tmp_path / "adapter_model.safetensors")) == HEAD
    again = PeftModel.from_pretrained(build("bert"), tmp_path, is_trainable=True).eval()
    assert torch.equal(outputs(again, "bert"), outputs(model, "bert"))
    assert trained(again) == HEAD
    for one in (model, again):
        step(one)
    assert torch.equal(outputs(again, "bert"), outputs(model, "bert"))
    with pytest.raises(ValueError, match="number of layers was"):
        PeftModel.from_pretrained(build("bert", num_hidden_layers=5), tmp_path)


@pytest.mark.filterwarnings("ignore:Adapter two was active")
@pytest.mark.parametrize("head_first", [True, False])
def test_it_stands_beside_other_adapters(head_first):
    other = make_config("STRATIFIED", "bert", [1, 2])
    model = get_peft_model(build("bert"), head_config() if head_first else other, adapter_name="one")
    model.add_adapter("two", other if head_first else head_config())
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if ".one." in name
    }
    for seed, name in enumerate(["one", "two"]):
        shake(model, name, seed)
    model.eval()
    expected = {name: outputs(plain("bert", merged_state(model, name)), "bert") for name in ("one", "two")}
    for name in ("two", "one", "two"):
        torch.testing.assert_close(outputs(model, "bert", name), expected[name])
        with model.disable_adapter():
            assert torch.equal(outputs(model, "bert"), base_outputs("bert"))
    rows = outputs(model, "bert", adapter_names=["one", "two", "__base__", "two"])
    for row, of in enumerate([expected["one"], expected["two"], base_outputs("bert"), expected["two"]]):
        torch.testing.assert_close(rows[row], of[row])
    model.delete_adapter("two")
    torch.testing.assert_close(outputs(model, "bert"), expected["one"])
    assert torch.equal(outputs(model.unload(), "bert"), base_outputs("bert"))


def test_heads_of_different_sizes_share_a_base(tmp_path):
    wide = build("bert", num_labels=5)
    wide.bert.load_state_dict(build("bert").bert.state_dict())
    wide = shake(get_peft_model(wide, head_config()), "default").eval()
    save(wide, tmp_path)
    model = head_alone()
    expected = outputs(model, "bert")
    model.load_adapter(tmp_path, adapter_name="wide")
    assert torch.equal(outputs(model, "bert", "wide"), outputs(wide, "bert"))
    assert model.config.num_labels == 5
    assert torch.equal(outputs(model, "bert", "default"), expected)


@pytest.mark.parametrize("order", [["default", "two"], ["two", "default"]])
def test_it_is_combined_with_an_adapter_that_tunes_layers(order):
    model = head_alone()
    add(model, "STRATIFIED", "bert", [1, 2], name="two")
    model.base_model.add_weighted_adapter(order, [0.5, 0.5], "sum", combination_type="cat")
    base, states = build("bert").state_dict(), [merged_state(model, name) for name in order]
    mean = {name: (states[0][name] + states[1][name]) / 2 for name in base}
    torch.testing.assert_close(outputs(model, "bert", "sum"), outputs(plain("bert", mean), "bert"))


def test_heads_alone_are_combined():
    model = head_alone()
    model.add_adapter("two", head_config())
    shake(model, "two", 2)
    model.base_model.add_weighted_adapter(["default", "two"], [2.0, -1.0], "sum", combination_type="linear")
    heads = model.base_model.model.classifier.modules_to_save
    base = build("bert").classifier.weight
    expected = base + 2 * (heads["default"].weight - base) - (heads["two"].weight - base)
    torch.testing.assert_close(heads["sum"].weight, expected)


def test_another_head_is_swapped_in(tmp_path):
    other = head_alone(seed=2)
    save(other, tmp_path)
    model = head_alone()
    hotswap_adapter(model, str(tmp_path), "default", torch_device="cpu")
    assert torch.equal(outputs(model, "bert"), outputs(other, "bert"))


def test_a_bank_serves_it(tmp_path):
    model = head_alone()
    save(model, tmp_path)
    bank = DeltaBank(build("bert"))
    bank.add("task", tmp_path)
    with bank.task("task") as served:
        assert torch.equal(outputs(served, "bert"), outputs(model, "bert"))


def test_stock_peft_takes_it_when_exported(tmp_path):
    model = head_alone()
    save(model, tmp_path / "delta")
    with pytest.raises(ValueError, match="nothing to export"):
        export_lora(tmp_path / "delta", tmp_path / "lora")
    assert export_lora(tmp_path / "delta", tmp_path / "lora", head=True) == []
    stock = PeftModel.from_pretrained(build("bert"), tmp_path / "lora").eval()
    assert type(stock.peft_config["default"]) is LoraConfig
    assert torch.equal(outputs(stock, "bert"), outputs(model, "bert"))


@pytest.mark.parametrize("family", ["bart", "towers"])
def test_every_stack_of_a_model_is_frozen(family):
    base = TwoTowers() if family == "towers" else build(family, head="BartForSequenceClassification")
    head = "classifier" if family == "towers" else "classification_head"
    before = copy.deepcopy(base.state_dict())
    model = get_peft_model(base, StratifiedConfig(strata=FROZEN, modules_to_save=[head]))
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert names
    assert all(f"{head}.modules_to_save.default" in name for name in names)
    assert all(torch.equal(value, before[name]) for name, value in model.unload().state_dict().items())


def test_frozen_layers_and_no_head_are_refused():
    with pytest.raises(ValueError, match="all layers frozen, and nothing else is trained.*modules_to_save"):
        get_peft_model(build("bert"), StratifiedConfig(strata=FROZEN))
