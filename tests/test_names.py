"""Files hold plain names, whatever wraps the modules of the model."""

from __future__ import annotations

import pytest
import torch
from adapters import METHODS, make_config, outputs, save, shake
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import batch, build
from torch import nn

from peft_surgical import find_stacks
from peft_surgical.layers import unwrap
from peft_surgical.names import CONTAINERS, CopyName, as_in_file, base_path, without_wrappers


def compile_layers(model: nn.Module) -> nn.Module:
    """Compile each layer by itself, as accelerate's regional compilation does."""
    for stack in find_stacks(model).values():
        layers = unwrap(model).get_submodule(stack.path)
        for i in range(len(layers)):
            layers[i] = torch.compile(layers[i], backend="eager")
    return model


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("tensor", ["weight", "out_proj.weight", "parametrizations.weight.original0"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_copys_name_is_read_as_it_was_written(container, tensor, in_place):
    name = CopyName("encoder.layer.0.dense", tensor, container, in_place)
    assert CopyName.parse(name.in_file) == name
    assert name.in_base == f"encoder.layer.0.dense.{tensor}"


@pytest.mark.parametrize(
    "key", ["base_model.model.classifier.weight", "base_model.model.query.lora_A.weight", "surgical_params", ""]
)
def test_other_tensors_are_no_copies(key):
    assert CopyName.parse(key) is None


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_wrappers_are_taken_out_wherever_they_stand(wrapper):
    assert without_wrappers(f"{wrapper}.layer.{wrapper}.0.{wrapper}.weight") == "layer.0.weight"
    assert without_wrappers(f"layer.0.{wrapper}") == "layer.0"
    assert without_wrappers(f"layer.my{wrapper}.weight") == f"layer.my{wrapper}.weight"
    assert base_path(f"base_model.model.layer.0.{wrapper}.dense.base_layer") == "layer.0.dense"
    assert as_in_file(f"{wrapper}.dense.base_layer.lora_tuned.bias") == "dense.lora_tuned.bias"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["bert", "llama", "vit"])
@pytest.mark.parametrize("before", [True, False], ids=["compiled-then-adapted", "adapted-then-compiled"])
def test_layers_compiled_one_by_one_save_plain_names_and_load_both_ways(method, family, before, tmp_path):
    torch.manual_seed(1)
    model = compile_layers(build(family)) if before else build(family)
    model = get_peft_model(model, make_config(method, family, [1, 3]))
    if not before:
        compile_layers(model)
    shake(model, "default").eval()
    expected = outputs(model, family)
    folder = save(model, tmp_path / "compiled")

    plain = get_peft_model(build(family), make_config(method, family, [1, 3]))
    assert set(load_file(folder / "adapter_model.safetensors")) == set(
        load_file(save(plain, tmp_path / "plain") / "adapter_model.safetensors")
    )
    for base in (build(family), compile_layers(build(family))):
        loaded = PeftModel.from_pretrained(base, folder).eval()
        assert torch.equal(outputs(loaded, family), expected)
        assert folder.exists()
        again = save(loaded, tmp_path / f"again-{id(base)}")
        for name, tensor in load_file(again / "adapter_model.safetensors").items():
            assert torch.equal(tensor, load_file(folder / "adapter_model.safetensors")[name])


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_on_compiled_layers_trains_its_own_tensors_only(method):
    model = get_peft_model(compile_layers(build("bert")), make_config(method, "bert", [1, 3]))
    assert model.base_model.tuning_report().lowest_layer("encoder") == 1
    model.train()
    model(**batch("bert")).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
