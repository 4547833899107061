"""The library's own ways to get the diagonal Fisher, for `speed.py`: its engines, and `rank_layers` itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.fisher.other_ways import Case
from peft_surgical import rank_layers
from peft_surgical.fisher import squares
from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.measure import layer_fisher
from peft_surgical.fisher.objective import make_objective
from peft_surgical.layers import choose_stack
from peft_surgical.ranking.scores import aggregate


def engine(case: Case, name: str, contributions: bool = False, aggregation: str = "frobenius") -> list[float]:
    """The scores of the layers by one engine.

    Args:
        case: The model and its batches; those sorted by length are used.
        name: The engine.
        contributions: Whether to estimate what each sample contributes, as `rank_layers` does for its intervals.
        aggregation: How the diagonal of a layer becomes one number.
    """
    measurement = layer_fisher(
        case.model,
        choose_stack(case.model, None).layers,
        batches_of(case),
        make_objective(case.model),
        diagonal=aggregation.startswith("frobenius"),
        engine=name,
        contributions=contributions,
    )
    return aggregate(measurement, aggregation).scores


def whole(case: Case, batch_size: int, verify: bool = True) -> list[float]:
    """`rank_layers` from the data to the ranking: it draws and sorts samples, and adds intervals to the scores."""
    options: dict[str, Any] = {"batch_size": batch_size, "verify": verify, "progress": False}
    features = [{k: v[0].tolist() for k, v in _inputs(case, sample).items()} for sample in case.samples]
    return rank_layers(case.model, features, num_samples=len(features), **options).scores


@contextlib.contextmanager
def without_kernel() -> Iterator[None]:
    """As on a machine without Triton."""
    previous, squares.kernel_works = squares.kernel_works, lambda operand, device: False
    try:
        yield
    finally:
        squares.kernel_works = previous


@contextlib.contextmanager
def with_float32_products() -> Iterator[None]:
    """The products of the Fisher in float32, though not those of the model."""
    previous, squares.operand_type = squares.operand_type, lambda dtype: dtype
    try:
        yield
    finally:
        squares.operand_type = previous


def batches_of(case: Case) -> list[Batch]:
    """The batches that are sorted by length, as the library has them."""
    batches, first = [], 0
    for inputs in case.sorted_batches:
        size = len(inputs["labels"])
        batches.append(Batch(_inputs(case, inputs), tuple(range(first, first + size))))
        first += size
    return batches


def _inputs(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """For a causal model the labels are the tokens themselves."""
    if not case.causal:
        return inputs
    return {**inputs, "labels": torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], -100)}
