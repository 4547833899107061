"""Find a model's stacks of transformer layers, and the layers that a user means by what may be written for them.

Layers are found in the module tree, by object: a stack is an outermost `nn.ModuleList` (or, in a model without any, an
outermost `nn.Sequential`) of like modules that are built of other modules and hold parameters. Names are never matched
as text.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass

from accelerate.utils import extract_model_from_parallel
from peft import PeftMixedModel, PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


LayerSpec = str | Sequence[int | str] | Mapping[str, "str | Sequence[int | str]"]
"""What a user may write for layers, see `resolve_layers`."""

_PLACES: dict[str, Callable[[int, int], Sequence[int]]] = {  # of so many layers of a stack of so many
    "first": lambda count, depth: range(count),
    "last": lambda count, depth: range(depth - count, depth),
    "middle": lambda count, depth: range((depth - count) // 2, (depth + count) // 2),
    "spread": lambda count, depth: [(2 * i + 1) * depth // (2 * count) for i in range(count)],
    "alternate": lambda count, depth: [*range(1, depth, 2), *range(0, depth, 2)][:count],
}
_FORMS = ", ".join(f"'{p}:3'" for p in _PLACES) + ", 'last:25%', '4-9', '10-', 'all', [3, -1], {'stack': ...}"
_COUNT = re.compile(rf"({'|'.join(_PLACES)}):(\d+(?:\.\d+)?)(%?)")
_RANGE = re.compile(r"(\d+)-(\d*)")


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
        layers: Indices (negative ones count from the end), `"4-9"` (both ends included), `"10-"`, `"all"`; a number or
            share of layers as `"last:3"`, `"last:25%"`, `"first:2"`, `"middle:5"`, `"spread:5"` (at equal distances),
            `"alternate:5"` (every other layer from the second, then the rest); or a mapping from stack names to these.
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
        >>> [layer.index for layer in resolve_layers(model, "spread:50%")]
        [1, 3, 5]
        >>> [layer.path for layer in resolve_layers(model, [0, -1])]
        ['encoder.layer.0', 'encoder.layer.5']
    """
    stacks = find_stacks(model := unwrap(model))
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
    stacks = find_stacks(model := unwrap(model))
    if stack is not None:
        return _named(model, stacks, stack)
    if len(stacks) == 1:
        return next(iter(stacks.values()))
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
    if found := [stack for stack in stacks.values() if name in (stack.name, stack.path)]:
        return found[0]
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


def layer_indices(spec: str | Sequence[int | str], stack: Sized) -> list[int]:
    """The indices in one stack that a specification means, ascending; errors as in `resolve_layers`."""
    if isinstance(spec, (Mapping, bytes)) or not isinstance(spec, Iterable):
        raise TypeError(f"layers={spec!r} is a {type(spec).__name__}; allowed are {_FORMS}.")
    indices: list[int] = []
    for item in [spec] if isinstance(spec, str) else spec:
        indices.extend(_parse(item, stack) if isinstance(item, str) else [_in_range(item, stack, spec)])
    twice = [i for i in indices if indices.count(i) > 1]
    if twice or not indices:
        fault = f"layer {twice[0]} more than once; name each layer once" if twice else "no layer"
        raise ValueError(f"layers={spec!r} chooses {fault}. Stack: {stack}.")
    return sorted(indices)


def _parse(text: str, stack: Sized) -> Sequence[int]:
    depth, text = len(stack), text.strip()
    if text == "all":
        return range(depth)
    if match := _COUNT.fullmatch(text):
        where, number, percent = match.groups()
        wanted = float(number) * depth / 100 if percent else float(number)
        if not 0 < wanted <= depth or ("." in number and not percent):
            raise ValueError(f"layers={text!r} must be 1 to {depth} layers or a share up to 100%. Stack: {stack}.")
        count = max(1, math.floor(wanted + 0.5))
        return _PLACES[where](count, depth)
    if match := _RANGE.fullmatch(text):
        first, last = int(match[1]), int(match[2] or depth - 1)
        if first > last:
            raise ValueError(f"layers={text!r} chooses no layer. Stack: {stack}.")
        return range(_in_range(first, stack, text), _in_range(last, stack, text) + 1)
    if re.fullmatch(r"-?\d+", text):
        return range(index := _in_range(int(text), stack, text), index + 1)
    raise ValueError(f"layers={text!r} is not understood; allowed are {_FORMS}.")


def _in_range(index: object, stack: Sized, spec: object) -> int:
    # numpy and torch integers are indices too; a truth value is one for Python, but is never meant as a layer
    try:
        if isinstance(index, bool):
            raise TypeError
        i = operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"layers={spec!r} contains {index!r}, a {type(index).__name__}; allowed are {_FORMS}."
        ) from None
    if not -len(stack) <= i < len(stack):
        raise ValueError(f"layers={spec!r}: there is no layer {i}. Stack: {stack}.")
    return i % len(stack)
