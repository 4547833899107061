"""The methods of `cost.py`: each of ours, and the same set of parameters trained without this package."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from peft import LoraConfig, get_peft_model
from torch import nn

from peft_surgical import StratifiedConfig, SurgicalConfig


ATTENTION = {"I": ["query", "key", "value"], "II": ["query", "key", "value", "attention.output.dense"]}
RANK, ALPHA = 64, 128  # Arora & Wang (2024), section 4


@dataclass(frozen=True)
class Method:
    """A way of fine-tuning, made in place on a fresh model.

    Args:
        name: What the table calls it.
        make: Makes a model ready to be trained.
        plain: The same without this package, if this is one of its methods.
    """

    name: str
    make: Callable[[nn.Module], nn.Module]
    plain: Callable[[nn.Module], nn.Module] | None = None


def methods(depth: int) -> list[Method]:
    """The methods that are compared on a model of `depth` layers."""
    first = depth // 4
    surgical = [first + i * depth // 8 for i in range(5)]
    last = list(range(depth - 6, depth))
    return [
        Method("full fine-tuning", lambda model: model),
        _spafit("SPAFIT-4-9-II", 4, 9, "II", depth),
        _spafit("SPAFIT-8-12-I", 8, 12, "I", depth),
        Method("PEFT LoRA-II", lambda model: _stock_lora(model, "II", range(depth))),
        Method("full BitFit", lambda model: _ours(model, StratifiedConfig.full_bitfit()), _plain_biases(range(depth))),
        Method(
            f"surgical top 5 {surgical}",
            lambda model: _ours(model, SurgicalConfig(layers=surgical)),
            _plain_layers(surgical),
        ),
        Method("last 6", lambda model: _ours(model, SurgicalConfig(layers="last:6")), _plain_layers(last)),
    ]


def _spafit(name: str, n1: int, n2: int, variant: str, depth: int) -> Method:
    """A model of the paper; with fewer than its 24 layers, the same shares of the depth."""
    n1, n2 = ((n + 1) * depth // 24 - 1 for n in (n1, n2))
    config = StratifiedConfig.spafit(f"SPAFIT-{n1}-{n2}-{variant}", r=RANK, lora_alpha=ALPHA)
    label = name if depth == 24 else f"{name} (as {n1}-{n2} of {depth})"

    def plain(model: nn.Module) -> nn.Module:
        model = _stock_lora(model, variant, range(n2 + 1, depth))
        for parameter, name in _layer_parameters(model):
            index, inside = name
            in_attention = inside.startswith("attention.")
            if inside.endswith("bias") and (n1 < index <= n2 or (index > n2 and not in_attention)):
                parameter.requires_grad_(True)
        return model

    return Method(label, lambda model: _ours(model, copy.deepcopy(config)), plain)


def _ours(model: nn.Module, config: StratifiedConfig | SurgicalConfig) -> nn.Module:
    config.task_type = "SEQ_CLS"
    return get_peft_model(model, config)


def _stock_lora(model: nn.Module, variant: str, layers: range) -> nn.Module:
    config = LoraConfig(
        task_type="SEQ_CLS",
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=ATTENTION[variant],
        layers_to_transform=list(layers),
    )
    return get_peft_model(model, config)


def _plain_biases(layers: range) -> Callable[[nn.Module], nn.Module]:
    return _plain(lambda index, inside: index in layers and inside.endswith("bias"))


def _plain_layers(layers: list[int]) -> Callable[[nn.Module], nn.Module]:
    return _plain(lambda index, inside: index in layers)


def _plain(is_trained: Callable[[int, str], bool]) -> Callable[[nn.Module], nn.Module]:
    def make(model: nn.Module) -> nn.Module:
        model.requires_grad_(False)
        model.classifier.requires_grad_(True)
        for parameter, (index, inside) in _layer_parameters(model):
            parameter.requires_grad_(is_trained(index, inside))
        return model

    return make


def _layer_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, tuple[int, str]]]:
    for name, parameter in model.named_parameters():
        _, in_layer, rest = name.partition(".encoder.layer.")
        if in_layer and "lora_" not in name:
            index, _, inside = rest.partition(".")
            yield parameter, (int(index), inside.replace(".base_layer", ""))
