"""Saving and loading stratified adapters: what is in the file, and what is checked."""

from __future__ import annotations

import pytest
import torch
from adapters import rewrite
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from tiny_models import FAMILIES, batch, build

from peft_surgical import StratifiedConfig


def spafit(family, **options):
    """SPAFIT's three groups on any family; biases are added where there are none."""
    if family == "albert":  # one shared layer
        options |= {"strata": [{"layers": "all", "tune": "lora"}], "target_modules": ["query", "value"]}
    else:
        options |= {"n1": 0, "n2": 1, "add_bias": True}
    if family == "xlnet":
        options["target_modules"] = ["layer_1"]
    return StratifiedConfig(**{"r": 2, "init_weights": False, **options})


def logits(model, family="bert"):
    with torch.no_grad():
        return model.eval()(**batch(family)).logits


def names_of_trained(model):
    """The trained parameters by their name in a file."""
    return {
        name.replace(".default", "").replace(".base_layer", "").replace(".modules_to_save", "")
        for name, p in model.named_parameters()
        if p.requires_grad
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_saved_tensors_are_the_trained_ones(family, tmp_path):
    task = "SEQ_CLS" if family in ("bert", "distilbert", "roberta") else None
    model = get_peft_model(build(family), spafit(family, task_type=task, bias_beside_lora="all"))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert set(saved) == names_of_trained(model)
    assert set(get_peft_model_state_dict(model)) == set(saved)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_loading_under_another_name_gives_the_same_logits(family, low_cpu_mem_usage, tmp_path):
    model = get_peft_model(build(family), spafit(family))
    expected = logits(model, family)
    assert not torch.equal(expected, logits(build(family), family))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(
        build(family), tmp_path, adapter_name="other", low_cpu_mem_usage=low_cpu_mem_usage
    )
    assert torch.equal(logits(loaded, family), expected)
    assert not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}, {"rank_pattern": {"query": 3}}])
def test_options_of_lora_survive(low_cpu_mem_usage, options, tmp_path):
    model = get_peft_model(build("bert"), spafit("bert", task_type="SEQ_CLS", **options))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build("bert"), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(logits(loaded), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_half_precision_bases(dtype, autocast, low_cpu_mem_usage, tmp_path):
    model = get_peft_model(build("bert").to(dtype), spafit("bert"), autocast_adapter_dtype=autocast)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1e-4 * torch.randn_like(parameter))  # values that the base's dtype cannot hold
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    assert trained == {torch.float32 if autocast else dtype}
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert {t.dtype for t in load_file(tmp_path / "adapter_model.safetensors").values()} == trained
    loaded = PeftModel.from_pretrained(
        build("bert").to(dtype),
        tmp_path,
        low_cpu_mem_usage=low_cpu_mem_usage,
        autocast_adapter_dtype=autocast,
        is_trainable=True,
    )
    assert {p.dtype for p in loaded.parameters() if p.requires_grad} == trained
    assert torch.equal(logits(loaded), expected)


def test_training_goes_on_after_loading(tmp_path):
    model = get_peft_model(build("bert"), spafit("bert", task_type="SEQ_CLS"))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build("bert"), tmp_path, is_trainable=True)
    assert [n for n, p in loaded.named_parameters() if p.requires_grad] == [
        n for n, p in model.named_parameters() if p.requires_grad
    ]


# ---- the base is checked


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: build("bert", seed=1), "has other values here"),
        (lambda: build("bert", num_hidden_layers=5), "number of layers"),
        (lambda: build("bert", vocab_size=120), r"vocabulary size.*resize_token_embeddings\(99\)"),
        (lambda: build("roberta"), "model type"),
        (lambda: other_weight("bert.encoder.layer.3.attention.self.query.weight"), "3.attention.self.query.weight"),
        (lambda: other_weight("bert.encoder.layer.1.output.dense.bias"), "1.output.dense.bias"),
    ],
)
def test_another_base_is_refused_and_left_as_it_was(change, message, tmp_path):
    get_peft_model(build("bert"), spafit("bert")).save_pretrained(tmp_path)
    base = change()
    before = logits(base)
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(logits(base), before)
    assert not any("lora" in name for name, _ in base.named_modules())


def other_weight(name):
    model = build("bert")
    with torch.no_grad():
        model.get_parameter(name).mul_(1.01)
    return model


def test_weights_that_no_stratum_touches_may_differ_only_if_the_base_is_not_checked(tmp_path):
    name = "bert.encoder.layer.0.output.dense.weight"
    model = get_peft_model(build("bert"), spafit("bert"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{name}' has other values here.*check_base=False"):
        PeftModel.from_pretrained(other_weight(name), tmp_path)
    loaded = PeftModel.from_pretrained(other_weight(name), tmp_path, check_base=False)
    assert torch.equal(loaded.get_base_model().get_parameter(name), other_weight(name).get_parameter(name))


def test_the_same_base_in_another_dtype_is_accepted(tmp_path):
    get_peft_model(build("bert"), spafit("bert")).save_pretrained(tmp_path)
    PeftModel.from_pretrained(build("bert").bfloat16(), tmp_path)
    get_peft_model(build("bert").bfloat16(), spafit("bert")).save_pretrained(tmp_path)
    PeftModel.from_pretrained(build("bert"), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(next(n for n in t if "lora_A" in n)), "lacks the tensor .*lora_A"),
        (lambda t: t.pop(next(n for n in t if "lora_tuned" in n)), "lacks the tensor .*lora_tuned"),
        (
            lambda t: t.update({next(n for n in t if "lora_B" in n): torch.zeros(16, 3)}),
            r"lora_B.*\(16, 3\).*\(16, 2\)",
        ),
        (
            lambda t: t.update({"base_model.model.bert.pooler.dense.weight": torch.zeros(2)}),
            "pooler.*does not account",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_before_the_model_is_changed(change, message, tmp_path):
    get_peft_model(build("bert"), spafit("bert")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    change(tensors)
    rewrite(tmp_path, tensors)
    base = build("bert")
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(base, tmp_path)
    assert not any("lora" in name for name, _ in base.named_modules())


def test_a_refused_second_adapter_leaves_the_first_as_it_was(tmp_path):
    get_peft_model(build("bert", seed=1), spafit("bert")).save_pretrained(tmp_path)
    model = get_peft_model(build("bert"), spafit("bert"))
    expected, flags = logits(model), [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match="other values"):
        model.load_adapter(tmp_path, adapter_name="second")
    assert torch.equal(logits(model), expected)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert list(model.peft_config) == ["default"]


# ---- other ways


def test_the_lora_part_loads_in_stock_peft(tmp_path):
    model = get_peft_model(build("bert"), StratifiedConfig.full_lora("I", r=2, lora_alpha=4, init_weights=False))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    config = LoraConfig(target_modules=["query", "key", "value"], r=2, lora_alpha=4)
    stock = get_peft_model(build("bert"), config)
    state = load_file(tmp_path / "adapter_model.safetensors")
    stock.load_state_dict({f"{k[:-7]}.default.weight": v for k, v in state.items()}, strict=False)
    assert torch.equal(logits(stock), expected)


@pytest.mark.parametrize("encoding", ["lossless", "values"])
def test_encodings_hold_for_copies_and_leave_lora_alone(encoding, tmp_path):
    model = get_peft_model(build("bert"), spafit("bert", task_type="SEQ_CLS", encoding=encoding))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(build("bert"), tmp_path)), expected)
