"""Measure the diagonal Fisher of chosen layers: in how many passes over the samples, and by which engine."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from peft_surgical.distributed import gather
from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.engine import FisherTask, HookEngine, LoopEngine
from peft_surgical.fisher.model_state import untouched
from peft_surgical.fisher.objective import LossObjective, Objective, no_gradient
from peft_surgical.fisher.sums import TensorFisher
from peft_surgical.layers import Layer, unwrap


logger = logging.getLogger(__name__)

ENGINES = ("auto", "hooks", "layer_major", "loop")

_USABLE = 0.5
"""The part of the free memory that the sums may take; the rest is for activations."""


@dataclass(frozen=True)
class FisherMeasurement:
    """The diagonal Fisher of some layers, and the samples it was measured on."""

    layers: list[dict[str, TensorFisher]]  # by the names of the parameters
    samples: list[int]  # the number of each in the draw, in the order of `TensorFisher.contributions`
    counts: Tensor  # what each sample added to the divisor, (N,) float64
    engine: str
    passes: int  # how often the model went through the samples


def layer_fisher(
    model: nn.Module,
    layers: Sequence[Layer],
    batches: Iterable[Batch],
    objective: Objective,
    *,
    diagonal: bool = True,
    engine: str = "auto",
    contributions: bool = True,
    seed: int = 0,
    progress: tqdm | None = None,
    verify: bool = True,
) -> FisherMeasurement:
    """Measure the diagonal Fisher of layers, from `resolve_layers`, on batches from a `Draw`, with an objective
    from `make_objective`.

    Nothing about the model is changed, whatever happens. In a distributed run each process goes through its own
    batches, and all get the same result. Without `diagonal` only its trace is measured, which takes no memory of the
    size of the layers. The engines, whose scores are the same, are those of `rank_layers`.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is unknown; allowed are {', '.join(map(repr, ENGINES))}.")
    task = FisherTask(unwrap(model), layers, objective, diagonal, contributions, seed, verify)
    _check_data(task)
    with untouched(task.model, seed):
        groups = choose_groups(task, engine)
        loop = engine == "loop" or isinstance(objective, LossObjective)
        job = (LoopEngine if loop else HookEngine)(task, list(batches))
        found = job.measure(groups, tqdm(disable=True) if progress is None else progress)
    _check_results(task, found)
    return FisherMeasurement(found, job.samples, job.counts, job.name, len(groups))


def choose_groups(task: FisherTask, engine: str) -> list[list[int]]:
    """The layers that are measured in each pass over the samples, the last ones first: nothing is computed for the
    layers below a group. The same on all processes."""
    numbers = list(range(len(task.layers)))
    if engine == "layer_major":
        return [[number] for number in reversed(numbers)]
    if engine != "auto" or not task.diagonal:
        return [numbers]
    groups = max(gather(_groups_that_fit(task)), key=len)
    if len(groups) > 1:
        logger.info("There is no room for the Fisher of all layers at once: it takes %d passes.", len(groups))
    return groups


def _groups_that_fit(task: FisherTask) -> list[list[int]]:
    own = next((p.device for p in task.model.parameters() if not p.is_meta), torch.device("cpu"))
    needs: list[Counter[torch.device]] = []
    for parameters in task.parameters:
        needs.append(Counter())
        for p in parameters.values():  # an offloaded parameter is computed with where the model is
            needs[-1][own if p.is_meta else p.device] += p.numel() * (8 if p.dtype == torch.float64 else 4)
    room = {device: _USABLE * free_bytes(device) for need in needs for device in need}
    groups: list[list[int]] = []
    taken: Counter[torch.device] = Counter()
    for number in reversed(range(len(needs))):
        together = taken + needs[number]
        if groups and all(size < room[device] for device, size in together.items()):
            groups[-1].append(number)
            taken = together
        else:
            groups.append([number])
            taken = needs[number]
    return groups


def free_bytes(device: torch.device) -> float:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available


def _check_data(task: FisherTask) -> None:
    if not any(p.is_meta for group in task.parameters for p in group.values()):
        return
    for layer in task.layers:
        for name, module in layer.module.named_modules():
            on_meta = any(p is not None and p.is_meta for p in module._parameters.values())
            if on_meta and not hasattr(module, "_hf_hook"):
                raise ValueError(
                    f"{layer.path}.{name} has no data (its parameters are on the meta device), so its gradients "
                    "cannot be measured. Load the weights first, or offload them with accelerate."
                )


def _check_results(task: FisherTask, found: list[dict[str, TensorFisher]]) -> None:
    for layer, tensors in zip(task.layers, found, strict=True):
        for name, tensor in tensors.items():
            if not math.isfinite(tensor.trace):
                raise ValueError(f"The squared gradients of {layer.path}.{name} overflow. Measure in float32.")
    if not any(tensor.trace for tensors in found for tensor in tensors.values()):
        raise ValueError(no_gradient(task.model, task.objective))
