"""Surgical fine-tuning as a method of PEFT: all weights of chosen layers are trained, the rest is frozen."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn

from peft_surgical.compat import add_peft_type
from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.select import bottom, innermost_tuned, matches_any, own_tensor_names, tunable_modules
from peft_surgical.copies.variants import DequantisedModule, can_be_dequantised, is_quantised
from peft_surgical.layers import Layer, resolve_layers, unwrap
from peft_surgical.methods.config import DeltaConfig
from peft_surgical.methods.register import register_method
from peft_surgical.methods.resolve import (
    Matching,
    Resolution,
    check_has_values,
    expand_all_linear,
    is_left_out,
    plain_layers,
    plain_spec,
)
from peft_surgical.methods.tuner import DeltaTuner
from peft_surgical.names import OWN_TENSORS
from peft_surgical.ranking.ranking import as_ranking


DEFAULT_LAYERS = "spread:40%"
"""At equal distances: no other choice was surely better in this project's benchmarks (docs/results.md)."""


@dataclass
class SurgicalConfig(DeltaConfig):
    """Which layers are fine-tuned in full; all others are frozen.

    Say it by `layers`, or `ranking` with `top_k`, or `target_modules` alone; by default 40 % of the layers, at equal
    distances. The choice becomes plain layer numbers when the adapter is made, and is stored so: loading needs no data
    and never ranks.

    Args:
        layers: The layers, e.g. `[3, 5, -1]`, `"last:3"`, `"last:25%"`, `"4-9"`, `{"decoder": "last:2"}`; see
            `resolve_layers`.
        ranking: A `LayerRanking` (Lodha et al. 2023, section 3.1), or the path or the contents of a saved one.
        top_k: How many of the ranking's layers to tune, the best first.
        target_modules: Narrows the choice to these modules inside the chosen layers (names or a regular expression as
            in `LoraConfig`). Without `layers` or `ranking`: the modules to tune, anywhere in the model.
        exclude_modules: Modules to leave frozen, by name or regular expression.
        extra_modules: Modules outside the layers that are tuned like them, by their path, e.g. `["bert.pooler"]`.
        modules_to_save: Further modules to train in full and to save, as in `LoraConfig`. The head of a task with
            labels is among them by itself.
        trainable_token_indices: Tokens whose embeddings are trained, as in `LoraConfig`.
        dequantize: Whether a quantised linear module in the chosen layers gets copies in the dtype that it was
            quantised from. If not, it is an error.
        init_weights: False starts the copies off the base's values. For tests only.
        ranking_record: How the layers were chosen: the ranking, as plain data. Set when the adapter is made.

    Raises:
        ValueError: Options that contradict one another.

    Example:

        >>> from peft import get_peft_model
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(num_hidden_layers=6, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> model = BertForSequenceClassification(config)
        >>> model = get_peft_model(model, SurgicalConfig(task_type="SEQ_CLS"))
        >>> model.peft_config["default"].layers
        [1, 4]
    """

    layers: Any = None
    ranking: Any = None
    top_k: int | None = None
    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    extra_modules: list[str] | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    dequantize: bool = False
    init_weights: bool = True
    ranking_record: dict | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = add_peft_type("SURGICAL")
        self.target_modules = (
            set(self.target_modules) if isinstance(self.target_modules, list) else self.target_modules
        )
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)
        # plain data, so that the config can be saved before it is used
        self.layers = plain_spec(self.layers)
        if isinstance(self.ranking, os.PathLike):
            self.ranking = os.fspath(self.ranking)
        if self.layers is not None and self.ranking is not None:
            raise ValueError("layers and ranking both choose the layers. Give one of them.")
        if self.top_k is not None and self.ranking is None:
            raise ValueError(
                f"top_k={self.top_k} counts the layers of a ranking, but ranking is None. Give ranking=..."
            )
        if self.ranking is not None and self.top_k is None:
            raise ValueError("ranking needs top_k=...: how many of its layers to tune.")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k!r} must be a whole number of layers, 1 or more.")


def resolve_surgical(config: SurgicalConfig, model: nn.Module) -> Resolution:
    """What a config means on a model. Its layers become plain numbers, with a record of the ranking behind them."""
    layers = _choose_layers(config, model)
    expand_all_linear(config, model)
    in_place: set[str] = set()
    chosen: dict[str, list[str]] = {}
    for root, module in _roots(config, model, layers):
        inside = dict(tunable_modules(root, module))
        if any(layer.path == root for layer in layers):
            # the layer keeps its class and place: what it owns itself is tuned without wrapping it
            inside = {}
            if own := own_tensor_names(module):
                inside[root] = own
                in_place.add(root)
            for name, child in module.named_children():
                if name != OWN_TENSORS:
                    inside.update(tunable_modules(f"{root}.{name}", child))
        for path, names in inside.items():
            if not is_left_out(path, config):
                chosen[path] = names
    if layers and not chosen:
        raise ValueError(
            f"No module of the layers {config.layers} is left to tune: target_modules={config.target_modules!r}, "
            f"exclude_modules={config.exclude_modules!r}, modules_to_save={config.modules_to_save!r}. Names in "
            f"these layers: {', '.join(_names_inside(layers))}."
        )
    for path in config.extra_modules or []:
        try:
            module = model.get_submodule(path)
        except AttributeError:
            raise ValueError(
                f"extra_modules: {type(model).__name__} has no module {path!r}. Give whole paths, as in "
                "named_modules()."
            ) from None
        for inner_path, names in tunable_modules(path, module):
            if not matches_any(inner_path, config.modules_to_save):
                chosen.setdefault(inner_path, names)
    is_dry_run = all(parameter.is_meta for parameter in model.parameters())  # nothing is to be trained, only named
    for path in chosen:
        module = model.get_submodule(path)
        if _is_quantised(module):
            chosen[path] = _check_dequantisable(path, bottom(module), config)
        elif not is_dry_run:
            _check_trainable(path, bottom(module))
    return Resolution(chosen, frozenset(in_place & set(chosen)))


class SurgicalModel(DeltaTuner):
    """The tuner behind `SurgicalConfig`. Made by `get_peft_model` and `PeftModel.from_pretrained`."""

    prefix: str = "surgical_"
    tuner_layer_cls = TunedModule

    def _resolve(self, config: SurgicalConfig, model: nn.Module) -> Resolution:
        return resolve_surgical(config, model)

    def _touched_tensors(self, config: SurgicalConfig, model: nn.Module) -> dict[str, torch.Tensor]:
        touched = super()._touched_tensors(config, model)
        for path, name in config.resolution.copy_names(self._container):
            if name.tensor == "weight" and _is_quantised(model.get_submodule(path)):
                del touched[name.in_base]  # it has no values that hold on the same base in another form
        return touched

    def _expected_tensors(self, config: SurgicalConfig, model: nn.Module) -> dict[str, torch.Size]:
        shapes = super()._expected_tensors(config, model)
        for path, name in config.resolution.copy_names(self._container):
            module: Any = bottom(model.get_submodule(path))
            if name.tensor == "weight" and is_quantised(module):
                shapes[name.in_file] = torch.Size((module.out_features, module.in_features))
        return shapes

    def _tuned_module_cls_for(self, module: nn.Module) -> type[TunedModule]:
        return DequantisedModule if is_quantised(module) else self.tuned_module_cls

    def _unite_choice(self, united: SurgicalConfig, configs: Sequence[SurgicalConfig]) -> None:
        united.extra_modules = list(dict.fromkeys(path for c in configs for path in c.extra_modules or [])) or None
        alike = all(
            (c.target_modules, c.exclude_modules) == (united.target_modules, united.exclude_modules) for c in configs
        )
        if alike and all(config.layers is not None for config in configs):
            chosen = {(x.stack, x.index): x for c in configs for x in resolve_layers(self.model, c.layers)}
            united.layers = plain_layers([chosen[key] for key in sorted(chosen)], self.model)
        else:  # the modules themselves
            united.layers = united.exclude_modules = united.extra_modules = None
            united.target_modules = {path for config in configs for path in config.resolution.copies}


def _choose_layers(config: SurgicalConfig, model: nn.Module) -> list[Layer]:
    if config.ranking is not None and config.top_k is not None:
        ranking = as_ranking(config.ranking)
        ranking.check_model(model)
        best = ranking.top(config.top_k)
        config.layers = {ranking.stack: best} if ranking.stack else best
        config.ranking_record = ranking.to_dict()
        config.ranking, config.top_k = None, None
    if config.layers is None:
        if config.target_modules:
            return []
        if config.target_modules is not None:
            raise ValueError(f"target_modules={config.target_modules!r} names no module. Name some, or leave it out.")
        config.layers = DEFAULT_LAYERS
    layers = resolve_layers(model, config.layers)
    config.layers = plain_layers(layers, model)
    return layers


def _roots(config: SurgicalConfig, model: nn.Module, layers: list[Layer]) -> list[tuple[str, nn.Module]]:
    """The modules to look for tensors in: the layers, or what `target_modules` matches (in the layers, if any)."""
    if not config.target_modules:
        return [(layer.path, layer.module) for layer in layers]
    places = [layer.path for layer in layers]
    matching = Matching.of(config)
    roots: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        inside = not layers or any(path == place or path.startswith(f"{place}.") for place in places)
        nested = any(path.startswith(f"{root}.") for root, _ in roots)
        if (
            path
            and inside
            and not nested
            and _is_base_module(path, model)
            and check_target_module_exists(matching, path)
        ):
            roots.append((path, module))
    if roots:  # else it is an error
        _warn_of_unmatched(config, [path for path, _ in model.named_modules()])
    return roots


def _warn_of_unmatched(config: SurgicalConfig, paths: list[str]) -> None:
    """PEFT passes over names that match nothing in silence; scripts for several architectures rely on it."""
    if isinstance(config.target_modules, str) or config.inference_mode:
        return
    for name in sorted(config.target_modules or ()):
        if not any(path == name or path.endswith(f".{name}") for path in paths):
            warnings.warn(
                f"target_modules={sorted(config.target_modules or ())} holds {name!r}, which matches no module of the "
                "model and is passed over.",
                stacklevel=2,
            )


def _is_base_module(path: str, model: nn.Module) -> bool:
    """Whether a path is the base model's own, not one inside the wrapper of an adapter."""
    above = path.split(".")[:-1]
    return not any(
        isinstance(model.get_submodule(".".join(above[: i + 1])), BaseTunerLayer) for i in range(len(above))
    )


def _names_inside(layers: list[Layer]) -> list[str]:
    names = {
        name for layer in layers for name, m in unwrap(layer.module).named_modules() if name and own_tensor_names(m)
    }
    return sorted(names)


def _is_quantised(module: nn.Module) -> bool:
    return isinstance(innermost_tuned(module), DequantisedModule) or is_quantised(bottom(module))


def _check_trainable(path: str, module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        check_has_values(f"{path}.{name}", parameter)
    if inner := [child for child in module.modules() if is_quantised(child)]:
        raise _quantised(path, inner[0], "narrow the choice")


def _check_dequantisable(path: str, module: nn.Module, config: SurgicalConfig) -> list[str]:
    """The tensors of a quantised module that get a copy; an error if it may or can have none."""
    if not config.dequantize:
        raise _quantised(path, module, "set dequantize=True to train copies in full precision, choose other layers")
    if not can_be_dequantised(module):
        raise _quantised(path, module, "choose other layers (how to dequantise this module is not known)")
    return ["weight"] if getattr(module, "bias", None) is None else ["weight", "bias"]


def _quantised(path: str, module: nn.Module, way_out: str) -> ValueError:
    return ValueError(
        f"{path} is a quantised {type(module).__name__}, and quantised weights cannot be trained in full. Either "
        f"{way_out} (quantised frozen layers are fine), narrow the choice with target_modules or exclude_modules, or "
        "leave the chosen layers out of the quantisation (llm_int8_skip_modules)."
    )


register_method("SURGICAL", SurgicalConfig, SurgicalModel)
