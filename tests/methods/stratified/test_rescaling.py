"""PEFT's `rescale_adapter_scale` scales LoRA alone: refused where an adapter has more than that."""

from __future__ import annotations

import pytest
import torch
from adapters import attention, base_outputs, make, outputs
from peft import get_peft_model
from peft.helpers import rescale_adapter_scale
from tiny_models import build

from peft_surgical import StratifiedConfig


def test_an_adapter_with_copies_is_refused_and_stays_as_it_is():
    model = make("STRATIFIED", "bert", [1, 3])
    expected = outputs(model, "bert")
    with (
        pytest.raises(ValueError, match="copies of biases or weights besides LoRA"),
        rescale_adapter_scale(model, 0.5),
    ):
        pass
    assert torch.equal(outputs(model, "bert"), expected)
    with rescale_adapter_scale(model, 1.0):
        assert torch.equal(outputs(model, "bert"), expected)


def test_lora_alone_is_scaled_as_in_peft():
    strata = [{"layers": [0, 1, 2], "tune": "frozen"}, {"layers": [3], "tune": "lora", "bias": "none"}]
    config = StratifiedConfig(task_type="CAUSAL_LM", r=2, target_modules=attention("gpt2"), strata=strata)
    model = get_peft_model(build("gpt2"), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    expected = outputs(model, "gpt2")
    with rescale_adapter_scale(model, 0.0):
        torch.testing.assert_close(outputs(model, "gpt2"), base_outputs("gpt2"))
    assert torch.equal(outputs(model, "gpt2"), expected)
