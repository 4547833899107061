"""What vLLM's workers do: from an adapter's folder to tensors in the place of the base's.

What goes to vLLM are tensors of the merged checkpoint under its own names, so that fused and sharded weights are the
business of vLLM's loaders. A STRATIFIED adapter is merged too, its LoRA with its copies: vLLM's own LoRA would compute
in every batch, knows neither all of its options nor copies, and would have to change at the same instant as these.

This is no engine of vLLM's `WeightTransferEngineFactory`, though it does what those do. Such an engine can refuse an
update by an error alone, after which vLLM 0.32 with several workers takes the answers of the others for those to
its next call, and dies. And a client that is killed between `start_weight_update` and `finish_weight_update` leaves a
state that no later one can tell from another without such an error. Here one call does all and returns what is wrong.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from peft_surgical.bank.memory import LruBudget, NoRoomError, parse_budget
from peft_surgical.convert.merge import merged_changes, tensors_of_base
from peft_surgical.files.checkpoint import Checkpoint, ModelTensors
from peft_surgical.files.safetensors_io import READERS
from peft_surgical.methods.config import naming_adapter, open_adapter


class TaskWorker:
    """A part of each of vLLM's workers: `--worker-extension-cls peft_surgical.vllm.worker.TaskWorker`."""

    model_runner: Any
    vllm_config: Any

    def serve_adapter(self, folder: str | None = None) -> dict[str, Any]:
        """Serve a saved adapter, or (None) the base, while nothing runs; gives `served_adapter`, and any problem."""
        problem = None
        try:
            with set_current_vllm_config(self.vllm_config):
                self._weights.change_to(folder)
        except Exception as error:  # never raised: see above
            problem = str(error) if isinstance(error, ValueError) else repr(error)
        return {**self.served_adapter(), "problem": problem}

    def served_adapter(self) -> dict[str, Any]:
        """The folder of the adapter that is served, None for the base, and whether all of it is there."""
        return {"folder": self._weights.folder, "is_whole": self._weights.is_whole}

    @cached_property
    def _weights(self) -> ServedWeights:
        return ServedWeights(self.model_runner.get_model(), self.vllm_config)


class ServedWeights:
    """The weights of one worker: those of the base, with one adapter's tensors in the place of some."""

    def __init__(self, model: Any, vllm_config: Any):
        self.folder: str | None = None
        self.is_whole = True
        self._model, self._config = model, vllm_config
        self._changed: set[str] = set()  # the tensors of the checkpoint that are not the base's own now
        self._checked: dict[str, Any] = {}  # by folder, which takes longer than to decode
        self._keeps_names = True  # of layers and other modules, but for prefixes
        self._shapes: dict[Any, ModelTensors] = {}  # by config, for nearly all tasks the same
        options = vllm_config.additional_config if isinstance(vllm_config.additional_config, dict) else {}
        self._is_on_gpu = next(model.parameters()).is_cuda
        budget = parse_budget(options.get("host_budget", "16GB" if self._is_on_gpu else "2GB"))
        self._kept = HostCopies(budget and budget // get_world_group().world_size, self._is_on_gpu)
        # of every module that an update leaves alone vLLM warns that it was not loaded
        reload_logger = logging.getLogger(initialize_layerwise_reload.__module__)
        reload_logger.addFilter(lambda record: "Failed to load weights" not in record.msg)

    @cached_property
    def _base(self) -> Checkpoint:
        if self._config.model_config.revision:
            raise ValueError("The base was loaded with --revision. Give vLLM a folder, so that it can be read again.")
        return Checkpoint(self._config.model_config.model)

    def change_to(self, folder: str | None) -> None:
        """Put an adapter's tensors into the model, and the base's in the place of those of the adapter before.

        Raises:
            ValueError: The adapter cannot be decoded on some worker, or is for another base; no worker has changed
                anything.
        """
        changes: dict[str, torch.Tensor] = {}
        problem = None
        try:
            if folder is not None:
                changes = self._decode(folder)
        except Exception as error:  # whatever it is, the other workers must hear of it
            problem = str(error) if isinstance(error, ValueError) else repr(error)
        if problem := next(filter(None, _told_to_all(problem)), None):
            raise ValueError(problem)
        touched = self._changed | changes.keys() if self.is_whole else set(self._base)
        self.is_whole = False
        self._load({_layer(name) for name in touched}, changes)
        self.folder, self._changed, self.is_whole = folder, set(changes), True

    def _decode(self, folder: str) -> dict[str, torch.Tensor]:
        if self._config.lora_config is not None:
            raise ValueError("Adapters are merged into the weights, which --enable-lora wraps. Leave it out.")
        if experts := [path for path, kind in self._kinds.items() if "moe" in kind.lower()]:
            raise ValueError(
                f"{experts[0]} has experts, which vLLM 0.32 reloads wrongly on a CPU; others are untried."
            )
        return self._kept.get(folder, _state_of(folder), lambda: self._read(folder))

    def _read(self, folder: str) -> dict[str, torch.Tensor]:
        saved = open_adapter(folder)
        found = saved.file.header, saved.config.to_dict()  # checksums of all tensors, which reading compares
        known, old = self._checked.get(folder, (None, None))
        if found[0] is None or known != found:
            with naming_adapter(saved.config):
                old = tensors_of_base(self._base, saved)
            model: Any = old.model
            old = self._shapes.setdefault((type(model), model.config.to_json_string()), old)
        changes = merged_changes(old, saved)
        self._checked[folder] = found, old
        return changes

    @cached_property
    def _kinds(self) -> dict[str, str]:
        """The classes of vLLM's modules, by path."""
        return {path: type(module).__name__ for path, module in self._model.named_modules()}

    @cached_property
    def _layers(self) -> dict[str, list[str]]:
        """The tensors of the base's checkpoint, by layer."""
        layers: dict[str, list[str]] = {}
        for name in self._base:
            layers.setdefault(_layer(name), []).append(name)
        return layers

    def _load(self, layers: set[str], changes: dict[str, torch.Tensor]) -> None:
        """Load whole layers as vLLM does, with the base's own tensors where there are no others.

        vLLM makes each of its modules anew from what it is given, and may have made one of many in a layer: q, k and
        v, or all experts.
        """
        paths = [self._path_of(layer) for layer in layers]
        # to make all modules ready takes as long as to copy some layers of a large model
        part = self._model if None in paths else nn.ModuleList(map(self._model.get_submodule, paths))
        initialize_layerwise_reload(part)
        try:
            loaded = load_checkpoint_weight_patches(self._model, self._patches(layers, changes))
        finally:
            finalize_layerwise_reload(part, self._config.model_config)
        if part is not self._model and not all(
            name.startswith(tuple(f"{path}." for path in paths)) for name in loaded
        ):
            self._keeps_names = False
            self._load(set(self._layers), changes)

    def _path_of(self, layer: str) -> str | None:
        """What vLLM calls a layer of the checkpoint, which has other prefixes; None if that is not certain."""
        ending = ".".join(layer.split(".")[-2:]) if layer[-1].isdigit() else layer.rpartition(".")[2]
        paths = [path for path in self._kinds if f".{path}".endswith(f".{ending}")]
        return paths[0] if self._keeps_names and len(paths) == 1 else None

    def _patches(self, layers: set[str], changes: dict[str, torch.Tensor]) -> Iterator[CheckpointWeightPatch]:
        for layer in self._layers.keys() & layers:
            names = self._layers[layer]
            tensors = changes
            if not changes.keys() >= set(names):
                tensors = {**self._own(layer, names), **changes}
            for name in names:
                tensor = tensors[name]
                yield CheckpointWeightPatch(name, tuple(tensor.shape), tensor.dtype, tensor.reshape(-1))

    def _own(self, layer: str, names: list[str]) -> dict[str, torch.Tensor]:
        def read() -> dict[str, torch.Tensor]:
            return {name: self._base[name] for name in names}

        return self._kept.get(layer, None, read) if self._is_on_gpu else read()  # on a CPU, they are but mapped


class HostCopies:
    """Tensors that go to the model again and again, read, checked and decoded once.

    For a GPU they lie in pinned memory, from where they go there at its full bandwidth. Those that were used least
    recently leave where others need room. What has no room is read again each time.
    """

    def __init__(self, budget: int | None, is_pinned: bool):
        self._is_pinned = is_pinned
        self._kept: LruBudget[str, tuple[Any, dict[str, torch.Tensor]]] = LruBudget("host", budget)

    def get(self, key: str, state: Any, read: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What was read in the same state, or else is read now."""
        kept = self._kept.get(key)
        if kept is not None and kept[0] == state:
            return kept[1]
        tensors = read()
        if kept is not None:
            self._kept.evict(key)
        try:
            self._kept.reserve(key, sum(tensor.nbytes for tensor in tensors.values()))
            if self._is_pinned:
                with ThreadPoolExecutor(READERS) as pool:
                    pinned = pool.map(torch.Tensor.pin_memory, tensors.values())
                    tensors = dict(zip(tensors, pinned, strict=True))
        except (NoRoomError, RuntimeError):  # the system may pin no more
            self._kept.drop_reservation(key)
            return tensors
        self._kept.put(key, (state, tensors))
        return tensors


def _state_of(folder: str) -> list[tuple[int, int, int]]:
    """What changes when an adapter is written anew."""
    paths = [os.path.join(folder, name) for name in (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME)]
    found = [os.stat(path) for path in paths if os.path.exists(path)]
    return [(status.st_size, status.st_mtime_ns, status.st_ino) for status in found]


def _told_to_all(problem: str | None) -> list[str | None]:
    """What each worker has to say."""
    group = get_world_group()
    if group.world_size == 1:
        return [problem]
    said: list[str | None] = [None] * group.world_size
    torch.distributed.all_gather_object(said, problem, group=group.cpu_group)
    return said


def _layer(name: str) -> str:
    """The outermost numbered module that a tensor is in, or else its module."""
    parts = name.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: numbered + 1])
