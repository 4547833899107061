"""Surgical fine-tuning equals plain freezing: the same layers left trainable in plain PyTorch, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import get_peft_model
from tiny_models import TwoTowers, batch, build, hidden_states

from peft_surgical import SurgicalConfig, resolve_layers


CASES = {
    "bert": ("SEQ_CLS", [1, 3], ["classifier"]),
    "distilbert": ("SEQ_CLS", [0, -1], ["pre_classifier", "classifier"]),
    "gpt2": ("CAUSAL_LM", "last:2", []),
    "llama": ("CAUSAL_LM", [0], []),
    "mixtral": ("CAUSAL_LM", [2], []),
    "t5": ("SEQ_2_SEQ_LM", {"encoder": [0], "decoder": [1, 3]}, []),
    "vit": ("SEQ_CLS", [1], ["classifier"]),
}


def train(model, parameters, family, steps=20):
    """AdamW with weight decay, dropout on, the same random numbers each time."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    model.train()
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        model(**batch(family, seed=step)).loss.backward()
        optimizer.step()
    return model.eval()


def plainly_freeze(model, layers, heads):
    model.requires_grad_(False)
    for layer in resolve_layers(model, layers):
        layer.module.requires_grad_(True)
    for head in heads:
        model.get_submodule(head).requires_grad_(True)
    return model


@pytest.mark.parametrize("family", CASES)
def test_twenty_steps_of_adamw_give_the_weights_of_plain_freezing(family):
    task_type, layers, heads = CASES[family]
    base = build(family, **({"hidden_dropout_prob": 0.2} if family == "bert" else {}))
    plain = plainly_freeze(copy.deepcopy(base), layers, heads)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    train(plain, [p for p in plain.parameters() if p.requires_grad], family)

    model = get_peft_model(base, SurgicalConfig(task_type=task_type, layers=layers))
    # as careless users do, give the optimizer everything: what is frozen must not move
    train(model, model.parameters(), family)
    trained = model.merge_and_unload().state_dict()
    moved = 0
    for name, value in plain.state_dict().items():
        assert torch.equal(trained[name], value), name
        moved += not torch.equal(value, before[name])
    assert moved > 5


def test_training_leaves_the_base_as_it_was():
    base = build("bert")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    model = get_peft_model(base, SurgicalConfig(task_type="SEQ_CLS", layers=[1]))
    train(model, model.parameters(), "bert", steps=5)
    for name, value in model.unload().state_dict().items():
        if not name.startswith("classifier"):  # PEFT's rule: the active adapter's head stays
            assert torch.equal(value, before[name]), name


def test_target_modules_narrow_the_choice_inside_the_layers():
    base = build("bert")
    plain = copy.deepcopy(base).requires_grad_(False)
    for layer in resolve_layers(plain, [2, 3]):
        layer.module.attention.self.requires_grad_(True)
    plain.classifier.requires_grad_(True)
    train(plain, [p for p in plain.parameters() if p.requires_grad], "bert")
    config = SurgicalConfig(task_type="SEQ_CLS", layers=[2, 3], target_modules=["query", "key", "value"])
    model = get_peft_model(base, config)
    train(model, model.parameters(), "bert")
    trained = model.merge_and_unload().state_dict()
    assert all(torch.equal(trained[name], value) for name, value in plain.state_dict().items())


def test_exclude_modules_leaves_modules_frozen():
    base = build("bert")
    config = SurgicalConfig(task_type="SEQ_CLS", layers=[2], exclude_modules=["attention"])
    report = get_peft_model(base, config).tuning_report()
    assert report.rows[0].tensors
    assert not any("attention" in name for name in report.rows[0].tensors)


def test_target_modules_alone_choose_modules_of_a_model_without_layers():
    base = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    model = get_peft_model(base, SurgicalConfig(target_modules=["2"]))
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        "base_model.model.2.surgical_params.default.weight",
        "base_model.model.2.surgical_params.default.bias",
    ]


def test_the_report_accounts_for_every_trainable_parameter():
    for family, (task_type, layers, _) in CASES.items():
        model = get_peft_model(build(family), SurgicalConfig(task_type=task_type, layers=layers))
        report = model.tuning_report()
        trainable = [p for p in model.parameters() if p.requires_grad]
        assert report.parameters == sum(p.numel() for p in trainable)
        assert report.bytes == sum(p.numel() * p.element_size() for p in trainable)
        assert report.parameters == model.get_nb_trainable_parameters()[0]


def test_the_report_tells_how_far_down_the_backward_pass_goes():
    model = get_peft_model(build("bert"), SurgicalConfig(task_type="SEQ_CLS", layers=[1, 3]))
    report = model.tuning_report()
    assert report.lowest_layer("encoder") == 1
    assert "through 3 of 4 layers, down to 1" in str(report)
    assert [(row.stack, row.index) for row in report.rows] == [("encoder", 1), ("encoder", 3), ("classifier", None)]


def test_the_backward_pass_stops_above_the_frozen_layers():
    model = get_peft_model(build("bert"), SurgicalConfig(task_type="SEQ_CLS", layers=[2]))
    layers = model.get_base_model().bert.encoder.layer
    reached = []
    for index, layer in enumerate(layers):
        layer.register_forward_hook(
            lambda module, args, output, index=index: reached.append((index, hidden_states(output).requires_grad))
        )
    model(**batch("bert"))
    assert reached == [(0, False), (1, False), (2, True), (3, True)]


def test_two_stacks_are_tuned_by_name():
    model = get_peft_model(TwoTowers(), SurgicalConfig(layers={"language_model": [-1], "vision_tower": [0]}))
    assert model.peft_config["default"].layers == {"vision_tower": [0], "language_model": [3]}
    places = [layer.path for layer in resolve_layers(model, {"vision_tower": [0], "language_model": [3]})]
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert names
    assert all(any(f".{place}." in n for place in places) for n in names)


def test_running_statistics_outside_the_chosen_modules_do_not_move_in_training():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm_a = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
            self.b, self.norm_b = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm_b(self.b(self.norm_a(self.a(x))))

    base = Net()
    model = get_peft_model(base, SurgicalConfig(target_modules=["b", "norm_b"])).train()
    model(torch.randn(8, 4))
    assert base.norm_a.num_batches_tracked == 0
    assert base.norm_b.tuned["default"]["num_batches_tracked"] == 1
    assert base.norm_b.base_layer.num_batches_tracked == 0


def test_a_compiled_model_in_several_pieces_trains_as_the_plain_one():
    base = build("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    base.bert.embeddings.register_forward_hook(lambda *args: torch._dynamo.graph_break())
    models = [get_peft_model(copy.deepcopy(base), SurgicalConfig(layers=[1, 2])).train() for _ in range(2)]
    for call in (models[0], torch.compile(models[1], backend="eager")):
        call(**batch("bert")).loss.backward()
    grads = [{name: p.grad for name, p in model.named_parameters() if p.grad is not None} for model in models]
    assert grads[0]
    torch.testing.assert_close(*grads)
