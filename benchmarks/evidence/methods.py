"""The ways of tuning that are compared, by name.

    full                        all parameters
    head                        the head alone
    layers-3.4.5                all parameters of these layers (SurgicalConfig)
    layers-3.4.5-bf16           the same in bfloat16, rounded to the nearest; -bf16-stochastic: at random
    turns-2-50-shuffled         all layers, two at a time for 50 steps (RotateLayers), in such an order
    lora-I, lora-II             PEFT's LoRA with r = 64 on query, key, value (II: and the attention's output)
    lora-16, lora-64            PEFT's LoRA with such a rank on all linear maps of the layers
    columns-32                  so many input columns of all linear maps of the layers (StratifiedConfig)
    mlp, attention              these linear maps of all layers
    norms                       the norms of a decoder
    bitfit                      the bias terms of all layers (StratifiedConfig)
    spafit-2-4-II               SPAFIT: layers 0 to 2 frozen, 3 and 4 bias terms, from 5 on LoRA (StratifiedConfig)
    strata-II-lora.5.6-bitfit.7 LoRA on these layers, bias terms on those, the rest frozen (StratifiedConfig)

The head is always trained. In a *plan* the layers may be left to a ranking: `fisher:5` are the best five layers by
`fisher`, `fisher:-1` the worst one, `spread:5` five at equal distances, `bf16:5` every other one in bfloat16,
`strata-II-lora:7-bitfit:2/fisher` the best seven by `fisher` and the next two. `prism:5` are the best of each of five
blocks of layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from benchmarks.evidence.models import head_names
from peft_surgical import StratifiedConfig, SurgicalConfig, resolve_layers
from peft_surgical.methods.stratified.attention_names import attention_names


RANK, ALPHA = 64, 128
"""LoRA's in the SPAFIT paper, section 4."""

RATES: dict[str, tuple[float, ...]] = {
    "full": (2e-5, 5e-5, 1e-4),
    "mlp": (2e-5, 5e-5, 1e-4),
    "attention": (2e-5, 5e-5, 1e-4),
    "norms": (3e-4, 1e-3, 3e-3),
    "layers": (5e-5, 1e-4, 2e-4),
    "turns": (5e-5, 1e-4, 2e-4),
    "lora": (1e-4, 3e-4, 1e-3),
    "columns": (1e-4, 3e-4, 1e-3),
    "bitfit": (3e-4, 1e-3, 3e-3),
    "spafit": (2e-4, 6e-4, 2e-3),
    "head": (3e-4, 1e-3, 3e-3),
}
"""The learning rates that are tried, three for each family of methods."""
PARTS = {
    "mlp": r"\.(mlp|intermediate|\d+\.output)\.(?!LayerNorm)",
    "attention": r"\.(self_attn|attention)\.(?!.*LayerNorm)",
    "norms": r"norm\.weight$",
    "head": r"(?!)",
}
"""What is trained beside the head, by a pattern of the parameters' names."""
HALVED = ("bf16", "bf16-stochastic")
"""Every other layer, trained in bfloat16."""
BLOCKWISE = ("prism",)
"""Scores by which the best layer of each block is tuned."""


def representatives(depth: int) -> dict[str, str]:
    """The method that a family's rate is chosen on. For `layers` it is every other layer, which favours no ranking."""
    return {
        "full": "full",
        "layers": f"alternate:{part(5, depth)}",
        "lora": "lora-II",
        "bitfit": "bitfit",
        "spafit": spafit_name(2, 4, "II", depth),
        "head": "head",
    }


def part(of_12: int, depth: int) -> int:
    """As large a part of a model's layers as so many of 12, at least one."""
    return max(1, depth * of_12 // 12)


def spafit_name(n1: int, n2: int, variant: str, depth: int) -> str:
    """SPAFIT with its groups as on 12 layers."""
    return f"spafit-{part(n1, depth)}-{part(n2, depth)}-{variant}"


def family(tuning: str) -> str:
    """The family of methods that share a learning rate."""
    first = tuning.split("-")[0]
    return "spafit" if first == "strata" else first


def layers_name(layers: Sequence[int]) -> str:
    """The name of tuning some layers."""
    return "layers-" + ".".join(map(str, sorted(layers)))


def best_layers(score: str, order: Sequence[int], count: int) -> Sequence[int]:
    """The layers that are best by a score: of all, or of each of so many blocks; the worst if the number is negative.

    Example:

        >>> best_layers("fisher", [0, 1, 3, 2], 2), best_layers("prism", [0, 1, 3, 2], 2)
        ([0, 1], [0, 3])
    """
    if score in BLOCKWISE and count > 0:
        edges = [block * len(order) // count for block in range(count + 1)]
        return [min(range(a, b), key=order.index) for a, b in pairwise(edges)]
    return order[:count] if count > 0 else order[count:]


def resolve(plan: str, orders: Mapping[str, Sequence[int]]) -> str:
    """What a plan is when the rankings are known.

    Args:
        plan: A method, perhaps with layers left to a ranking.
        orders: The layers by each score, best first.

    Returns:
        The method.

    Example:

        >>> resolve("fisher:2", {"fisher": [5, 3, 4]}), resolve("fisher:-1", {"fisher": [5, 3, 4]})
        ('layers-3.5', 'layers-4')
    """
    if match := re.fullmatch(r"spread:(\d+)", plan):
        depth, count = len(next(iter(orders.values()))), int(match[1])
        return layers_name([(2 * i + 1) * depth // (2 * count) for i in range(count)])
    if match := re.fullmatch(r"([\w-]+):(-?\d+)", plan):
        name = layers_name(best_layers(match[1], orders[match[1]], int(match[2])))
        return f"{name}-{match[1]}" if match[1] in HALVED else name
    if match := re.fullmatch(r"strata-(I|II)-lora:(\d+)-bitfit:(\d+)/(\w+)", plan):
        order, lora, bitfit = orders[match[4]], int(match[2]), int(match[3])
        parts = [sorted(order[:lora]), sorted(order[lora : lora + bitfit])]
        return f"strata-{match[1]}-" + "-".join(
            ".".join([name, *map(str, part)]) for name, part in zip(("lora", "bitfit"), parts, strict=True)
        )
    return plan


def adapt(model: nn.Module, tuning: str) -> nn.Module:
    """Make a model ready to be tuned in some way.

    Args:
        model: A model with a head. It is changed.
        tuning: The method.

    Returns:
        The model, or the `PeftModel` around it.

    Raises:
        ValueError: There is no such method.
    """
    heads = head_names(model)
    if tuning == "full":
        return model.requires_grad_(True)
    if tuning in PARTS:
        for path, parameter in model.named_parameters():
            in_head = not {*heads}.isdisjoint(path.split("."))
            parameter.requires_grad_(in_head or bool(re.search(PARTS[tuning], path)))
        return model
    adapted = get_peft_model(model, _config(model, tuning, heads))
    for parameter in adapted.parameters() if tuning.endswith(HALVED) else ():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return adapted


def _config(model: nn.Module, tuning: str, heads: list[str]):
    if match := re.fullmatch(r"layers-([\d.]+)(-bf16.*)?", tuning):
        return SurgicalConfig(layers=_numbers(match[1]), modules_to_save=heads)
    if tuning.startswith("turns-"):
        return SurgicalConfig(layers="all", modules_to_save=heads)
    if match := re.fullmatch(r"lora-(I|II)", tuning):
        targets = attention_names(model, resolve_layers(model, "all"), match[1])
        return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, modules_to_save=heads)
    if match := re.fullmatch(r"lora-(\d+)", tuning):
        rank = int(match[1])
        return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", modules_to_save=heads)
    if match := re.fullmatch(r"columns-(\d+)", tuning):
        strata = [{"layers": "all", "tune": "columns", "columns": int(match[1])}]
        return StratifiedConfig(strata=strata, modules_to_save=heads)
    if tuning == "bitfit":
        return StratifiedConfig.full_bitfit(modules_to_save=heads)
    if tuning.startswith("spafit-"):
        return StratifiedConfig.spafit(tuning.upper(), modules_to_save=heads)
    if match := re.fullmatch(r"strata-(I|II)-lora\.([\d.]+)-bitfit\.([\d.]+)", tuning):
        strata = [
            {"layers": _numbers(match[2]), "tune": "lora"},
            {"layers": _numbers(match[3]), "tune": "bitfit"},
        ]
        used = {layer for stratum in strata for layer in stratum["layers"]}
        frozen = [layer.index for layer in resolve_layers(model, "all") if layer.index not in used]
        strata += [{"layers": frozen, "tune": "frozen"}] if frozen else []
        options = {"r": RANK, "lora_alpha": ALPHA, "variant": match[1], "modules_to_save": heads}
        return StratifiedConfig(strata=strata, **options)
    raise ValueError(f"There is no method {tuning!r}; see the top of {__file__}.")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(".")]


def size(model: nn.Module) -> dict[str, int]:
    """How much a model that was made ready trains, and how large the file of a task is."""
    trained = [p for p in model.parameters() if p.requires_grad]
    tuned = any(isinstance(module, BaseTunerLayer) for module in model.modules())
    saved: list[torch.Tensor] = (
        list(get_peft_model_state_dict(model, save_embedding_layers=False).values()) if tuned else list(trained)
    )
    heads = set(head_names(model.get_base_model() if tuned else model))
    in_head = [p for path, p in model.named_parameters() if p.requires_grad and heads & set(path.split("."))]
    return {
        "trained_parameters": sum(p.numel() for p in trained),
        "head_parameters": sum(p.numel() for p in in_head),
        "delta_bytes": sum(t.numel() * t.element_size() for t in saved),
    }
