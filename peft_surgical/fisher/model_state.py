"""Measure on a model and leave no trace, whatever happens in between."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn


_LARGEST_BUFFER = 2**20
"""Entries of a buffer up to which its contents are copied, to be put back if a forward pass writes to them."""


@contextmanager
def untouched(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """A context for measuring: evaluation mode, nothing requires a gradient, adapters off, no caches; all put back.

    Args:
        model: Any module, also one that holds adapters.
        seed: Seeds the global random number generators inside the context, for data collators that use them.

    Raises:
        ValueError: An adapter is merged into the base.

    Example:

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train()
        >>> with untouched(model):
        ...     model.training, model[0].weight.requires_grad
        (False, False)
        >>> model.training, model[0].weight.requires_grad
        (True, True)
    """
    modules = list(model.modules())
    # by place: a module with offloaded weights has other parameter objects after each call
    parameters = [(m, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
    with ExitStack() as stack:
        # what is entered first is put back last: switching adapters back on changes what requires a gradient
        stack.enter_context(_same_flags(modules, parameters))
        stack.enter_context(_same_buffers(modules))
        stack.enter_context(same_random_numbers((p for _, _, p in parameters), seed))
        stack.enter_context(_adapters_off(modules))
        stack.enter_context(_no_cache(modules))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for module in modules:
            if module.training:
                module.training = False
        for _, _, parameter in parameters:
            if parameter.requires_grad:
                parameter.requires_grad_(False)
        yield


@contextmanager
def _same_flags(
    modules: Sequence[nn.Module], parameters: Sequence[tuple[nn.Module, str, nn.Parameter]]
) -> Iterator[None]:
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
    configs: dict[int, Any] = {}
    for module in modules:
        config = module.__dict__.get("config")
        if getattr(config, "use_cache", None):
            configs[id(config)] = config
    try:
        for config in configs.values():
            config.use_cache = False
        yield
    finally:
        for config in configs.values():
            config.use_cache = True
