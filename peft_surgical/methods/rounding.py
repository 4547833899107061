"""Steps of bfloat16 parameters without a float32 copy of them: `round_stochastically`."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


COUNT = "rounded_steps"
"""Where the number of the next step is kept: in the first group of parameters, which is saved and loaded."""


def round_stochastically(optimizer_class: type[Optimizer], seed: int = 0) -> type[Optimizer]:
    """An optimizer that takes the steps of bfloat16 parameters in float32 and rounds what comes out at random.

    Each number becomes one of its two neighbours, the nearer one more often, so that small steps are not lost but
    right in the mean (Gupta et al. 2015, section 3). The optimizer's states are those of float32 parameters. What is
    drawn depends on the seed and the number of the step alone: the processes of DDP stay alike, and a training that
    is resumed goes on as it would have. One parameter at a time is in float32; those of other dtypes are left to the
    optimizer.

    Args:
        optimizer_class: An optimizer that updates each parameter for itself, of torch or bitsandbytes for instance.
        seed: Of what is drawn, the same in all processes.

    Returns:
        A class to use in its place. Its `step` raises a `TypeError` if the optimizer has a state of all parameters.

    Raises:
        TypeError: The optimizer computes the loss itself, as LBFGS does.

    Example:

        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> optimizer = round_stochastically(torch.optim.AdamW)([weight], lr=1e-4)
        >>> # or Trainer(..., optimizer_cls_and_kwargs=(round_stochastically(torch.optim.AdamW), {"lr": 1e-4}))
    """
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(f"{optimizer_class.__name__} computes the loss itself, for all parameters. Use AdamW.")
    # without the hooks around a step, which are to run once
    take_step = inspect.unwrap(optimizer_class.step, stop=lambda step: not getattr(step, "hooked", False))

    class Rounded(optimizer_class):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            groups = self.param_groups
            number = groups[0].setdefault(COUNT, 0)
            for state in self.state.values() if number == 0 else ():  # made by the constructor, as Adagrad's
                state.update({k: v.float() for k, v in state.items() if getattr(v, "dtype", None) == torch.bfloat16})
            before = [{**group} for group in groups]
            draw = random.Random(f"{seed} {number}").getrandbits(63)
            generators: dict[torch.device, torch.Generator] = {}
            gradients = {p: p.grad for group in groups for p in group["params"] if p.grad is not None}
            places = [(held, index) for held, index in _halves(self) if held[index] in gradients]
            for held, index in places:
                held[index].grad = None
            take_step(self)  # the others
            for parameter in gradients:
                parameter.grad = None
            for held, index in places:
                parameter = held[index]
                full = nn.Parameter(parameter.detach().float())
                full.grad = gradients[parameter].float()
                with _replaced(self, [(held, index, full)]):
                    take_step(self)  # this one alone, since no other has a gradient
                if (device := parameter.device) not in generators:
                    generators[device] = torch.Generator(device).manual_seed(draw)
                _local(parameter).copy_(round_at_random(_local(full), generators[device]))
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            if any(group[k] is not old.get(k) for group, old in zip(groups, before, strict=True) for k in group):
                raise TypeError(
                    f"{optimizer_class.__name__} has a state of all parameters, so it cannot update one after the "
                    "other. Use AdamW, or train float32 copies."
                )
            groups[0][COUNT] = number + 1
            return loss

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            empty = [(held, i, nn.Parameter(held[i].new_empty(0, dtype=torch.float32))) for held, i in _halves(self)]
            with _replaced(self, empty):  # states are cast to the dtype of their parameter
                super().load_state_dict(state_dict)

    Rounded.__name__ = Rounded.__qualname__ = f"{optimizer_class.__name__}Rounded"
    Rounded.__module__ = optimizer_class.__module__  # by which transformers knows those of bitsandbytes
    return Rounded


def round_at_random(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Float32 values rounded to bfloat16, each to one of its neighbours, so that the mean of draws is the value."""
    noise = torch.randint(1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    # bfloat16 is the upper half of float32; the lower half says how far the value is on the way to the next one
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def _halves(optimizer: Optimizer) -> list[tuple[list[nn.Parameter], int]]:
    """The places of bfloat16 parameters in the lists of an optimizer's groups."""
    lists = [group["params"] for group in optimizer.param_groups]
    return [(held, index) for held in lists for index, p in enumerate(held) if p.dtype == torch.bfloat16]


@contextmanager
def _replaced(optimizer: Optimizer, others: list[tuple[list[nn.Parameter], int, nn.Parameter]]) -> Iterator[None]:
    """In here an optimizer holds others in these places. A parameter would lose DDP's hooks with its own dtype."""

    def exchange() -> None:
        for number, (held, index, new) in enumerate(others):
            old = held[index]
            held[index], others[number] = new, (held, index, old)
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)

    exchange()
    try:
        yield
    finally:
        exchange()


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that FSDP2 has sharded."""
    part: Any = tensor.detach()
    return part.to_local() if isinstance(part, DTensor) else part
