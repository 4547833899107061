"""The demo's resident model: several tasks on one encoder, swapped, checked and asked."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peft_surgical.bank import DeltaBank
from peft_surgical.cli import demo_data as source
from peft_surgical.training.loading import load_classifier, load_tokenizer, load_trained


@dataclass(frozen=True)
class Resident:
    """One encoder with the adapters of several tasks.

    Args:
        encoder: The folder of the encoder.
        folders: The folders of the adapters by task.
        labels: The classes by task.
        tokenizer: The encoder's tokenizer.
        bank: The model with all of them, whatever their method.
    """

    encoder: str
    folders: Mapping[str, Path]
    labels: Mapping[str, Sequence[str]]
    tokenizer: Any
    bank: DeltaBank


@dataclass(frozen=True)
class Swapped:
    """What came of swapping.

    Args:
        seconds: The time of one swap.
        equal: How many swaps gave the logits of the task loaded alone, bit for bit.
        base_equal: Whether without a task the logits are the encoder's own.
        weights_equal: Whether the encoder's weights are still those of its file.
    """

    seconds: float
    equal: int
    base_equal: bool
    weights_equal: bool


def load_resident(encoder: str, folders: Mapping[str, Path]) -> Resident:
    """Load an encoder once and the adapters of all tasks onto it."""
    tokenizer = load_tokenizer(encoder)
    base, _ = load_classifier(encoder, source.SENTIMENT, tokenizer)
    bank = DeltaBank(base)
    for task, folder in folders.items():
        bank.add(task, folder)
        bank.activate(task)  # reads it into memory
    labels = {task: source.OPINION if task.startswith("opinion") else source.SENTIMENT for task in folders}
    return Resident(encoder, folders, labels, tokenizer, bank)


@torch.no_grad()
def swap(resident: Resident, sentences: Sequence[str], times: int, seed: int = 0) -> Swapped:
    """Swap tasks at random, and compare the logits each time with those of the task loaded alone.

    Args:
        resident: The resident model.
        sentences: What to compute on.
        times: How often to swap.
        seed: Seed of the draw of tasks.
    """
    batch = resident.tokenizer([*sentences], padding=True, return_tensors="pt")
    expected = {task: _alone(resident, task, batch) for task in resident.folders}
    fresh, _ = load_classifier(resident.encoder, source.SENTIMENT, resident.tokenizer)
    draw = random.Random(seed)
    seconds, equal = 0.0, 0
    for _ in range(times):
        task = draw.choice([*resident.folders])
        started = time.perf_counter()
        resident.bank.activate(task)
        seconds += time.perf_counter() - started
        with resident.bank.task(task) as model:
            equal += torch.equal(model(**batch).logits, expected[task])
    with resident.bank.task(None) as model:
        base_equal = torch.equal(model(**batch).logits, fresh.eval()(**batch).logits)
    originals = {name: tensor for name, tensor in fresh.named_parameters()}
    weights = dict(_base_weights(resident.bank.model))
    weights_equal = all(torch.equal(weights[name], tensor) for name, tensor in originals.items())
    return Swapped(seconds / times, equal, base_equal, weights_equal)


@torch.no_grad()
def answer(resident: Resident, task: str, sentence: str) -> tuple[str, float]:
    """What the adapter of a task says of a sentence: the class, and its probability."""
    with resident.bank.task(task) as model:
        logits = model(**resident.tokenizer(sentence, return_tensors="pt")).logits[0]
    best = int(logits.argmax())
    return resident.labels[task][best], float(logits.softmax(-1)[best])


def peak_memory() -> int | None:
    """The most memory that this process held so far in bytes, where the system tells."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _alone(resident: Resident, task: str, batch: Mapping[str, Tensor]) -> Tensor:
    model = load_trained(str(resident.folders[task]), resident.encoder, resident.labels[task], resident.tokenizer)
    return model(**batch).logits


def _base_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of the base by their name in it, wherever adapters have moved them."""
    for name, tensor in model.named_parameters():
        if not any(mark in name for mark in ("surgical_params", "lora_", "modules_to_save")):
            yield name.replace("base_layer.", "").replace("original_module.", ""), tensor
