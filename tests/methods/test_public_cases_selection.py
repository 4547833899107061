"""Kinds of fault that users report of choosing layers and of tuning biases; each test has the id of its kind."""

from __future__ import annotations

import pytest
import torch
import transformers
from adapters import METHODS, make, make_config, outputs, save, shake
from peft import PeftModel, get_peft_model
from tiny_models import TwoTowers, build
from torch import nn

from peft_surgical import StratifiedConfig, SurgicalConfig, find_stacks


methods = pytest.mark.parametrize("method", METHODS)


def trained(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def layers_of(names: list[str]) -> set[int]:
    return {int(name.split(".layer.")[1].split(".")[0]) for name in names if ".layer." in name}


def test_S1_any_layers_may_be_chosen():
    for layers, wanted in {
        "a list with an index from the end": ([1, 10, -1], {1, 10, 11}),
        "the last": ("last:2", {10, 11}),
        "a share": ("first:25%", {0, 1, 2}),
        "a range": ("4-6", {4, 5, 6}),
    }.values():
        model = get_peft_model(build("bert", num_hidden_layers=12), SurgicalConfig(layers=layers))
        assert layers_of(trained(model)) == wanted
    strata = [{"layers": "0-8", "tune": "frozen"}, {"layers": "9-11", "tune": "lora"}]  # LoRA above a frozen part
    model = get_peft_model(build("bert", num_hidden_layers=12), StratifiedConfig(strata=strata))
    assert layers_of(trained(model)) == {9, 10, 11}


@methods
@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_S2_bare_and_headed_models_are_numbered_alike(family, method):
    def tuned(bare: bool) -> set[str]:
        model = get_peft_model(build(family, bare=bare), make_config(method, family, [1, 2], task_type=None))
        prefix = "" if bare else build(family).base_model_prefix + "."
        return {n.replace(f"base_model.model.{prefix}", "", 1) for n in trained(model)}

    assert tuned(True) == tuned(False) != set()


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class MixtureLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(4), nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x):
        return x + sum(expert(self.norm(x)) for expert in self.experts)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MixtureLayer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_S3_an_experts_number_is_not_its_layers():
    model = get_peft_model(Mixture(), SurgicalConfig(layers=[1]))
    names = trained(model)
    assert all(name.startswith("base_model.model.layers.1.") for name in names)
    assert {name.split(".experts.")[1][0] for name in names if "experts" in name} == {"0", "1", "2"}
    strata = [{"layers": [0, 1, 3], "tune": "frozen"}, {"layers": [2], "tune": "lora", "target_modules": ["up"]}]
    names = trained(get_peft_model(Mixture(), StratifiedConfig(strata=strata)))
    assert names
    assert all(name.startswith("base_model.model.layers.2.") for name in names)


@pytest.mark.parametrize("layers", [[99], [], "last:0", "50-60"])
def test_S6_a_choice_that_matches_nothing_raises_with_the_valid_range(layers):
    model = build("bert")
    names = list(dict(model.named_modules()))
    with pytest.raises(ValueError, match="layers 0 to 3|1 to 4"):
        get_peft_model(model, SurgicalConfig(layers=layers))
    assert list(dict(model.named_modules())) == names


@pytest.mark.parametrize("layers", [[1, 99], [1, 1], [3, -1]])
def test_S7_a_choice_that_matches_in_part_raises(layers):
    with pytest.raises(ValueError, match=r"no layer 99|layer \d more than once"):
        get_peft_model(build("bert"), SurgicalConfig(layers=layers))
    strata = [{"layers": layers, "tune": "bitfit"}, {"layers": [0], "tune": "frozen"}]
    with pytest.raises(ValueError):
        get_peft_model(build("bert"), StratifiedConfig(strata=strata))


def test_S8_an_ambiguous_index_asks_for_the_name_of_the_stack():
    with pytest.raises(ValueError, match=r"vision_tower.*language_model"):
        get_peft_model(TwoTowers(), SurgicalConfig(layers=[3]))
    names = trained(get_peft_model(TwoTowers(), SurgicalConfig(layers={"language_model": [3]})))
    assert all("language_model.layers.3." in name for name in names)


@methods
@pytest.mark.parametrize("family", ["bert", "mixtral", "t5"])
def test_S9_the_report_agrees_with_what_requires_a_gradient(family, method):
    model = make(method, family, [1, 2])
    report = model.base_model.tuning_report()
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert report.parameters == sum(p.numel() for p in parameters) == model.get_nb_trainable_parameters()[0]
    optimizer = torch.optim.AdamW(parameters)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(trained(model))
    stack = "decoder" if family == "t5" else next(iter(find_stacks(model)))
    assert {row.index for row in report.rows if row.stack == stack and row.parameters} == {1, 2}


@methods
def test_S10_another_choice_during_training_is_another_adapter(method):
    model = make(method, "bert", [1], name="first").train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(ValueError, match="first"):
        model.add_weighted_adapter(["first"], [1.0], "first")
    model.add_adapter("second", make_config(method, "bert", [2]))
    model.set_adapter("second")
    new = [p for p in model.parameters() if p.requires_grad]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert not held & {id(p) for p in new}
    optimizer.add_param_group({"params": new})
    before = [p.detach().clone() for p in new]
    model(**{"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([1])}).loss.backward()
    optimizer.step()
    assert any(not torch.equal(p, old) for p, old in zip(new, before, strict=True))


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 has a module for each expert")
def test_S11_experts_that_are_plain_parameters_go_with_their_layer(tmp_path):
    model = make("SURGICAL", "mixtral", [1])
    layer = build("mixtral").model.layers[1]
    assert any(p.ndim == 3 for p in layer.parameters())
    assert len(trained(model)) == len(list(layer.parameters()))
    again = PeftModel.from_pretrained(build("mixtral"), save(model, tmp_path)).eval()
    assert torch.equal(outputs(again, "mixtral"), outputs(model, "mixtral"))
    (row,) = make("STRATIFIED", "mixtral", [1]).base_model.tuning_report().rows
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} <= set(row.frozen)  # they get neither LoRA nor biases


# ---- biases


def test_B2_a_stratum_of_biases_without_biases_is_an_error_with_a_way_out():
    strata = [{"layers": [0, 2, 3], "tune": "frozen"}, {"layers": [1], "tune": "bitfit"}]
    model = build("llama")
    keys = model.state_dict().keys()
    with pytest.raises(ValueError, match=r"Layer 1 of the stratum.*no bias terms.*norm.*add_bias=True"):
        get_peft_model(model, StratifiedConfig(strata=strata))
    assert model.state_dict().keys() == keys
    strata[1]["tune"] = "norm"
    tuned = shake(get_peft_model(build("llama"), StratifiedConfig(strata=strata)), "default")
    assert tuned.merge_and_unload().state_dict().keys() == keys


def test_B3_every_adapter_has_biases_of_its_own():
    model = make("STRATIFIED", "bert", [1, 2], name="rte")
    config = make_config("STRATIFIED", "bert", [1, 2])
    model.add_adapter("cola", config)
    shake(model, "cola", seed=2)
    alone = {"rte": make("STRATIFIED", "bert", [1, 2], name="rte")}
    for _ in range(2):
        one, other = outputs(model, "bert", "rte"), outputs(model, "bert", "cola")
        assert torch.equal(one, outputs(alone["rte"], "bert"))
        assert not torch.allclose(one, other)
        with model.disable_adapter():
            assert torch.equal(outputs(model, "bert"), outputs(build("bert"), "bert"))
    assert torch.equal(outputs(model.unload(), "bert"), outputs(build("bert"), "bert"))


@methods
@pytest.mark.parametrize("family", ["bert", "gpt2", "mixtral", "vit"])
def test_B4_everything_that_is_trained_is_in_the_file(family, method, tmp_path):
    from safetensors.torch import load_file

    model = make(method, family, [1, 2])
    path = save(model, tmp_path)
    stored = load_file(path / "adapter_model.safetensors")
    in_file = {
        name.replace(".modules_to_save.default.", ".").replace(".default.", ".").replace(".base_layer.", ".")
        for name in trained(model)
    }
    assert set(stored) == in_file
    again = PeftModel.from_pretrained(build(family), path).eval()
    assert torch.equal(outputs(again, family), outputs(model, family))


def test_B5_biases_are_trained_in_their_stratum_only():
    strata = [{"layers": "2-3", "tune": "lora"}, {"layers": [1], "tune": "bitfit"}, {"layers": [0], "tune": "frozen"}]
    model = get_peft_model(build("bert"), StratifiedConfig(task_type="SEQ_CLS", strata=strata))
    names = trained(model)
    assert layers_of([n for n in names if ".bert." in n]) == {1, 2, 3}
    assert all(".encoder.layer." in name for name in names if ".bert." in name)
    assert [name for name in names if ".bert." not in name] == [
        "base_model.model.classifier.modules_to_save.default.weight",
        "base_model.model.classifier.modules_to_save.default.bias",
    ]


class Router(nn.Module):
    """As in DeepSeek-V3: the correction is called a bias, and is a buffer."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.register_buffer("e_score_correction_bias", torch.randn(3))

    def forward(self, x):
        return self.gate(x).softmax(-1) + self.e_score_correction_bias


class RoutedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.q_proj, self.out = Router(), nn.Linear(4, 4, bias=False), nn.Linear(3, 4)
        self.q_proj.note = "kept"

    def forward(self, x):
        return self.q_proj(x) + self.out(self.router(x))


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(RoutedLayer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_B6_buffers_called_bias_stay_buffers_and_no_bias_appears():
    torch.manual_seed(0)
    base = Routed()
    before = {name: buffer.clone() for name, buffer in base.named_buffers()}
    strata = [{"layers": [0], "tune": "bitfit"}, {"layers": "1-2", "tune": "lora", "target_modules": ["q_proj"]}]
    model = get_peft_model(base, StratifiedConfig(strata=strata))
    assert not any("correction" in name for name in trained(model))
    model.train()(torch.randn(2, 4)).sum().backward()
    after = {n.removeprefix("base_model.model."): b for n, b in model.named_buffers()}
    assert all(torch.equal(after[name], value) for name, value in before.items())
    wrapped = model.get_base_model().layers[1].q_proj
    assert wrapped.get_base_layer().bias is None
    assert wrapped.get_base_layer().note == "kept"
