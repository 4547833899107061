"""What a config means on one model: the names that it matches, and the modules and tensors that it chooses."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_surgical.compat import ExcludedModule, include_all_linear_layers, parse_pattern
from peft_surgical.copies.select import base_modules, bottom, innermost_tuned, matches_any, token_embeddings
from peft_surgical.copies.variants import is_quantised
from peft_surgical.layers import Layer, find_stacks
from peft_surgical.names import RESERVED, CopyName, base_path, without_wrappers


@dataclass(frozen=True)
class Resolution:
    """The modules and tensors of one model that a config chooses."""

    copies: Mapping[str, list[str]]  # names of tensors, by the path of the module that owns them
    in_place: frozenset[str] = frozenset()  # paths of the owners that keep their place (`TunedInPlace`)
    lora: frozenset[str] = frozenset()  # paths of the modules that get LoRA
    columns: Mapping[str, list[int]] = field(default_factory=dict)  # of a weight that are copied alone, by path
    shapes: Mapping[str, torch.Size] = field(default_factory=dict)
    """Of all tensors of the adapter, head included, by their names in its file; known once it is in the model."""

    def copy_names(self, container: str) -> Iterator[tuple[str, CopyName]]:
        """The copies, which one of `names.CONTAINERS` holds: their module's path in the model, and names."""
        for path, tensors in self.copies.items():
            for tensor in tensors:
                yield path, CopyName(without_wrappers(path), tensor, container, path in self.in_place)

    def tensors(self) -> set[str]:
        """What is copied, by the names in the base, with its columns, and the paths of all modules with LoRA."""
        copies = {f"{path}.{n}{self.columns.get(path, '')}" for path, names in self.copies.items() for n in names}
        return copies | self.lora


@dataclass
class Matching:
    """The fields of a config that PEFT's matching of names reads."""

    target_modules: Any
    exclude_modules: Any
    modules_to_save: Any
    target_parameters: Any = None
    layers_to_transform: Any = None
    layers_pattern: Any = None

    @classmethod
    def of(cls, config: Any) -> Matching:
        return cls(config.target_modules or [], config.exclude_modules, config.modules_to_save)


def is_left_out(path: str, config: Any) -> bool:
    """Whether a config excludes a module, or one that it is in, or has it in `modules_to_save`."""
    if matches_any(path, config.modules_to_save):
        return True
    matching = Matching([], config.exclude_modules, None)
    parts = path.split(".")
    return any(
        isinstance(check_target_module_exists(matching, ".".join(parts[: i + 1])), ExcludedModule)
        for i in range(len(parts))
    )


def expand_all_linear(config: Any, model: nn.Module) -> None:
    """Write `target_modules="all-linear"` out as paths of modules.

    PEFT's own function does so, but does not see the linear modules that another adapter has copies of.
    """
    if not isinstance(config.target_modules, str) or config.target_modules.lower() != "all-linear":
        return
    include_all_linear_layers(config, model)
    head = token_embeddings(model)[1]
    config.target_modules = set(config.target_modules) | {
        path
        for path, module in base_modules("", model)
        if isinstance(module, (nn.Linear, Conv1D))
        and innermost_tuned(model.get_submodule(path)) is not None
        and (head is None or bottom(head) is not module)
    }


def shared_once(resolution: Resolution, model: nn.Module) -> Resolution:
    """A choice in which a module that several layers hold comes once, under the path at which PEFT finds it.

    Warns of what the chosen modules share with others, which are not chosen.
    """
    first = {id(module): path for path, module in model.named_modules()}
    at = {path: first[id(model.get_submodule(path))] for path in [*resolution.copies, *resolution.lora]}
    holders: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, child in module._modules.items():
            holders.setdefault(id(child), []).append(f"{path}.{name}")
    for path in at:
        module = model.get_submodule(path)
        if all(p.is_meta for p in module.parameters()):  # a file is checked, as before a merge: nothing is computed
            continue
        if len(held := holders.get(id(module), [])) > 1 and path not in resolution.in_place:
            raise ValueError(
                f"{' and '.join(held)} are one module, which cannot be tuned in both places. Name it in "
                "exclude_modules, or give each its own copy.deepcopy of it."
            )
    chosen = {f"{path}.{name}" for path, names in resolution.copies.items() for name in names}
    partners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        partners.setdefault(id(parameter), []).append(name)
    embeddings = {id(p) for module in token_embeddings(model) if module is not None for p in module.parameters()}
    for key, names in partners.items():
        alone = [name for name in names if name not in chosen]
        if alone and len(alone) < len(names) and key not in embeddings:
            mine = next(name for name in names if name in chosen)
            warnings.warn(
                f"{mine} is shared with {alone[0]}, whose layer is not chosen. The adapter is exact, but a merged "
                "model that is saved and loaded shares it again, and answers otherwise. Choose that layer too.",
                stacklevel=2,
            )
            break
    return replace(
        resolution,
        copies={at[path]: names for path, names in resolution.copies.items()},
        in_place=frozenset(at[path] for path in resolution.in_place),
        lora=frozenset(at[path] for path in resolution.lora),
        columns={at[path]: columns for path, columns in resolution.columns.items()},
    )


# ---- layers as a config stores them


def plain_spec(layers: Any) -> Any:
    """What a user wrote for layers, with ranges, arrays and the like as lists of plain integers.

    Example:

        >>> plain_spec({"decoder": range(2), "encoder": "last:3"})
        {'decoder': [0, 1], 'encoder': 'last:3'}
    """
    if isinstance(layers, Mapping):
        return {stack: plain_spec(spec) for stack, spec in layers.items()}
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        return layers
    return [operator.index(i) if hasattr(i, "__index__") and not isinstance(i, bool) else i for i in layers]


def plain_layers(layers: Sequence[Layer], model: nn.Module) -> list[int] | dict[str, list[int]]:
    """Layers as plain integers, the form that is stored in a config."""
    return by_stack_unless_single([(layer.stack, layer.index) for layer in layers], model)


def by_stack_unless_single(pairs: Iterable[tuple[str, Any]], model: nn.Module) -> Any:
    """What there is for each stack, as a config has it: a list if the model has one stack only, else by stack."""
    by_stack: dict[str, list] = {}
    for stack, value in pairs:
        by_stack.setdefault(stack, []).append(value)
    if len(by_stack) == 1 and list(by_stack) == list(find_stacks(model)):
        return next(iter(by_stack.values()))
    return by_stack


# ---- what may be tuned, and what adapters may be called


def untrained_parameters(model: nn.Module) -> frozenset[str]:
    """The parameters that a base leaves frozen in layers whose others it trains, e.g. corrections of a router.

    Where all of a layer is frozen, somebody froze it who did not mean to tell what can be trained.
    """
    found: set[str] = set()
    for stack in find_stacks(model).values():
        for layer in stack.layers:
            own = {
                f"{path}.{name}": parameter.requires_grad
                for path, module in base_modules(layer.path, layer.module)
                if not is_quantised(module)
                for name, parameter in module.named_parameters(recurse=False)
            }
            if any(own.values()):
                found |= {without_wrappers(name) for name, is_trained in own.items() if not is_trained}
    return frozenset(found)


def check_has_values(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that cannot be trained, before the model is changed."""
    if tensor.device.type == "meta":
        raise ValueError(
            f"{name} has no values: it is on the meta device or offloaded, and training it would change nothing. Load "
            "the model without device_map offloading, or choose other layers."
        )


def check_adapter_name(name: str, model: nn.Module) -> None:
    """Refuse names that would be mistaken for parts of tensors' names, which PEFT puts an adapter's name between."""
    reason = None
    if "." in name:
        reason = "it has a dot, which PyTorch allows in no module's name"
    elif hasattr(nn.ModuleDict(), name):
        reason = "PyTorch uses that name"
    elif name in RESERVED or any(name in base_path(path).split(".") for path in model.state_dict(keep_vars=True)):
        reason = "tensors of this model have it in their names, so that those of the adapter could not be told apart"
    if reason is not None:
        raise ValueError(f"An adapter cannot be called {name!r}: {reason}. Choose another name.")


# ---- patterns in configs that others wrote


MOST_WAYS = 4_000_000
"""How many ways a pattern may have to match a name of 100 characters: three `.*`, or two and many alternatives."""


def check_patterns(patterns: Iterable[str]) -> None:
    """Refuse regular expressions that could take very long to match a name: Python tries every way that there is.

    Example:

        >>> check_patterns([r".*decoder\\.(q|v)_proj", r"layer\\.\\d+\\.output"])
        >>> check_patterns([r"(a+)+b"])
        Traceback (most recent call last):
        ...
        ValueError: The pattern '(a+)+b' could take very long to match. Name the modules instead.
    """
    ways = 0
    for pattern in patterns:
        try:
            ways += _ways(parse_pattern(pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"The pattern {pattern[:100]!r} is no regular expression ({error}).") from error
        if ways > MOST_WAYS:
            raise ValueError(f"The pattern {pattern[:100]!r} could take very long to match. Name the modules instead.")


def _ways(parsed: Any) -> int:
    """The ways in which a parsed pattern can match 100 characters, at most `MOST_WAYS` + 1."""
    ways = 1
    for code, argument in parsed:
        kind = str(code)
        if kind.endswith("REPEAT"):
            least, most, inner = argument
            inside = _ways(inner)
            times = min(int(most), 100)
            ways *= (times + 1 if most > least else 1) if inside == 1 else min(inside ** min(times, 99), MOST_WAYS) + 1
        elif kind == "BRANCH":
            ways *= sum(map(_ways, argument[1]))
        elif kind in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            ways *= _ways(argument[-1])
        elif kind == "ATOMIC_GROUP":
            ways *= _ways(argument)
        elif kind == "GROUPREF_EXISTS":
            ways *= _ways(argument[1]) + (_ways(argument[2]) if argument[2] else 1)
        ways = min(ways, MOST_WAYS + 1)
    return ways
