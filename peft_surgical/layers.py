"""Find a model's stacks of transformer layers, and the layers a user means.

Layers are found in the module tree, by object: a stack is an outermost `nn.ModuleList` (or, in a model without any, an
outermost `nn.Sequential`) of like modules that are built of other modules and hold parameters. Names are never matched
as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from accelerate.utils import extract_model_from_parallel
from peft import PeftMixedModel, PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from peft_surgical.layer_specs import LayerSpec, layer_indices


@dataclass(frozen=True)
class Layer:
    """One transformer layer.

    Args:
        stack: Name of the stack that holds the layer.
        index: Position in the stack, counted from 0. A layer that is applied several times is counted once.
        path: Dotted path of the module in the model.
        module: The layer itself.
    """

    stack: str
    index: int
    path: str
    module: nn.Module


@dataclass(frozen=True)
class Stack:
    """A run of transformer layers that are applied one after the other.

    Args:
        name: Short name, the same for the bare and for the headed model.
        path: Dotted path of the list in the model.
        layers: The layers, in order.
    """

    name: str
    path: str
    layers: tuple[Layer, ...]

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        return f"{self.name} ({self.path or 'the model itself'}), layers 0 to {len(self) - 1}"


def find_stacks(model: nn.Module) -> dict[str, Stack]:
    """Find all stacks of transformer layers of a model.

    Args:
        model: Any module. The wrappers of PEFT, of `torch.compile` and of distributed training are looked through.

    Returns:
        The stacks by name, in the order of the module tree. A single stack is named after the module that holds it;
        several are named after the first part of the path in which they differ (`encoder` and `decoder`).

    Example:

        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(num_hidden_layers=3, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> {name: len(stack) for name, stack in find_stacks(BertModel(config)).items()}
        {'encoder': 3}
    """
    model = unwrap(model)
    lists = [*_outermost_lists(model)]
    lists = [pair for pair in lists if isinstance(pair[1], nn.ModuleList)] or lists
    names = _short_names([path for path, _ in lists], prefix=getattr(model, "base_model_prefix", ""))
    return {name: _make_stack(name, path, modules) for name, (path, modules) in zip(names, lists, strict=True)}


def resolve_layers(model: nn.Module, layers: LayerSpec, stack: str | None = None) -> list[Layer]:
    """Turn what a user wrote into layers of the model.

    Args:
        model: The model that holds the layers.
        layers: Indices (negative ones count from the end), `"last:3"`, `"first:2"`, `"last:25%"`, `"4-9"` (both ends
            included), `"10-"`, `"all"`, or a mapping from stack names to any of these.
        stack: Name or path of the stack that `layers` counts in. Needed if the model has several.

    Returns:
        The layers in the order of the model, each once.

    Raises:
        ValueError: Nothing is chosen, a layer is chosen twice, lies outside its stack or holds no parameters, or the
            model has several stacks and none is named. The message lists the stacks and their valid range.
        TypeError: `layers` is none of the accepted forms.

    Example:

        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(num_hidden_layers=6, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> model = BertModel(config)
        >>> [layer.index for layer in resolve_layers(model, "last:50%")]
        [3, 4, 5]
        >>> [layer.path for layer in resolve_layers(model, [0, -1])]
        ['encoder.layer.0', 'encoder.layer.5']
    """
    model = unwrap(model)
    stacks = find_stacks(model)
    if not isinstance(layers, Mapping):
        pairs = [(choose_stack(model, stack), layers)]
    elif stack is not None:
        raise ValueError(f"layers={layers!r} already names its stacks, so stack={stack!r} has no meaning. Drop one.")
    else:
        pairs = [(_named(model, stacks, name), spec) for name, spec in layers.items()]
    names = [named.name for named, _ in pairs]
    if not names or len(set(names)) < len(names):
        fault = "names a stack twice" if names else "chooses no layer"
        raise ValueError(f"layers={layers!r} {fault}. {describe_stacks(stacks)}")
    # a stack given by path need not be among those found by rule; it then comes last
    order = [*stacks, *(name for name in names if name not in stacks)]
    pairs.sort(key=lambda pair: order.index(pair[0].name))
    chosen = [named.layers[index] for named, spec in pairs for index in layer_indices(spec, named)]
    if empty := [layer.path for layer in chosen if not any(True for _ in layer.module.parameters())]:
        raise ValueError(f"layers={layers!r} chooses {', '.join(empty)}, without parameters. Leave such layers out.")
    return chosen


def choose_stack(model: nn.Module, stack: str | None = None) -> Stack:
    """The stack called `stack`, or the only one of the model."""
    model = unwrap(model)
    stacks = find_stacks(model)
    if stack is None and len(stacks) == 1:
        return next(iter(stacks.values()))
    if stack is not None:
        return _named(model, stacks, stack)
    if not stacks:
        raise ValueError(
            f"No stack of layers was found in {type(model).__name__}: it has no ModuleList of like modules that are "
            "built of other modules and hold parameters. Name the modules with target_modules=[...], or give "
            "stack='path.to.the.list'."
        )
    raise ValueError(
        f"{type(model).__name__} has several stacks of layers, so a layer needs the name of its stack: "
        f"layers={{'{next(iter(stacks))}': [...]}}, or stack=... where it is an option. {describe_stacks(stacks)}"
    )


def plain_layers(layers: Sequence[Layer], model: nn.Module) -> list[int] | dict[str, list[int]]:
    """Layers as plain integers, the form that is stored in a config: a list if the model has one stack only."""
    by_stack: dict[str, list[int]] = {}
    for layer in layers:
        by_stack.setdefault(layer.stack, []).append(layer.index)
    if len(by_stack) == 1 and list(by_stack) == list(find_stacks(model)):
        return next(iter(by_stack.values()))
    return by_stack


def describe_stacks(stacks: Mapping[str, Stack]) -> str:
    """One sentence that lists the stacks with their valid range, for error messages."""
    return f"Stacks: {'; '.join(map(str, stacks.values())) or 'none'}."


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of PEFT, of `torch.compile` and of distributed training."""
    while True:
        inner = model
        if any(name in vars(model) or name in model._modules for name in _INSIDE):
            inner = extract_model_from_parallel(model, keep_torch_compile=False)  # looks at all modules
        if isinstance(inner, (PeftModel, PeftMixedModel)):
            inner = inner.base_model
        elif isinstance(inner, BaseTuner):
            inner = inner.model
        if inner is model:
            return model
        model = inner


_INSIDE = ("module", "_orig_mod", "_fsdp_wrapped_module")
"""Where the wrappers of distributed training and of `torch.compile` keep the model."""


def _named(model: nn.Module, stacks: Mapping[str, Stack], name: str) -> Stack:
    for stack in stacks.values():
        if name in (stack.name, stack.path):
            return stack
    try:
        modules = model.get_submodule(name)
    except AttributeError:
        modules = None
    if not name or not isinstance(modules, (nn.ModuleList, nn.Sequential)) or not len(modules):
        raise ValueError(f"{type(model).__name__} has no stack of layers named {name!r}. {describe_stacks(stacks)}")
    return _make_stack(name, name, modules)


def _make_stack(name: str, path: str, modules: nn.ModuleList | nn.Sequential) -> Stack:
    layers = []
    for index, (child, module) in enumerate(modules.named_children()):
        place = _join(path, child)
        while isinstance(module._modules.get("_orig_mod"), nn.Module):  # a layer that was compiled by itself
            place, module = f"{place}._orig_mod", module.get_submodule("_orig_mod")
        layers.append(Layer(name, index, place, module))
    return Stack(name, path, tuple(layers))


def _outermost_lists(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and _holds_layers(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost_lists(child, _join(path, name))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _holds_layers(modules: nn.ModuleList | nn.Sequential) -> bool:
    """Whether these are layers: like modules that hold parameters and are built of other modules."""
    # a Sequential of one module is a mere wrapper; an injected adapter may have wrapped some layers and not others
    children = [c.get_base_layer() if isinstance(c, BaseTunerLayer) else c for c in modules.children()]
    if len(children) < (2 if isinstance(modules, nn.Sequential) else 1):
        return False
    if not all(any(True for _ in c.children()) and any(True for _ in c.parameters()) for c in children):
        return False
    # hybrid models mix several classes in one stack; transformers marks what it means as a layer
    return len({type(c) for c in children}) == 1 or all(isinstance(c, GradientCheckpointingLayer) for c in children)


def _short_names(paths: Sequence[str], prefix: str) -> list[str]:
    parts = []
    for path in paths:
        first, _, rest = path.partition(".")
        # a few classes of transformers keep the bare model in `model`, whatever their prefix says
        parts.append((rest if rest and first in (prefix, "model") else path).split("."))
    if len(parts) == 1:
        return [(parts[0][-2:-1] or parts[0])[0] or "layers"]
    owners = [p[:-1] for p in parts]
    common = 0
    while all(len(o) > common for o in owners) and len({o[common] for o in owners}) == 1:
        common += 1
    short = [o[common] if len(o) > common else p[-1] for o, p in zip(owners, parts, strict=True)]
    return [s if short.count(s) == 1 else ".".join(p[common:]) for s, p in zip(short, parts, strict=True)]
