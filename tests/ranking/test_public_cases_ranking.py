"""Kinds of fault that users report of tools that measure importance; each test has the id of its kind in the name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from forks import run_forked
from peft import get_peft_model
from tiny_models import batch, build
from torch import nn

from peft_surgical import LayerRanking, SurgicalConfig, find_stacks, rank_layers


def samples(family: str = "bert", n: int = 6, labels: bool = True) -> list[dict[str, torch.Tensor]]:
    rows = [batch(family, n=1, length=6, seed=i, labels=labels) for i in range(n)]
    return [{key: value[0] for key, value in row.items()} for row in rows]


def scores(model: nn.Module, data, **options) -> list[float]:
    # LayerRanking.scores are in the order of the layers
    return [float(score) for score in rank_layers(model, data, progress=False, **options).scores]


def by_hand(model: nn.Module, data) -> list[float]:
    """The norm of the mean of squared gradients of log p(y|x), one sample after the other."""
    layers = [layer.module for layer in next(iter(find_stacks(model).values())).layers]
    sums = [[torch.zeros_like(p, dtype=torch.float64) for p in layer.parameters()] for layer in layers]
    for sample in data:
        model.zero_grad()
        out = model(**{key: value[None] for key, value in sample.items()})
        targets = (sample["labels"] != -100).sum() - 1 if sample["labels"].ndim else 1
        (out.loss * targets).backward()
        for total, layer in zip(sums, layers, strict=True):
            for entry, parameter in zip(total, layer.parameters(), strict=True):
                entry += parameter.grad.double() ** 2
    model.zero_grad(set_to_none=True)
    return [torch.cat([(t / len(data)).flatten() for t in total]).norm().item() for total in sums]


def test_F1_opposing_samples_do_not_cancel():
    data = samples(n=1) * 2
    data = [{**data[0], "labels": torch.tensor(0)}, {**data[1], "labels": torch.tensor(1)}]
    wanted = by_hand(build("bert"), data)
    for batch_size in (1, 2, 16):
        assert scores(build("bert"), data, batch_size=batch_size) == pytest.approx(wanted, rel=1e-5)
    longer = samples(n=6)
    wanted = by_hand(build("bert"), longer)
    for batch_size in (1, 2, 6):
        assert scores(build("bert"), longer, batch_size=batch_size) == pytest.approx(wanted, rel=1e-5)


def test_F5_estimators_are_named_and_recorded_and_none_takes_the_most_likely_label():
    unlabelled = samples(labels=False)
    with pytest.raises(ValueError, match="label"):
        rank_layers(build("bert"), unlabelled, progress=False)
    sampled = [scores(build("bert"), unlabelled, labels="sampled", seed=seed) for seed in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]
    model = build("bert")
    wrong = [{**s, "labels": 1 - model(**{k: v[None] for k, v in s.items()}).logits.argmax(-1)[0]} for s in unlabelled]
    likely = [{**s, "labels": 1 - s["labels"]} for s in wrong]
    assert scores(build("bert"), wrong) != pytest.approx(scores(build("bert"), likely), rel=1e-3)
    ranking = rank_layers(build("bert"), unlabelled, labels="sampled", seed=3, progress=False)
    assert ranking.record["labels"] == "sampled"
    assert ranking.record["seed"] == 3
    with pytest.raises(ValueError, match="argmax"):
        rank_layers(build("bert"), unlabelled, labels="argmax", progress=False)


def test_F6_scores_are_averages():
    data = samples(n=4)
    once = scores(build("bert"), data)
    assert scores(build("bert"), data * 3) == pytest.approx(once, rel=1e-5)
    exact = scores(build("bert"), data, labels="exact")
    many = scores(build("bert"), data, labels="sampled", draws=64)
    assert many == pytest.approx(exact, rel=0.3)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_F7_a_parameter_used_twice_gets_the_summed_gradient_once(family):
    model = build(family, tie_word_embeddings=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    data = samples(family, n=3)
    assert scores(model, data) == pytest.approx(by_hand(build(family, tie_word_embeddings=True), data), rel=1e-4)


def test_F8_whatever_is_frozen_beforehand_makes_no_difference():
    data = samples(n=4)
    wanted = scores(build("bert"), data)
    model = build("bert")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    assert scores(model, data) == pytest.approx(wanted, rel=1e-6)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("engine", ["hooks", "layer_major"])
def test_F9_dropout_and_masks_make_no_difference_to_any_engine(engine):
    options = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    data = samples(n=3)
    data = [{**s, "attention_mask": torch.tensor([1, 1, 1, 1, 0, 0])} for s in data]
    model = build("bert", **options).train()
    found = scores(model, data, engine=engine)
    assert found == pytest.approx(scores(build("bert"), data, engine="loop"), rel=1e-5)
    assert model.training


def test_F10_no_more_samples_are_read_than_asked_for():
    drawn = []

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            i = 0
            while True:
                drawn.append(i)
                yield samples(n=i % 5 + 1)[-1]
                i += 1

    loader = torch.utils.data.DataLoader(Endless(), batch_size=1)
    ranking = rank_layers(build("bert"), loader, num_samples=7, progress=False)
    assert ranking.record["num_samples"] == 7
    assert len(drawn) <= 8  # one may be on its way


def choose_without_gradients(file: Path) -> None:
    torch.Tensor.backward = torch.autograd.grad = None
    model = get_peft_model(build("bert"), SurgicalConfig(ranking=str(file), top_k=2))
    print(model.peft_config["default"].layers)


def test_F11_a_saved_ranking_makes_the_same_choice_elsewhere_without_data(tmp_path):
    ranking = rank_layers(build("bert"), samples(), progress=False)
    ranking.save(tmp_path / "ranking.json")
    here = get_peft_model(build("bert"), SurgicalConfig(ranking=ranking, top_k=2)).peft_config["default"].layers
    done = run_forked(choose_without_gradients, tmp_path / "ranking.json")
    assert done.output.strip().splitlines()[-1] == str(here), done.output
    assert sorted(here) == sorted(ranking.top(2))
    record = json.loads((tmp_path / "ranking.json").read_text())
    assert json.dumps(record)
    assert LayerRanking.load(tmp_path / "ranking.json").to_dict() == ranking.to_dict()
