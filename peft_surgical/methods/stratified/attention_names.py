"""The names of the attention's weight matrices, by model type: what SPAFIT's variants I and II adapt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_surgical.copies.select import base_modules
from peft_surgical.layers import Layer


Variant = Literal["I", "II"]
VARIANTS = ("I", "II")


@dataclass(frozen=True)
class AttentionNames:
    """The ends of the paths of an attention's weight matrices."""

    inputs: tuple[str, ...]  # query, key and value, or the one module that makes all three
    output: str  # the dense module behind the attention

    def of(self, variant: str) -> list[str]:
        """The modules of variant I (query, key, value) or II (the output too); Arora & Wang (2024), section 4."""
        return [*self.inputs, self.output] if variant == "II" else [*self.inputs]


_BERT = AttentionNames(("query", "key", "value"), "attention.output.dense")
_LLAMA = AttentionNames(("q_proj", "k_proj", "v_proj"), "o_proj")
_BART = AttentionNames(("q_proj", "k_proj", "v_proj"), "out_proj")
_T5 = AttentionNames(("q", "k", "v"), "o")

# model type -> names, several where they changed between versions of transformers
_KNOWN: dict[str, tuple[AttentionNames, ...]] = {
    **dict.fromkeys(["bert", "roberta", "xlm-roberta", "camembert", "electra"], (_BERT,)),
    "deberta": (AttentionNames(("in_proj",), "attention.output.dense"),),
    "deberta-v2": (AttentionNames(("query_proj", "key_proj", "value_proj"), "attention.output.dense"),),
    "distilbert": (AttentionNames(("q_lin", "k_lin", "v_lin"), "out_lin"),),
    "mpnet": (AttentionNames(("attn.q", "attn.k", "attn.v"), "attn.o"),),
    "modernbert": (AttentionNames(("Wqkv",), "attn.Wo"),),
    "gpt2": (AttentionNames(("c_attn",), "attn.c_proj"),),
    **dict.fromkeys(["llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2"], (_LLAMA,)),
    **dict.fromkeys(["gemma3", "gemma3_text", "gpt_oss"], (_LLAMA,)),
    **dict.fromkeys(["bart", "mbart", "opt", "gptj"], (_BART,)),
    **dict.fromkeys(["t5", "mt5"], (_T5,)),
    "vit": (_LLAMA, _BERT),
}


def attention_names(model: nn.Module, layers: Sequence[Layer], variant: str) -> list[str]:
    """The ends of the paths of the modules in some layers that a variant of SPAFIT adapts with LoRA (section 4)."""
    paths = [path for layer in layers for path, _ in base_modules(layer.path, layer.module)]
    kind = getattr(getattr(model, "config", None), "model_type", None)
    for names in _KNOWN.get(kind or "", ()):
        if any(path.endswith(f".{name}") for path in paths for name in names.inputs):
            return names.of(variant)
    raise ValueError(
        f"The names of the attention's modules are not known for {type(model).__name__} (model type {kind!r}). Name "
        f"them with target_modules=[...]. Linear modules in these layers: {', '.join(linear_names(layers))}."
    )


def linear_names(layers: Sequence[Layer]) -> list[str]:
    """The paths, inside their layer, of the linear modules of some layers."""
    names: dict[str, None] = {}
    for layer in layers:
        for path, module in base_modules(layer.path, layer.module):
            if isinstance(module, (nn.Linear, Conv1D)):
                names.setdefault(path[len(layer.path) + 1 :])
    return list(names)
