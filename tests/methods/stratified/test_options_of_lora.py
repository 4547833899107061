"""`StratifiedConfig` with target modules alone is LoRA, with each option of `LoraConfig`: it trains as in PEFT, and
loads what it saves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import batch, build

from peft_surgical import StratifiedConfig


BLOCKS = {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["o_proj"], "nblocks": 2}
OPTIONS = {
    "alpha_pattern": {"alpha_pattern": {"q_proj": 3}},
    "bias": {"bias": "lora_only"},
    "ensure_weight_tying": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "ensure_weight_tying of a head": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "ensure_weight_tying of tokens": {"trainable_token_indices": {"embed_tokens": [4]}, "ensure_weight_tying": True},
    "exclude_modules": {"exclude_modules": ["layers.1.self_attn.q_proj"]},
    "init_lora_weights": {"init_lora_weights": "orthogonal"},
    "init_lora_weights that change the base": {"init_lora_weights": "pissa"},
    "kasa_config": {"kasa_config": {}},
    "layer_replication": {"layer_replication": [(0, 2), (1, 4)]},
    "layers_to_transform": {"layers_to_transform": [1, 2], "layers_pattern": "layers"},
    "lora_alpha": {"lora_alpha": 3},
    "lora_bias": {"lora_bias": True},
    "lora_dropout": {"lora_dropout": 0.5},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "monteclora_config": {"monteclora_config": {}},
    "r": {"r": 1, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "rank_pattern": {"rank_pattern": {r"layers\.1\.self_attn\.q_proj": 3, "o_proj": 2}},
    "target_modules": {"target_modules": r".*\.(q|v)_proj"},
    "target_modules, all linear": {"target_modules": "all-linear"},
    "target_modules, embeddings": {"target_modules": ["embed_tokens", "lm_head"]},
    "target_parameters": {"target_modules": ["o_proj"], "target_parameters": ["q_proj.weight"]},
    "trainable_token_indices": {"trainable_token_indices": [4, 5]},
    "use_bdlora": {"use_bdlora": BLOCKS},
    "use_bdlora of a part": {"use_bdlora": {**BLOCKS, "target_modules_bd_a": None, "match_strict": False}},
    "use_dora": {"use_dora": True},
    "use_qalora": {"use_qalora": True, "qalora_group_size": 8},
    "use_rslora": {"use_rslora": True},
    "velora_config": {"velora_config": {}},
}
# chosen by what the model is, set by PEFT itself, or of starts that look at data first
NOT_TRIED = {"task_type", "peft_type", "inference_mode", "auto_mapping", "base_model_name_or_path", "revision"}
NOT_TRIED |= {"peft_version", "fan_in_fan_out", "runtime_config", "megatron_config", "megatron_core", "loftq_config"}
NOT_TRIED |= {"eva_config", "corda_config", "lora_ga_config", "arrow_config", "alora_invocation_tokens"}
NOT_ON_META = {"init_lora_weights", "layer_replication", "monteclora_config"}  # what PEFT itself cannot load so
NAMES = {option.name for option in dataclasses.fields(LoraConfig)}


def config(cls, options):
    return cls(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "o_proj"], **options})


def test_each_option_of_lora_is_tried_here_or_cannot_be():
    assert NAMES - NOT_TRIED <= {name for options in OPTIONS.values() for name in options}


@pytest.mark.filterwarnings("ignore:.* changes the base model's weights")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_option_trains_as_in_peft_and_survives_saving(options, tmp_path):
    if not options.keys() <= NAMES:
        pytest.skip("this PEFT does not have the option")

    def base():
        return build("llama", tie_word_embeddings="ensure_weight_tying" in options)

    losses = []
    for cls in (LoraConfig, StratifiedConfig):
        torch.manual_seed(0)
        model = get_peft_model(base(), config(cls, options)).train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            loss = model(**batch("llama")).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:2] == losses[2:]
    assert losses[0] != losses[1]
    model.save_pretrained(tmp_path)
    expected = model.eval()(**batch("llama")).logits
    for low_cpu_mem_usage in (True, False):
        if not (low_cpu_mem_usage and options.keys() & NOT_ON_META):
            loaded = PeftModel.from_pretrained(base(), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage).eval()
            torch.testing.assert_close(loaded(**batch("llama")).logits, expected, rtol=1e-4, atol=1e-5)
    if not options.get("lora_bias"):  # which PEFT merges only where the base has a bias
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(**batch("llama")).logits, expected, rtol=1e-4, atol=1e-5)


def test_what_it_saves_of_lora_itself_is_loaded(tmp_path):
    model = get_peft_model(build("llama"), config(StratifiedConfig, {"velora_config": {}})).train()
    model(**batch("llama")).loss.backward()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build("llama"), tmp_path).state_dict()
    kept = {name: tensor for name, tensor in model.state_dict().items() if "velora" in name}
    assert kept
    assert all(tensor.any() and torch.equal(loaded[name], tensor) for name, tensor in kept.items())


def test_monteclora_is_not_loaded_without_what_its_sampler_has_learnt(tmp_path):
    """PEFT makes no sampler on the meta device."""
    if "monteclora_config" not in NAMES:
        pytest.skip("this PEFT does not have the option")
    get_peft_model(build("llama"), config(StratifiedConfig, {"monteclora_config": {}})).save_pretrained(tmp_path)
    base = build("llama")
    with pytest.raises(ValueError, match="monteclora_config cannot be loaded by low_cpu_mem_usage=True. Drop"):
        PeftModel.from_pretrained(base, tmp_path, low_cpu_mem_usage=True)
    assert not any("lora" in name for name, _ in base.named_modules())
    model = get_peft_model(base, config(StratifiedConfig, {}))
    with pytest.raises(ValueError, match="monteclora_config cannot be loaded by low_cpu_mem_usage=True. Drop"):
        model.load_adapter(tmp_path, "second", low_cpu_mem_usage=True)
    assert list(model.peft_config) == ["default"]


@pytest.mark.filterwarnings("ignore:.* changes the base model's weights")
def test_a_conversion_that_would_leave_out_copies_is_refused(tmp_path):
    model = get_peft_model(build("llama"), config(StratifiedConfig, {"init_lora_weights": "olora"}))
    with pytest.raises(ValueError, match="path_initial_model_for_weight_conversion is not .* peft's LoraConfig"):
        model.save_pretrained(tmp_path, path_initial_model_for_weight_conversion=str(tmp_path / "begun"))


def test_activated_lora_is_refused():
    if "alora_invocation_tokens" in NAMES:
        with pytest.raises(ValueError, match=r"alora_invocation_tokens=\[7, 8\].*Use peft's LoraConfig"):
            config(StratifiedConfig, {"alora_invocation_tokens": [7, 8]})
