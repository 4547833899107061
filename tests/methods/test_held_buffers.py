"""No buffer of the base moves while adapters train, whatever its kind: without the adapter the model is the base."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from peft.tuners.lora.config import MontecloraConfig
from tiny_models import batch, build
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

from peft_surgical import StratifiedConfig, SurgicalConfig


class MovingAverage(nn.Module):
    """A buffer under a name of its own that moves in training, and by assignment."""

    def __init__(self, width: int, *, in_place: bool, starts_after: int = 0):
        super().__init__()
        self.register_buffer("codebook_usage", torch.zeros(width))
        self.in_place = in_place
        self.passes_left = starts_after
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        if self.training and self.passes_left:
            self.passes_left -= 1
        elif self.training:
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
            self.fc = nn.Sequential(
                self.fc, MovingAverage(6, in_place=kind.endswith("in place"), starts_after=5 * ("late" in kind))
            )

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


KINDS = ["spectral norm", "old spectral norm", "batch norm", "average", "average in place", "average, late, in place"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("method", ["surgical", "stratified"])
def test_disabling_gives_the_base_back_after_training(kind, checkpointed, method):
    torch.manual_seed(0)
    base = Model(kind, checkpointed)
    base.train()
    for _ in range(3):
        base(torch.randn(8, 6))  # buffers off their start
    base.eval()
    before = {name: buffer.clone() for name, buffer in base.named_buffers()}
    x = torch.randn(8, 6)
    plain = base(x).detach()
    model = get_peft_model(base, CONFIGS[method]())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model.train()
    for _ in range(4):
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


@pytest.mark.parametrize("method", ["surgical", "stratified"])
def test_statistics_stay_without_a_tuner_around_the_model(method):
    base, x = Model("batch norm", False), torch.randn(8, 6)
    torch.manual_seed(0)
    model = inject_adapter_in_model(CONFIGS[method](), copy.deepcopy(base))
    torch.manual_seed(0)
    around = get_peft_model(copy.deepcopy(base), CONFIGS[method]())
    for trained in (model, around):
        optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.5)
        for _ in range(3):
            trained.train()(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model(x), around(x))
    again = inject_adapter_in_model(CONFIGS[method](), copy.deepcopy(base))
    set_peft_model_state_dict(again, get_peft_model_state_dict(model))
    assert torch.equal(model.eval()(x), again.eval()(x))


@pytest.mark.parametrize("method", ["surgical", "stratified"])
def test_what_a_user_writes_before_a_buffer_moves_is_what_it_is_given_back(method):
    model = get_peft_model(Model("average, late, in place", False).train(), CONFIGS[method]())
    usage = model.base_model.model.layers[0].fc[1].codebook_usage
    model(torch.randn(8, 6)).sum().backward()
    usage.fill_(3)
    for _ in range(6):
        model(torch.randn(8, 6)).sum().backward()
    assert torch.equal(usage, torch.full((6,), 3.0))


def test_frequencies_that_grow_with_the_sequence_grow_as_without_an_adapter(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    options = {"max_position_embeddings": 16, "rope_parameters": rope, "rope_scaling": rope}
    plain, inputs = build("llama", **options).train(), batch("llama", length=40)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(".layers.2." in name)
    model = get_peft_model(build("llama", **options), SurgicalConfig(task_type="CAUSAL_LM", layers=[2])).train()
    losses = []
    for trained in (plain, model):
        optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            loss = trained(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(build("llama", **options), tmp_path)
    assert torch.equal(model.eval()(**inputs).logits, again.eval()(**inputs).logits)


@pytest.mark.parametrize("options", [{"velora_config": {}}, {"monteclora_config": MontecloraConfig()}])
def test_buffers_of_lora_itself_move_as_in_peft(options):
    losses = []
    for cls in (LoraConfig, StratifiedConfig):
        torch.manual_seed(0)
        model = get_peft_model(build("llama"), cls(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4, **options))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            loss = model.train()(**batch("llama")).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
