"""Rows of one batch that belong to different adapters: `model(**batch, adapter_names=["rte", "__base__"])`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from peft_surgical.copies.compute import rows_unknown
from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.variants import TunedInPlace
from peft_surgical.files.adapter import method_of


BASE = "__base__"
_METHODS_BY_ROWS = ("LORA", "SURGICAL", "STRATIFIED")
KNOW_ROWS = (TunedModule, LoraLayer)  # their wrappers, which can compute each row with an adapter of its own
_ROWS_NOT_FIRST = ("xlnet", "fsmt", "longformer", "led")  # hidden states, or some of them, are (tokens, batch, width)
_PARTS_WITHOUT_ROWS = {  # what these modules see first may by chance be as many as the rows of a batch
    "relative_attention_bias": "sees queries first",
    "global_relative_attention_bias": "sees queries first",
    "experts": "sees the tokens that are sent to it",
}


@contextmanager
def adapter_names_in_forward(
    tuner: BaseTuner, adapter_names: Sequence[str], inputs: Iterable[Any], num_beams: int = 1
) -> Iterator[None]:
    """Tell every adapted module, for the time of a forward call, which row belongs to which adapter, or `"__base__"`.

    The first tensor in `inputs` tells the number of rows. With beam search each is repeated, except in an encoder.
    """
    handles: list[Any] = []
    is_on = [True]
    try:
        hook_rows(tuner, adapter_names, inputs, handles, is_on, num_beams)
        yield
    finally:
        is_on.clear()
        for handle in handles:
            handle.remove()


def hook_rows(
    tuner: BaseTuner,
    adapter_names: Sequence[str],
    inputs: Iterable[Any],
    handles: list[Any],
    is_on: list[bool],
    num_beams: int = 1,
) -> None:
    """Hook every adapted module; hooks that an interrupt leaves behind do nothing once `is_on` is empty."""
    model = tuner.model
    used = [name for name in dict.fromkeys(adapter_names) if name != BASE]
    _check_rows(tuner, used, is_mixed=len(set(adapter_names)) > 1)
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
    is_first = len(set(adapter_names)) == 1 or _has_rows_first(model)
    for module in model.modules():
        if isinstance(module, (*KNOW_ROWS, AuxiliaryTrainingWrapper)) and isinstance(module, nn.Module):
            names = list(adapter_names) if id(module) in in_encoder else repeated
            if isinstance(module, AuxiliaryTrainingWrapper):  # PEFT's own does not know adapters without a copy
                names = [name if name in module._adapters else BASE for name in names]
            if isinstance(module, TunedModule) and len({*names}) > 1 and any(name in module.tuned for name in used):
                module.by_rows = is_on
            hook = partial(_add_adapter_names, adapter_names=names, is_on=is_on, is_first=is_first)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))


def _add_adapter_names(
    module: Any, args: tuple, kwargs: dict, adapter_names: list[str], is_on: list[bool], is_first: bool
) -> tuple[tuple, dict]:
    if is_on and not is_first:
        base = getattr(module, "original_module", None) or module.get_base_layer()
        x: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
        rows = len(adapter_names)
        is_told = x is None or isinstance(base, (nn.Conv1d, nn.Conv2d, nn.Conv3d))  # a convolution's rows are first
        if not is_told and (x.shape[:-1] if x.is_floating_point() else x.shape)[:2] == (rows, rows):
            raise rows_unknown(
                f"A {type(base).__name__} sees a batch of {rows} by {rows}, and may have its rows or its tokens first "
                "(padded to another length they can be told)"
            )
    return args, {**kwargs, "adapter_names": adapter_names} if is_on else kwargs


def _has_rows_first(model: nn.Module) -> bool:
    """Whether a model's modules are known to see rows first: where lengths coincide, their inputs do not tell."""
    is_second = any(getattr(module, "batch_first", True) is False for module in model.modules())
    return isinstance(model, PreTrainedModel) and not is_second


def _check_rows(tuner: Any, used: Sequence[str], is_mixed: bool) -> None:
    if tuner.training:
        raise ValueError("Cannot pass `adapter_names` when the model is in training mode.")
    unknown = sorted(set(used) - set(tuner.peft_config))
    if unknown:
        raise ValueError(f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}")
    if others := {method_of(tuner.peft_config[name]) for name in used} - set(_METHODS_BY_ROWS):
        raise TypeError(
            f"Rows of one batch may belong to adapters of {', '.join(_METHODS_BY_ROWS)}, but not of "
            f"{', '.join(sorted(others))}. Run a batch per adapter."
        )
    kind = getattr(getattr(tuner.model, "config", None), "model_type", None)
    if kind in _ROWS_NOT_FIRST:
        raise TypeError(f"{kind} does not keep the rows of a batch first, so adapter_names cannot be used with it.")
    for path, module in tuner.model.named_modules():
        if not isinstance(module, KNOW_ROWS) or set(used).isdisjoint(module._all_available_adapter_names()):
            continue
        if isinstance(module, TunedInPlace):
            raise TypeError(
                f"The layer {path.rpartition('.')[0]} has tuned parameters of its own, which all rows share."
            )
        for part in _PARTS_WITHOUT_ROWS.keys() & path.split(".") if is_mixed else ():
            raise rows_unknown(f"{path} {_PARTS_WITHOUT_ROWS[part]}")
    labels = {name: (getattr(tuner.peft_config[name], "labels", None) or {}).get("num_labels") for name in used}
    if len(set(labels.values()) - {None}) > 1:  # stock LoRA does not tell
        raise ValueError(f"The heads of these adapters differ in size and cannot share a batch: labels {labels}.")
