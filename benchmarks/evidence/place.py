"""Where everything of a model is: its tasks, and its results so far."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.evidence import criteria, decoders, few_rows, models, prompts, records, tasks, texts


@dataclass(frozen=True)
class Place:
    """Where everything is.

    Args:
        model: A folder, or a name on the hub.
        data: The folder with the tasks.
        results: Where results go.
        cache: Where tokenised tasks are kept.
        device: What it runs on.
    """

    model: str
    data: Path
    results: Path
    cache: Path
    device: str

    def load(self, task: str, seed: int) -> torch.nn.Module:
        """The pretrained model with a fresh head."""
        if few_rows.whole(task) in texts.TASKS:
            return texts.load(self.model, self.device)
        if self.is_decoder:
            return decoders.load(self.model, few_rows.whole(task), self.device)
        made = self.task(task)
        return models.load(self.model, made.outputs, choices=made.choices, seed=seed, device=self.device)

    def read(self, task: str, seed: int = 0) -> tasks.TaskData:
        """The rows of a task, on the CPU; the seed matters where they are drawn."""
        whole = few_rows.whole(task)
        if self.is_decoder:
            return few_rows.draw((texts if whole in texts.TASKS else decoders).read(self.model, whole), task, seed)
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.model)
        return few_rows.draw(tasks.load_cached(whole, tokenizer, self.data, self.cache), task, seed)

    def rows(self, task: str, seed: int = 0) -> tasks.TaskData:
        """The rows of a task, on the device."""
        data = self.read(task, seed)
        return tasks.TaskData(*(part.to(self.device) for part in (data.train, data.held_out, data.validation)))

    @cached_property
    def is_decoder(self) -> bool:
        """Whether the model answers prompts."""
        return decoders.is_decoder(self.model)

    def task(self, name: str) -> tasks.Task:
        """What a task is for this model."""
        every = texts.TASKS | (prompts if self.is_decoder else tasks).TASKS
        return few_rows.made(every[few_rows.whole(name)], name)

    def lengths(self, task: str) -> torch.Tensor:
        """How many tokens the training rows of a task have."""
        return _lengths(self, task)

    @property
    def depth(self) -> int:
        """How many layers the model has."""
        return transformers.AutoConfig.from_pretrained(self.model).num_hidden_layers

    def sizes(self) -> dict[str, dict[str, Any]]:
        """How large the tasks are, as far as it was written down."""
        file = self.results / "tasks.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def runs_file(self, task: str) -> Path:
        """Where the runs of a task go, one a line."""
        return self.results / "runs" / f"{task}.jsonl"

    def runs(self, task: str) -> dict[tuple[str, float, int], dict[str, Any]]:
        """The runs of a task so far, by method, learning rate and seed."""
        every = records.read(self.runs_file(task))
        return {(r["tuning"], r["rate"], r["seed"]): r for r in every if is_current(r)}

    def rankings(self, task: str, seed: int) -> dict[str, dict[str, Any]]:
        """The rankings of a task so far, by score."""
        found = [r for r in records.read(self.results / "rankings.jsonl") if r["task"] == task]
        found = [r for r in found if is_current(r)]
        same_rows = "@" not in task  # with every seed
        shared = {r["score"]: r for r in found if same_rows and r["seed"] == 0 and r["score"] in criteria.COSTLY}
        return shared | {r["score"]: r for r in found if r["seed"] == seed}

    def is_tracked(self, task: str, seed: int) -> bool:
        """Whether there is a result of `track`."""
        return any((r["task"], r["seed"]) == (task, seed) for r in records.read(self.results / "track.jsonl"))

    def sampled(self, task: str, seed: int) -> set[str]:
        """The kinds of rankings that there are of `samples`."""
        found = [r for r in records.read(self.results / "samples.jsonl") if (r["task"], r["seed"]) == (task, seed)]
        return {ranking["kind"] for record in found for ranking in record["rankings"]}

    def rates(self) -> dict[str, float]:
        """The learning rate chosen for each family of methods."""
        file = self.results / "rates.json"
        if not file.exists():
            raise ValueError(f"{file} is not there: choose the learning rates first, with the command `rates`.")
        return json.loads(file.read_text())["chosen"]


def is_current(record: dict[str, Any]) -> bool:
    """Whether a record is of its task as it is now."""
    return record.get("revision", 1) == (tasks.TASKS | texts.TASKS)[few_rows.whole(record["task"])].revision


@cache
def _lengths(place: Place, task: str) -> torch.Tensor:
    return place.read(task).train.lengths
