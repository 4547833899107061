"""Divide labelled rows so that the final numbers are measured on rows that chose nothing.

Layers are ranked on training rows, the best checkpoint is chosen on rows cut off the training rows, and the evaluation
rows are looked at once, when all is decided.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasets import ClassLabel, Dataset

from peft_surgical.training.splits import find_split
from peft_surgical.training.tasks import Task


@dataclass(frozen=True)
class Parts:
    """The rows of a task by what they are used for.

    Args:
        train: Rows that the layers are ranked on and the weights are fitted to.
        selection: Rows that the best checkpoint is chosen on, if one is chosen.
        evaluation: Rows that the final numbers are measured on.
        train_name: What the training rows are, in words.
        selection_name: What the selection rows are, in words.
        evaluation_name: What the evaluation rows are, in words.
        optimistic: Whether the selection rows are the evaluation rows, which makes the final numbers too good.
        overlap: How many evaluation rows have a text that occurs in the training or selection rows too.
    """

    train: Dataset
    selection: Dataset | None
    evaluation: Dataset
    train_name: str
    selection_name: str | None
    evaluation_name: str
    optimistic: bool
    overlap: int


def divide(
    task: Task,
    *,
    eval_split: str | None = None,
    select_on: str = "held-out",
    held_out: float = 0.1,
    max_train_samples: int | None = None,
    seed: int = 0,
) -> Parts:
    """Divide the rows of a task into training, selection and evaluation rows.

    Args:
        task: The task.
        eval_split: The split to evaluate on. Without: the validation split, else the test split, else a part cut off
            the training split.
        select_on: `"held-out"`, a part cut off the training split; `"none"`; or the name of a split.
        held_out: The fraction of the training split to cut off.
        max_train_samples: The most training rows, a random draw of those left.
        seed: Seed of the draws.

    Returns:
        The parts.

    Raises:
        ValueError: A split is missing, or is to be used for two things that exclude each other.
    """
    train_name = find_split(task.splits, "train")
    if train_name is None:
        raise ValueError(f"There is no training split; the splits with labels are: {[*task.splits]}.")
    for option, name in (("--eval-split", eval_split), ("--select-on", select_on)):
        if name == train_name:
            raise ValueError(f"{option} {name}: these rows are trained on and would tell nothing.")
    train = task.split(train_name)
    eval_split = eval_split or find_split(task.splits, "validation") or find_split(task.splits, "test")
    cut = f"{held_out:.0%} of the {train_name} split"
    if eval_split:
        evaluation, evaluation_name = task.split(eval_split), f"the {eval_split} split"
    else:
        train, evaluation = hold_out(train, held_out, seed)
        evaluation_name = f"{cut}, cut off first"
    selection, selection_name = None, None
    if select_on == "held-out":
        train, selection = hold_out(train, held_out, seed + 1)
        selection_name = f"{held_out:.0%} of the training rows, held out"
    elif select_on != "none":
        selection, selection_name = task.split(select_on), f"the {select_on} split"
    if max_train_samples is not None and max_train_samples < len(train):
        train = train.shuffle(seed=seed).select(range(max_train_samples))
    return Parts(
        train,
        selection,
        evaluation,
        f"rows of the {train_name} split",
        selection_name,
        evaluation_name,
        optimistic=select_on == eval_split,
        overlap=_overlap(evaluation, [train] + ([] if select_on in ("none", eval_split) else [selection])),
    )


def hold_out(data: Dataset, part: float, seed: int) -> tuple[Dataset, Dataset]:
    """Cut a random part off a split, with the same mix of classes where every class is frequent enough.

    Args:
        data: Rows with `labels`.
        part: The fraction of the rows to cut off, 0 to 1.
        seed: Seed of the draw.

    Returns:
        The rows that stay and the rows cut off.

    Raises:
        ValueError: One of the two would be empty.

    Example:

        >>> rest, cut = hold_out(Dataset.from_dict({"labels": [0.5] * 10}), 0.2, seed=0)
        >>> len(rest), len(cut)
        (8, 2)
    """
    count = round(part * len(data))
    if not 0 < count < len(data):
        raise ValueError(
            f"--held-out {part} of {len(data)} rows is {count} rows; at least one has to be held out, and one left. "
            "Change --held-out, or choose the last checkpoint with --select-on none."
        )
    stratify = "labels" if _can_stratify(data, count) else None
    parts = data.train_test_split(test_size=count, seed=seed, stratify_by_column=stratify)
    return parts["train"], parts["test"]


def _can_stratify(data: Dataset, count: int) -> bool:
    if not isinstance(data.features["labels"], ClassLabel):
        return False
    present = data["labels"][:]
    classes = set(present)
    return min(present.count(c) for c in classes) >= 2 and min(count, len(data) - count) >= len(classes)


def _overlap(evaluation: Dataset, others: list[Dataset | None]) -> int:
    seen = {row for data in others if data is not None for row in _texts(data)}
    return sum(row in seen for row in _texts(evaluation))


def _texts(data: Dataset) -> list[tuple[str, ...]]:
    columns = [data[c][:] for c in ("text", "text_pair") if c in data.column_names]
    return [*zip(*columns, strict=True)]
