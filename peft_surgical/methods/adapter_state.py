"""The tensors of an adapter: by the names that they have in a model at present, and in a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from peft_surgical.names import PREFIX, without_engines, without_wrappers


def embedding_tensors(model: nn.Module) -> set[str]:
    """The embeddings' tensors by their names in a file; PEFT saves them along on demand or if they were resized."""
    found: set[str] = set()
    for get in ("get_input_embeddings", "get_output_embeddings"):
        embedding = getattr(model, get, lambda: None)()
        for path, module in model.named_modules():
            if module is embedding and module is not None:
                path = without_wrappers(path).removeprefix(PREFIX)
                # inside the wrapper of an adapter if they are tuned themselves
                for name in module.state_dict():
                    found.update({f"{PREFIX}{path}.{name}", f"{PREFIX}{path}.base_layer.{name}"})
    return found


def prefix_of_peft_model(names: Iterable[str]) -> str:
    """What a `PeftModel` puts before the names of its base model's tensors; empty if these are not a `PeftModel`'s."""
    return PREFIX if any(name.startswith(PREFIX) for name in names) else ""


def live_tensors(model: nn.Module, adapter_name: str) -> dict[str, torch.Tensor]:
    """All tensors of an adapter in a model, head included, by their names in the model."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        tables: Mapping[str, Any] = {}
        if isinstance(module, BaseTunerLayer):
            tables = {name: getattr(module, name) for name in module.adapter_layer_names}
        elif isinstance(module, ModulesToSaveWrapper):
            tables = {"modules_to_save": module.modules_to_save}
        for name, table in tables.items():
            if adapter_name not in table:
                continue
            entry = table[adapter_name]
            prefix = without_engines(f"{path}.{name}.{adapter_name}")
            if isinstance(entry, nn.Module):
                found.update({f"{prefix}.{key}": value for key, value in entry.state_dict().items()})
            else:
                found[prefix] = entry
    return found


def as_live(live: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A loaded tensor with the dtype and on the device of the tensor that it is for."""
    device = tensor.device if live.device.type == "meta" else live.device  # those follow their base afterwards
    return tensor.to(device, live.dtype)
