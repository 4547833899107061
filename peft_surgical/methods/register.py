"""Make this package's methods known to PEFT: its tables of methods, its loading and its hot swap."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from peft import PeftConfig, peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import CONFIG_NAME, hotswap, register_peft_method
from peft.utils.peft_types import PeftType
from torch import nn

from peft_surgical.compat import add_peft_type
from peft_surgical.files.adapter import weights_file
from peft_surgical.files.check import StateOfFile, checked
from peft_surgical.files.safetensors_io import TensorFile
from peft_surgical.methods.config import MOST_BYTES, DeltaConfig, sources


SwapIn = Callable[[nn.Module, Mapping[str, torch.Tensor], str, PeftConfig], None]


def register_method(name: str, config_cls: type[PeftConfig], model_cls: type[BaseTuner], prefix: str) -> None:
    """Register one method with PEFT, as `get_peft_model` and `PeftModel.from_pretrained` need it.

    Registering the same method again, as on a reload, replaces its classes and changes nothing else.
    """
    name_damaged_configs()
    read_by_own_class()
    peft_type = add_peft_type(name)
    if peft_type in PEFT_TYPE_TO_CONFIG_MAPPING:
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

        PEFT_TYPE_TO_CONFIG_MAPPING[peft_type] = config_cls
        PEFT_TYPE_TO_TUNER_MAPPING[peft_type] = model_cls
        return
    register_peft_method(name=name.lower(), config_cls=config_cls, model_cls=model_cls, prefix=prefix)


def name_damaged_configs() -> None:
    """Let an `adapter_config.json` that cannot be read be a `ValueError` that names it, also where PEFT reads it."""
    original: Any = PeftConfig._get_peft_type.__func__  # type: ignore[attr-defined]
    if hasattr(original, "names_files"):
        return

    @functools.wraps(original)
    def named(cls: Any, model_id: Any, **kwargs: Any) -> Any:
        path = os.path.join(model_id, kwargs.get("subfolder") or "", CONFIG_NAME)
        try:
            if os.path.isfile(path) and os.path.getsize(path) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
            kind = original(cls, model_id, **kwargs)
            if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
                raise ValueError(f"peft_type={kind!r} is no method that PEFT knows")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            if not os.path.isfile(path):
                raise
            raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}).") from error
        return kind

    named.names_files = True  # type: ignore[attr-defined]
    PeftConfig._get_peft_type = classmethod(named)  # type: ignore[method-assign, assignment]


def read_by_own_class() -> None:
    """Let `PeftConfig.from_pretrained` give a config of this package that knows its folder, as its own class does."""
    original: Any = PeftConfig.from_pretrained.__func__  # type: ignore[attr-defined]
    if hasattr(original, "knows_its_folder"):
        return

    @functools.wraps(original)
    def reread(cls: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(cls, *args, **kwargs)
        if cls is PeftConfig and isinstance(config, DeltaConfig):
            return type(config).from_pretrained(*args, **kwargs)
        return config

    reread.knows_its_folder = True  # type: ignore[attr-defined]
    PeftConfig.from_pretrained = classmethod(reread)  # type: ignore[method-assign, assignment]


def load_on_cpu() -> None:
    """Let PEFT load the tensors that were checked, from the CPU, from where each goes to its module's device.

    PEFT itself reads them to the first accelerator that it finds, in every process and wherever the model is. Adapters
    of other methods are read as before: those of this package are told by where their configs were read from, or by
    the header of their file, which goes along with what is read with a config that a user made.
    """
    original: Any = peft_model.load_peft_weights
    if not hasattr(original, "sources"):

        @functools.wraps(original)
        def by_source(model_id: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
            is_own = os.fspath(model_id) in by_source.sources  # type: ignore[attr-defined]
            if is_own and (state := checked.take(model_id, kwargs.get("subfolder"))) is not None:
                return state
            file = _open_own(model_id, kwargs, is_own)
            if file is None or kwargs.get("key_mapping"):
                state = original(model_id, "cpu" if is_own or file else device, *args, **kwargs)
                file = file or _open_own(model_id, kwargs, is_own)  # it was on the hub
            else:
                state = dict(file)
            return state if file is None or file.header is None else StateOfFile(state, file.header)

        peft_model.load_peft_weights = hotswap.load_peft_weights = by_source
    peft_model.load_peft_weights.sources = sources  # type: ignore[attr-defined]


def _open_own(model_id: Any, options: Mapping[str, Any], is_own: bool) -> TensorFile | None:
    """The file that PEFT is about to read, or has downloaded, if it is one of this package."""
    subfolder, known = options.get("subfolder"), {**options, "local_files_only": True}
    path = weights_file(os.fspath(model_id), subfolder, known)
    if path is None:
        return None
    try:
        file = TensorFile(path)
    except ValueError:
        if is_own:
            raise
        return None  # PEFT says what is wrong
    return file if is_own or file.header is not None else None


def register_hotswap(name: str, swap_in: SwapIn, model_cls: type[BaseTuner], keys: Sequence[str] = ()) -> None:
    """Let PEFT's `hotswap_adapter` use another function for one method.

    PEFT's own function loads the saved adapter and hands it to `hotswap_adapter_from_state_dict`, which is replaced,
    once, by one that looks the method up first. `keys` are options in which the two configs must agree.
    """

    def without_adapter_name(
        model: Any, state_dict: Any, adapter_name: str, config: Any, *args: Any, **kwargs: Any
    ) -> None:
        names = {key: model_cls._remove_adapter_name_from_key(key, adapter_name) for key in state_dict}
        swap_in(model, {names[key]: tensor for key, tensor in state_dict.items()}, adapter_name, config)

    hotswap.CONFIG_KEYS_TO_CHECK[PeftType[name]] = list(keys)
    original: Any = hotswap.hotswap_adapter_from_state_dict
    if not hasattr(original, "swaps"):

        @functools.wraps(original)
        def by_method(model: Any, state_dict: Any, adapter_name: str, config: Any, *args: Any, **kwargs: Any) -> Any:
            swap = by_method.swaps.get(config.peft_type, original)  # type: ignore[attr-defined]
            return swap(model, state_dict, adapter_name, config, *args, **kwargs)

        by_method.swaps = {}  # type: ignore[attr-defined]
        hotswap.hotswap_adapter_from_state_dict = by_method
    hotswap.hotswap_adapter_from_state_dict.swaps[PeftType[name]] = without_adapter_name  # type: ignore[attr-defined]
