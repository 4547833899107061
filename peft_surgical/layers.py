"""Find a model's stacks of transformer layers, and the layers a user means.

Layers are found in the module tree, by object: a stack is an outermost `nn.ModuleList` (or, in a model without any, an
outermost `nn.Sequential`) of like modules that hold parameters. Names are never matched as text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from peft import PeftModel
from torch import nn
from torch._dynamo import OptimizedModule


LayerSpec = str | Sequence[int | str] | Mapping[str, "str | Sequence[int | str]"]
"""What a user may write for layers: `[3, -1]`, `"last:3"`, `"first:2"`, `"last:25%"`, `"4-9"`, `"10-"`, `"all"`, or a
mapping from stack names to those."""


@dataclass(frozen=True)
class Layer:
    """One transformer layer.

    Args:
        stack: Name of the stack that holds the layer.
        index: Position in the stack, counted from 0.
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


def find_stacks(model: nn.Module) -> dict[str, Stack]:
    """Find all stacks of transformer layers of a model.

    Args:
        model: Any module. A `PeftModel` is looked through to its base model.

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
    lists: list[tuple[str, nn.ModuleList | nn.Sequential]] = [*_outermost_lists(model, nn.ModuleList)]
    lists = lists or [*_outermost_lists(model, nn.Sequential)]
    paths = [path for path, _ in lists]
    names = _short_names(paths, prefix=getattr(model, "base_model_prefix", ""))
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
        ValueError: Nothing is chosen, a layer is chosen twice or lies outside its stack, or the model has several
            stacks and none is named. The message lists the stacks and their valid range.
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
    if isinstance(layers, Mapping):
        if stack is not None:
            raise ValueError(
                f"layers={dict(layers)!r} already names its stacks, so stack={stack!r} has no meaning. Drop one."
            )
        if not layers:
            raise ValueError(f"layers={{}} chooses no layer. {describe_stacks(stacks)}")
        pairs = [(_named(model, stacks, name), spec) for name, spec in layers.items()]
        names = [named.name for named, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError(f"layers={dict(layers)!r} names a stack twice. {describe_stacks(stacks)}")
        # a stack given by path need not be among those found by rule; it then comes last
        order = [*stacks, *(name for name in names if name not in stacks)]
        pairs.sort(key=lambda pair: order.index(pair[0].name))
    else:
        pairs = [(choose_stack(model, stack), layers)]
    return [named.layers[index] for named, spec in pairs for index in layer_indices(spec, named)]


def choose_stack(model: nn.Module, stack: str | None = None) -> Stack:
    """The stack called `stack`, or the only one of the model.

    Raises:
        ValueError: There is no such stack; or none is named and the model has several, or none at all.
    """
    model = unwrap(model)
    stacks = find_stacks(model)
    if stack is not None:
        return _named(model, stacks, stack)
    if len(stacks) == 1:
        return next(iter(stacks.values()))
    if not stacks:
        raise ValueError(
            f"No stack of layers was found in {type(model).__name__}: it has no ModuleList of like modules that hold "
            "parameters. Name the modules with target_modules=[...], or give stack='path.to.the.list'."
        )
    raise ValueError(
        f"{type(model).__name__} has several stacks of layers, so a layer needs the name of its stack: "
        f"layers={{'{next(iter(stacks))}': [...]}}, or stack=... where it is an option. {describe_stacks(stacks)}"
    )


def layer_indices(spec: str | Sequence[int | str], stack: Stack) -> list[int]:
    """The indices in one stack that a specification means, ascending.

    Raises:
        ValueError: See `resolve_layers`.
        TypeError: `spec` is neither text nor a sequence of indices.
    """
    if isinstance(spec, str):
        indices = list(_parse(spec, stack))
    elif isinstance(spec, Sequence) or (hasattr(spec, "__iter__") and not isinstance(spec, Mapping)):
        indices = []
        for item in spec:
            if isinstance(item, str):
                indices.extend(_parse(item, stack))
            else:
                indices.append(_in_range(item, stack, spec))
    else:
        raise TypeError(f"layers={spec!r} is a {type(spec).__name__}; allowed are {_FORMS}.")
    if not indices:
        raise ValueError(f"layers={spec!r} chooses no layer. {describe_stacks({stack.name: stack})}")
    twice = sorted({i for i in indices if indices.count(i) > 1})
    if twice:
        raise ValueError(f"layers={spec!r} chooses layer {twice[0]} more than once. Name each layer once.")
    return sorted(indices)


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
    if not stacks:
        return "The model has no stack of layers."
    return "Stacks: " + "; ".join(f"{s.name} ({s.path}), layers 0 to {len(s) - 1}" for s in stacks.values()) + "."


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of PEFT, `torch.compile` and data-parallel training."""
    while True:
        if isinstance(model, PeftModel):
            model = model.get_base_model()
        elif isinstance(model, OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


_List = TypeVar("_List", nn.ModuleList, nn.Sequential)

_FORMS = "a list of indices such as [3, -1], 'last:3', 'first:2', 'last:25%', '4-9', '10-', 'all', or {'stack': ...}"
_COUNT = re.compile(r"(first|last):(\d+(?:\.\d+)?)(%?)")
_RANGE = re.compile(r"(\d+)-(\d*)")


def _parse(text: str, stack: Stack) -> range:
    depth = len(stack)
    text = text.strip()
    if text == "all":
        return range(depth)
    if match := _COUNT.fullmatch(text):
        where, number, percent = match.groups()
        if percent:
            count = max(1, math.floor(float(number) / 100 * depth + 0.5)) if float(number) > 0 else 0
        elif "." in number:
            raise ValueError(f"layers={text!r} asks for a part of a layer; allowed are {_FORMS}.")
        else:
            count = int(number)
        if not 0 < count <= depth:
            raise ValueError(f"layers={text!r} asks for {count} layers. {describe_stacks({stack.name: stack})}")
        return range(count) if where == "first" else range(depth - count, depth)
    if match := _RANGE.fullmatch(text):
        first = int(match[1])
        last = int(match[2]) if match[2] else depth - 1
        if first > last:
            raise ValueError(f"layers={text!r} chooses no layer. {describe_stacks({stack.name: stack})}")
        return range(_in_range(first, stack, text), _in_range(last, stack, text) + 1)
    if re.fullmatch(r"-?\d+", text):
        index = _in_range(int(text), stack, text)
        return range(index, index + 1)
    raise ValueError(f"layers={text!r} is not understood; allowed are {_FORMS}.")


def _in_range(index: object, stack: Stack, spec: object) -> int:
    # numpy and torch integers have __index__; bool has it too, but is never meant as a layer
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise TypeError(f"layers={spec!r} contains {index!r}, a {type(index).__name__}; allowed are {_FORMS}.")
    i = index.__index__()
    if not -len(stack) <= i < len(stack):
        raise ValueError(f"layers={spec!r}: there is no layer {i}. {describe_stacks({stack.name: stack})}")
    return i % len(stack)


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
    return Stack(name, path, tuple(Layer(name, i, f"{path}.{i}", module) for i, module in enumerate(modules)))


def _outermost_lists(module: nn.Module, kind: type[_List], path: str = "") -> Iterator[tuple[str, _List]]:
    if path and isinstance(module, kind) and _holds_layers(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost_lists(child, kind, f"{path}.{name}" if path else name)


def _holds_layers(modules: nn.Module) -> bool:
    """Whether these are layers: like modules that hold parameters and are built of other modules."""
    children = list(modules.children())
    if not children or not all(any(True for _ in c.children()) for c in children):
        return False
    if not all(any(True for _ in c.parameters()) for c in children):
        return False
    return len({type(c) for c in children}) == 1 or all(_is_marked_layer(c) for c in children)


def _is_marked_layer(module: nn.Module) -> bool:
    """Whether transformers marks the module as a layer; hybrid models mix several classes in one stack."""
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)


def _short_names(paths: Sequence[str], prefix: str) -> list[str]:
    parts = []
    for path in paths:
        if prefix and path.startswith(f"{prefix}."):
            path = path[len(prefix) + 1 :]
        parts.append(path.split("."))
    if len(parts) == 1:
        return [(parts[0][-2:-1] or parts[0])[0]]
    owners = [p[:-1] for p in parts]
    common = 0
    while all(len(o) > common for o in owners) and len({o[common] for o in owners}) == 1:
        common += 1
    short = [o[common] if len(o) > common else p[-1] for o, p in zip(owners, parts, strict=True)]
    if len(set(short)) == len(short):
        return short
    return [".".join(p[common:]) for p in parts]
