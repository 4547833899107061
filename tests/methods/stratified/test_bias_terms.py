"""A bias term is what a module adds, whatever it is called; see `peft_surgical.methods.stratified.tensors`."""

from __future__ import annotations

import pytest
import torch
import transformers
from peft import get_peft_model
from tiny_models import FAMILIES, VOCABULARY, build
from torch import nn

from peft_surgical import StratifiedConfig, find_stacks
from peft_surgical.copies.select import owners
from peft_surgical.methods.stratified.tensors import bias_terms, is_norm


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def make(name, **options):
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    return getattr(transformers, f"{name}Model")(config)


def terms(model, stack=None):
    """The bias terms of the last layer of a stack."""
    stacks = find_stacks(model)
    layer = (stacks[stack] if stack else next(iter(stacks.values()))).layers[-1]
    return {
        f"{owner.path}.{name}".removeprefix(f"{layer.path}.")
        for owner in owners(layer.path, layer.module)
        for name in bias_terms(owner)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_bias_terms_are_the_parameters_that_are_called_so(family):
    model = build(family)
    for name, stack in find_stacks(model).items():
        named = {n for n, _ in stack.layers[-1].module.named_parameters() if n.endswith("bias")}
        assert terms(model, name) == named


def test_the_biases_of_debertas_queries_and_values_count():
    model = make("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"])
    assert {"attention.self.q_bias", "attention.self.v_bias", "attention.self.pos_q_proj.bias"} <= terms(model)


def test_the_biases_of_experts_count():
    model = make("GptOss", num_key_value_heads=1, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    found = terms(model)
    assert {"mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias", "mlp.router.bias"} <= found
    assert "self_attn.sinks" not in found


def test_the_biases_that_xlnet_adds_to_its_queries_count():
    found = terms(build("xlnet"))
    assert {"rel_attn.r_w_bias", "rel_attn.r_r_bias", "rel_attn.r_s_bias"} <= found
    assert "rel_attn.seg_embed" not in found


def test_an_embedding_table_does_not_count():
    model = build("t5")
    assert not terms(model, "encoder")
    assert not terms(model, "decoder")
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    assert bias_terms(next(owners("table", table))) == []


@pytest.mark.parametrize("name", ["relative_position_bias_table", "position_bias", "e_score_correction_bias"])
def test_tables_and_corrections_of_routers_do_not_count(name):
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.zeros(3)))
    module.register_parameter("dt_bias", nn.Parameter(torch.zeros(3)))
    assert bias_terms(next(owners("m", module))) == ["dt_bias"]


def test_a_buffer_does_not_count():
    module = nn.Linear(2, 2)
    module.register_buffer("mask_bias", torch.zeros(2))
    assert bias_terms(next(owners("m", module))) == ["bias"]


def test_extra_keys_and_values_do_not_count_but_biases_of_queries_do():
    attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
    found = {f"{owner.path}.{name}" for owner in owners("m", attention) for name in bias_terms(owner)}
    assert found == {"m.in_proj_bias", "m.out_proj.bias"}
    relative = nn.Module()
    relative.register_parameter("bias_u", nn.Parameter(torch.zeros(2)))
    relative.register_parameter("bias_v", nn.Parameter(torch.zeros(2)))
    assert bias_terms(next(owners("m", relative))) == ["bias_u", "bias_v"]


def test_biases_of_recurrent_modules_count():
    found = bias_terms(next(owners("m", nn.LSTM(2, 2, bidirectional=True))))
    assert sorted(found) == ["bias_hh_l0", "bias_hh_l0_reverse", "bias_ih_l0", "bias_ih_l0_reverse"]


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_are_the_modules_that_only_scale_and_shift(family):
    for stack in find_stacks(build(family)).values():
        for name, module in stack.layers[-1].module.named_modules():
            own = dict(module.named_parameters(recurse=False))
            scales = bool(own) and all(p.ndim == 1 for p in own.values()) and "weight" in own
            assert is_norm(module) == scales, name


def test_buffers_called_bias_keep_their_values_and_stay_out_of_training():
    model = make(
        "DeepseekV3",
        num_key_value_heads=2,
        moe_intermediate_size=8,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=0,
        q_lora_rank=None,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    )
    before = {name: value.clone() for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")}
    assert before
    bias_free = {name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m.bias is None}
    strata = [{"layers": [0], "tune": "norm"}, {"layers": [1], "tune": "lora", "target_modules": ["q_proj"]}]
    model = get_peft_model(model, StratifiedConfig(strata=strata))
    model.train()
    model(input_ids=torch.randint(3, VOCABULARY, (2, 5))).last_hidden_state.sum().backward()
    base = model.get_base_model()
    buffers = dict(base.named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in before.items())
    for name in bias_free:
        module = base.get_submodule(name)
        assert getattr(module, "base_layer", module).bias is None
