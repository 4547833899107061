"""What of vLLM the worker's weight path calls, for machines that have no vLLM: the same steps, copies and modules.

Reloading is that of vLLM 0.32: every module's parameters make way for empty ones; what is loaded is held back until a
module has all of its elements, goes into new memory on the device by the loaders of its parameters, and is copied from
there to where the parameters were.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


CHUNK = 512 << 20  # bytes of a call of the model's loader


class CheckpointWeightPatch(NamedTuple):
    """A tensor of the checkpoint; values are flat."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor


@torch.no_grad()
def load_checkpoint_weight_patches(model: Any, patches: Iterable[CheckpointWeightPatch]) -> set[str]:
    """Give the tensors to the model's own loader, some at a time; gives the parameters' names."""
    chunk: list[tuple[str, torch.Tensor]] = []
    loaded, size = set(), 0
    for patch in list(patches):
        nbytes = math.prod(patch.shape) * patch.dtype.itemsize
        if chunk and size + nbytes > CHUNK:
            loaded |= model.load_weights(chunk)
            chunk, size = [], 0
        chunk.append((patch.name, patch.values.to(patch.dtype).view(patch.shape)))
        size += nbytes
    return loaded | model.load_weights(chunk)


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


class _Reload:
    """What is known of a module while it is loaded anew."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.kept = dict(module._parameters)
        self.loaded: list[tuple[str, Callable[..., Any], inspect.BoundArguments]] = []
        self.count = 0
        for name, own in self.kept.items():
            assert own is not None
            delattr(module, name)
            empty = nn.Parameter(own.data.to("meta"), requires_grad=False)
            loader = getattr(own, "weight_loader", copy_whole)
            empty.weight_loader = self._holding_back(name, loader, inspect.signature(loader))
            module.register_parameter(name, empty)

    def _holding_back(
        self, name: str, loader: Callable[..., Any], signature: inspect.Signature
    ) -> Callable[..., None]:
        def load(*args: Any) -> None:
            bound = signature.bind(*args)
            self.loaded.append((name, loader, bound))
            with _Count() as count:
                loader(*bound.args)
            self.count += count.elements
            if self.count >= sum(own.numel() for own in self.kept.values() if own is not None):
                self.process()

        return load

    def process(self) -> None:
        new = {name: torch.empty_like(own) for name, own in self.kept.items() if own is not None}
        for name, loader, bound in self.loaded:
            bound.arguments["param"] = new[name]
            loader(*bound.args)
        for name, tensor in new.items():
            own = self.kept[name]
            assert own is not None
            own.data.copy_(tensor)
        self.put_back()

    def put_back(self) -> None:
        for name, own in self.kept.items():
            delattr(self.module, name)
            self.module.register_parameter(name, own)
        self.kept = {}


def initialize_layerwise_reload(model: Any) -> None:
    """Begin to load some modules anew."""
    model.reloading = [_Reload(module) for module in model.modules()]


def finalize_layerwise_reload(model: Any, model_config: Any) -> None:
    """Put back the parameters of modules that were not loaded."""
    for reload in model.__dict__.pop("reloading"):
        reload.put_back()


def copy_whole(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """The loader of a parameter that the checkpoint has as one tensor."""
    assert param.shape == loaded_weight.shape
    param.data.copy_(loaded_weight)


def copy_into_rows(starts: dict[str, int]) -> Callable[..., None]:
    """The loader of a parameter that is several tensors of the checkpoint, by the rows at which these begin."""

    def load(param: torch.Tensor, loaded_weight: torch.Tensor, loaded_shard_id: str) -> None:
        place = param.data.narrow(0, starts[loaded_shard_id], len(loaded_weight))
        assert place.shape == loaded_weight.shape
        place.copy_(loaded_weight)

    return load


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""By vLLM's names of a Llama's modules, what the checkpoint calls their parts."""


class ServedLlama(nn.Module):
    """The parameters of a Llama as vLLM has them, and as many modules; it computes nothing."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.parts: dict[str, tuple[str, str, int, int]] = {}
        """Of each tensor of the checkpoint: the parameter, its name in there, its first row and its rows."""
        sizes: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            *path, own, weight = name.split(".")
            fused = next((fused for fused, parts in FUSED.items() if own in parts), own)
            place = ".".join([*path, fused, weight])
            start = sizes.get(place, (0,))[0]
            self.parts[name] = place, own, start, shape[0]
            sizes[place] = (start + shape[0], *shape[1:])
        for place, shape in sizes.items():
            module: nn.Module = self
            *path, weight = place.split(".")
            for step in path:
                if not hasattr(module, step):
                    module.add_module(step, nn.Module())
                module = getattr(module, step)
            parameter: Any = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
            if path[-1] in FUSED:
                starts = {own: start for own_place, own, start, _ in self.parts.values() if own_place == place}
                parameter.weight_loader = copy_into_rows(starts)
            module.register_parameter(weight, parameter)
        for path, module in list(self.named_modules()):
            for name in {"self_attn": ("attn", "rotary_emb"), "mlp": ("act_fn",)}.get(path.rpartition(".")[2], ()):
                module.add_module(name, nn.Module())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors of a checkpoint."""
        weights = list(weights)
        for name, tensor in weights:
            place, own, *_ = self.parts[name]
            parameter: Any = self.get_parameter(place)
            is_fused = place.split(".")[-2] in FUSED
            getattr(parameter, "weight_loader", copy_whole)(parameter, tensor, *[own] * is_fused)
        return {self.parts[name][0] for name, _ in weights}

    def served(self, name: str) -> torch.Tensor:
        """What is served of a tensor of the checkpoint."""
        place, _, start, rows = self.parts[name]
        return self.get_parameter(place).data.narrow(0, start, rows)


def install() -> None:
    """Let `peft_surgical.vllm.worker` be imported where there is no vLLM."""
    loader = "vllm.model_executor.model_loader"
    contents = {
        "vllm": {},
        "vllm.config": {"set_current_vllm_config": lambda config: nullcontext()},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_world_group": one_worker},
        "vllm.model_executor": {},
        loader: {},
        f"{loader}.checkpoint_weight_patch": {
            "CheckpointWeightPatch": CheckpointWeightPatch,
            "load_checkpoint_weight_patches": load_checkpoint_weight_patches,
        },
        f"{loader}.reload": {
            "initialize_layerwise_reload": initialize_layerwise_reload,
            "finalize_layerwise_reload": finalize_layerwise_reload,
        },
    }
    for name, members in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(members)
        sys.modules[name] = module


def one_worker() -> SimpleNamespace:
    """The group of the one worker that there is."""
    return SimpleNamespace(world_size=1)
