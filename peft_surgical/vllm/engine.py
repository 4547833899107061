"""The engine in vLLM's workers: from an adapter's folder to tensors in the place of the base's.

What goes to vLLM are tensors of the merged checkpoint under its own names, so that fused and sharded weights are the
business of vLLM's loaders. A STRATIFIED adapter is merged too, its LoRA with its copies: vLLM's own LoRA would need
kernels and memory for it in every batch, knows neither all of its options nor copies, and would have to change at the
same instant as the patches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from peft_surgical.convert.merge import merged_changes
from peft_surgical.files.checkpoint import Checkpoint
from peft_surgical.methods.config import open_adapter
from peft_surgical.vllm import UNCHANGED


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """The engine needs no connection to anything."""


@dataclass
class AdapterUpdate(WeightTransferUpdateInfo):
    """Which task to serve."""

    adapter: str | None  # a folder that each worker can read; None for the base


class AdapterEngine(WeightTransferEngine[NoInitInfo, AdapterUpdate]):
    """Serves the base of a server with one adapter at a time in it.

    An update is decoded and checked on all workers before any of them changes a tensor.
    """

    init_info_cls = NoInitInfo
    update_info_cls = AdapterUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module):
        super().__init__(config, vllm_config, device, model)
        if vllm_config.lora_config is not None:
            raise ValueError("The engine merges adapters into the weights, which --enable-lora wraps. Leave it out.")
        self._base = Checkpoint(self.model_config.model)
        self._changed: set[str] = set()  # the tensors of the checkpoint that are not the base's own now
        self._checked: dict[str, Any] = {}  # by folder, what was checked, which takes longer than to decode
        # of every module that an update leaves alone vLLM warns that it was not loaded
        reload_logger = logging.getLogger(initialize_layerwise_reload.__module__)
        reload_logger.addFilter(lambda record: "Failed to load weights" not in record.msg)

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do: an update is one call."""

    def finish_weight_update(self) -> None:
        """Nothing to do: an update is one call."""

    def shutdown(self) -> None:
        """Nothing to do."""

    def receive_weights(self, update_info: AdapterUpdate) -> None:
        """Put an adapter's tensors into the model, and the base's in the place of those of the adapter before.

        Raises:
            ValueError: The adapter cannot be decoded on some worker, or is for another base; nothing was changed.
        """
        changes: dict[str, torch.Tensor] = {}
        problem = None
        try:
            if update_info.adapter is not None:
                changes = self._decode(update_info.adapter)
        except Exception as error:  # whatever it is, the other workers must hear of it
            problem = str(error) if isinstance(error, ValueError) else repr(error)
        if problem := next(filter(None, _told_to_all(problem)), None):
            raise ValueError(f"{problem} {UNCHANGED}")
        before, self._changed = self._changed, set(self._base)  # all, should loading fail
        self._load({name: changes.get(name) for name in self._whole_layers(before | changes.keys())})
        self._changed = set(changes)

    def _decode(self, folder: str) -> dict[str, torch.Tensor]:
        saved = open_adapter(folder)
        found = saved.file.header, saved.config.to_dict()  # checksums of all tensors, which reading compares
        is_known = found[0] is not None and self._checked.get(folder) == found
        changes = merged_changes(self._base, saved, check=not is_known)
        self._checked[folder] = found
        return changes

    def _whole_layers(self, names: Iterable[str]) -> list[str]:
        """All tensors of the base's checkpoint in the layers of some.

        vLLM makes each of its modules anew from what it is given, and may have made one of many in a layer: q, k and
        v, or all experts.
        """
        touched = {_layer(name) for name in names}
        return [name for name in self._base if _layer(name) in touched]

    def _load(self, changes: dict[str, torch.Tensor | None]) -> None:
        """Load tensors of a checkpoint as vLLM does, the base's own in the place of None."""

        def patch(name: str, tensor: torch.Tensor | None) -> CheckpointWeightPatch:
            tensor = self._base[name] if tensor is None else tensor
            return CheckpointWeightPatch(name, tuple(tensor.shape), tensor.dtype, tensor.reshape(-1))

        initialize_layerwise_reload(self.model)
        try:
            load_checkpoint_weight_patches(self.model, [patch(*item) for item in changes.items()])
        finally:
            finalize_layerwise_reload(self.model, self.model_config)


def _told_to_all(problem: str | None) -> list[str | None]:
    """What each worker has to say."""
    group = get_world_group()
    said: list[str | None] = [None] * group.world_size
    torch.distributed.all_gather_object(said, problem, group=group.cpu_group)
    return said


def _layer(name: str) -> str:
    """The outermost numbered module that a tensor is in, or else its module."""
    parts = name.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: numbered + 1])
