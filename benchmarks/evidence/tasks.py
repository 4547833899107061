"""The tasks of GLUE and SuperGLUE, read from Parquet files, as padded tensors, with their official metrics.

    python -m benchmarks.evidence.tasks data models/mpnet  # sizes, lengths and the first text of every task

The training split is cut in two: a tenth is held out to choose learning rates and the best epoch. The validation split
serves the final number only.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.sparse.csgraph import connected_components
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch import Tensor


SPLIT_SEED = 0
PAD_TO = 8
ALIKE = 0.6
"""Two texts are alike that share more than this part of their words."""
CHOICE_QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}

Texts = tuple[Sequence[str], ...]
"""The texts of all rows: (first, second), (first,), or (first, second, first, second) for two choices."""


@dataclass(frozen=True)
class Task:
    """What a task is, and how it is trained.

    Args:
        folder: Where its files lie, below the data folder.
        metric: The metric of the tables; see `score`.
        texts: Makes the texts out of the rows.
        outputs: How many classes; 1 for regression.
        choices: Whether a row offers two texts to choose from.
        length: Texts are cut to so many tokens, the first text of a pair first.
        batch: Rows in a batch.
        epochs: How long it is trained at most.
        rows: How many training rows are used at most.
        group: Numbers the rows; those of one number stay on one side of the cut between training and held-out rows.
        revision: Counts changes of what stands here. Results of another revision are left aside.
    """

    folder: str
    metric: str
    texts: Callable[[pd.DataFrame], Texts]
    outputs: int = 2
    choices: bool = False
    length: int = 128
    batch: int = 32
    epochs: int = 10
    rows: int = 10_000
    group: Callable[[pd.DataFrame], np.ndarray] | None = None
    revision: int = 1

    @property
    def regression(self) -> bool:
        """Whether the label is an amount."""
        return self.outputs == 1


@dataclass(frozen=True)
class Rows:
    """Some rows of a task as tensors.

    Args:
        inputs: The model's inputs, each (rows, tokens) or (rows, choices, tokens), padded on the right.
        lengths: How many tokens a row needs, (rows,).
        labels: Class numbers, or amounts, (rows,); of documents how many tokens are predicted, (rows, 1).
        questions: What rows belong to one question, for metrics that count questions; (rows,).
    """

    inputs: dict[str, Tensor]
    lengths: Tensor
    labels: Tensor
    questions: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Tensor) -> Rows:
        """The rows of an index."""
        inputs = {name: t[index] for name, t in self.inputs.items()}
        return Rows(inputs, self.lengths[index], self.labels[index], self.questions[index])

    def to(self, device: torch.device | str) -> Rows:
        """The rows on a device."""
        inputs = {name: t.to(device) for name, t in self.inputs.items()}
        return Rows(inputs, self.lengths.to(device), self.labels.to(device), self.questions.to(device))

    def features(self) -> list[dict[str, Any]]:
        """The rows without padding, as `rank_layers` reads them."""
        return [
            {name: t[row, ..., : int(self.lengths[row])] for name, t in self.inputs.items()}
            | {"labels": self.labels[row]}
            for row in range(len(self))
        ]


@dataclass(frozen=True)
class TaskData:
    """The rows of a task."""

    train: Rows
    held_out: Rows
    validation: Rows


def _single(first: str) -> Callable[[pd.DataFrame], Texts]:
    return lambda rows: (rows[first].tolist(),)


def _pair(first: str, second: str) -> Callable[[pd.DataFrame], Texts]:
    return lambda rows: (rows[first].tolist(), rows[second].tolist())


def _same(column: str) -> Callable[[pd.DataFrame], np.ndarray]:
    return lambda rows: pd.factorize(rows[column])[0]


def _alike(column: str) -> Callable[[pd.DataFrame], np.ndarray]:
    """Rows whose texts share most of their words: a Winograd schema has two, which differ in a word and the answer."""

    def groups(rows: pd.DataFrame) -> np.ndarray:
        number, texts = pd.factorize(rows[column])
        words = [set(re.findall(r"\w+", text.lower())) for text in texts]
        alike = [[len(a & b) > ALIKE * len(a | b) for b in words] for a in words]
        return connected_components(np.array(alike))[1][number]

    return groups


def _copa(rows: pd.DataFrame) -> Texts:
    premises = [f"{p} {CHOICE_QUESTIONS[q]}" for p, q in zip(rows["premise"], rows["question"], strict=True)]
    return premises, rows["choice1"].tolist(), premises, rows["choice2"].tolist()


def _multirc(rows: pd.DataFrame) -> Texts:
    asked = [f"{question} {answer}" for question, answer in zip(rows["question"], rows["answer"], strict=True)]
    return rows["paragraph"].tolist(), asked


def _wic(rows: pd.DataFrame) -> Texts:
    """The two sentences, with the word in quotes in each."""
    return tuple(
        [
            f'{text[:start]}"{text[start:end]}"{text[end:]}'
            for text, start, end in zip(rows[f"sentence{i}"], rows[f"start{i}"], rows[f"end{i}"], strict=True)
        ]
        for i in (1, 2)
    )


def _wsc(rows: pd.DataFrame) -> Texts:
    """The text with the pronoun in quotes, and what it may refer to."""
    marked = []
    for text, index, pronoun in zip(rows["text"], rows["span2_index"], rows["span2_text"], strict=True):
        words = text.split(" ")
        words[index] = words[index].replace(pronoun, f'"{pronoun}"', 1)
        marked.append(" ".join(words))
    return marked, rows["span1_text"].tolist()


TASKS: dict[str, Task] = {
    "cola": Task("glue/cola", "matthews", _single("sentence"), length=64, epochs=5),
    "sst2": Task("glue/sst2", "accuracy", _single("sentence"), length=64, epochs=4, rows=6_000),
    "mrpc": Task("glue/mrpc", "f1", _pair("sentence1", "sentence2"), epochs=8),
    "stsb": Task("glue/stsb", "pearson", _pair("sentence1", "sentence2"), outputs=1, epochs=6),
    "rte": Task("glue/rte", "accuracy", _pair("sentence1", "sentence2"), length=192),
    "wnli": Task(
        "glue/wnli", "accuracy", _pair("sentence1", "sentence2"), batch=16, group=_alike("sentence1"), revision=2
    ),
    "cb": Task("superglue/cb", "accuracy", _pair("premise", "hypothesis"), outputs=3, length=192, batch=16),
    "copa": Task("superglue/copa", "accuracy", _copa, choices=True, length=64, batch=16),
    "multirc": Task(
        *("superglue/multirc", "accuracy", _multirc),
        **{"length": 256, "epochs": 8, "rows": 4_000, "group": _same("paragraph"), "revision": 2},
    ),
    "wic": Task("superglue/wic", "accuracy", _wic, length=64, epochs=6),
    "wsc": Task("superglue/wsc", "accuracy", _wsc, batch=16, group=_alike("text"), revision=2),
}
"""All tasks whose training split is at hand; large ones with fewer rows or epochs, for 1,200 steps at most."""
NOT_LEARNT = ("wnli",)
"""Tasks that means go without: nothing is learnt, and validation repeats training sentences with the other answer."""


def load(name: str, tokenizer: Any, data: Path) -> TaskData:
    """Read a task.

    Args:
        name: One of `TASKS`.
        tokenizer: A tokenizer of transformers.
        data: The folder with `glue/` and `superglue/`.

    Returns:
        Its rows.
    """
    return TaskData(*(encode(TASKS[name], rows, tokenizer) for rows in frames(name, data)))


def frames(name: str, data: Path) -> list[pd.DataFrame]:
    """The rows of a task to train on, those held out, and those of the validation split."""
    task = TASKS[name]
    files = [data / task.folder / f"{split}.parquet" for split in ("train", "validation")]
    if missing := [str(file) for file in files if not file.exists()]:
        raise FileNotFoundError(
            f"{' and '.join(missing)} not found; benchmarks/README.md says where the tasks are from."
        )
    train, validation = (pd.read_parquet(file) for file in files)
    kept, held_out = _cut(task, train)
    return [train.iloc[kept], train.iloc[held_out], validation]


def load_cached(name: str, tokenizer: Any, data: Path, cache: Path) -> TaskData:
    """Read a task, or what was read before."""
    file = cache / f"{name}-{TASKS[name].revision}.pt"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        torch.save(load(name, tokenizer, data), file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)
    return torch.load(file, weights_only=False)


def _cut(task: Task, train: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """The rows to train on and the rows held out, the same ones in every run."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(train))
    if task.group is not None:
        number = task.group(train)
        order = order[np.argsort(pd.factorize(number[order])[0], kind="stable")]  # whole groups in random order
        order = order[: task.rows]
        groups = number[order]
        later = np.isin(groups, pd.unique(groups)[: max(1, len(pd.unique(groups)) // 10)])
        return np.sort(order[~later]), np.sort(order[later])
    order = order[: task.rows]
    if not task.regression:
        order = order[np.argsort(train["label"].to_numpy()[order], kind="stable")]  # a tenth of each class
    return np.sort(np.delete(order, np.s_[::10])), np.sort(order[::10])


def encode(task: Task, rows: pd.DataFrame, tokenizer: Any) -> Rows:
    """Turn rows into padded tensors.

    Args:
        task: The task.
        rows: Rows of its files.
        tokenizer: A tokenizer of transformers.

    Returns:
        The rows.
    """
    texts = task.texts(rows)
    pairs = [texts[:2], texts[2:]] if task.choices else [texts]
    cut: dict[str, Any] = {"truncation": "only_first" if len(texts) > 1 else True, "max_length": task.length}
    encoded = [tokenizer(*pair, padding="max_length", return_tensors="pt", **cut) for pair in pairs]
    names = [name for name in tokenizer.model_input_names if name in encoded[0]]
    inputs = {name: torch.stack([e[name] for e in encoded], 1) if task.choices else encoded[0][name] for name in names}
    needed = inputs["attention_mask"].sum(-1)
    lengths = needed.amax(1) if task.choices else needed
    longest = min(task.length, -(-int(lengths.max()) // PAD_TO) * PAD_TO)
    labels = torch.tensor(rows["label"].to_numpy(), dtype=torch.float32 if task.regression else torch.long)
    return Rows({name: t[..., :longest] for name, t in inputs.items()}, lengths, labels, questions(rows))


def questions(rows: pd.DataFrame) -> Tensor:
    """Numbers the rows by the question that they belong to."""
    if len(rows) and isinstance(rows["idx"].iloc[0], dict):
        keys = [(i["paragraph"], i["question"]) for i in rows["idx"]]
        return torch.tensor(pd.factorize(pd.Series(keys))[0])
    return torch.arange(len(rows))


def score(task: Task, logits: Tensor, rows: Rows) -> dict[str, float]:
    """The metrics of a task.

    Args:
        task: The task.
        logits: What the model says, (rows, outputs or more).
        rows: The rows it says it of.

    Returns:
        `pearson` and `spearman` for regression, else `accuracy`, `f1` (of class 1 if there are two classes, as in MRPC
        and MultiRC, else the mean over the classes, as in CB), `matthews`, and `exact_match` (the share of questions
        with no wrong answer, for MultiRC); of documents `log_likelihood`, the mean over tokens.
    """
    if rows.labels.dim() == 2:
        return {"log_likelihood": -float(logits.sum() / rows.labels.sum())}
    truth = rows.labels.cpu().numpy()
    if task.regression:
        said = pd.Series(logits.float().cpu().numpy()[:, 0])
        given = pd.Series(truth)
        return {name: float(np.nan_to_num(said.corr(given, method=name))) for name in ("pearson", "spearman")}
    said = logits[:, : task.outputs].float().cpu().numpy().argmax(-1)
    right = pd.Series(said == truth).groupby(rows.questions.cpu().numpy()).all()
    average = "binary" if task.outputs == 2 else "macro"
    return {
        "accuracy": float(accuracy_score(truth, said)),
        "f1": float(f1_score(truth, said, average=average, zero_division=0.0)),
        "matthews": float(matthews_corrcoef(truth, said)),
        "exact_match": float(right.mean()),
    }


def main() -> None:
    """Print what the tasks are like."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("model")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    print(f"{'task':8} {'train':>6} {'held out':>8} {'valid.':>6}   tokens: mean, 90 %, most   most frequent label")
    for name in TASKS:
        data = load(name, tokenizer, options.data)
        lengths = data.train.lengths.float()
        most = (
            "" if TASKS[name].regression else f"{data.validation.labels.bincount().max() / len(data.validation):.3f}"
        )
        print(
            f"{name:8} {len(data.train):6} {len(data.held_out):8} {len(data.validation):6}   {lengths.mean():12.0f} "
            f"{lengths.quantile(0.9):5.0f} {lengths.max():5.0f}   {most:>8}   "
            f"{tokenizer.decode(data.train.inputs['input_ids'][0].reshape(-1)[:40])}"
        )


if __name__ == "__main__":
    main()
