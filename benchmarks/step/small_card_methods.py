"""The methods of `small_cards.py`: their models and optimizers, and what they take on paper."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks.step import shapes
from peft_surgical import SurgicalConfig, round_stochastically


SHAPES = {name: shapes.SHAPES[name] for name in ("llama-1b", "llama-7b", "llama-13b")} | {
    "tiny": {**shapes.SHAPES["tiny"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 7}
}
TUNED, RANK = 5, 16


@dataclass(frozen=True)
class Method:
    """A way of fine-tuning.

    Args:
        name: What the table calls it.
        half: Whether what is trained is in bfloat16, with stochastic rounding, and not in float32.
        optimizer: `"AdamW"` of torch, or `"AdamW8bit"` or `"PagedAdamW8bit"` of bitsandbytes.
        bits: Of the base's numbers.
        in_backward: Whether each parameter is updated as soon as its gradient is there.
        is_lora: LoRA on all linear maps in place of layers.
    """

    name: str
    half: bool = False
    optimizer: str = "AdamW"
    bits: int = 16
    in_backward: bool = False
    is_lora: bool = False


METHODS = [
    Method("surgical"),
    Method("surgical, 8-bit AdamW", optimizer="AdamW8bit"),
    Method("surgical, 8-bit AdamW, base in 4 bits", optimizer="AdamW8bit", bits=4),
    Method("surgical bf16", half=True),
    Method("surgical bf16, 8-bit AdamW", half=True, optimizer="AdamW8bit"),
    Method("surgical bf16, paged 8-bit AdamW", half=True, optimizer="PagedAdamW8bit"),
    Method("surgical bf16, 8-bit AdamW in backward", half=True, optimizer="AdamW8bit", in_backward=True),
    Method("surgical bf16, 8-bit AdamW, base in 8 bits", half=True, optimizer="AdamW8bit", bits=8),
    Method("surgical bf16, 8-bit AdamW, base in 4 bits", half=True, optimizer="AdamW8bit", bits=4),
    Method("LoRA r=16", is_lora=True),
    Method("LoRA r=16, base in 8 bits", bits=8, is_lora=True),
    Method("QLoRA r=16", bits=4, is_lora=True),
]


def tuned_layers(depth: int) -> list[int]:
    """The layers at equal distances, as `layers="spread:5"` chooses them."""
    return [(2 * i + 1) * depth // (2 * TUNED) for i in range(TUNED)]


def make_model(shape: dict[str, int], method: Method, device: torch.device) -> Any:
    """A model ready to be trained. It is made and quantised layer by layer, so that all of it never has 16 bits."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**shape, "num_hidden_layers": 0}, use_cache=False)
    depth, tuned = shape["num_hidden_layers"], tuned_layers(shape["num_hidden_layers"])
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for index in range(depth):
        with device:
            layer = LlamaDecoderLayer(config, index).to(torch.bfloat16)
        if method.bits < 16 and (method.is_lora or index not in tuned):
            for parent in (layer.self_attn, layer.mlp):
                for name, child in [*parent.named_children()]:
                    if isinstance(child, nn.Linear):
                        setattr(parent, name, quantised(child, method.bits))
        model.model.layers.append(layer)
    config.num_hidden_layers = model.config.num_hidden_layers = depth
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = method.bits == 4, method.bits == 8  # PEFT asks for it
    if method.is_lora:
        adapter: Any = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    else:
        adapter = SurgicalConfig(task_type="CAUSAL_LM", layers=tuned)
    model.requires_grad_(False)
    model = get_peft_model(model, adapter, autocast_adapter_dtype=not method.half)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def quantised(linear: nn.Linear, bits: int) -> nn.Module:
    """A linear module with its weights in 4 bits (NF4, constants quantised too, as in QLoRA) or in 8 (LLM.int8)."""
    import bitsandbytes as bnb

    shape, values = (linear.in_features, linear.out_features), linear.weight.data
    made: Any
    if bits == 4:
        made = bnb.nn.Linear4bit(*shape, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
        weight = bnb.nn.Params4bit(values, requires_grad=False, quant_type="nf4", compress_statistics=True)
        made.weight = weight.to(values.device)
        made.quant_state = made.weight.quant_state
    else:
        made = bnb.nn.Linear8bitLt(*shape, bias=False, has_fp16_weights=False, threshold=6.0, device="meta")
        made.weight = bnb.nn.Int8Params(values, requires_grad=False, has_fp16_weights=False)._quantize(values.device)
    return made


def make_optimizers(model: nn.Module, method: Method) -> list[torch.optim.Optimizer]:
    """One optimizer for all that is trained, or one for each tensor if each is updated in the backward pass."""
    trained = [p for p in model.parameters() if p.requires_grad]
    options: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.01}
    if method.optimizer == "AdamW":
        kind: Any = torch.optim.AdamW
        options["fused"] = trained[0].is_cuda
    else:
        import bitsandbytes

        kind = getattr(bitsandbytes.optim, method.optimizer)
    kind = round_stochastically(kind) if method.half else kind
    if not method.in_backward:
        return [kind(trained, **options)]
    optimizers = [kind([p], **options) for p in trained]

    def update(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        optimizer.step()
        parameter.grad = None

    for parameter, optimizer in zip(trained, optimizers, strict=True):
        # a tensor whose hook leads back to it is never freed
        parameter.register_post_accumulate_grad_hook(partial(update, weakref.proxy(optimizer)))
    return optimizers


def compute(shape: dict[str, int], method: Method, tokens: int) -> dict[str, Any]:
    """The bytes of each part from the shape alone: counts of numbers times their size. Activations are the inputs of
    the layers that checkpointing keeps, from the lowest trained one on, and what the loss keeps of the logits."""
    width, inside, depth, words = (
        shape[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    )
    sizes = [(width, width)] * 4 + [(width, inside)] * 2 + [(inside, width)]  # of a layer's linear maps: in, out
    matrices, norms = sum(a * b for a, b in sizes), 2 * width
    rest = 2 * words * width + width + depth * norms
    if method.is_lora:
        trained = depth * RANK * sum(a + b for a, b in sizes)
        first, layers = 0, depth
        scales = depth * sum(b for _, b in sizes)
    else:
        trained = TUNED * (matrices + norms)
        first, layers = tuned_layers(depth)[0], depth - TUNED  # the others' values are on the host
        scales = layers * sum(b for _, b in sizes)
    numbers = layers * matrices
    weights = rest * 2
    if method.bits == 16:
        weights += numbers * 2
    elif method.bits == 8:  # a float32 scale for each row
        weights += numbers + 4 * scales
    else:  # a scale for each 64 numbers, in 8 bits; 256 of these share a float32
        weights += round(numbers * (0.5 + 1 / 64 + 4 / (64 * 256)))
    copies = trained * (2 if method.half else 4)
    states = trained * (2 + 8 / 256) if "8bit" in method.optimizer else trained * 8
    return {
        "trained": trained,
        "weights": weights,
        "copies": copies,
        "gradients": 0 if method.in_backward else copies,
        "optimizer": round(states),
        "activations": tokens * ((depth - first) * width * 2 + words * (2 + 4)),
    }
