"""The tasks as prompts for a decoder: a text that ends in `Answer:`, and one token for each answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.evidence import tasks
from benchmarks.evidence.tasks import PAD_TO, Rows, Task, TaskData


NO_YES = (" no", " yes")
PLAIN_LENGTH, PLAIN_ROWS = 128, 256
"""Plain text, on which a model that was tuned may have got worse: the beginnings of passages of BoolQ (Wikipedia)."""

Parts = Callable[[Any], tuple[str, str]]
"""A row as its first text, which is cut where a prompt is too long, and the rest."""


def _both(first: str, second: str, question: str) -> Parts:
    return lambda row: (f"{row[first]}", f"\n{row[second]}\n{question}")


def _claim(first: str, second: str, answers: str) -> Parts:
    return lambda row: (f"{row[first]}", f"\nQuestion: {row[second]} {answers}?")


def _copa(row: Any) -> tuple[str, str]:
    choices = f"\nA: {row['choice1']}\nB: {row['choice2']}"
    return f"{row['premise']} {tasks.CHOICE_QUESTIONS[row['question']]}", choices


PROMPTS: dict[str, tuple[Parts, tuple[str, ...]]] = {
    "cola": (lambda row: (row["sentence"], "\nQuestion: Is this sentence acceptable English?"), NO_YES),
    "sst2": (
        lambda row: (row["sentence"].strip(), "\nQuestion: Is this review negative or positive?"),
        (" negative", " positive"),
    ),
    "mrpc": (_both("sentence1", "sentence2", "Question: Do both sentences mean the same?"), NO_YES),
    "stsb": (
        _both("sentence1", "sentence2", "Question: How much do both mean the same, from A (not at all) to F (fully)?"),
        tuple(f" {letter}" for letter in "ABCDEF"),
    ),
    "rte": (_claim("sentence1", "sentence2", "True or false"), (" true", " false")),
    "wnli": (_claim("sentence1", "sentence2", "True or false"), (" false", " true")),
    "cb": (_claim("premise", "hypothesis", "Yes, no or maybe"), (" yes", " no", " maybe")),
    "copa": (_copa, (" A", " B")),
    "multirc": (
        lambda row: (row["paragraph"], f"\n{row['question']}\n{row['answer']}\nQuestion: Is this answer right?"),
        NO_YES,
    ),
    "wic": (
        _both("sentence1", "sentence2", "Question: Does the word in quotes mean the same in both sentences?"),
        NO_YES,
    ),
    "wsc": (
        lambda row: (row["text"], f'\nQuestion: Does the word in quotes mean "{row["span1_text"]}"?'),
        NO_YES,
    ),
}
"""For each task the texts of a row, and the answers in the order of the labels."""

TASKS: dict[str, Task] = {
    name: replace(task, choices=False, length={"multirc": 288, "rte": 224, "cb": 224}.get(name, 160))
    for name, task in tasks.TASKS.items()
}


def load(name: str, tokenizer: Any, data: Path) -> TaskData:
    """Read a task as prompts; the same rows as those of encoders are held out."""
    return TaskData(*(encode(name, rows, tokenizer) for rows in tasks.frames(name, data)))


def encode(name: str, rows: pd.DataFrame, tokenizer: Any) -> Rows:
    """Turn rows into prompts, padded on the right.

    Args:
        name: The task.
        rows: Rows of its files.
        tokenizer: A tokenizer of transformers.

    Returns:
        The rows; the answer is no part of the inputs.
    """
    task, (parts, _) = TASKS[name], PROMPTS[name]
    if name in ("wic", "wsc"):  # with the word in quotes
        marked = tasks.TASKS[name].texts(rows)
        columns = ("sentence1", "sentence2") if name == "wic" else ("text",)
        rows = rows.assign(**dict(zip(columns, marked, strict=False)))
    texts = [parts(row) for row in rows.to_dict("records")]
    start = [tokenizer.bos_token_id]
    firsts, rests = (
        tokenizer([text + end for text in part], add_special_tokens=False)["input_ids"]
        for part, end in zip(zip(*texts, strict=True), ("", "\nAnswer:"), strict=True)
    )
    ids = [start + a[: task.length - 1 - len(b)] + b for a, b in zip(firsts, rests, strict=True)]
    labels = torch.tensor(rows["label"].to_numpy(), dtype=torch.float32 if task.regression else torch.long)
    return padded(ids, labels, tasks.questions(rows))


def padded(ids: Sequence[Sequence[int]], labels: Tensor, questions: Tensor) -> Rows:
    """Rows out of lists of tokens."""
    lengths = torch.tensor([len(row) for row in ids])
    longest = -(-int(lengths.max()) // PAD_TO) * PAD_TO
    table = torch.zeros(len(ids), longest, dtype=torch.long)
    for row, tokens in zip(table, ids, strict=True):
        row[: len(tokens)] = torch.as_tensor(tokens)
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return Rows({"input_ids": table, "attention_mask": mask}, lengths, labels, questions)


def answers(name: str, tokenizer: Any) -> list[int]:
    """The token of each answer, in the order of the labels."""
    found = tokenizer(list(PROMPTS[name][1]), add_special_tokens=False)["input_ids"]
    if any(len(tokens) != 1 for tokens in found):
        raise ValueError(f"Not every answer of {name} is one token: {found}")
    return [tokens[0] for tokens in found]


def plain(tokenizer: Any, data: Path) -> Tensor:
    """Plain text that no task has, (rows, tokens)."""
    passages = pd.read_parquet(data / "superglue/boolq/validation.parquet")["passage"].drop_duplicates().tolist()
    ids = tokenizer(passages, add_special_tokens=True)["input_ids"]
    return torch.tensor([row[:PLAIN_LENGTH] for row in ids if len(row) >= PLAIN_LENGTH][:PLAIN_ROWS])
