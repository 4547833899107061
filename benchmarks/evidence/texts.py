"""Language modelling on three kinds of text, cut out of a decoder's prompts.

    lm-reviews     SST-2's reviews of films: fragments to train on, whole sentences of others for the rest
    lm-news        the first texts of RTE, from news and encyclopedias
    lm-examples    CoLA's sentences, from books on linguistics

A document is what stands before the first new line of a prompt, so it has no tokens but those that the model was cut
to. Held out is a half of the validation's documents: those of the training are akin to one another, fragments of the
same review or examples that stand together, by which an epoch too many would be chosen. The metric is the mean
log-likelihood of a token in nats: as everywhere, the higher the better.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from benchmarks.evidence import decoders, prompts, tasks
from benchmarks.evidence.tasks import Rows, Task, TaskData


SOURCES = {"lm-reviews": "sst2", "lm-news": "rte", "lm-examples": "cola"}
TASKS: dict[str, Task] = {
    name: replace(tasks.TASKS[source], metric="log_likelihood", outputs=1, batch=16, epochs=3, revision=2)
    for name, source in SOURCES.items()
}
AT_A_TIME = 16
"""Rows whose logits, one for each token of the vocabulary at each place, are there at the same time."""


def read(folder: str | Path, name: str) -> TaskData:
    """The documents of a task; none is in two parts."""
    new_line = _common_end(_prompts(decoders.read(folder, "cola").train))[0]
    data = decoders.read(folder, SOURCES[name])
    trained, others = (
        [*dict.fromkeys(prompt[: prompt.index(new_line)] for prompt in _prompts(rows))]
        for rows in (data.train, data.validation)
    )
    seen = {*trained, *(prompt[: prompt.index(new_line)] for prompt in _prompts(data.held_out))}
    others = [document for document in others if document not in seen]
    random.Random(0).shuffle(others)
    half = len(others) // 2
    return TaskData(*map(_rows, (trained, others[:half], others[half:])))


def _rows(documents: Sequence[tuple[int, ...]]) -> Rows:
    documents = [document for document in documents if len(document) > 1]
    predicted = torch.tensor([[len(document) - 1] for document in documents])
    return prompts.padded(documents, predicted, torch.arange(len(documents)))


def _prompts(rows: Rows) -> list[tuple[int, ...]]:
    return [
        tuple(ids[:length])
        for ids, length in zip(rows.inputs["input_ids"].tolist(), rows.lengths.tolist(), strict=True)
    ]


def _common_end(sequences: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest end that all have: the question, from the new line before it on."""
    length = 0
    while len({sequence[-length - 1] for sequence in sequences}) == 1:
        length += 1
    return sequences[0][-length:]


def load(folder: str | Path, device: torch.device | str = "cpu") -> nn.Module:
    """The model, which gives for documents minus their log-likelihood as logits, (rows, 1)."""
    model = decoders.fast_model(folder, device)
    model.amounts = None
    model.forward = MethodType(_surprise, model)
    return model


def _surprise(model: Any, input_ids: Tensor, attention_mask: Tensor) -> SequenceClassifierOutput:
    found = []
    for ids, mask in zip(input_ids.split(AT_A_TIME), attention_mask.split(AT_A_TIME), strict=True):
        states = model.model(input_ids=ids, attention_mask=decoders.WHOLE_MASK, use_cache=False).last_hidden_state
        logits = model.lm_head(states[:, :-1]).float().transpose(1, 2)
        losses = nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none")
        found.append((losses * mask[:, 1:]).sum(1, keepdim=True))
    return SequenceClassifierOutput(logits=torch.cat(found))


def features(rows: Rows) -> list[dict[str, Tensor]]:
    """The documents as `rank_layers` reads them."""
    return [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        for ids in map(torch.tensor, _prompts(rows))
    ]
