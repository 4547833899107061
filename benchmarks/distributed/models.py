"""The models and adapters of `multi_gpu.py`."""

from __future__ import annotations

import torch
from torch import nn

from peft_surgical.layers import choose_stack


def build(name: str, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """A model with random weights, made on the device; the same on every process. Llamas are bfloat16 if not told."""
    from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    bert = {
        "bert-tiny": {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 2, "intermediate_size": 128},
        "bert-large": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    }
    llama = {
        "llama-tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 2},
        "llama-1b": {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
        },
        "llama-7b": {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    }
    with device:
        if name in bert:
            return BertForSequenceClassification(BertConfig(**bert[name], num_labels=2)).to(device, dtype)
        torch.set_default_dtype(dtype or torch.bfloat16)
        model = LlamaForCausalLM(LlamaConfig(**llama[name], vocab_size=32000))
        torch.set_default_dtype(torch.float32)
    return model.to(device)


def adapt(model: nn.Module, name: str, method: str) -> nn.Module:
    """The model with a method's adapter; for `full` the model itself with everything trainable."""
    from peft import LoraConfig, get_peft_model

    from peft_surgical import StratifiedConfig, SurgicalConfig

    task = "SEQ_CLS" if name.startswith("bert") else "CAUSAL_LM"
    attention = ["query", "key", "value", "attention.output.dense"]
    attention = attention if task == "SEQ_CLS" else ["q_proj", "k_proj", "v_proj", "o_proj"]
    same_dtype = {"autocast_adapter_dtype": False}  # one dtype per unit, for every engine and method alike
    torch.manual_seed(1)
    if method == "full":
        return model
    if method.endswith(" 5"):  # five layers over the whole depth; plain: frozen by requires_grad alone
        depth = len(choose_stack(model))
        layers = [round(i * (depth - 1) / 4) for i in range(5)]
        if method == "plain 5":
            model.requires_grad_(False)
            for layer in layers:
                choose_stack(model).layers[layer].module.requires_grad_(True)
            if task == "SEQ_CLS":
                model.classifier.requires_grad_(True)
            return model
        if method == "columns 5":  # 16 of each linear map's
            others = [layer for layer in range(depth) if layer not in layers]
            strata = [{"layers": others, "tune": "frozen"}, {"layers": layers, "tune": "columns"}]
            return get_peft_model(model, StratifiedConfig(task_type=task, strata=strata), **same_dtype)
        return get_peft_model(model, SurgicalConfig(task_type=task, layers=layers), **same_dtype)
    if method == "SPAFIT-4-9-II":
        if task == "SEQ_CLS":
            config = StratifiedConfig.spafit("SPAFIT-4-9-II", task_type=task, r=64, lora_alpha=128)
        else:  # no biases in Llama: the middle stratum tunes the norms
            depth = len(choose_stack(model))
            strata = [
                {"layers": "0-4", "tune": "frozen"},
                {"layers": "5-9", "tune": "norm"},
                {"layers": f"10-{depth - 1}", "tune": "lora", "target_modules": attention, "bias": "none"},
            ]
            config = StratifiedConfig(task_type=task, strata=strata, r=64, lora_alpha=128)
        return get_peft_model(model, config, **same_dtype)
    return get_peft_model(
        model, LoraConfig(task_type=task, r=64, lora_alpha=128, target_modules=attention), **same_dtype
    )
