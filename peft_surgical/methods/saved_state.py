"""From the adapter in a model to the tensors of its file, and back: PEFT's hooks for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from peft_surgical.files.adapter import is_encoded
from peft_surgical.files.base import check_gathered, check_tensors, sharded
from peft_surgical.methods.adapter_state import as_live, embedding_tensors, live_tensors, prefix_of_peft_model
from peft_surgical.methods.encoded_state import decode_state, encode_state
from peft_surgical.processes import process_number
from peft_surgical.sharding import whole_weights


class SavedState(BaseTuner):
    """What `DeltaTuner` does when PEFT saves an adapter's state or loads one."""

    @classmethod
    def _may_be_saved_along(cls, config: Any, model: nn.Module) -> Callable[[str], bool]:
        """Tells which tensors of the base PEFT may save with an adapter."""
        return embedding_tensors(model).__contains__

    @classmethod
    def _get_adapter_state_dict(cls, model, config, adapter_name, state_dict, unwanted_adapter_names):
        found = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, unwanted_adapter_names)
        expected = cls._wanted_shapes(config, adapter_name, state_dict)
        if not found:  # under FSDP1 the modules' paths are not the names of their tensors, and PEFT finds none
            found = {
                name: state_dict[name] for name in expected if name in state_dict and ".modules_to_save." not in name
            }
        heads = {name: tensor for name, tensor in state_dict.items() if name in expected}
        present = {name: tensor for name, tensor in {**found, **heads}.items() if name in expected}
        shapes = {name: torch.Size(tensor.shape) for name, tensor in present.items()}
        if process_number() and (shapes != expected or sharded(present)):
            # the first process has the gathered weights and writes them; what stands for them here cannot be written
            live = live_tensors(model, adapter_name)
            wanted = cls._wanted_shapes(config, adapter_name, live)
            state_dict.update({name: torch.empty(wanted[name], device="meta") for name in live})
            return {name: state_dict[name] for name in live if ".modules_to_save." not in name}
        check_gathered(present, expected, source=f"The state of adapter {adapter_name!r}")
        check_tensors(shapes, expected, source=f"The state of adapter {adapter_name!r}")
        return encode_state(model, adapter_name, found, config.encoding, state_dict)

    @classmethod
    def _wanted_shapes(cls, config: Any, adapter_name: str, names: Iterable[str]) -> dict[str, torch.Size]:
        """The shapes of an adapter's tensors by the names that they have at present.

        Another adapter may have wrapped their modules since the adapter was made; the names in the file tell which is
        which.
        """
        prefix = prefix_of_peft_model(names)
        present = {cls._remove_adapter_name_from_key(name, adapter_name): name for name in names}
        return {present.get(prefix + name, prefix + name): shape for name, shape in config._shapes.items()}

    @classmethod
    def _remap_adapter_state_dict_for_load(cls, model, config, adapter_name, state_dict):
        state_dict = {config.present_name(name): tensor for name, tensor in state_dict.items()}
        with whole_weights(model) if is_encoded(state_dict) else nullcontext():
            decoded = decode_state(model, adapter_name, state_dict, cls._remove_adapter_name_from_key)
        remapped = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, decoded)
        live = live_tensors(model, adapter_name)
        # under FSDP1 the modules' paths are not the names of their tensors, and PEFT finds none
        by_saved_name = {cls._remove_adapter_name_from_key(name, adapter_name): name for name in live}
        remapped = {name if name in live else by_saved_name.get(name, name): t for name, t in remapped.items()}
        check_tensors(
            {name: torch.Size(tensor.shape) for name, tensor in remapped.items()},
            cls._wanted_shapes(config, adapter_name, live),
            source=f"The state for adapter {adapter_name!r}",
            is_known=cls._may_be_saved_along(config, model),
        )
        config.forget_saved_names()
        # PEFT may assign what it loads, which would bring the file's dtype and device into the model
        loaded = {name: as_live(live[name], tensor) if name in live else tensor for name, tensor in remapped.items()}
        prefix = prefix_of_peft_model(live)
        if prefix_of_peft_model(name for name, _ in model.named_parameters()) == prefix:
            return loaded
        # FSDP1 puts its own prefix first, so PEFT takes the model for one without a prefix and cuts the file's
        return {prefix + name: tensor for name, tensor in loaded.items()}
