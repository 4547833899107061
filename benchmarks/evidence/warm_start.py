"""What the candidate scores have in common: the samples as tensors, and a head that was trained on them alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.evidence.methods import adapt
from benchmarks.evidence.tasks import PAD_TO, Rows
from benchmarks.evidence.training import Trainee, train
from peft_surgical.ranking.scores import ScoreRequest


BATCH = 32
HEAD_RATE, HEAD_STEPS = 1e-3, 100


def rows_of(request: ScoreRequest) -> Rows:
    """The samples of a request as padded tensors, in the order of the draw."""
    pad = getattr(request.model.config, "pad_token_id", 0) or 0
    device = next(request.model.parameters()).device
    longest = max(batch.inputs["input_ids"].shape[-1] for batch in request.batches)
    longest = -(-longest // PAD_TO) * PAD_TO
    parts: dict[str, list[Tensor]] = {}
    for batch in request.batches:
        for name, tensor in batch.inputs.items():
            if name != "labels":
                fill = pad if name == "input_ids" else 0
                tensor = nn.functional.pad(tensor, (0, longest - tensor.shape[-1]), value=fill)
            parts.setdefault(name, []).append(tensor)
    order = torch.tensor([i for batch in request.batches for i in batch.index]).argsort()
    tensors = {name: torch.cat(some)[order].to(device) for name, some in parts.items()}
    labels = tensors.pop("labels")
    needed = tensors["attention_mask"].sum(-1)
    lengths = needed.amax(1) if needed.dim() > 1 else needed
    return Rows(tensors, lengths, labels, torch.arange(len(labels), device=device))


def split(rows: Rows) -> tuple[Rows, Rows]:
    """Two thirds to train on, and a third to measure a loss on."""
    index = torch.arange(len(rows), device=rows.labels.device)
    return rows.take(index[index % 3 != 2]), rows.take(index[index % 3 == 2])


def warm_head(model: nn.Module, rows: Rows, seed: int) -> nn.Module:
    """A copy of a model whose head was trained alone on some rows."""
    model = adapt(copy.deepcopy(model), "head")
    train_for([Trainee(model, HEAD_RATE)], rows, HEAD_STEPS, seed)
    return model


def same_layers(request: ScoreRequest, model: nn.Module) -> list[nn.Module]:
    """The layers of the request in a copy of its model."""
    return [model.get_submodule(layer.path) for layer in request.layers]


def samples_of(request: ScoreRequest) -> list[int]:
    """The samples' numbers in the data, for the ranking's record."""
    return [i for batch in request.batches for i in batch.index]


def train_for(trainees: Sequence[Trainee], rows: Rows, steps: int, seed: int) -> None:
    """Train models in step for at least so many steps, in whole epochs."""
    epochs = math.ceil(steps / math.ceil(len(rows) / BATCH))
    for _ in train(trainees, rows, batch=BATCH, epochs=epochs, seed=seed):
        pass
