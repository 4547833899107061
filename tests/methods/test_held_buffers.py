"""No buffer of the base moves while adapters train, whatever its kind: without the adapter the model is the base."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

from peft_surgical import StratifiedConfig, SurgicalConfig


class MovingAverage(nn.Module):
    """A buffer under a name of its own that moves in training, and by assignment."""

    def __init__(self, width: int, *, in_place: bool):
        super().__init__()
        self.register_buffer("codebook_usage", torch.zeros(width))
        self.in_place = in_place
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        if self.training:
            new = 0.9 * self.codebook_usage + 0.1 * x.detach().abs().mean(0)
            if self.in_place:
                self.codebook_usage.copy_(new)
            else:
                self.codebook_usage = new
        return x * self.gain + 0.1 * self.codebook_usage


class Layer(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)
        if kind == "spectral norm":
            self.fc = parametrizations.spectral_norm(self.fc)
        elif kind == "old spectral norm":
            self.fc = spectral_norm(self.fc)
        elif kind == "batch norm":
            self.fc = nn.Sequential(self.fc, nn.BatchNorm1d(6))
        elif kind.startswith("average"):
            self.fc = nn.Sequential(self.fc, MovingAverage(6, in_place=kind.endswith("in place")))

    def forward(self, x):
        return x + torch.tanh(self.other(self.fc(x)))


class Model(nn.Module):
    def __init__(self, kind: str, checkpointed: bool):
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed and self.training else layer(x)
        return x


CONFIGS = {
    "surgical": lambda: SurgicalConfig(layers=[2], target_modules=["other"]),
    "stratified": lambda: StratifiedConfig(
        r=2,
        target_modules=["other"],
        strata=[{"layers": [0, 1], "tune": "frozen"}, {"layers": [2], "tune": "lora", "bias": "none"}],
    ),
    "lora": lambda: LoraConfig(r=2, target_modules=["other"]),
}


@pytest.mark.parametrize("kind", ["spectral norm", "old spectral norm", "batch norm", "average", "average in place"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("method", ["surgical", "stratified"])
def test_disabling_gives_the_base_back_after_training(kind, checkpointed, method):
    torch.manual_seed(0)
    base = Model(kind, checkpointed)
    base.train()
    base(torch.randn(8, 6))  # buffers off their start
    base.eval()
    before = {name: buffer.clone() for name, buffer in base.named_buffers()}
    x = torch.randn(8, 6)
    plain = base(x).detach()
    model = get_peft_model(base, CONFIGS[method]())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model.train()
    for _ in range(3):
        loss = model(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    assert not torch.equal(model(x), plain)
    with model.disable_adapter():
        assert torch.equal(model(x), plain)
    after = dict(base.named_buffers())
    for name, buffer in before.items():
        found = next(b for n, b in after.items() if n.replace(".base_layer", "") == name)
        assert torch.equal(found, buffer), name


def test_what_a_user_writes_to_a_buffer_that_does_not_move_stays():
    model = get_peft_model(Model("none", False).train(), CONFIGS["surgical"]())
    model.base_model.model.register_buffer("of_the_user", torch.zeros(2))
    model(torch.randn(8, 6)).sum().backward()
    model.base_model.model.of_the_user.fill_(3)
    model(torch.randn(8, 6)).sum().backward()
    assert torch.equal(model.base_model.model.of_the_user, torch.full((2,), 3.0))
