"""Rows of one batch that belong to different adapters: `model(**batch, adapter_names=["rte", "cola", "__base__"])`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from peft_surgical.copies.module import TunedModule


BASE = "__base__"
_ROWS_NOT_FIRST = ("xlnet",)  # hidden states are (tokens, batch, width)


@contextmanager
def adapter_names_in_forward(
    tuner: BaseTuner, adapter_names: Sequence[str], inputs: Iterable[Any], num_beams: int = 1
) -> Iterator[None]:
    """Tell every adapted module, for the time of a forward call, which row belongs to which adapter, or `"__base__"`.

    The first tensor in `inputs` tells the number of rows. With beam search each is repeated, except in an encoder.
    """
    model = tuner.model
    used = [name for name in dict.fromkeys(adapter_names) if name != BASE]
    _check(tuner, used)
    rows = next((len(value) for value in inputs if isinstance(value, torch.Tensor)), len(adapter_names))
    if rows != len(adapter_names):
        raise ValueError(
            "Length of `adapter_names` should be the same as the number of inputs, but got "
            f"{len(adapter_names)} and {rows} respectively."
        )
    repeated = [name for name in adapter_names for _ in range(num_beams)]
    # a model that is all decoder has the method as well, and returns itself
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    encoder = model.get_encoder() if num_beams > 1 and has_encoder else None
    in_encoder = {id(m) for m in encoder.modules()} if encoder is not None else set()
    handles, is_on = [], [True]  # an interrupt may leave hooks behind, which then do nothing
    try:
        for module in model.modules():
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and isinstance(module, nn.Module):
                names = list(adapter_names) if id(module) in in_encoder else repeated
                if isinstance(module, AuxiliaryTrainingWrapper):  # PEFT's own does not know adapters without a copy
                    names = [name if name in module._adapters else BASE for name in names]
                hook = partial(_add_adapter_names, adapter_names=names, is_on=is_on)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        is_on.clear()
        for handle in handles:
            handle.remove()


def _add_adapter_names(
    module: nn.Module, args: tuple, kwargs: dict, adapter_names: list[str], is_on: list[bool]
) -> tuple[tuple, dict]:
    return args, {**kwargs, "adapter_names": adapter_names} if is_on else kwargs


def _check(tuner: Any, used: Sequence[str]) -> None:
    if tuner.training:
        raise ValueError("Cannot pass `adapter_names` when the model is in training mode.")
    unknown = sorted(set(used) - set(tuner.peft_config))
    if unknown:
        raise ValueError(f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}")
    kind = getattr(getattr(tuner.model, "config", None), "model_type", None)
    if kind in _ROWS_NOT_FIRST:
        raise TypeError(f"{kind} does not keep the rows of a batch first, so adapter_names cannot be used with it.")
    for path, module in tuner.model.named_modules():
        if isinstance(module, TunedModule) and module.is_in_place and any(name in module.tuned for name in used):
            raise TypeError(
                f"The layer {path.rpartition('.')[0]} has tuned parameters of its own, which all rows share."
            )
    labels = {name: (getattr(tuner.peft_config[name], "labels", None) or {}).get("num_labels") for name in used}
    if len(set(labels.values()) - {None}) > 1:  # stock LoRA does not tell
        raise ValueError(f"The heads of these adapters differ in size and cannot share a batch: labels {labels}.")
