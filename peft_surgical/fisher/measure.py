"""What the engines share: running the model and its objective, the sums, and the results of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from peft_surgical.distributed import gather
from peft_surgical.fisher.batches import LABELS, Batch, forward_names
from peft_surgical.fisher.entries import EntryKeeper, Generators
from peft_surgical.fisher.log_likelihood import Objective, Rows
from peft_surgical.fisher.owners import layer_parameters
from peft_surgical.fisher.sums import DiagonalSum, LayerZeros, NormSum, TensorFisher, reduce_diagonals, reduce_norms
from peft_surgical.layers import Layer


NO_GRADIENT = (
    "No layer gets a gradient: what is differentiated does not depend on the layers. Look for a detach() or a "
    "no_grad() between them and the outputs."
)


class Progress:
    """Hears how far a measurement is. This one does nothing."""

    def expect(self, steps: int, unit: str) -> None:
        """There will be so many steps."""

    def advance(self, steps: int) -> None:
        """So many steps more are done."""


@dataclass(frozen=True)
class FisherTask:
    """What is to be measured.

    Args:
        model: The base model.
        layers: The layers.
        objective: What is differentiated.
        diagonal: Whether the norm of the diagonal is wanted, or only its trace.
        shares: Whether to estimate what each sample contributes to the norm.
        seed: Seed of that estimate.
    """

    model: nn.Module
    layers: Sequence[Layer]
    objective: Objective
    diagonal: bool = True
    shares: bool = True
    seed: int = 0

    @cached_property
    def parameters(self) -> list[dict[str, nn.Parameter]]:
        """The parameters of each layer, by name. An offloaded module has others after each call."""
        return layer_parameters(self.layers)


@dataclass
class SampleLog:
    """The samples that were seen.

    Args:
        index: The number of each in the draw.
        counts: What each adds to the divisor.
    """

    index: list[int] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)

    def add(self, batch: Batch, counts: Tensor) -> None:
        """Note a batch."""
        self.index += batch.index
        self.counts.append(counts.double())

    def gathered(self) -> tuple[list[int], Tensor]:
        """Index and counts, (N,), of the samples of all processes."""
        mine = torch.cat([c.cpu() for c in self.counts]) if self.counts else torch.zeros(0, dtype=torch.float64)
        parts = gather((self.index, mine))
        return [i for index, _ in parts for i in index], torch.cat([counts for _, counts in parts])


class FisherSums:
    """The sums of the parameters of some layers.

    Args:
        task: What is measured.
        parameters: The parameters of each layer, by name.
        generators: Random numbers for the estimate of the shares.
    """

    def __init__(self, task: FisherTask, parameters: Sequence[dict[str, nn.Parameter]], generators: Generators):
        self.parameters = parameters
        self._keeper = EntryKeeper(generators) if task.diagonal and task.shares else None
        self.by_id: dict[int, DiagonalSum | NormSum] = {}
        for group in parameters:
            zeros = LayerZeros(group.values())
            for key in map(id, group.values()):
                self.by_id[key] = DiagonalSum(self._keeper, partial(zeros.take, key)) if task.diagonal else NormSum()

    def start(self, samples: int) -> None:
        """Get ready for a batch."""
        for total in self.by_id.values():
            total.start(samples)

    def finish(self) -> None:
        """Finish a backward pass, after nothing is pending any more."""
        if self._keeper is not None:
            self._keeper.flush()

    def results(self, count: float) -> list[dict[str, TensorFisher]]:
        """The means over all processes, for each layer."""
        pairs = [(p, self.by_id[id(p)]) for group in self.parameters for p in group.values()]
        diagonals = [(p, total) for p, total in pairs if isinstance(total, DiagonalSum)]
        norms = [(p, total) for p, total in pairs if isinstance(total, NormSum)]
        found = iter(reduce_diagonals(diagonals, count) if diagonals else reduce_norms(norms, count))
        return [{name: next(found) for name in group} for group in self.parameters]


class Runner:
    """Runs a model on batches.

    Args:
        task: What is measured.
    """

    def __init__(self, task: FisherTask):
        self.model, self.objective = task.model, task.objective
        self.names = forward_names(task.model)
        self.device = next((p.device for p in task.model.parameters() if not p.is_meta), torch.device("cpu"))

    def forward(self, batch: Batch) -> Any:
        """The model's outputs."""
        return self.model(**model_inputs(self.model, batch.to(self.device), self.names))

    def rows(self, batch: Batch) -> Rows:
        """What is to be differentiated.

        Raises:
            ValueError: Nothing of it depends on the layers.
        """
        batch = batch.to(self.device)
        rows = self.objective(self.forward(batch), batch)
        if not rows.values.requires_grad:
            raise ValueError(NO_GRADIENT)
        return rows


def check_values(values: Tensor, batch: Batch) -> None:
    """Check what is differentiated.

    Raises:
        ValueError: A value is not finite.
    """
    bad = ~torch.isfinite(values.detach()).all(0)
    if bad.any():
        sample = batch.index[int(bad.nonzero()[0])]
        raise ValueError(
            f"The log-likelihood of sample {sample} of the draw is not finite. Look at its inputs and labels, or "
            "measure in float32."
        )


def model_inputs(model: nn.Module, batch: Batch, names: set[str] | None) -> dict[str, Any]:
    """The part of a batch that goes into the model. Labels do not, so that it computes no loss of its own."""
    inputs = {k: v for k, v in batch.inputs.items() if k not in LABELS and (names is None or k in names)}
    labels = batch.inputs.get("labels")
    prepare: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    takes = names is not None and "decoder_input_ids" in names and "decoder_input_ids" not in inputs
    if prepare and takes and labels is not None:
        inputs["decoder_input_ids"] = prepare(labels=labels)
    return inputs
