"""The diagonal Fisher of chosen layers: what is measured, by which engine, and the result of each layer."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from peft_surgical.distributed import gather, on_all_ranks
from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.engines import Engine, HookEngine, LoopEngine
from peft_surgical.fisher.input_store import KEEP
from peft_surgical.fisher.layer_major import LayerMajorEngine
from peft_surgical.fisher.log_likelihood import Objective
from peft_surgical.fisher.measure import NO_GRADIENT, FisherTask, Progress
from peft_surgical.fisher.memory import free_bytes
from peft_surgical.fisher.model_state import untouched
from peft_surgical.fisher.sums import TensorFisher
from peft_surgical.layers import Layer, unwrap


logger = logging.getLogger(__name__)

ENGINES = ("auto", "hooks", "layer_major", "loop")

_USABLE = 0.5
"""The part of the free memory that the sums may take; the rest is for activations."""


@dataclass(frozen=True)
class FisherMeasurement:
    """The diagonal Fisher of some layers, and the samples it was measured on.

    Args:
        layers: For each layer the diagonal Fisher of its parameters, by name.
        samples: The number of each sample in the draw, in the order of `TensorFisher.shares`.
        counts: What each sample added to the divisor, (N,) float64.
        engine: How it was measured.
    """

    layers: list[dict[str, TensorFisher]]
    samples: list[int]
    counts: Tensor
    engine: str


def layer_fisher(
    model: nn.Module,
    layers: Sequence[Layer],
    batches: Iterable[Batch],
    objective: Objective,
    *,
    diagonal: bool = True,
    engine: str = "auto",
    shares: bool = True,
    seed: int = 0,
    keep_inputs: str = "device",
    progress: Progress | None = None,
) -> FisherMeasurement:
    """Measure the diagonal Fisher of layers.

    In a distributed run each process goes through its own batches, and all get the same result.

    Args:
        model: The model. Nothing about it is changed, whatever happens.
        layers: The layers, from `resolve_layers`.
        batches: The samples, from `draw_batches`.
        objective: What is differentiated, from `make_objective`.
        diagonal: Whether the norm of the diagonal is wanted. False measures only its trace, which takes no memory of
            the size of the layers.
        engine: `"hooks"` (all layers at once), `"layer_major"` (one layer at a time, about a third slower, with memory
            for one layer), `"loop"` (plain autograd, one sample at a time; slow), or `"auto"`: hooks if there is room.
        shares: Whether to estimate what each sample contributes to the norms.
        seed: Seed of that estimate, and of the global random numbers meanwhile.
        keep_inputs: Where the layer-major engine keeps the inputs of the layers: `"device"`, `"cpu"` or `"disk"`.
        progress: Hears how far it is.

    Returns:
        The measurement.

    Raises:
        ValueError: An option is unknown; there are no samples; a value or a gradient is not finite; no layer gets a
            gradient; a parameter has no data.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is unknown; allowed are {', '.join(map(repr, ENGINES))}.")
    if keep_inputs not in KEEP:
        raise ValueError(f"keep_inputs={keep_inputs!r} is unknown; allowed are {', '.join(map(repr, KEEP))}.")
    task = FisherTask(unwrap(model), layers, objective, diagonal, shares, seed)
    _check_data(task)
    with untouched(task.model, seed):
        job = _make_engine(task, list(batches), engine, keep_inputs)
        on_all_ranks(partial(job.run, progress or Progress()))
        samples, counts = job.log.gathered()
        if not samples:
            raise ValueError("There are no samples. Give data that are not empty.")
        if not any(gather(job.heard)):
            raise ValueError(NO_GRADIENT)
        found = list(job.results(float(counts.sum())))
        on_all_ranks(job.check)
    _check_results(task, found)
    return FisherMeasurement(found, samples, counts, job.name)


def _make_engine(task: FisherTask, batches: list[Batch], name: str, keep_inputs: str) -> Engine:
    if name == "auto":
        name = "hooks" if not task.diagonal or _sums_fit(task) else "layer_major"
        if name == "layer_major":
            logger.info("There is no room for the Fisher of all layers at once: they are taken one at a time.")
    if name == "layer_major":
        return LayerMajorEngine(task, batches, keep_inputs)
    return {"hooks": HookEngine, "loop": LoopEngine}[name](task, batches)


def _sums_fit(task: FisherTask) -> bool:
    parameters = [p for group in task.parameters for p in group.values()]
    needed = sum(p.numel() * (8 if p.dtype == torch.float64 else 4) for p in parameters)
    device = next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))
    return all(gather(needed < _USABLE * free_bytes(device)))


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
        raise ValueError(NO_GRADIENT)
