"""Tiny random models of many families, built from configs; nothing is downloaded.

`build("bert")` gives a model with a head for the family's usual task, `build("bert", bare=True)` the one without.
All have 4 layers in each stack (ALBERT: one shared layer) and are deterministic in `seed`.
"""

from __future__ import annotations

import torch
import transformers
from torch import nn


WIDTH, LAYERS, HEADS, INSIDE, VOCABULARY = 16, 4, 2, 32, 99

_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INSIDE,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_LLAMA = {**_BERT, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}

# family -> (config class, its options, bare model class, headed model class)
FAMILIES = {
    "bert": ("BertConfig", _BERT, "BertModel", "BertForSequenceClassification"),
    "roberta": ("RobertaConfig", _BERT, "RobertaModel", "RobertaForSequenceClassification"),
    "xlnet": (
        "XLNetConfig",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "d_inner": INSIDE},
        "XLNetModel",
        "XLNetForSequenceClassification",
    ),
    "deberta-v2": (
        "DebertaV2Config",
        {**_BERT, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
        "DebertaV2Model",
        "DebertaV2ForSequenceClassification",
    ),
    "distilbert": (
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": INSIDE},
        "DistilBertModel",
        "DistilBertForSequenceClassification",
    ),
    "electra": (
        "ElectraConfig",
        {**_BERT, "embedding_size": WIDTH},
        "ElectraModel",
        "ElectraForSequenceClassification",
    ),
    "mpnet": ("MPNetConfig", {**_BERT, "pad_token_id": 1}, "MPNetModel", "MPNetForSequenceClassification"),
    "albert": ("AlbertConfig", {**_BERT, "embedding_size": 8}, "AlbertModel", "AlbertForSequenceClassification"),
    "modernbert": (
        "ModernBertConfig",
        {**_BERT, "global_attn_every_n_layers": 2, "local_attention": 8},
        "ModernBertModel",
        "ModernBertForSequenceClassification",
    ),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        "GPT2Model",
        "GPT2LMHeadModel",
    ),
    "llama": ("LlamaConfig", _LLAMA, "LlamaModel", "LlamaForCausalLM"),
    "qwen3": ("Qwen3Config", {**_LLAMA, "head_dim": 8}, "Qwen3Model", "Qwen3ForCausalLM"),
    "gemma3": (
        "Gemma3TextConfig",
        {**_LLAMA, "head_dim": 8, "sliding_window": 8},
        "Gemma3TextModel",
        "Gemma3ForCausalLM",
    ),
    "mixtral": (
        "MixtralConfig",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
        "MixtralModel",
        "MixtralForCausalLM",
    ),
    "t5": (
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": INSIDE, "num_layers": LAYERS}
        | {"num_decoder_layers": LAYERS, "num_heads": HEADS, "decoder_start_token_id": 0, "pad_token_id": 0},
        "T5Model",
        "T5ForConditionalGeneration",
    ),
    "bart": (
        "BartConfig",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS}
        | {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "max_position_embeddings": 64}
        | {"encoder_ffn_dim": INSIDE, "decoder_ffn_dim": INSIDE, "pad_token_id": 1, "decoder_start_token_id": 2},
        "BartModel",
        "BartForConditionalGeneration",
    ),
    "vit": (
        "ViTConfig",
        {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INSIDE}
        | {"image_size": 16, "patch_size": 8},
        "ViTModel",
        "ViTForImageClassification",
    ),
}

CAUSAL = ["gpt2", "llama", "qwen3", "gemma3", "mixtral"]
SEQ2SEQ = ["t5", "bart"]


def build(family: str, *, bare: bool = False, head: str | None = None, seed: int = 0, **options) -> nn.Module:
    """A tiny model. `head` overrides the class of the headed model; `options` go to its config."""
    config_name, defaults, bare_name, head_name = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**defaults, **options})
    cls = getattr(transformers, head or (bare_name if bare else head_name))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config)
        spread(model)
    return model.eval()


def spread(model: nn.Module) -> None:
    """Move every parameter off its tame initial value, so that no bias is zero and no norm weight one."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def batch(family: str, n: int = 4, length: int = 7, *, seed: int = 0, labels: bool = True) -> dict[str, torch.Tensor]:
    """Inputs for the headed model of a family, with labels, right-padded where the family has padding."""
    g = torch.Generator().manual_seed(seed)
    if family == "vit":
        out = {"pixel_values": torch.randn(n, 3, 16, 16, generator=g)}
        return out | ({"labels": torch.randint(0, 2, (n,), generator=g)} if labels else {})
    ids = torch.randint(3, VOCABULARY, (n, length), generator=g)
    mask = torch.ones_like(ids)
    for row in range(1, n):
        mask[row, length - row % (length - 2) :] = 0
    pad = FAMILIES[family][1].get("pad_token_id", 0)
    ids = torch.where(mask.bool(), ids, torch.tensor(pad))
    out = {"input_ids": ids, "attention_mask": mask}
    if labels and family in CAUSAL:
        out["labels"] = torch.where(mask.bool(), ids, torch.tensor(-100))
    elif family in SEQ2SEQ:
        out["labels"] = torch.randint(3, VOCABULARY, (n, 5), generator=g)
    elif labels:
        out["labels"] = torch.randint(0, 2, (n,), generator=g)
    return out


def hidden_states(output: torch.Tensor | tuple) -> torch.Tensor:
    """What a layer returned: a tensor, or a tuple that begins with it (transformers 4)."""
    return output[0] if isinstance(output, tuple) else output


class TwoTowers(nn.Module):
    """A toy multimodal model: a vision tower of 2 layers and a language model of 4."""

    def __init__(self):
        super().__init__()
        self.vision_tower = build("vit", bare=True, num_hidden_layers=2)
        self.language_model = build("llama", bare=True)
        self.classifier = nn.Linear(WIDTH, 2)

    def forward(self, pixel_values, input_ids):
        image = self.vision_tower(pixel_values).last_hidden_state.mean(1, keepdim=True)
        text = self.language_model(input_ids).last_hidden_state
        return self.classifier((text + image).mean(1))
