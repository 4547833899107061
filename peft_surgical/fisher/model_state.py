"""The parameters of a model that are measured, and the model left as it was, whatever happens in between."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from peft_surgical.fisher.calls import OwnHook
from peft_surgical.fisher.rules import is_packed_linear
from peft_surgical.layers import Layer


Place = tuple[nn.Module, str, nn.Parameter]

_LARGEST_BUFFER = 2**20
"""Entries of a buffer up to which its contents are copied, to be put back if a forward pass writes to them."""


@contextmanager
def untouched(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """A context for measuring: evaluation mode, nothing requires a gradient, adapters off, no caches, global random
    numbers from the seed; all put back. A `ValueError` if an adapter is merged into the base."""
    modules = list(model.modules())
    parameters = _by_place(modules)
    stack = ExitStack()
    try:
        # what is entered first is put back last: switching adapters back on changes what requires a gradient
        stack.enter_context(_same_flags(modules, parameters))
        stack.enter_context(_same_buffers(modules))
        stack.callback(_remove_hooks, modules)
        stack.enter_context(same_random_numbers((p for _, _, p in parameters), seed))
        stack.enter_context(_adapters_off(modules))
        stack.enter_context(_no_cache(modules))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        _freeze(modules, parameters)
        yield
    finally:
        with uninterrupted():
            stack.close()


@contextmanager
def at_rest(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which modules beside the model are in evaluation mode and nothing of them requires a gradient;
    these and their buffers are put back."""
    parameters = _by_place(modules)
    with _same_flags(modules, parameters), _same_buffers(modules):
        _freeze(modules, parameters)
        yield


def _by_place(modules: Sequence[nn.Module]) -> list[Place]:
    """The parameters by their place: a module with offloaded weights has other parameter objects after each call."""
    return [(m, name, p) for m in modules for name, p in m._parameters.items() if p is not None]


def _freeze(modules: Sequence[nn.Module], parameters: Sequence[Place]) -> None:
    for module in modules:
        # in evaluation bitsandbytes packs 4-bit weights for the CPU, for good and without a backward pass
        training = hasattr(module._parameters.get("weight"), "quant_state")
        if module.training != training:
            module.training = training
    for _, _, parameter in parameters:
        if parameter.requires_grad:
            parameter.requires_grad_(False)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A context that Ctrl-C ends only after its end, however it ends."""
    alone = threading.current_thread() is threading.main_thread()  # only the main thread is interrupted
    if not alone or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        pressed = True

    handler = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def _remove_hooks(modules: Sequence[nn.Module]) -> None:
    """Remove what an interrupt left behind while hooks were set or removed."""
    for module in modules:
        for key in [key for key, hook in module._forward_hooks.items() if isinstance(hook, OwnHook)]:
            del module._forward_hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)


@contextmanager
def _same_flags(modules: Sequence[nn.Module], parameters: Sequence[Place]) -> Iterator[None]:
    training = [module.training for module in modules]
    requiring = [parameter.requires_grad for _, _, parameter in parameters]
    try:
        yield
    finally:
        for module, flag in zip(modules, training, strict=True):
            if module.training != flag:
                module.training = flag
        for (module, name, _), flag in zip(parameters, requiring, strict=True):
            parameter = module._parameters[name]
            if parameter is not None and parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


@contextmanager
def _same_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    kept = []
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                small = buffer.numel() <= _LARGEST_BUFFER and not buffer.is_meta
                kept.append((module, name, buffer, buffer.clone() if small else None))
    try:
        yield
    finally:
        for module, name, buffer, copy in kept:
            module._buffers[name] = buffer
            if copy is not None and not torch.equal(buffer, copy):
                with torch.no_grad():
                    buffer.copy_(copy)


@contextmanager
def same_random_numbers(parameters: Iterable[nn.Parameter], seed: int) -> Iterator[None]:
    """A context that seeds the global random number generators and puts their state back."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = {parameter.device for parameter in parameters}
    cuda = sorted(device.index or 0 for device in devices if device.type == "cuda")
    try:
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _adapters_off(modules: Sequence[nn.Module]) -> Iterator[None]:
    wrappers = [m for m in modules if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    for wrapper in wrappers:
        if getattr(wrapper, "merged", False):
            raise ValueError(
                "An adapter is merged into the base model, so the base cannot be measured. Call unmerge_adapter() "
                "first."
            )
    active = [wrapper for wrapper in wrappers if not wrapper.disable_adapters]
    try:
        for wrapper in active:
            wrapper.enable_adapters(False)
        yield
    finally:
        for wrapper in active:
            wrapper.enable_adapters(True)


@contextmanager
def _no_cache(modules: Sequence[nn.Module]) -> Iterator[None]:
    configs = {id(c): c for c in (module.__dict__.get("config") for module in modules) if c is not None}.values()
    # a model writes down what kind of problem it has when it computes a loss
    kept = [(c, name, getattr(c, name)) for c in configs for name in ("use_cache", "problem_type") if hasattr(c, name)]
    try:
        for config, name, value in kept:
            if name == "use_cache" and value:
                config.use_cache = False
        yield
    finally:
        for config, name, value in kept:
            setattr(config, name, value)


class Owner(NamedTuple):
    """A module, and some parameters that it owns itself."""

    path: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]  # by their name in the module


def layer_parameters(layers: Sequence[Layer]) -> list[dict[str, nn.Parameter]]:
    """The base's parameters of each layer, by name. One that several layers share counts for the first of them."""
    seen: set[int] = set()
    found = []
    for layer in layers:
        own = {}
        for name, p in _base_parameters(layer.module):
            if id(p) not in seen:
                seen.add(id(p))
                own[name] = p
        found.append(own)
    return found


def find_owners(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[Owner]:
    """The modules that own some of these parameters, in the order of the model. To be called before the model runs:
    offloaded modules have other parameter objects after each call."""
    wanted = {id(p) for p in parameters}
    owners = []
    for path, module in model.named_modules():
        if not module._parameters and not module._buffers:
            continue
        own = {name: p for name, p in own_parameters(module) if id(p) in wanted}
        if own:
            owners.append(Owner(path, module, own))
    return owners


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a module owns itself. The packed weight of a quantised linear map counts as one."""
    for name, p in module._parameters.items():  # named_parameters takes ten times as long
        if p is not None:
            yield name, p
    if is_packed_linear(module):
        if module not in _packed:
            shape = (module.out_features, module.in_features)
            _packed[module] = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)  # type: ignore
        yield "weight", _packed[module]


_packed: WeakKeyDictionary[nn.Module, nn.Parameter] = WeakKeyDictionary()
"""What stands for the packed weight of a module: an empty parameter with the weight's shape."""


def _base_parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module, without those of adapters."""
    yield from ((prefix + name, p) for name, p in own_parameters(module))
    for name, child in module._modules.items():
        if isinstance(child, BaseTunerLayer):
            if "base_layer" not in child._modules:
                continue  # it tunes the module that it is a child of
            child = child.get_base_layer()
        elif isinstance(child, AuxiliaryTrainingWrapper):
            child = child.original_module
        if child is not None:
            yield from _base_parameters(child, f"{prefix}{name}.")
