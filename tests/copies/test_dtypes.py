"""The table of docs/dtypes.md."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import batch, build

from peft_surgical import SurgicalConfig


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TABLE = [
    # base, autocast_adapter_dtype, trained = saved = loaded copy
    (F32, True, F32),
    (F32, False, F32),
    (BF16, True, F32),
    (BF16, False, BF16),
    (F16, True, F32),
    (F16, False, F16),
]


def dtypes(model):
    return {p.dtype for name, p in model.named_parameters() if ".surgical_params." in name}


@pytest.mark.parametrize(("base", "autocast", "copy"), TABLE)
def test_the_trained_and_the_saved_copy(base, autocast, copy, tmp_path):
    config = SurgicalConfig(task_type="SEQ_CLS", layers=[1])
    model = get_peft_model(build("bert").to(base), config, autocast_adapter_dtype=autocast)
    assert dtypes(model) == {copy}
    output = model(**batch("bert"))
    assert output.logits.dtype == base
    output.loss.backward()
    assert all(p.grad.dtype == p.dtype for p in model.parameters() if p.requires_grad)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {value.dtype for name, value in saved.items() if "surgical_params" in name} == {copy}
    assert {value.dtype for name, value in saved.items() if "classifier" in name} == {base}


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("file", [F32, BF16])
@pytest.mark.parametrize(("base", "autocast", "copy"), TABLE)
def test_the_loaded_copy_whatever_the_file_holds(base, autocast, copy, file, low_cpu_mem_usage, tmp_path):
    config = SurgicalConfig(task_type="SEQ_CLS", layers=[1])
    get_peft_model(build("bert").to(file), config, autocast_adapter_dtype=False).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(
        build("bert").to(base), tmp_path, autocast_adapter_dtype=autocast, low_cpu_mem_usage=low_cpu_mem_usage
    )
    assert dtypes(model) == {copy}
    model(**batch("bert"))
    with torch.no_grad():
        saved = load_file(tmp_path / "adapter_model.safetensors")
        for name, parameter in model.named_parameters():
            if ".surgical_params." in name:
                assert torch.equal(parameter, saved[name.replace(".default.", ".")].to(copy))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_merging_rounds_once(dtype):
    model = get_peft_model(build("bert").to(dtype), SurgicalConfig(layers=[1]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    copies = {
        name.removeprefix("base_model.model.").replace(".surgical_params.default", ""): p.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    merged = model.merge_and_unload()
    assert copies
    assert all(torch.equal(merged.get_parameter(name), value.to(dtype)) for name, value in copies.items())


def test_a_cast_that_was_kept_before_a_training_is_not_used_after_it():
    """A fused AdamW, which is what Trainer takes, leaves no trace in a tensor's version."""
    model = get_peft_model(build("bert").to(BF16), SurgicalConfig(task_type="SEQ_CLS", layers=[1]))

    @torch.no_grad()
    def logits():
        model.eval().set_adapter("default", inference_mode=True)
        return model(**batch("bert", labels=False)).logits

    before = logits()
    model.train().set_adapter("default")
    copies = [p for name, p in model.named_parameters() if ".surgical_params." in name]
    optimizer = torch.optim.AdamW(copies, lr=0.1, fused=True)
    model(**batch("bert")).loss.backward()
    optimizer.step()
    after = logits()
    assert not torch.equal(after, before)
    assert torch.equal(after, model.merge_and_unload()(**batch("bert", labels=False)).logits)


def copies_of(model):
    return {name: p for name, p in model.named_parameters() if ".surgical_params." in name}


def load_others(model, folder):
    for seed in (1, 2):  # the second one takes the memory that the first one gives back
        model.load_adapter(folder / str(seed), adapter_name="default", low_cpu_mem_usage=True)


def make_the_base_float32(model, folder):
    model.float()


def write_to_the_base_of_a_sum(model, folder):
    model.load_adapter(folder / "1", adapter_name="other")
    model.base_model.set_adapter(["default", "other"], inference_mode=True)
    model(**batch("bert"))
    for name, parameter in model.named_parameters():
        if ".base_layer." in name:
            parameter.mul_(0.5)


def write_to_the_copies(model, folder):
    for parameter in copies_of(model).values():
        parameter.mul_(0.5)


@pytest.mark.parametrize(
    "change", [load_others, make_the_base_float32, write_to_the_base_of_a_sum, write_to_the_copies]
)
@torch.no_grad()
def test_a_kept_cast_is_that_of_what_is_there(change, tmp_path):
    for seed in range(3):
        torch.manual_seed(seed)
        adapted = get_peft_model(build("bert").to(BF16), SurgicalConfig(layers=[1]))
        for parameter in copies_of(adapted).values():
            parameter.add_(0.2 * torch.randn_like(parameter))
        adapted.save_pretrained(tmp_path / str(seed))
    model = PeftModel.from_pretrained(build("bert").to(BF16), tmp_path / "0").eval()
    model.load_adapter(tmp_path / "0", adapter_name="default", low_cpu_mem_usage=True)
    model(**batch("bert"))
    change(model, tmp_path)
    fresh = deepcopy(model)  # has kept nothing
    assert torch.equal(model(**batch("bert")).logits, fresh(**batch("bert")).logits)
    model, fresh = model.merge_and_unload(), fresh.merge_and_unload()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))
