"""Every private name of PEFT, transformers and PyTorch that this package uses, checked when it is imported.

A private name may go with any release. One that is called would fail with a bare AttributeError; worse, a method that
is overridden here and no longer called there would be ignored in silence. So each is listed, and an unknown release is
refused with what to do. What a private function *computes* is held by `tests/test_compat.py`.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import peft
import torch
import transformers
from packaging import version
from peft.tuners import tuners_utils
from peft.tuners.lora.layer import LoraLayer
from peft.utils import other as peft_other
from peft.utils import save_and_load
from peft.utils.other import ModulesToSaveWrapper
from peft.utils.peft_types import PeftType
from torch import nn
from torch.utils import _python_dispatch, _pytree


OLDEST_PEFT = "0.21"
"""Older releases have all of these names, but load otherwise."""

# by the module, or the class in a module, that has them
PRIVATE_NAMES: dict[str, tuple[str, ...]] = {
    "peft:PeftConfig": ("_get_peft_type", "_split_kwargs"),
    "peft:PeftModel": ("_enable_peft_forward_hooks", "_upload_modified_files", "create_or_update_model_card"),
    "peft.peft_model": ("load_peft_weights",),
    "peft.mapping": ("PEFT_TYPE_TO_CONFIG_MAPPING", "PEFT_TYPE_TO_TUNER_MAPPING"),
    "peft.tuners.tuners_utils": (
        "_ExcludedModule",
        "_check_adapters_not_merged",
        "_maybe_include_all_linear_layers",
        "check_adapters_to_merge",
        "check_target_module_exists",
    ),
    "peft.tuners.tuners_utils:BaseTuner": (
        "_cast_adapter_dtype",
        "_check_merge_allowed",
        "_check_target_module_compatiblity",  # PEFT's spelling
        "_check_target_module_exists",
        "_convert_state_dict_for_initial_model",
        "_create_and_replace",
        "_enable_adapter_layers",
        "_get_adapter_state_dict",
        "_prepare_adapter_config",
        "_prepare_model",
        "_remap_adapter_state_dict_for_load",
        "_remove_adapter_name_from_key",
        "_unload_and_optionally_merge",
    ),
    "peft.tuners.tuners_utils:BaseTunerLayer": (
        "_active_adapter",
        "_all_available_adapter_names",
        "_disable_adapters",
        "_move_adapter_to_device_of_base_layer",
    ),
    "peft.tuners.lora:LoraModel": (
        "_create_new_module",
        "_enable_peft_forward_hooks",
        "_svd_generalized_task_arithmetic_weighted_adapter",
    ),
    "peft.tuners.lora.layer:LoraLayer": ("_get_base_layer_device_and_dtype",),
    "peft.utils.hotswap": ("CONFIG_KEYS_TO_CHECK", "hotswap_adapter_from_state_dict"),
    "peft.utils.integrations": ("dequantize_module_weight", "gather_params_ctx"),
    "peft.utils.other": ("AuxiliaryTrainingWrapper", "_get_submodules"),
    "peft.utils.save_and_load": ("_insert_adapter_name_into_state_dict",),
    "transformers:AutoModel": ("_model_mapping",),
    "transformers:PreTrainedModel": ("_hf_peft_config_loaded", "_init_weights"),
    "torch:Tensor": ("_version",),
    "torch.nn.modules.module": (
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
    ),
    "torch.nn.parallel:DistributedDataParallel": (
        "_build_debug_param_to_name_mapping",
        "_build_params_for_reducer",
        "_ddp_init_helper",
    ),
    "torch.utils._python_dispatch": ("TorchDispatchMode",),
    "torch.utils._pytree": ("TreeSpec", "tree_flatten", "tree_unflatten"),
}
if int(transformers.__version__.partition(".")[0]) >= 5:  # what it converts when it reads a checkpoint
    PRIVATE_NAMES["transformers.conversion_mapping"] = ("get_model_conversion_mapping",)
    PRIVATE_NAMES["transformers.utils.loading_report"] = ("LoadStateDictInfo",)
    PRIVATE_NAMES["transformers.core_model_loading"] = ("WeightConverter", "WeightRenaming", "rename_source_key")


def require(owner: Any, *names: str) -> None:
    """Check that a module, class or object has these names; else the installed release is one that is not known."""
    for name in names:
        if not hasattr(owner, name):
            where = getattr(owner, "__name__", type(owner).__name__)
            raise unknown_release(f"{where} has no {name}")


def unknown_release(reason: str) -> ImportError:
    """The error for a release of PEFT, transformers or PyTorch that this package does not know."""
    return ImportError(
        f"peft_surgical does not know peft {peft.__version__} with transformers {transformers.__version__} and torch "
        f"{torch.__version__}: {reason}. Install versions that it supports, pip install "
        f'"peft>={OLDEST_PEFT},<0.22", or a newer peft_surgical: {install()}.'
    )


def install(extra: str = "") -> str:
    """How this package, or an extra of it, is installed: as README.md says, for no index has it."""
    what = f'".[{extra}]"' if extra else "."
    return f"pip install {what} in a checkout of peft-surgical"


def check_private_names() -> None:
    """Check PEFT's release, all of `PRIVATE_NAMES`, and the attributes that the instances of some classes have."""
    if version.parse(peft.__version__) < version.parse(f"{OLDEST_PEFT}.dev0"):
        raise unknown_release("this PEFT is too old")
    for place, names in PRIVATE_NAMES.items():
        module, _, cls = place.partition(":")
        try:
            owner = import_module(module)
        except ImportError as error:
            raise unknown_release(f"there is no {module}") from error
        require(getattr(owner, cls) if cls else owner, *names)
    linear = nn.Linear(1, 1, device="meta")
    require(linear, "_buffers", "_modules", "_non_persistent_buffers_set", "_parameters")
    require(linear, "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
    require(LoraLayer(linear), "_caches", "lora_variant")
    require(ModulesToSaveWrapper(linear, "adapter"), "_adapters", "modules_to_save", "original_module")


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
        raise unknown_release("PEFT's enum of methods does not take a new member")
    return member


# ---- how transformers names and converts the tensors of checkpoints


@dataclass
class ConvertedTensors:
    """Tensors of a checkpoint that make up tensors of a model together."""

    name: str  # the first in the model, as transformers gives it
    converter: Any
    patterns: dict[str, str] = field(default_factory=dict)  # by tensor of the checkpoint, what its name matches
    renamed: dict[str, str] = field(default_factory=dict)  # their names, by what they are called when converted
    names: dict[str, str] = field(default_factory=dict)  # transformers' of what they become, by the model's

    def convert(self, read: Callable[[str], torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
        """The model's tensors, from the checkpoint's."""
        converter = copy.deepcopy(self.converter)
        for source in sorted(self.patterns, key=natural_order):
            converter.add_tensor(self.name, source, self.patterns[source], read(source))
        return _converted(converter, self.name, model)

    def revert(self, values: Mapping[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors, from the model's; a `ValueError` if transformers cannot convert them back."""
        converters: dict[str, Any] = {}
        for name, value in values.items():
            converter = self.converter.reverse_transform()
            renamed, pattern = converter.rename_source_key(self.names[name])
            converters.setdefault(renamed, converter).add_tensor(renamed, self.names[name], pattern, value)
        made = {}
        prefix = getattr(model, "base_model_prefix", "")
        for renamed, converter in converters.items():
            for name, tensor in _converted(converter, renamed, model).items():
                made[self.renamed.get(with_prefix(name, prefix, self.renamed), name)] = tensor
        if set(made) != set(self.patterns):
            raise ValueError(
                f"transformers {transformers.__version__} makes {', '.join(self.names)} of {', '.join(self.patterns)} "
                f"and {', '.join(made)} of these: they cannot be written as the checkpoint has them."
            )
        return made


def loading_rules(model: nn.Module, prefix: str, wanted: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """How transformers renames and converts the tensors of this model's checkpoints while it loads them.

    Returns:
        A function from a name in a checkpoint to the name in the model and the `ConvertedTensors` that it belongs to,
        if any; and a function that gives all of these, once all names were asked for.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before version 5 names were changed, and nothing converted
        return lambda source: (_renamed_before_5(source, model), None), lambda: []
    rules = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, ConvertedTensors] = {}

    def rename(source: str) -> tuple[str, ConvertedTensors | None]:
        name, pattern = rename_source_key(source, renamings, converters, prefix, wanted)  # type: ignore[arg-type]
        if pattern is None:
            return name, None
        group = found.setdefault(name, ConvertedTensors(name, by_pattern[pattern]))
        group.patterns[source] = pattern
        renamed = source
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        group.renamed[renamed] = source
        return name, group

    return rename, found.values


def with_prefix(name: str, prefix: str, wanted: Container[str]) -> str:
    """The name with the bare model's prefix put on or taken off, if the model has it so."""
    if name not in wanted:
        for other in (f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
            if prefix and other in wanted:
                return other
    return name


def _converted(converter: Any, name: str, model: Any) -> dict[str, torch.Tensor]:
    made = converter.convert(name, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _renamed_before_5(source: str, model: nn.Module) -> str:
    for pattern, replacement in (getattr(model, "_checkpoint_conversion_mapping", None) or {}).items():
        renamed, count = re.subn(pattern, re.sub(r"\(.*\)", "", replacement.lstrip("^")), source)
        if count:
            return renamed
    return re.sub("gamma$", "weight", re.sub("beta$", "bias", source))


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """A key to sort names by: numbers between dots count as numbers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


check_private_names()

# under public names, for the rest of the package
parse_pattern: Any = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse").parse
check_adapters_not_merged = tuners_utils._check_adapters_not_merged
ExcludedModule = tuners_utils._ExcludedModule
include_all_linear_layers = tuners_utils._maybe_include_all_linear_layers
get_submodules = peft_other._get_submodules
insert_adapter_name = save_and_load._insert_adapter_name_into_state_dict
TreeSpec = _pytree.TreeSpec
tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten
TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode
