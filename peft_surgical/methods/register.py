"""Make this package's methods known to PEFT. The only file that touches PEFT's enum and method tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from peft import PeftConfig, peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import hotswap, register_peft_method
from peft.utils.peft_types import PeftType
from torch import nn


# what the tuners of this package override or call; a PEFT without them would ignore the overrides in silence
_REQUIRED = (
    "_prepare_model",
    "_check_target_module_exists",
    "_create_and_replace",
    "_get_adapter_state_dict",
    "_remap_adapter_state_dict_for_load",
)


SwapIn = Callable[[nn.Module, Mapping[str, torch.Tensor], str, PeftConfig], None]


def register_method(name: str, config_cls: type[PeftConfig], model_cls: type[BaseTuner], prefix: str) -> None:
    """Register one method with PEFT, as `get_peft_model` and `PeftModel.from_pretrained` need it.

    Registering the same method again, as on a reload, replaces its classes and changes nothing else.

    Args:
        name: The method's name in capitals, as it stands in `adapter_config.json`.
        config_cls: The class of its configs.
        model_cls: The class of its tuner.
        prefix: What the names of its trained tensors contain; `model_cls.prefix`.

    Raises:
        ImportError: The installed PEFT is not one that this package knows how to extend.
    """
    missing = [attribute for attribute in _REQUIRED if not hasattr(BaseTuner, attribute)]
    if missing:
        raise _unknown_peft(f"peft.tuners.tuners_utils.BaseTuner has no {missing[0]}")
    peft_type = add_peft_type(name)
    if peft_type in PEFT_TYPE_TO_CONFIG_MAPPING:
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

        PEFT_TYPE_TO_CONFIG_MAPPING[peft_type] = config_cls
        PEFT_TYPE_TO_TUNER_MAPPING[peft_type] = model_cls
        return
    register_peft_method(name=name.lower(), config_cls=config_cls, model_cls=model_cls, prefix=prefix)


def load_on_cpu(name: str) -> None:
    """Let PEFT read the files of one method to the CPU, from where each tensor goes straight to its module's device.

    PEFT itself reads them to the first accelerator that it finds, in every process and wherever the model is.

    Args:
        name: The method's name in capitals.
    """
    original: Any = peft_model.load_peft_weights
    if not hasattr(original, "on_cpu"):

        @functools.wraps(original)
        def by_method(model_id, device=None, *args, **kwargs):
            source = {key: kwargs[key] for key in ("subfolder", "revision", "cache_dir", "token") if key in kwargs}
            try:
                kind = PeftConfig._get_peft_type(model_id, **source)
            except Exception:  # the original says what is wrong
                kind = None
            return original(model_id, "cpu" if kind in by_method.on_cpu else device, *args, **kwargs)  # type: ignore[attr-defined]

        by_method.on_cpu = set()  # type: ignore[attr-defined]
        peft_model.load_peft_weights = by_method
    peft_model.load_peft_weights.on_cpu.add(PeftType[name])  # type: ignore[attr-defined]


def register_hotswap(name: str, swap_in: SwapIn, model_cls: type[BaseTuner], keys: Sequence[str] = ()) -> None:
    """Let PEFT's `hotswap_adapter` use another function for one method.

    PEFT's own function loads the saved adapter and hands it to `hotswap_adapter_from_state_dict`, which is replaced,
    once, by one that looks the method up first.

    Args:
        name: The method's name in capitals.
        swap_in: Called with the model, the tensors by their names in the file, the adapter's name and its config.
        model_cls: The class of the method's tuner.
        keys: Options in which the two configs must agree, as PEFT checks them.
    """

    def without_adapter_name(model, state_dict, adapter_name, config, *args, **kwargs):
        names = {key: model_cls._remove_adapter_name_from_key(key, adapter_name) for key in state_dict}
        swap_in(model, {names[key]: tensor for key, tensor in state_dict.items()}, adapter_name, config)

    hotswap.CONFIG_KEYS_TO_CHECK[PeftType[name]] = list(keys)
    original: Any = hotswap.hotswap_adapter_from_state_dict
    if not hasattr(original, "swaps"):

        @functools.wraps(original)
        def by_method(model, state_dict, adapter_name, config, *args, **kwargs):
            swap = by_method.swaps.get(config.peft_type, original)  # type: ignore[attr-defined]
            return swap(model, state_dict, adapter_name, config, *args, **kwargs)

        by_method.swaps = {}  # type: ignore[attr-defined]
        hotswap.hotswap_adapter_from_state_dict = by_method
    hotswap.hotswap_adapter_from_state_dict.swaps[PeftType[name]] = without_adapter_name  # type: ignore[attr-defined]


def add_peft_type(name: str) -> PeftType:
    """Add a member to PEFT's enum of methods; PEFT offers no other way. Idempotent."""
    if name in PeftType.__members__:
        return PeftType[name]
    member: Any = str.__new__(PeftType, name)
    member._name_ = name
    member._value_ = name
    member.__objclass__ = PeftType
    member._sort_order_ = len(PeftType.__members__)
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member
    type.__setattr__(PeftType, name, member)
    if PeftType(name) is not member or getattr(PeftType, name) is not member or name not in list(PeftType):
        raise _unknown_peft("its enum of methods does not take a new member")
    return member


def _unknown_peft(reason: str) -> ImportError:
    import peft

    return ImportError(
        f"peft_surgical does not know how to register with peft {peft.__version__}: {reason}. "
        'Install a version that it supports: pip install -U peft-surgical "peft>=0.21".'
    )
