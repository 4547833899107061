"""Training many layers a few at a time: `RotateLayers`, a callback for transformers' Trainer."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from peft_surgical.copies.host import has_own_memory
from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.tensors import RestingValues, TunedTensors
from peft_surgical.distributed import ddp_around, engine_of, renew_reducer
from peft_surgical.layers import find_stacks
from peft_surgical.methods.before_training import adapter_parameters
from peft_surgical.methods.tuner import DeltaTuner
from peft_surgical.names import as_attribute


ORDERS = ("random", "shuffled", "ascending", "descending")
AT_REST = ("host", "device", "rounded")


class RotateLayers(TrainerCallback):
    """Trains the layers of an adapter in turns, a few at a time: gradients and optimizer state exist for these alone.

    `order="random"` is LISA (Pan et al. 2024, algorithm 1), `"shuffled"` with one layer BAdam (Luo et al. 2024,
    algorithm 1). Each turn begins with a fresh optimizer state. What the adapter trains outside the layers, a head or
    embeddings, is trained all the time. In the end it is an adapter like any other.

    Args:
        layers: How many layers are trained in a turn.
        every: How many optimizer steps a turn lasts.
        order: `"random"` draws the layers of each turn anew; `"shuffled"` draws, for each pass over all layers, an
            order of blocks of neighbours; `"ascending"` and `"descending"` go through the blocks as they lie.
        seed: Of what is drawn. The same in all processes.
        at_rest: Where the float32 values of layers are while these rest, on a base in half precision. `"host"`: in
            host memory; an accelerator has them in the base's dtype, which is what it computes with anyway, so nothing
            changes but the memory. `"device"`: where they are in their turn. `"rounded"`: nowhere; what a turn
            learnt is rounded to the base's dtype at its end, as in BAdam's implementation, and so is the file.

    Raises:
        ValueError: An option is not allowed; or at the start of a training the model, its adapter, the optimizer, the
            engine of distributed training or the checkpoint does not go with it.

    Example:

        >>> RotateLayers(layers=2, every=20).layers_of(0, depth=12)  # give it as Trainer(..., callbacks=[...])
        [4, 5]
    """

    def __init__(
        self, layers: int = 2, every: int = 50, order: str = "random", seed: int = 0, *, at_rest: str = "host"
    ) -> None:
        for name, number in (("layers", layers), ("every", every)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number!r} must be a whole number, 1 or more.")
        for name, choice, allowed in (("order", order, ORDERS), ("at_rest", at_rest, AT_REST)):
            if choice not in allowed:
                raise ValueError(f"{name}={choice!r}: allowed are {', '.join(allowed)}.")
        self.layers, self.every, self.order, self.seed, self.at_rest = layers, every, order, seed, at_rest
        self._release()

    def _release(self) -> None:
        """Hold nothing of a model."""
        self._tuner: Any = None
        self._layers: list[list[nn.Parameter]] = []
        self._dtypes: dict[nn.Parameter, torch.dtype] = {}  # at rest
        self._values = RestingValues()
        self._is_begun = False
        self._wrappers: list[DistributedDataParallel] = []

    def layers_of(self, turn: int, depth: int) -> list[int]:
        """The layers that are trained in a turn.

        Args:
            turn: Its number, from 0.
            depth: How many layers take turns.

        Returns:
            Their numbers, from 0.
        """
        if self.order == "random":
            return sorted(random.Random(f"{self.seed} {turn}").sample(range(depth), self.layers))
        blocks = [list(range(i, min(i + self.layers, depth))) for i in range(0, depth, self.layers)]
        if self.order == "shuffled":
            random.Random(f"{self.seed} {turn // len(blocks)}").shuffle(blocks)
        elif self.order == "descending":
            blocks.reverse()
        return blocks[turn % len(blocks)]

    # ---- events of Trainer

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        _wake(model)  # before the optimizer is made, if a training before this one was interrupted

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        tuner = _wake(model)
        self._release()  # a training before this one may have been interrupted
        self._tuner = tuner
        trained = {p for _, p in adapter_parameters(model, self._tuner.active_adapters) if p.requires_grad}
        modules = [layer.module for stack in find_stacks(model).values() for layer in stack.layers]
        self._layers = [inside for m in modules if (inside := [p for p in m.parameters() if p in trained])]
        if len(self._layers) < self.layers:
            raise ValueError(
                f"RotateLayers(layers={self.layers}): the adapter trains {len(self._layers)} layers. Give fewer here, "
                "or choose more in its config."
            )
        self._check_optimizer(model, optimizer)
        if engine_of(model) == "FSDP2":
            self._check_options_of_fsdp2(args)
        if state.global_step % self.every:
            self._check_checkpoint(state.global_step, optimizer)
        if self.at_rest == "rounded" or (self.at_rest == "host" and engine_of(model) != "FSDP2"):
            self._prepare_rest(model)
        self._wrappers = ddp_around(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        turn = self._turn(state.global_step)
        resting = [p for layer in self._layers for p in layer if p not in turn]
        for parameter in turn:
            parameter.requires_grad_(True)
        self._tuner.resting = resting  # first, so that an interrupt leaves none frozen that is not known
        for parameter in resting:
            parameter.requires_grad_(False)
        is_new = state.global_step % self.every == 0
        if is_new or not self._is_begun:
            self._is_begun = True
            self._lay_to_rest(resting)
            for parameter in turn:
                self._wake(parameter)
            for wrapper in self._wrappers:
                renew_reducer(wrapper)
        if is_new:
            for parameter in [*turn, *resting]:
                parameter.grad = None
                optimizer.state.pop(parameter, None)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.at_rest == "rounded":
            self._lay_to_rest(p for layer in self._layers for p in layer)
        _wake(model)
        self._release()

    # ---- turns

    def _turn(self, step: int) -> dict[nn.Parameter, None]:
        """What is trained in the turn of a step."""
        numbers = self.layers_of(step // self.every, len(self._layers))
        return {parameter: None for number in numbers for parameter in self._layers[number]}

    def _prepare_rest(self, model: nn.Module) -> None:
        """Find the copies that another dtype is enough for while they rest: what they are cast to in each call."""
        for module in model.modules():
            if not isinstance(module, TunedModule):
                continue
            for adapter in set(module.active_adapters) & set(module.tuned):
                entry = module.tuned[adapter]
                entry.resting = self._values
                for name in entry.names:
                    copy = entry._parameters.get(as_attribute(name))
                    if copy is not None and (self.at_rest == "rounded" or has_own_memory(copy)):  # else a buffer
                        self._dtypes[copy] = module._dtype_of(name)

    def _lay_to_rest(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            dtype = self._dtypes.get(parameter, parameter.dtype)
            if self.at_rest == "rounded":
                parameter.data = parameter.data.to(dtype)
            else:
                self._values.lay_down(parameter, dtype)
            increment_version(parameter)  # a fused AdamW does not, and what is cast for inference is kept by it

    def _wake(self, parameter: nn.Parameter) -> None:
        if self.at_rest == "rounded" and parameter in self._dtypes:
            parameter.data = parameter.data.float()
        self._values.wake(parameter)

    # ---- checks

    def _check_optimizer(self, model: nn.Module, optimizer: Any) -> None:
        held = {p for group in optimizer.param_groups for p in group["params"]}
        if engine_of(model) == "FSDP1" or not all(p in held for layer in self._layers for p in layer):
            raise ValueError(
                "RotateLayers needs an optimizer that was made while all layers of the adapter were trainable, and "
                "holds their own tensors. FSDP1 and DeepSpeed put others in their places: use DDP or FSDP2."
            )

    def _check_options_of_fsdp2(self, args: Any) -> None:
        if self.at_rest == "rounded":
            raise ValueError("at_rest='rounded' changes the dtype of tensors, which FSDP2 does not allow.")
        if args.save_strategy != "no" and not args.save_only_model:
            raise ValueError(
                "Under FSDP2 no optimizer state can be loaded that lacks some layers, so a training with RotateLayers "
                "cannot be resumed with it. Save checkpoints without: save_only_model=True, or save_strategy='no'."
            )

    def _check_checkpoint(self, step: int, optimizer: Any) -> None:
        """Check that a training may go on inside a turn."""
        turn = self._turn(step)
        if any(optimizer.state.get(p) for layer in self._layers for p in layer if p not in turn):
            raise ValueError(
                f"The checkpoint of step {step} has an optimizer state of layers that are not trained then. Resume "
                "with the options that the training was begun with."
            )


def _wake(model: nn.Module) -> DeltaTuner:
    """The tuner of a model, with no layer at rest."""
    for module in model.modules():
        if isinstance(module, TunedTensors):
            module.wake()
    for module in model.modules():
        if isinstance(module, DeltaTuner):
            for parameter in module.resting:
                parameter.requires_grad_(True)
            module.resting = ()
            return module
    raise ValueError(
        f"RotateLayers trains the layers of an adapter, and this {type(model).__name__} has none of this package. "
        "Make one: get_peft_model(model, SurgicalConfig(layers='all'))."
    )
