"""What a stratified adapter trains and what it leaves alone, on every family."""

from __future__ import annotations

import pytest
import torch
import transformers
from peft import get_peft_model
from tiny_models import CAUSAL, FAMILIES, SEQ2SEQ, batch, build

from peft_surgical import StratifiedConfig, find_stacks
from peft_surgical.methods.stratified.tensors import is_norm


TRANSFORMERS_4 = transformers.__version__.startswith("4.")
WITH_BIASES = ["bert", "roberta", "xlnet", "deberta-v2", "distilbert", "electra", "mpnet", "gpt2", "bart", "vit"]


def trained_names(model):
    """The trained parameters by their name in the base model, those of LoRA by the weight that they adapt."""
    names = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
            name = name.replace(".base_layer", "").replace(".own_tensors", "").replace(".lora_tuned.default", "")
            names.add(name.partition(".lora_")[0] + ".weight" if ".lora_" in name else name)
    return names


def strata_for(family, strata):
    return {"encoder": strata, "decoder": strata} if family in SEQ2SEQ else strata


@pytest.mark.parametrize("family", WITH_BIASES)
def test_bitfit_trains_every_bias_of_its_layers_and_nothing_else(family):
    base = build(family)
    expected = {
        f"{layer.path}.{name}"
        for stack in find_stacks(base).values()
        for layer in stack.layers
        if layer.index in (1, 2)
        for name, _ in layer.module.named_parameters()
        if name.endswith("bias")
    }
    strata = strata_for(family, [{"layers": "1-2", "tune": "bitfit"}, {"layers": [0, 3], "tune": "frozen"}])
    assert trained_names(get_peft_model(base, StratifiedConfig(strata=strata))) == expected


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "albert"])
def test_norm_trains_every_norm_of_its_layers_and_nothing_else(family):
    base = build(family)
    expected = {
        f"{layer.path}.{path}.{name}"
        for stack in find_stacks(base).values()
        for layer in stack.layers
        for path, module in layer.module.named_modules()
        if is_norm(module)
        for name, _ in module.named_parameters()
    }
    strata = strata_for(family, [{"layers": "all", "tune": "norm"}])
    assert trained_names(get_peft_model(base, StratifiedConfig(strata=strata))) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_full_trains_every_weight_of_its_layers_and_nothing_else(family):
    base = build(family)
    stacks = find_stacks(base).values()
    expected = {f"{layer.path}.{n}" for s in stacks for layer in s.layers for n, _ in layer.module.named_parameters()}
    strata = strata_for(family, [{"layers": "all", "tune": "full"}])
    assert trained_names(get_peft_model(base, StratifiedConfig(strata=strata))) == expected


# the weights that LoRA adapts in the last layer, and the biases beside them with bias="other", by sub-layers
BESIDE = {
    "bert": ({"attention.self.query", "attention.self.key", "attention.self.value"}, ("intermediate", "output")),
    "deberta-v2": (
        {"attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"},
        ("intermediate", "output"),
    ),
    "mpnet": ({"attention.attn.q", "attention.attn.k", "attention.attn.v"}, ("intermediate", "output")),
    "distilbert": (
        {"attention.q_lin", "attention.k_lin", "attention.v_lin"},
        ("sa_layer_norm", "ffn", "output_layer_norm"),
    ),
    "gpt2": ({"attn.c_attn"}, ("ln_1", "ln_2", "mlp")),
    "vit": (
        {"attention.q_proj", "attention.k_proj", "attention.v_proj"},
        ("layernorm_before", "layernorm_after", "mlp"),
    ),
    "llama": ({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, ()),
    "mixtral": ({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, ()),
    "modernbert": ({"attn.Wqkv"}, ()),
}


@pytest.mark.parametrize("family", BESIDE)
@pytest.mark.parametrize("bias", ["other", "all", "none"])
def test_lora_adapts_the_attention_and_biases_beside_it(family, bias):
    if TRANSFORMERS_4 and family == "vit":
        pytest.skip("the names of ViT's modules are those of transformers 5")
    base = build(family)
    adapted, beside = BESIDE[family]
    layer = next(iter(find_stacks(base).values())).layers[3]
    biases = {name for name, _ in layer.module.named_parameters() if name.endswith("bias")}
    if bias == "other":
        biases = {name for name in biases if name.startswith(beside)} if beside else set()
    expected = {f"{name}.weight" for name in adapted} | (biases if bias != "none" else set())
    strata = [{"layers": "0-2", "tune": "frozen"}, {"layers": [3], "tune": "lora", "bias": bias}]
    model = get_peft_model(base, StratifiedConfig(strata=strata, variant="I", r=2))
    assert trained_names(model) == {f"{layer.path}.{name}" for name in expected}


def test_cross_attention_is_a_sub_layer_of_its_own():
    strata = {"decoder": [{"layers": "0-2", "tune": "frozen"}, {"layers": [3], "tune": "lora"}]}
    config = StratifiedConfig(strata=strata, target_modules=["self_attn.q_proj"], r=2)
    names = {n.partition("layers.3.")[2] for n in trained_names(get_peft_model(build("bart"), config))}
    assert "encoder_attn.q_proj.bias" in names
    assert "self_attn.q_proj.weight" in names
    assert not any(n.startswith("self_attn.") and n.endswith("bias") for n in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_final_norm_and_pooler_stay_frozen_and_the_head_is_trained(family):
    base = build(family)
    task = "SEQ_CLS" if hasattr(base, "num_labels") and family not in [*CAUSAL, *SEQ2SEQ] else None
    strata = strata_for(family, [{"layers": "all", "tune": "full"}])
    model = get_peft_model(base, StratifiedConfig(strata=strata, task_type=task))
    inside = [f"{layer.path}." for stack in find_stacks(build(family)).values() for layer in stack.layers]
    outside = {name for name in trained_names(model) if not any(name.startswith(path) for path in inside)}
    bare = f"{base.base_model_prefix}."
    head = {name for name, _ in build(family).named_parameters() if not name.startswith(bare)} if task else set()
    assert outside == head


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_what_is_trained_and_nothing_else(family):
    options = {"n1": 0, "n2": 1, "add_bias": True, "r": 2}
    if family == "albert":
        options = {"strata": [{"layers": "all", "tune": "lora"}], "target_modules": ["query"], "r": 2}
    if family == "xlnet":
        options["target_modules"] = ["layer_1"]
    model = get_peft_model(build(family), StratifiedConfig(**options, init_lora_weights=False)).train()
    model(**batch(family)).loss.backward()
    missing = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    # XLNet's bias for segments has a gradient only where segments are given
    assert all("r_s_bias" in name for name in missing)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_modules_that_are_excluded_or_saved_whole_are_left_to_that():
    config = StratifiedConfig(
        n1=0, n2=1, variant="I", r=2, exclude_modules=["output.LayerNorm"], modules_to_save=["intermediate"]
    )
    model = get_peft_model(build("bert"), config)
    names = trained_names(model)
    assert not any("LayerNorm" in name for name in names)
    intermediate = {name for name in names if ".intermediate." in name}
    assert len(intermediate) == 4 * 2  # weight and bias in all layers, by modules_to_save
    assert sum("modules_to_save" in name for name, p in model.named_parameters() if p.requires_grad) == 4 * 2


# ---- the report


def test_the_report_lists_what_is_trained_and_what_is_not():
    model = get_peft_model(build("bert"), StratifiedConfig(n1=0, n2=1, variant="I", r=2, task_type="SEQ_CLS"))
    report = model.tuning_report()
    assert report.parameters == model.get_nb_trainable_parameters()[0]
    assert [(row.stack, row.index) for row in report.rows] == [
        ("encoder", 1),
        ("encoder", 2),
        ("encoder", 3),
        ("classifier", None),
    ]
    biases = {n for n, _ in build("bert").bert.encoder.layer[1].named_parameters() if n.endswith("bias")}
    assert set(report.rows[0].tensors) == biases
    assert set(report.rows[0].frozen) == {name.replace("bias", "weight") for name in biases}
    assert {n for n in report.rows[1].tensors if "lora" in n} == {
        f"attention.self.{m}.lora_{x}.weight" for m in ("query", "key", "value") for x in "AB"
    }
    assert "attention.self.query.weight" not in report.rows[1].frozen
    assert "attention.self.query.bias" in report.rows[1].frozen
    assert "down to 1" in str(report)


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 has a module for each expert")
def test_the_report_says_that_experts_get_neither_lora_nor_biases():
    strata = [{"layers": "0-2", "tune": "frozen"}, {"layers": [3], "tune": "lora"}]
    model = get_peft_model(build("mixtral"), StratifiedConfig(strata=strata, r=2))
    row = model.tuning_report().rows[0]
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} <= set(row.frozen)
    assert not any("experts" in name for name in row.tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_report_adds_up_on_every_family(family):
    model = get_peft_model(
        build(family), StratifiedConfig(strata=strata_for(family, [{"layers": "all", "tune": "full"}]))
    )
    report = model.tuning_report()
    assert report.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert not any(row.frozen for row in report.rows)
    with torch.no_grad():
        named = {name for row in report.rows for name in row.tensors}
    stacks = find_stacks(build(family)).values()
    assert named == {name for s in stacks for layer in s.layers for name, _ in layer.module.named_parameters()}
