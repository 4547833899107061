"""Labelled text as a task: one or two texts in, a class or a number out, whatever the columns are called."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import ClassLabel, Dataset, Features, Value

from peft_surgical.training.data import Task, check_columns, find_split, is_text
from peft_surgical.training.formats import SUPPORTED, is_for_language_model, make_language_task
from peft_surgical.training.options import CAUSAL_LM


logger = logging.getLogger(__name__)

TEXT_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question", "passage"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text", "text_pair"),
)
TEXTS = ("text", "sentence", "content")
LABELS = ("label", "labels", "target", "class")
MOST_CLASSES_FROM_NUMBERS = 50
FEW_CLASSES = 10  # so few that each may occur once in a toy data set


def make_task(
    splits: Mapping[str, Dataset],
    *,
    text_columns: Sequence[str] = (),
    label_column: str | None = None,
    kind: str | None = None,
    labels: Sequence[str] = (),
) -> Task:
    """Find out what the columns mean, and bring all splits into one form. What is not given is found.

    Args:
        splits: The raw data sets by split name, all with the same columns (test splits may lack labels).
        text_columns: One or two columns with text: a well-known pair (`sentence1` and `sentence2`, `premise` and
            `hypothesis`, ...), else `text`, `sentence` or `content`, else the only column of strings.
        label_column: The column with labels: `label`, `labels`, `target` or `class`, else the only column that
            `datasets` knows to be a label.
        kind: `"classification"`, `"regression"` or `"causal-lm"`, by the columns and the type of the labels.
        labels: Names of the classes in the order of the ids that a model was trained with.

    Example:

        >>> data = Dataset.from_dict({"text": ["good", "bad", "fine"], "label": ["+", "-", "+"]})
        >>> task = make_task({"train": data})
        >>> task.kind, task.labels, task.split("train")["labels"][:]
        ('classification', ('+', '-'), [0, 1, 0])
    """
    reference = splits[find_split(splits, "train") or next(iter(splits))]
    if kind is None and label_column is None and is_for_language_model(reference, LABELS):
        kind = CAUSAL_LM
    if kind == CAUSAL_LM:
        return make_language_task(splits, text_columns)
    label = _find_label_column(reference, label_column)
    texts, unused = _find_text_columns(reference, text_columns, label)
    _check_types(reference, texts, label)
    labelled = {name: rows for name, data in splits.items() if (rows := _labelled_rows(name, data, label)) is not None}
    name = find_split(splits, "validation")
    if name is not None and label not in (columns := splits[name].column_names):
        raise ValueError(f"{name!r} has no column {label!r}, as the others do; it has {columns}.")
    if not labelled:
        raise ValueError(f"Column {label!r} holds no label in any of the splits {[*splits]}.")
    reference = labelled[find_split(labelled, "train") or next(iter(labelled))]
    kind = kind or ("classification" if labels else _guess_kind(reference, label))
    names = tuple(labels) if labels or kind == "regression" else _class_names(reference, label)
    if kind == "classification" and len(names) < 2:
        raise ValueError(f"Column {label!r} holds the single class {names[0]!r}; a classifier needs two or more.")
    for name, data in labelled.items():
        for column in texts:
            if column not in data.column_names:
                raise ValueError(f"{name!r} has no column {column!r}, as the others do; it has {data.column_names}.")
    made = {name: _normalise(name, data, texts, label, names) for name, data in labelled.items()}
    return Task(kind, texts, label, names, unused, made)


def encode(data: Dataset, tokenizer: Any, max_length: int) -> Dataset:
    """Turn the texts of one split of a task into token ids, cut to `max_length` tokens and not padded."""

    def tokenize(rows: dict[str, list]) -> dict[str, list]:
        pair = rows.get("text_pair")
        return tokenizer(rows["text"], pair, truncation=True, max_length=max_length)

    return data.map(tokenize, batched=True, remove_columns=[c for c in data.column_names if c != "labels"])


def _find_label_column(data: Dataset, named: str | None) -> str:
    columns = data.column_names
    if named is not None:
        check_columns(data, [named], "--label-column")
        return named
    found = [c for c in LABELS if c in columns] or [c for c, f in data.features.items() if isinstance(f, ClassLabel)]
    if not found:
        raise ValueError(
            f"No column is called {' or '.join(LABELS)}. Name one of {columns} with --label-column; or, to "
            f"train a language model on {SUPPORTED}, say --task {CAUSAL_LM}."
        )
    return found[0]


def _find_text_columns(data: Dataset, named: Sequence[str], label: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    strings = [c for c, f in data.features.items() if c != label and is_text(f)]
    if named:
        if len(named) > 2:
            raise ValueError(f"text_columns={[*named]} are more than two; a task has one text or two.")
        check_columns(data, named)
        texts = tuple(named)
    else:
        pairs = [pair for pair in TEXT_PAIRS if set(pair) <= set(strings)]
        singles = [(c,) for c in TEXTS if c in strings] or [(c,) for c in strings if len(strings) == 1]
        found: list[tuple[str, ...]] = [*pairs, *singles]
        if not found:
            raise ValueError(
                f"It is not clear which column holds the text. Name one or two of {strings or data.column_names} "
                "with --text-column."
            )
        texts = found[0]
    return texts, tuple(c for c in strings if c not in texts)


def _check_types(data: Dataset, texts: Sequence[str], label: str) -> None:
    for column in texts:
        if not is_text(data.features[column]):
            raise ValueError(f"--text-column {column}: it holds {data.features[column]}, not text.")
    feature = data.features[label]
    if not isinstance(feature, (ClassLabel, Value)) or feature.dtype.startswith(("binary", "date", "time")):
        raise ValueError(
            f"Column {label!r} holds {feature}. Supported are one class or one number a row; several labels a row, as "
            "for multi-label classification or for tagging tokens, are not. Name another column with --label-column."
        )


def _labelled_rows(name: str, data: Dataset, label: str) -> Dataset | None:
    """The rows that have a label (unlabelled test rows carry -1, NaN or nothing), or None if there is none."""
    if label not in data.column_names:
        return None
    values = data[label][:]
    unknown = (None, -1) if isinstance(data.features[label], ClassLabel) or set(values) == {-1} else (None,)
    keep = [i for i, value in enumerate(values) if value not in unknown and value == value]
    if len(keep) < len(data):
        logger.warning("%d of %d rows of %r have no label and are left out.", len(data) - len(keep), len(data), name)
    return data.select(keep) if keep else None


def _guess_kind(data: Dataset, label: str) -> str:
    feature = data.features[label]
    if isinstance(feature, ClassLabel):
        return "classification"
    counts = Counter(data[label][:])
    once = sum(count == 1 for count in counts.values())
    are_many = len(counts) > FEW_CLASSES and once > len(counts) / 2
    what = f"Column {label!r} holds {len(counts)} different values in {len(data)} rows, {once} of which occur once"
    if is_text(feature) or feature.dtype == "bool":
        if are_many:
            examples = ", ".join(repr(str(value)[:40]) for value in [*counts][:3])
            raise ValueError(
                f"{what}, such as {examples}: no classes that could be learned. Name the column with "
                "the class with --label-column, or insist with --task classification."
            )
        return "classification"
    if "float" in feature.dtype and not all(float(v).is_integer() for v in counts):
        return "regression"
    if "int" in feature.dtype and len(counts) <= MOST_CLASSES_FROM_NUMBERS and not are_many:
        return "classification"
    raise ValueError(
        f"{what} (type {feature.dtype}): they may be classes or amounts. "
        "Say --task classification or --task regression."
    )


def _class_names(data: Dataset, label: str) -> tuple[str, ...]:
    feature = data.features[label]
    if isinstance(feature, ClassLabel):
        return tuple(feature.names)
    return tuple(_name(value) for value in sorted(set(data[label][:])))


def _name(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _normalise(split: str, data: Dataset, texts: Sequence[str], label: str, names: Sequence[str]) -> Dataset:
    columns: dict[str, list[Any]] = {
        name: [t or "" for t in data[c][:]] for name, c in zip(("text", "text_pair"), texts, strict=False)
    }
    features: dict[str, Any] = dict.fromkeys(columns, Value("string"))
    features["labels"] = ClassLabel(names=[*names]) if names else Value("float32")
    columns["labels"] = _class_ids(split, data, label, names) if names else _amounts(split, data, label)
    empty = sum(not t.strip() for t in columns["text"])
    if empty:
        logger.warning("%d of %d rows of %r have an empty text.", empty, len(data), split)
    return Dataset.from_dict(columns, features=Features(features))


def _class_ids(split: str, data: Dataset, label: str, names: Sequence[str]) -> list[int]:
    feature = data.features[label]
    values = data[label][:]
    own = [feature.int2str(v) for v in values] if isinstance(feature, ClassLabel) else [_name(v) for v in values]
    ids = {name: i for i, name in enumerate(names)}
    unknown = sorted(set(own) - set(ids))
    if unknown:
        raise ValueError(f"{split!r} holds the label {unknown[0]!r}, which is not one of the classes {[*names]}.")
    return [ids[name] for name in own]


def _amounts(split: str, data: Dataset, label: str) -> list[float]:
    if isinstance(data.features[label], ClassLabel):
        raise ValueError(f"Column {label!r} holds the classes {data.features[label].names}, not amounts.")
    try:
        amounts = [float(value) for value in data[label][:]]
    except ValueError as error:
        raise ValueError(f"{split!r} holds a label that is not a number: {error}") from error
    if infinite := [amount for amount in amounts if math.isinf(amount)]:
        raise ValueError(f"{split!r} holds the label {infinite[0]}, which no model can reach.")
    return amounts
