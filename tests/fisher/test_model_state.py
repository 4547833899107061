"""Measuring leaves no trace, whatever happens, and measures the base of whatever model it gets."""

from __future__ import annotations

import random
import signal

import numpy as np
import pytest
import tiny_models
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn

from peft_surgical import StratifiedConfig, SurgicalConfig, rank_layers
from peft_surgical.fisher import rules as fisher_rules
from peft_surgical.fisher.model_state import uninterrupted, untouched


DATA = [
    {"input_ids": torch.randint(3, 99, (n,), generator=torch.Generator().manual_seed(n)), "labels": n % 2}
    for n in range(4, 10)
]


def rank(model, **options):
    return rank_layers(model, DATA, progress=False, batch_size=4, **options)


def state(model: nn.Module) -> dict:
    """Everything about a model and the process that a measurement could change."""
    configs = {id(c): c.to_dict() for m in model.modules() if hasattr(c := getattr(m, "config", None), "to_dict")}
    return {
        "modes": [m.training for m in model.modules()],
        "flags": [(n, p.requires_grad) for n, p in model.named_parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "parameters": [(id(p), p.detach().clone()) for p in model.parameters()],
        "buffers": [(n, id(b), b.clone()) for n, b in model.named_buffers()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), len(m._backward_pre_hooks))
            for m in model.modules()
        ],
        "attributes": [sorted(m.__dict__) for m in model.modules()],
        "checkpointing": [getattr(m, "gradient_checkpointing", None) for m in model.modules()],
        "configs": configs,
        "torch": torch.random.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].copy(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same(before: dict, after: dict) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert same(value, after[name]), name


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def untidy(family="bert", **options) -> nn.Module:
    """A model in a state that is not the usual one."""
    model = tiny_models.build(family, **options).train()
    model.gradient_checkpointing_enable()
    for n, module in enumerate(model.modules()):
        module.training = n % 3 > 0
    for n, p in enumerate(model.parameters()):
        p.requires_grad_(n % 4 > 0)
        p.grad = torch.ones_like(p) if n % 5 == 0 else None
    model.enable_input_require_grads()
    model.register_buffer("counter", torch.zeros(()))
    model.register_forward_pre_hook(lambda m, args: m.counter.add_(1) and None)
    return model


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [None, Stop, KeyboardInterrupt])
@pytest.mark.parametrize("engine", ["hooks", "layer_major", "loop"])
def test_nothing_changes_even_when_it_is_stopped_in_the_middle(engine, error, monkeypatch):
    model = untidy()
    before = state(model)
    if error is None:
        rank(model, engine=engine)
    else:
        cls, calls = type(model.bert.encoder.layer[2].output), []
        forward = cls.forward

        def failing(self, *args, **kwargs):
            calls.append(1)
            if len(calls) == 4:
                raise error
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", failing)
        with pytest.raises(error):
            rank(model, engine=engine)
    assert_same(before, state(model))


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("engine", ["hooks", "layer_major"])
def test_nothing_changes_when_it_is_stopped_in_a_backward_pass(engine, error, monkeypatch):
    model, calls = untidy(), []
    before = state(model)

    def failing(module, inputs, grad_output):
        calls.append(1)
        if len(calls) == 9:
            raise error
        return fisher_rules.linear(module, inputs, grad_output)

    monkeypatch.setitem(fisher_rules.RULES, nn.Linear, failing)
    with pytest.raises(error):
        rank(model, engine=engine)
    assert_same(before, state(model))


@pytest.mark.parametrize("score", ["grad_norm", "rgn", "snr", "last", "random"])
def test_the_other_scores_change_nothing_either(score):
    model = untidy()
    before = state(model)
    rank(model, score=score)
    assert_same(before, state(model))


def test_redrawn_heads_are_put_back():
    model = untidy()
    before = state(model)
    rank(model, head_inits=2)
    assert_same(before, state(model))


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_cache_flags_and_rotary_buffers_are_put_back(family):
    model = tiny_models.build(family).train()
    inputs = tiny_models.batch(family)
    data = [{k: v[n] for k, v in inputs.items()} for n in range(4)]
    before = state(model)
    assert model.config.use_cache
    for engine in ("hooks", "layer_major"):
        rank_layers(model, data, stack="decoder" if family == "t5" else None, engine=engine, progress=False)
        assert_same(before, state(model))


@pytest.mark.parametrize("engine", ["hooks", "layer_major"])
def test_the_state_of_a_model_does_not_change_the_scores(engine):
    expected = rank(tiny_models.build("bert"), engine="loop").scores
    model = untidy()
    assert rank(model, engine=engine).scores == pytest.approx(expected, rel=1e-4)
    model.requires_grad_(False)
    with torch.no_grad():
        assert rank(model, engine=engine).scores == pytest.approx(expected, rel=1e-4)
    with torch.inference_mode():
        assert rank(model, engine=engine).scores == pytest.approx(expected, rel=1e-4)


def test_what_it_is_wrapped_in_does_not_change_the_scores():
    expected = rank(tiny_models.build("bert")).scores
    assert rank(nn.DataParallel(tiny_models.build("bert"))).scores == pytest.approx(expected, rel=1e-6)
    compiled = torch.compile(tiny_models.build("bert"), backend="eager")
    assert rank(compiled).scores == pytest.approx(expected, rel=1e-6)


def test_half_precision_comes_near():
    expected = rank(tiny_models.build("bert"))
    for engine in ("hooks", "layer_major", "loop"):
        assert rank(tiny_models.build("bert").bfloat16(), engine=engine).scores == pytest.approx(
            expected.scores, rel=0.1
        )


ADAPTERS = {
    "lora": LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], init_lora_weights=False),
    "dora": LoraConfig(task_type="SEQ_CLS", target_modules=["query"], use_dora=True, init_lora_weights=False),
    "ia3": IA3Config(
        task_type="SEQ_CLS", target_modules=["key", "dense"], feedforward_modules=["dense"], init_ia3_weights=False
    ),
    "prompt": PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
    "surgical": SurgicalConfig(task_type="SEQ_CLS", layers=[0, 2], init_weights=False),
    "stratified": StratifiedConfig(task_type="SEQ_CLS", n1=0, n2=1, target_modules=["query"], init_lora_weights=False),
}


@pytest.mark.parametrize("engine", ["hooks", "layer_major", "loop"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_of_a_model_with_an_adapter_the_base_is_ranked(name, engine):
    expected = rank(tiny_models.build("bert")).scores
    model = get_peft_model(tiny_models.build("bert"), ADAPTERS[name])
    before, logits = state(model), model(**tiny_models.batch("bert", labels=False)).logits
    ranking = rank(model, engine=engine)
    assert ranking.scores == pytest.approx(expected, rel=1e-5)
    assert ranking.record["model"]["class"] == "BertForSequenceClassification"
    assert_same(before, state(model))
    assert torch.equal(model(**tiny_models.batch("bert", labels=False)).logits, logits)


@pytest.mark.parametrize("name", ["lora", "surgical"])
def test_adapters_that_are_off_stay_off(name):
    model = get_peft_model(tiny_models.build("bert"), ADAPTERS[name])
    with model.disable_adapter():
        before = state(model)
        rank(model)
        assert_same(before, state(model))


@pytest.mark.parametrize("name", ["lora", "surgical"])
def test_a_merged_adapter_is_refused_for_it_is_in_the_base(name):
    model = get_peft_model(tiny_models.build("bert"), ADAPTERS[name])
    model.merge_adapter()
    with pytest.raises(ValueError, match="Call unmerge_adapter"):
        rank(model)


def test_the_global_random_numbers_do_not_change_a_ranking():
    rankings = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        rankings.append(rank(tiny_models.build("bert"), labels="sampled", seed=5))
    assert rankings[0] == rankings[1]
    assert rankings[0] != rank(tiny_models.build("bert"), labels="sampled", seed=6)


def test_a_collator_that_draws_draws_from_the_seed():
    def mask(rows):
        ids = torch.nn.utils.rnn.pad_sequence([r["input_ids"] for r in rows], batch_first=True)
        hidden = (torch.rand(ids.shape) < 0.3) & (ids > 0)
        hidden[:, 0] = True
        return {
            "input_ids": ids.masked_fill(hidden, 1),
            "attention_mask": (ids > 0).long(),
            "labels": ids.where(hidden, -100),
        }

    model = tiny_models.build("bert", head="BertForMaskedLM")
    before = state(model)
    scores = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(scores))
        scores.append(rank_layers(model, DATA, data_collator=mask, seed=seed, progress=False).scores)
    assert scores[0] == scores[1] != scores[2]
    before["torch"] = torch.random.get_rng_state()
    assert_same(before, state(model))


def test_small_buffers_that_a_forward_pass_writes_to_are_put_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).train()
    before = state(model)
    with untouched(model):
        model.train()
        model(torch.randn(4, 2))
        assert not torch.equal(model[1].running_mean, torch.zeros(2))
        model[1].running_mean = torch.ones(2)
    assert_same(before, state(model))


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_ctrl_c_meanwhile_is_heard_afterwards(ends):
    done = []

    @uninterrupted()
    def work():
        signal.raise_signal(signal.SIGINT)
        done.append("the rest")
        if ends == "with an error":
            raise ValueError("no such adapter")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the rest"]
