"""What is checked and set before a model is trained: what is trained, and how far down the backward pass reaches.

Reentrant gradient checkpointing gives no gradients to a layer none of whose inputs requires one. So PEFT and
transformers let the output of the embeddings require a gradient (`enable_input_require_grads`), which makes the
backward pass run through all frozen layers too, for nothing. Here the output of the layer below the lowest trained one
does so instead. Without reentrant checkpointing nothing needs to.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.utils.hooks import RemovableHandle

from peft_surgical.copies.host import BaseOnHost
from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.select import token_embeddings
from peft_surgical.distributed import engine_of
from peft_surgical.layers import find_stacks
from peft_surgical.methods.held_buffers import HeldBuffers
from peft_surgical.methods.report import GradientWatch, is_anything_trained_before
from peft_surgical.names import CONTAINERS


logger = logging.getLogger(__name__)

_WHOLE = (*CONTAINERS, "modules_to_save")  # what holds tensors that stand for the base's own
_ON_EMBEDDINGS = ("make_inputs_require_grads", "make_inputs_require_grad")  # the hooks of transformers and PEFT


def adapter_parameters(model: nn.Module, adapters: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of some adapters in a model, heads included, by their names in the model."""
    for path, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            for attribute in module.adapter_layer_names:
                table: Any = attrgetter(attribute)(module)
                for name, parameter in table.named_parameters():
                    if name.partition(".")[0] in adapters:
                        yield f"{path}.{attribute}.{name}", parameter


@torch.compiler.disable  # where a compiled model is in several pieces, this would be compiled by itself
def before_training(tuner: Any) -> None:
    """What is done before each forward pass in training."""
    tuner.__dict__.setdefault("_backward_start", BackwardStart())
    if "_held_buffers" not in tuner.__dict__ or not tuner._is_trained_set_checked:
        tuner._is_trained_set_checked = True
        tuner._base_on_host = None  # an engine may have taken the model over since
        tuner._held_buffers = HeldBuffers()
        warn_of_surprises(tuner, tuner._frozen_on_purpose)
        tuner._backward_start.look_again()
        for module in tuner.model.modules():
            if isinstance(module, TunedModule):
                module._kept.clear()  # a fused AdamW leaves no trace in a tensor's version
        tuner._gradient_watch = GradientWatch(adapter_parameters(tuner.model, tuner.active_adapters))
    BaseOnHost.of(tuner).before_forward()
    tuner._backward_start.update(tuner.model)
    tuner._gradient_watch.update()


def warn_of_surprises(tuner: Any, frozen_on_purpose: Collection[str] = ()) -> None:
    """Warn if something else is trained than the active adapters say, but for those that PEFT's own functions froze.

    Frameworks and helpers (`prepare_model_for_kbit_training`) freeze or unfreeze parameters by their own rules.
    Without this, training would do nothing, or would change weights that are not saved, in silence.
    """
    for_inference = [name for name in tuner.active_adapters if tuner.peft_config[name].inference_mode]
    active = [name for name in tuner.active_adapters if name not in {*frozen_on_purpose, *for_inference}]
    declared = dict(adapter_parameters(tuner.model, active))
    if for_inference and not any(parameter.requires_grad for parameter in tuner.model.parameters()):
        warnings.warn(
            f"The model is in training mode, but adapter {for_inference[0]!r} was loaded for inference, so that "
            "nothing is trained. Load it with is_trainable=True, give a config with inference_mode=False, or call "
            "model.eval().",
            stacklevel=2,
        )
    elif drawn := [name for name in for_inference if tuner.peft_config[name].resolution.columns]:
        warnings.warn(
            f"Adapter {drawn[0]!r} was loaded for inference, so that whole weights are trained where its config chose "
            "columns of them. Load it with is_trainable=True.",
            stacklevel=2,
        )
    resting = {id(parameter) for parameter in tuner.resting}
    if frozen := [name for name, p in declared.items() if not p.requires_grad and id(p) not in resting]:
        warnings.warn(
            f"{len(frozen)} of the {len(declared)} tensors that the adapters {active} train are frozen, e.g. "
            f"{frozen[0]}: something froze them after the adapter was made, as prepare_model_for_kbit_training does. "
            f"Call it before, or model.set_requires_grad({active}) after it.",
            stacklevel=2,
        )
    whole = {name: p.dtype for name, p in declared.items() if any(f".{part}." in name for part in _WHOLE)}
    half = [name for name, dtype in whole.items() if dtype in (torch.float16, torch.bfloat16)]
    is_asked_for = not any(tuner._autocast.get(name, True) for name in active)
    if half and not is_asked_for and getattr(tuner.model, "is_quantized", False):
        warnings.warn(
            f"{len(half)} tensors that are trained whole on a quantised base are {whole[half[0]]}, where small steps "
            f"are lost, e.g. {half[0]}. TRL's trainers round what they train to it. Undo that before training: "
            "for p in trainer.model.parameters(): p.data = p.data.float() if p.requires_grad else p.data",
            stacklevel=2,
        )
    if engine_of(tuner.model) == "FSDP1":
        return  # what it flattens together with a trained head looks trained as well
    own = {id(parameter) for _, parameter in adapter_parameters(tuner.model, list(tuner.peft_config))}
    if loose := [name for name, p in tuner.model.named_parameters() if p.requires_grad and id(p) not in own]:
        warnings.warn(
            f"{len(loose)} tensors of the base model are trained, e.g. {loose[0]}, which no adapter holds: they are "
            "not saved with the adapter and stay changed when it is disabled. Freeze them with requires_grad_(False), "
            "or name their modules in modules_to_save.",
            stacklevel=2,
        )


class BackwardStart:
    """Where the backward pass of a model stops. Called before each forward pass in training."""

    def __init__(self) -> None:
        self._stacks: list[list[nn.Module]] | None = None
        self._modules: list[nn.Module] | None = None
        self._hooks: list[RemovableHandle] = []
        self._paused: list[nn.Module] = []

    def update(self, model: nn.Module) -> None:
        """Put the hooks where the trained layers and the kind of checkpointing need them, and remove all others."""
        if self._stacks is None:
            self._stacks = [[layer.module for layer in stack.layers] for stack in find_stacks(model).values()]
        if not self._stacks or self._is_idle(model):
            return
        self._undo()
        needs_hook_on_embeddings = False
        for stack in self._stacks:
            trained = [any(parameter.requires_grad for parameter in layer.parameters()) for layer in stack]
            lowest = trained.index(True) if any(trained) else None
            if lowest is None:
                continue
            is_reentrant = _is_reentrant(stack[lowest])
            if lowest == 0:
                needs_hook_on_embeddings |= is_reentrant
                continue
            # a frozen layer with nothing trained below it keeps nothing for the backward pass, so there is nothing to
            # save by checkpointing it; and hooks inside a checkpoint have no effect
            below = stack[lowest - 1 : lowest] if is_anything_trained_before(stack[0], model) else stack[:lowest]
            if is_reentrant:
                self._hooks.append(stack[lowest - 1].register_forward_hook(_require_gradient))
            if is_reentrant or len(below) == lowest:
                self._pause_checkpointing(below)
        _set_hook_on_embeddings(model, needs_hook_on_embeddings)

    def look_again(self) -> None:
        """Take note that the model may have other modules than before."""
        self._modules = None

    def _is_idle(self, model: nn.Module) -> bool:
        """Whether there is nothing to put or remove; so it is in nearly all steps, which should not pay for more."""
        if self._modules is None:
            self._modules = [*_checkpointable(model), *_input_embeddings(model)]
        return not (self._hooks or self._paused) and not any(
            module._forward_hooks or module.__dict__.get("gradient_checkpointing") for module in self._modules
        )

    def _pause_checkpointing(self, layers: list[nn.Module]) -> None:
        for module in (module for layer in layers for module in layer.modules()):
            if module.__dict__.get("gradient_checkpointing"):
                module.gradient_checkpointing = False  # type: ignore[assignment]
                self._paused.append(module)

    def _undo(self) -> None:
        for hook in self._hooks:
            hook.remove()
        # it may have been switched off altogether since
        is_on = any(_checkpointed(layer) is not None for stack in self._stacks or [] for layer in stack)
        for module in self._paused:
            module.gradient_checkpointing = is_on  # type: ignore[assignment]
        self._hooks, self._paused = [], []

    def __reduce__(self) -> tuple:  # a copy of the model, and one from a file, starts anew
        return BackwardStart, ()


def _checkpointable(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that have transformers' switch for gradient checkpointing."""
    for module in model.modules():
        if hasattr(type(module), "gradient_checkpointing") or "gradient_checkpointing" in module.__dict__:
            yield module


def _input_embeddings(model: nn.Module) -> list[nn.Module]:
    """The modules whose output transformers and PEFT let require a gradient."""
    found: dict[nn.Module, None] = {}  # a model and the one inside it share theirs
    for module in model.modules():
        embeddings = token_embeddings(module)[0] if hasattr(type(module), "get_input_embeddings") else None
        if isinstance(embeddings, nn.Module):
            found[embeddings] = None
    return list(found)


def _require_gradient(module: nn.Module, args: Any, output: Any) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    if module.training and torch.is_grad_enabled() and not hidden.requires_grad:
        hidden.requires_grad_(True)


def _is_reentrant(layer: nn.Module) -> bool:
    """Whether a layer is under reentrant gradient checkpointing."""
    function = getattr(_checkpointed(layer), "_gradient_checkpointing_func", None)
    options = function.keywords if isinstance(function, functools.partial) else {}
    return function is not None and bool(options.get("use_reentrant", True))


def _checkpointed(layer: nn.Module) -> nn.Module | None:
    # of the instance: an adapter's module passes questions on to the module inside it, which takes time
    return next((module for module in layer.modules() if module.__dict__.get("gradient_checkpointing")), None)


def _set_hook_on_embeddings(model: Any, is_needed: bool) -> None:
    present = [
        (module, key)
        for module in _input_embeddings(model)
        for key, hook in module._forward_hooks.items()
        if getattr(hook, "__name__", "") in _ON_EMBEDDINGS
    ]
    if is_needed and not present and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    elif present and not is_needed:
        logger.info("The embeddings' output need not require a gradient: no layer below the trained ones does.")
        for module, key in present:
            del module._forward_hooks[key]
