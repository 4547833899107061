"""The memory of a training step and the size of what it saves, counted in the tensors that there are."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import nn

from peft_surgical.compat import TorchDispatchMode, tree_flatten
from peft_surgical.copies.module import TunedModule
from peft_surgical.files.encodings import ENCODINGS
from peft_surgical.methods.wrappers import live_tensors


@dataclass(frozen=True)
class Memory:
    """Bytes on the device in a training step; None is what was not measured."""

    weights: int  # the base model's parameters and buffers
    copies: int  # what the method adds: copies of tuned weights, LoRA's matrices, the task's head
    gradients: int
    optimizer: int  # its states
    activations: int | None = None  # what is kept for the backward pass
    peak: int | None = None
    """The most that there is of all at one time, workspace as well; less than the sum where activations are gone
    before all gradients are there."""

    @property
    def total(self) -> int:
        """The peak, or the sum of what is known."""
        return self.peak or self.weights + self.copies + self.gradients + self.optimizer


def memory_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, is_rounded: bool = False) -> Memory:
    """What a model and an optimizer hold: the gradients and states that are there now, or without an optimizer those
    that AdamW will make, in float32 if it rounds stochastically."""
    copies = nbytes(live_tensors(model, "default").values())
    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer is None:
        gradients = sum(p.nbytes for p in trained)
        # two moments of each number, and each tensor's count of steps
        states = sum(2 * p.numel() * (4 if is_rounded else p.itemsize) + 4 for p in trained)
    else:
        gradients = nbytes(p.grad for p in trained if p.grad is not None)
        states = nbytes(states_of(optimizer))
    places = {p.device for p in trained}  # the base's own values of what is tuned may lie on the host
    held = nbytes(tensor for tensor in held_by(model) if tensor.device in places)
    return Memory(held - copies, copies, gradients, states)


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """All tensors that an optimizer holds."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def eight_bit_states(model: nn.Module) -> int:
    """The bytes of the states of bitsandbytes' AdamW in 8 bits."""
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    # two bytes a number and two scales a block of 256; tensors below 4096 numbers stay in float32
    return sum(8 * n if n < 4096 else 2 * n + 8 * -(-n // 256) for n in trained)


def held_by(model: nn.Module) -> Iterator[torch.Tensor]:
    """All tensors that a model holds: parameters, buffers, and what bitsandbytes keeps beside quantised weights."""
    yield from model.parameters()
    yield from model.buffers()
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            yield from (value for value in vars(state).values() if isinstance(value, torch.Tensor))
            state = getattr(state, "state2", None)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors, where those that share memory count once.

    Example:

        >>> ten = torch.zeros(10)
        >>> nbytes([ten, ten[:5], torch.zeros(2)])
        48
    """
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())


def file_sizes(model: nn.Module) -> dict[str, int]:
    """The most that the saved tensors of a model take, in bytes, by encoding; of a lossless one the data decide."""
    if not isinstance(model, PeftModel):
        return {"values": nbytes(model.state_dict().values())}
    values = sum(t.nbytes for t in get_peft_model_state_dict(model, save_embedding_layers=False).values())
    copies = [
        tensor
        for module in model.modules()
        if isinstance(module, TunedModule)
        for tensor in getattr(module, module.adapter_layer_names[0])["default"].state_dict().values()
        if tensor.ndim > 1  # others stay as they are
    ]
    sizes = {"values": values}
    for name in ENCODINGS if copies else ():
        if ENCODINGS[name].lossy:
            sizes[name] = values - sum(max(0, tensor.nbytes - _encoded(name, tensor)) for tensor in copies)
    return sizes


def _encoded(encoding: str, tensor: torch.Tensor) -> int:
    chosen = ENCODINGS[encoding]
    parts = chosen.part_shapes(tensor.shape)
    norms = 8  # of the error and of the difference, in float32
    return norms + sum(math.prod(shape or ()) * chosen.dtypes[part].itemsize for part, shape in parts.items())


class PeakOnCPU(TorchDispatchMode):
    """Counts what PyTorch has allocated, from what is held before it was entered on, as
    `torch.cuda.max_memory_allocated` does on a GPU; what an operation takes for itself and gives back is not seen."""

    def __init__(self, held: Iterable[torch.Tensor]):
        super().__init__()
        held = [*held]
        self._known = {tensor.untyped_storage().data_ptr() for tensor in held}
        self._now = self.peak = nbytes(held)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operation(*args, **(kwargs or {}))
        for tensor in tree_flatten(made)[0]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                place, size = storage.data_ptr(), storage.nbytes()
                if place not in self._known:
                    self._known.add(place)
                    self._now += size
                    weakref.finalize(storage, self._forget, place, size)
        self.peak = max(self.peak, self._now)
        return made

    def _forget(self, place: int, size: int) -> None:
        self._known.discard(place)
        self._now -= size


def let_go(model: nn.Module) -> None:
    """Let go of what a step that did not fit has left."""
    model.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
