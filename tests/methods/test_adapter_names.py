"""An adapter's name is part of its tensors' names in the model: each works as any other, or is refused at once."""

from __future__ import annotations

import pytest
import torch
from adapters import METHODS, make, make_config, outputs, save, shake
from peft import PeftModel, get_peft_model
from tiny_models import build


NAMES = ["layer", "weight", "bias", "query", "encoder", "bert", "1", "0", "base_layer", "model", "base_model"]
NAMES += ["surgical_params", "lora_tuned", "lora_A", "modules_to_save", "own_tensors", "v1.0", "training", "keys"]
NAMES += ["default2", "my adapter", "é", "_orig_mod", "a|b", "tuned", "forward", "classifier", "out_proj", "lora"]


@pytest.mark.filterwarnings("ignore:Adapter .* was active which is now deleted")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_of_any_name_is_saved_and_loaded_or_refused_with_the_reason(method, name, tmp_path):
    model = make(method, "bert", [1, 3])
    expected = outputs(model, "bert", "default")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    try:
        model.add_adapter(name, make_config(method, "bert", [0, 2]))
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert repr(name) in refusal
        assert "Choose another" in refusal
        assert {key: tensor.shape for key, tensor in model.state_dict().items()} == {
            key: tensor.shape for key, tensor in before.items()
        }
        assert list(model.peft_config) == ["default"]
        return
    shake(model, name, seed=3).eval()
    wanted = outputs(model, "bert", name)
    assert not torch.equal(wanted, expected)
    folder = save(model, tmp_path, name)
    for adapter, result in (("default", expected), (name, wanted)):
        path = tmp_path if adapter == "default" else folder
        save(model, tmp_path, adapter)
        loaded = PeftModel.from_pretrained(build("bert"), path, adapter_name=adapter).eval()
        assert torch.equal(outputs(loaded, "bert", adapter), result)
    model.delete_adapter(name)
    assert torch.equal(outputs(model, "bert", "default"), expected)


@pytest.mark.parametrize("name", ["layer", "weight", "query"])
@pytest.mark.parametrize("method", METHODS)
def test_a_first_adapter_is_refused_as_well(method, name):
    base = build("bert")
    with pytest.raises(ValueError, match=f"An adapter cannot be called '{name}'"):
        get_peft_model(base, make_config(method, "bert", [1]), adapter_name=name)
    assert set(base.state_dict()) == set(build("bert").state_dict())
