"""Make this package's methods known to PEFT: its tables of methods, its loading, its hot swap and its model card."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, get_origin, get_type_hints

import torch
from peft import PeftConfig, PeftModel, inject_adapter_in_model, peft_model, set_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import CONFIG_NAME, hotswap, register_peft_method
from transformers import PreTrainedModel
from transformers.integrations.peft import PeftAdapterMixin

from peft_surgical.compat import add_peft_type
from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.select import token_embeddings
from peft_surgical.files.adapter import AdapterTensors, weights_file
from peft_surgical.files.check import StateOfFile, checked
from peft_surgical.fisher.model_state import uninterrupted
from peft_surgical.methods.card import upload_with_card, write_card
from peft_surgical.methods.config import MOST_BYTES, DeltaConfig, sources
from peft_surgical.methods.hotswap import swap_in
from peft_surgical.methods.wrappers import whole_or_not_at_all
from peft_surgical.names import PREFIX, as_attribute, renamed, without_wrappers


_tuners: dict[str, type[BaseTuner]] = {}  # of the methods of this package


def register_method(
    name: str, config_cls: type[PeftConfig], model_cls: type[BaseTuner], keys: Sequence[str] = ()
) -> None:
    """Register one method with PEFT, and put functions around those of PEFT that read, swap and describe adapters.

    Registering the same method again, as on a reload, replaces its classes and these functions and changes nothing
    else. `keys` are options in which two configs must agree for a hot swap, as PEFT checks them.
    """
    peft_type = add_peft_type(name)
    if peft_type in PEFT_TYPE_TO_CONFIG_MAPPING:
        PEFT_TYPE_TO_CONFIG_MAPPING[peft_type] = config_cls
        PEFT_TYPE_TO_TUNER_MAPPING[peft_type] = model_cls
    else:
        prefix = model_cls.prefix
        register_peft_method(name=name.lower(), config_cls=config_cls, model_cls=model_cls, prefix=prefix)
    _tuners[peft_type] = model_cls
    hotswap.CONFIG_KEYS_TO_CHECK[peft_type] = list(keys)
    _put_around(PeftConfig, "_get_peft_type", _name_damaged_configs)
    _put_around(PeftConfig, "from_pretrained", _read_by_own_class)
    _put_around(PeftModel, "add_adapter", _put_in_whole)
    _put_around(PeftModel, "load_adapter", _put_in_whole)
    _put_around(PeftModel, "set_adapter", _do_at_once)
    _put_around(PeftModel, "delete_adapter", _do_at_once)
    _put_around(peft_model, "set_peft_model_state_dict", _do_at_once)
    _put_around(peft_model, "load_peft_weights", _load_checked)
    hotswap.load_peft_weights = peft_model.load_peft_weights
    _put_around(hotswap, "hotswap_adapter_from_state_dict", _swap_by_method)
    _put_around(PeftModel, "create_or_update_model_card", write_card)
    _put_around(PeftModel, "_upload_modified_files", upload_with_card)
    _put_around(PeftAdapterMixin, "load_adapter", _load_as_peft)
    _put_around(PreTrainedModel, "tie_weights", _tie_untuned)
    for module in ("transformers.trainer_pt_utils", "transformers.trainer"):  # the second takes it from the first
        if module in sys.modules:
            _put_around(sys.modules[module], "get_parameter_names", _spare_as_in_base)


def _put_around(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Put a function, which gets PEFT's own first, around PEFT's own, in the place of an earlier one."""
    present = getattr(owner, name)
    is_of_class = inspect.ismethod(present)
    present = getattr(present, "__func__", present)
    of_peft = getattr(present, "of_peft", present)

    @functools.wraps(of_peft)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(of_peft, *args, **kwargs)

    around.of_peft = of_peft  # type: ignore[attr-defined]
    setattr(owner, name, classmethod(around) if is_of_class else around)


def _name_damaged_configs(of_peft: Callable[..., str], cls: Any, model_id: Any, **kwargs: Any) -> str:
    """An `adapter_config.json` that cannot be read is a `ValueError` that names it, also where PEFT reads it."""
    path = os.path.join(model_id, kwargs.get("subfolder") or "", CONFIG_NAME)
    try:
        if os.path.isfile(path) and os.path.getsize(path) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        kind = of_peft(cls, model_id, **kwargs)
        if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
            raise ValueError(f"peft_type={kind!r} is no method that PEFT knows")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        if not os.path.isfile(path):
            raise
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}).") from error
    return kind


def _read_by_own_class(of_peft: Callable[..., PeftConfig], cls: Any, *args: Any, **kwargs: Any) -> PeftConfig:
    """`PeftConfig.from_pretrained` gives a config of this package that knows its folder, as its own class does."""
    config = of_peft(cls, *args, **kwargs)
    if cls is PeftConfig and isinstance(config, DeltaConfig):
        return type(config).from_pretrained(*args, **kwargs)
    return config


def _put_in_whole(of_peft: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """`add_adapter` and `load_adapter` of a `PeftModel`, for methods of this package: to the end, or nothing stays."""
    given, kept = inspect.signature(of_peft).bind(model, *args, **kwargs).arguments, {*model.peft_config}
    if fills := "model_id" in given and getattr(model.peft_config.get(given["adapter_name"]), "_is_unfilled", False):
        kept.remove(given["adapter_name"])
    is_first = fills and not kept
    with whole_or_not_at_all(model.base_model, kept, is_first) if model.peft_type in _tuners else nullcontext():
        return of_peft(model, *args, **kwargs)


def _do_at_once(of_peft: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """What changes module by module; for methods of this package, Ctrl-C waits until all are changed."""
    with uninterrupted() if model.peft_type in _tuners else nullcontext():
        return of_peft(model, *args, **kwargs)


def _load_checked(
    of_peft: Callable[..., dict[str, torch.Tensor]], model_id: Any, device: Any = None, *args: Any, **kwargs: Any
) -> dict[str, torch.Tensor]:
    """The tensors that were checked, on the CPU, from where each goes to its module's device.

    PEFT itself reads them to the first accelerator that it finds, in every process and wherever the model is. Adapters
    of other methods are read as before: those of this package are told by where their configs were read from, or by
    the header of their file, which goes along with what is read with a config that a user made.
    """
    is_own = os.fspath(model_id) in sources
    if is_own and (state := checked.take(model_id, kwargs.get("subfolder"))) is not None:
        return state
    file = _open_own(model_id, kwargs, is_own)
    if file is None:
        state = of_peft(model_id, "cpu" if is_own else device, *args, **kwargs)
        if (file := _open_own(model_id, kwargs, is_own)) is None:
            return state  # else it was on the hub
    return dict(file) if file.header is None else StateOfFile(dict(file), file.header)


def _open_own(model_id: Any, options: Mapping[str, Any], is_own: bool) -> AdapterTensors | None:
    """The file that PEFT is about to read, or has downloaded, if it is one of this package."""
    of_hub = {name: value for name, value in options.items() if name not in ("key_mapping", "subfolder")}
    path = weights_file(os.fspath(model_id), options.get("subfolder"), {**of_hub, "local_files_only": True})
    if path is None:
        return None
    try:
        file = AdapterTensors(path, lambda name: renamed(name, options.get("key_mapping")))
    except ValueError:
        if is_own:
            raise
        return None  # PEFT says what is wrong
    return file if is_own or file.header is not None else None


def _load_as_peft(of_transformers: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' `model.load_adapter`, and `from_pretrained` of an adapter's folder, load by PEFT what is of this
    package. transformers reads files itself: of weights that are stored once for two places it would take one, and
    since version 5 nothing of what is encoded, and say so in a report."""
    bound = inspect.signature(of_transformers).bind(model, *args, **kwargs)
    given = bound.arguments
    loading, config, state = (given.get(name) for name in ("load_config", "peft_config", "adapter_state_dict"))
    source: Any = given.get("peft_model_id") or getattr(loading, "pretrained_model_name_or_path", None)
    options = {**getattr(loading, "download_kwargs", {}), **(given.get("adapter_kwargs") or {})}
    options |= {key: given[key] for key in ("local_files_only", "revision", "token") if given.get(key)}
    with suppress(Exception):  # of which transformers tells
        config = config or PeftConfig.from_pretrained(source, **options)
    name = given.get("adapter_name") or "default"
    is_there = name in (getattr(model, "peft_config", None) or {})
    if not isinstance(config, DeltaConfig) or is_there or (source is None and state is None):
        return of_transformers(model, *args, **kwargs)
    config.inference_mode = not given.get("is_trainable", False)
    try:
        from transformers.utils.loading_report import LoadStateDictInfo
    except ImportError:  # before version 5 it lets PEFT do the rest
        state = peft_model.load_peft_weights(source, device="cpu", **options) if state is None else state
        given |= {"peft_model_id": None, "peft_config": config, "adapter_state_dict": state}
        return of_transformers(*bound.args, **bound.kwargs)
    inject_adapter_in_model(config, model, name)
    if state is None:
        state = peft_model.load_peft_weights(source, device="cpu", **options)
    set_peft_model_state_dict(model, {key.removeprefix(PREFIX): t for key, t in state.items()}, adapter_name=name)
    model._hf_peft_config_loaded = True
    if config.inference_mode:
        model.eval()
    return LoadStateDictInfo(**{name: get_origin(hint)() for name, hint in get_type_hints(LoadStateDictInfo).items()})


def _spare_as_in_base(of_transformers: Callable[..., list[str]], module: Any, *args: Any, **kwargs: Any) -> list[str]:
    """transformers' names of the parameters that get weight decay, module by module: a copy gets it where the base's
    own tensor would, which the name of a copy does not tell, nor the type of what holds it, of a norm inside a module
    that is tuned as a whole."""
    names = of_transformers(module, *args, **kwargs)
    if not isinstance(module, TunedModule) or module.is_in_place:
        return names
    decayed = {without_wrappers(name) for name in names}
    in_base = {without_wrappers(name) for name, _ in module.base_layer.named_parameters(remove_duplicate=False)}
    spared = {as_attribute(name) for name in in_base if f"base_layer.{name}" not in decayed}
    return [n for n in names if n.startswith("base_layer.") or n.rpartition(".")[2] not in spared]


def _tie_untuned(of_transformers: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' `model.tie_weights`, which accelerate calls under FSDP2. It would put an adapter's copy of the
    embeddings into the base's head; what is tied in the base is so already."""
    if not any(isinstance(module, TunedModule) for module in token_embeddings(model)):
        return of_transformers(model, *args, **kwargs)


def _swap_by_method(
    of_peft: Callable[..., None],
    model: Any,
    state_dict: Any,
    adapter_name: str,
    config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """PEFT's `hotswap_adapter`, which has loaded an adapter, goes on with `swap_in` for methods of this package."""
    if (tuner_cls := _tuners.get(config.peft_type)) is None:
        of_peft(model, state_dict, adapter_name, config, *args, **kwargs)
        return
    names = {key: tuner_cls._remove_adapter_name_from_key(key, adapter_name) for key in state_dict}
    swap_in(model, {names[key]: tensor for key, tensor in state_dict.items()}, adapter_name, config)
