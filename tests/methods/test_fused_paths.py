"""PyTorch's own transformer layers read weights past wrappers in a fused kernel: adapters hold there as well."""

from __future__ import annotations

import copy

import pytest
import torch
from adapters import shake
from peft import get_peft_model
from torch import nn

from peft_surgical import StratifiedConfig, SurgicalConfig


class Encoder(nn.Module):
    def __init__(self, norm_first: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x, mask=None):
        return self.encoder(x, src_key_padding_mask=mask)


def make(norm_first: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Encoder(norm_first).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


CONFIGS = {
    "surgical": lambda: SurgicalConfig(layers=[1, 2]),
    "bias terms": lambda: StratifiedConfig(
        strata=[{"layers": [0], "tune": "frozen"}, {"layers": [1, 2], "tune": "bitfit"}]
    ),
    "norms": lambda: StratifiedConfig(strata=[{"layers": [0], "tune": "frozen"}, {"layers": "1-", "tune": "norm"}]),
    "lora": lambda: StratifiedConfig(
        r=2,
        target_modules=["linear1", "linear2"],
        strata=[{"layers": [0], "tune": "frozen"}, {"layers": "1-", "tune": "lora"}],
    ),
    "lora alone": lambda: StratifiedConfig(r=2, target_modules=["linear1", "linear2"]),
}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_evaluation_computes_what_training_computes(name, norm_first):
    base = make(norm_first)
    x = torch.randn(2, 5, 8)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        plain = [base(x), base(x, mask)]
    model = get_peft_model(base, CONFIGS[name]()).eval()
    shake(model, "default")
    for inputs, of_base in zip([(x,), (x, mask)], plain, strict=True):
        keep = ~mask if len(inputs) == 2 else slice(None)
        with_grad = model(*inputs)
        with torch.no_grad():
            without = model(*inputs)
        torch.testing.assert_close(without[keep], with_grad[keep])
        assert not torch.allclose(with_grad[keep], of_base[keep], atol=1e-3)
        with torch.no_grad(), model.disable_adapter():
            torch.testing.assert_close(model(*inputs)[keep], of_base[keep])
        merged = copy.deepcopy(model).merge_and_unload()
        with torch.no_grad():
            torch.testing.assert_close(merged(*inputs)[keep], with_grad[keep], rtol=1e-4, atol=1e-5)
    plain_again = model.unload()
    assert all(layer.activation_relu_or_gelu for layer in plain_again.encoder.layers)
