"""What a stratum means for one of its layers: which modules get LoRA, and which tensors a copy per adapter."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_surgical.copies.columns import draw_columns
from peft_surgical.copies.select import Owner, base_modules, bottom, original_tensor, owners
from peft_surgical.layers import Layer
from peft_surgical.methods.resolve import Matching, Resolution, check_has_values, is_left_out
from peft_surgical.methods.stratified.attention_names import linear_names
from peft_surgical.methods.stratified.strata import Stratum
from peft_surgical.names import without_wrappers


_ADDED = re.compile(r"(.*_)?bias(_u|_v|_[ih]h_l\d+(_reverse)?)?")
_NORM = re.compile(r".*(layer|rms|group|no)norm(gated|2d|1p|perhead)?", re.IGNORECASE)
_NOT_ADDED = ("position_bias", "e_score_correction_bias", "expert_bias")


def bias_terms(owner: Owner) -> list[str]:
    return [name for name in owner.names if _is_bias_term(owner.module, name)]


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a LayerNorm or RMSNorm of any make; families bring their own, so the name decides."""
    return any(_NORM.fullmatch(kind.__name__) for kind in type(module).__mro__)


def _is_bias_term(module: nn.Module, name: str) -> bool:
    if isinstance(module, nn.Embedding) or name not in dict(module.named_parameters()):
        return False
    name = name.rpartition(".")[2]
    if isinstance(module, nn.MultiheadAttention) and name in ("bias_k", "bias_v"):
        return False
    return bool(_ADDED.fullmatch(name)) and not name.endswith(_NOT_ADDED)


def choose(strata: Sequence[Stratum], config: Any) -> Resolution:
    """What strata mean on the model that their layers belong to."""
    all_matched: set[str] = set()
    lora: set[str] = set()
    columns: dict[str, list[int]] = {}
    copies: dict[str, list[str]] = {}
    in_place: set[str] = set()
    for stratum in strata:
        for layer in stratum.modules:
            matched = target_paths(stratum, layer, config)
            all_matched.update(matched)
            if stratum.tune == "columns" and stratum.columns is not None:
                for path, module in matched.items():
                    copies[path], plain = ["weight"], without_wrappers(path)
                    columns[path] = draw_columns(plain, _linear(path, module), stratum.columns, config.columns_seed)
                continue
            lora.update(matched)
            for path, (owner, names) in copied_tensors(stratum, layer, matched, config).items():
                copies[path] = names
                if owner.has_parts or path == layer.path:
                    in_place.add(path)
    _check_targets(strata, all_matched)
    return Resolution(copies, frozenset(in_place), frozenset(lora), columns)


def target_paths(stratum: Stratum, layer: Layer, config: Any) -> dict[str, nn.Module]:
    """The modules of a layer that get LoRA, or trained columns, by path."""
    if stratum.target_modules is None:
        return {}
    found = {
        path: module
        for path, module in base_modules(layer.path, layer.module)
        if _is_target(path, module, stratum) and not is_left_out(path, config)
    }
    if not found:
        raise ValueError(
            f"Layer {layer.index} of the {stratum} has none of target_modules={stratum.target_modules!r}. Linear "
            f"modules in it: {', '.join(linear_names([layer]))}."
        )
    return found


def copied_tensors(
    stratum: Stratum, layer: Layer, lora: Collection[str], config: Any
) -> dict[str, tuple[Owner, list[str]]]:
    """The modules of a layer of whose tensors each adapter gets a copy, by path, with the names of these tensors."""
    touched = [place for place in _sublayers(layer) if any(_is_inside(path, place) for path in lora)]
    found = {}
    for owner in owners(layer.path, layer.module):
        if not is_left_out(owner.path, config) and (names := _chosen(stratum, owner, touched)):
            found[owner.path] = owner, names
    if not found and stratum.tune in ("bitfit", "norm", "full"):
        raise ValueError(_nothing_to_tune(stratum, layer))
    return found


def _chosen(stratum: Stratum, owner: Owner, touched: Collection[str]) -> list[str]:
    if stratum.tune == "full":
        return owner.names
    if stratum.tune == "norm":
        return [n for n in owner.names if n in dict(owner.module.named_parameters())] if is_norm(owner.module) else []
    if stratum.tune == "frozen" or (stratum.tune == "lora" and stratum.bias == "none"):
        return []
    if stratum.tune == "lora" and stratum.bias == "other" and any(_is_inside(owner.path, t) for t in touched):
        return []
    is_addable = isinstance(owner.module, nn.Linear) and owner.module._parameters.get("bias", owner) is None
    return bias_terms(owner) + (["bias"] if stratum.add_bias and is_addable else [])


def _sublayers(layer: Layer) -> list[str]:
    """The paths of a layer's parts; lists are looked through, and so is a part that is the only one."""
    path, module = layer.path, bottom(layer.module)
    while True:
        parts = _parts(path, module)
        if len(parts) != 1 or not any(True for _ in parts[0][1].children()):
            return [path for path, _ in parts]
        path, module = parts[0]


def _parts(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    parts = []
    for name, child in module.named_children():
        inner = bottom(child)
        if isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
            parts += _parts(f"{path}.{name}", inner)
        elif any(True for _ in inner.parameters()):
            parts.append((f"{path}.{name}", inner))
    return parts


def _is_target(path: str, module: nn.Module, stratum: Stratum) -> bool:
    targets = stratum.target_modules
    if targets == "all-linear":
        return isinstance(module, (nn.Linear, Conv1D))
    matching = Matching(list(targets) if isinstance(targets, tuple) else targets, None, None)
    return bool(check_target_module_exists(matching, path))


def _linear(path: str, module: nn.Module) -> nn.Module:
    if not isinstance(module, (nn.Linear, Conv1D)):
        raise ValueError(f"{path} is a {type(module).__name__}; columns are trained of linear modules alone.")
    _check_tensor(f"{path}.weight", module.weight, is_dry_run=True)  # 4 bits are packed into a single column
    return module


def _is_inside(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place}.")


def _nothing_to_tune(stratum: Stratum, layer: Layer) -> str:
    what = {"bitfit": "bias terms", "norm": "norms"}.get(stratum.tune, "tensors")
    hint = "Leave the layer frozen, or drop what excludes its modules."
    if stratum.tune == "bitfit":
        hint = (
            'Tune its norms instead (group_2="norm" beside n1 and n2, or {"layers": ..., "tune": "norm"} in strata), '
            "or give its linear modules biases that start at zero (add_bias=True)."
        )
    return f"Layer {layer.index} of the {stratum} has no {what} to tune. {hint}"


def check_choice(choice: Resolution, model: nn.Module, *, use_dora: bool = False) -> None:
    """Refuse what cannot be trained, before the model is changed."""
    is_dry_run = all(parameter.device.type == "meta" for parameter in model.parameters())
    users = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for path in [*choice.lora, *choice.copies]:
        _check_place(path, model)
    for path, names in choice.copies.items():
        for name in names:
            _check_tensor(f"{path}.{name}", original_tensor(model.get_submodule(path), name), is_dry_run)
        if path in choice.columns and users[id(original_tensor(model.get_submodule(path), "weight"))] > 1:
            raise ValueError(
                f"{path}.weight is shared with another module, so that columns of it cannot be trained for this one. "
                "Leave it out with exclude_modules, or tune the layers in full."
            )
        if use_dora and path in choice.lora and "bias" in names:
            raise ValueError(
                f"DoRA takes the base model's bias out of the output of {path} and cannot do so with a trained one. "
                "Use bias_beside_lora='other' or 'none', or use_dora=False."
            )


def _check_targets(strata: Sequence[Stratum], lora: Collection[str]) -> None:
    """Refuse names among `target_modules` that match nothing; PEFT passes over them in silence."""
    for stratum in strata:
        for name in stratum.target_modules if isinstance(stratum.target_modules, tuple) else ():
            if not any(path == name or path.endswith(f".{name}") for path in lora):
                raise ValueError(
                    f"target_modules={list(stratum.target_modules or ())} of the {stratum} holds {name!r}, which "
                    f"matches no module. Linear modules there: {', '.join(linear_names(stratum.modules))}."
                )


def _check_tensor(name: str, tensor: torch.Tensor, is_dry_run: bool) -> None:
    if not is_dry_run:
        check_has_values(name, tensor)
    if isinstance(tensor, nn.Parameter) and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(
            f"{name} is quantised ({tensor.dtype}), and quantised weights cannot be trained in full. Use "
            "tune='lora' or 'bitfit' for its layer, or leave the layer out of the quantisation."
        )


def _check_place(path: str, model: nn.Module) -> None:
    parts = path.split(".")
    for i in range(1, len(parts)):
        outer = model.get_submodule(".".join(parts[:i]))
        if isinstance(outer, BaseTunerLayer):
            raise ValueError(
                f"{path} cannot be tuned: it is inside {'.'.join(parts[:i])} ({type(bottom(outer)).__name__}), which "
                "another adapter tunes as a whole. Unload that adapter first."
            )
