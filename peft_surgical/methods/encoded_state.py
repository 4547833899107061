"""The tensors of an adapter in a model on their way to and from the form that its file has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from peft_surgical.copies.in_place import TunedOwner
from peft_surgical.copies.module import TunedModule
from peft_surgical.files.adapter import decode_tensors, encode_tensor, is_encoded
from peft_surgical.names import PREFIX, as_attribute


def encode_state(
    model: nn.Module,
    adapter_name: str,
    state: Mapping[str, torch.Tensor],
    encoding: str,
    model_state: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Encode the tensors of an adapter that are copies of the base's own; others pass through.

    Args:
        model: The model with the adapter in it.
        adapter_name: The adapter.
        state: The adapter's tensors, by their names in the model.
        encoding: `"values"`, or a name in `ENCODINGS`.
        model_state: The state of the model. It has the whole tensors of the base where a sharded model has none.
    """
    bases = dict(_bases(model, adapter_name, model_state)) if encoding != "values" else {}
    encoded: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        encoded.update(encode_tensor(name, tensor, bases[name], encoding) if name in bases else {name: tensor})
    return encoded


def decode_state(
    model: nn.Module,
    adapter_name: str,
    state: Mapping[str, torch.Tensor],
    name_in_file: Callable[[str, str], str],
) -> dict[str, torch.Tensor]:
    """Decode an adapter's tensors, by their names in its file; what is not encoded passes through.

    Args:
        model: The model with the adapter in it.
        adapter_name: The adapter.
        state: The tensors of its file.
        name_in_file: Gives a tensor's name in the file from its name in the model and the adapter.
    """
    if not is_encoded(state):
        return dict(state)
    bases: dict[str, torch.Tensor] = {}
    for name, base in _bases(model, adapter_name, {}):
        name = name_in_file(name, adapter_name)
        bases[name] = bases[PREFIX + name] = base  # a model without PeftModel around it has no prefix
    return decode_tensors(state, bases)


def _bases(
    model: nn.Module, adapter_name: str, state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The base's own tensors, by the names in the model of the adapter's copies."""
    for path, module in model.named_modules():
        if not isinstance(module, TunedModule) or adapter_name not in module.tuned:
            continue
        path = path.replace("_fsdp_wrapped_module.", "")
        owner = path.rpartition(".")[0] if isinstance(module, TunedOwner) else f"{path}.base_layer"
        for name in module.tuned[adapter_name].names:
            base = module.original(name)
            if not module.merged:  # a gathered state has the whole tensor where the module holds a shard
                base = state.get(f"{owner}.{name}", base)
            yield f"{path}.{module.adapter_layer_names[0]}.{adapter_name}.{as_attribute(name)}", base
