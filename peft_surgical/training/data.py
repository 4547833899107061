"""Read labelled rows by split name, and split them so that the final numbers are measured on rows that chose nothing.

Layers are ranked on training rows, the best checkpoint is chosen on rows cut off the training rows, and the evaluation
rows are looked at once, when all is decided.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Value, concatenate_datasets, load_dataset, load_from_disk


FORMATS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".json": "json"}
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "eval")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def read_splits(data: str, *, subset: str | None = None, encoding: str = "utf-8") -> dict[str, Dataset]:
    """Read data sets by split name, from a .parquet, .csv, .tsv, .jsonl or .json file; a folder of such files, each
    named after its split (`validation.csv`, `train-00000-of-00002.parquet`); a folder written by `save_to_disk`; or a
    subset of a data set on the hub. A single file whose name is not that of a split is `train`."""
    path = Path(data).expanduser()
    if path.is_file():
        name = path.stem if path.stem in ("train", *VALIDATION_NAMES, "test") else "train"
        return {name: _read_files([path], encoding)}
    if path.is_dir():
        return _read_folder(path, encoding)
    if path.suffix in FORMATS or data.startswith((".", "/", "~")):
        raise ValueError(f"--data {data}: there is no such file or folder.")
    return _read_from_hub(data, subset)


def find_split(splits: Mapping[str, Any] | Iterable[str], role: str) -> str | None:
    """The name of the split that plays a role: `"train"`, `"validation"` (also `dev`, `val`, `valid`) or `"test"`.
    That of exactly this name, else the first one that starts so, else None.

    Example:

        >>> find_split(["train", "validation_matched", "validation_mismatched"], "validation")
        'validation_matched'
    """
    starts = VALIDATION_NAMES if role == "validation" else (role,)
    names = [*splits]
    found = [start for start in starts if start in names] or [name for name in names if name.startswith(starts)]
    return found[0] if found else None


def is_text(feature: Any) -> bool:
    """Whether a column holds one text a row."""
    return isinstance(feature, Value) and feature.dtype in ("string", "large_string")


def check_columns(data: Dataset, columns: Iterable[str], option: str = "--text-column") -> None:
    """Make sure that data have the columns that an option names."""
    for column in columns:
        if column not in data.column_names:
            raise ValueError(f"{option} {column}: there is no such column; the columns are {data.column_names}.")


@dataclass(frozen=True)
class Task:
    """A task, read and put into one form."""

    kind: str  # "classification", "regression" or "causal-lm"
    text_columns: tuple[str, ...]  # of the data; of labelled text one or two
    label_column: str | None  # None for language models
    labels: tuple[str, ...]  # names of the classes in the order of their ids; empty for the other kinds
    unused_columns: tuple[str, ...]  # with text that the task does not read
    splits: Mapping[str, Dataset]
    """The rows with a label: their `text`, for two texts also `text_pair`, and `labels`. For language models, see
    `make_language_task`."""
    form: str = ""  # for language models, how a prompt is put: "chat", "instruction" or "text"

    def split(self, name: str) -> Dataset:
        """The rows of a split; a `ValueError` that lists the splits if there is none of that name with labels."""
        if name not in self.splits:
            raise ValueError(
                f"There are no labelled rows called {name!r}; the splits with labels are: {[*self.splits]}."
            )
        return self.splits[name]


@dataclass(frozen=True)
class Parts:
    """The rows of a task by what they are used for, and what they are in words."""

    train: Dataset  # the layers are ranked on these and the weights fitted to them
    selection: Dataset | None  # the best checkpoint is chosen on these, if one is chosen
    evaluation: Dataset  # the final numbers are measured on these
    train_name: str
    selection_name: str | None
    evaluation_name: str
    optimistic: bool  # the selection rows are the evaluation rows, which makes the final numbers too good
    overlap: int  # how many evaluation rows have a text that is in the training or selection rows too


def split_rows(task: Task, job: Any) -> Parts:
    """Split the rows of a task into training, selection and evaluation rows, as a `TrainingJob` says."""
    select_on, held_out = job.select_on, job.held_out
    train_name = find_split(task.splits, "train")
    if train_name is None:
        raise ValueError(f"There is no training split; the splits with labels are: {[*task.splits]}.")
    for option, name, words in (
        ("--eval-split", job.eval_split, ()),
        ("--select-on", select_on, ("held-out", "none")),
    ):
        if name == train_name:
            raise ValueError(f"{option} {name}: these rows are trained on, so to measure on them would say nothing.")
        allowed = [*words, *(split for split in task.splits if split != train_name)]
        if name is not None and name not in allowed:
            listed = (
                f"allowed are {', '.join(allowed)}" if allowed else f"there is no split with labels but {train_name}"
            )
            raise ValueError(f"{option} {name}: {listed}.")
    train = task.split(train_name)
    eval_split = job.eval_split or find_split(task.splits, "validation") or find_split(task.splits, "test")
    cut = f"{held_out:.0%} of the {train_name} split"
    if eval_split:
        evaluation, evaluation_name = task.split(eval_split), f"the {eval_split} split"
    else:
        train, evaluation = train_test_split(train, held_out, job.seed)
        evaluation_name = f"{cut}, cut off first"
    selection, selection_name = None, None
    if select_on == "held-out":
        train, selection = train_test_split(train, held_out, job.seed + 1)
        selection_name = f"{held_out:.0%} of the training rows, held out"
    elif select_on != "none":
        selection, selection_name = task.split(select_on), f"the {select_on} split"
    if job.max_train_samples is not None and job.max_train_samples < len(train):
        train = train.shuffle(seed=job.seed).select(range(job.max_train_samples))
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


def describe_rows(task: Task, parts: Parts) -> dict[str, Any]:
    """What the rows that a run trains and chooses on are known by later: their number, and a hash."""
    digest = hashlib.sha256(repr(task.labels).encode())
    used = [rows for rows in (parts.train, parts.selection) if rows is not None]
    for rows in used:
        for batch in rows.iter(1000):
            digest.update(repr(batch).encode())
    return {"count": sum(map(len, used)), "sha256": digest.hexdigest()}


def train_test_split(data: Dataset, part: float, seed: int) -> tuple[Dataset, Dataset]:
    """Cut a random part off a split, with the same mix of classes where every class is frequent enough."""
    count = round(part * len(data))
    if not 0 < count < len(data):
        raise ValueError(
            f"--held-out {part} of {len(data)} rows is {count} rows; at least one has to be held out, and one left. "
            "Change --held-out, or choose the last checkpoint with --select-on none."
        )
    stratify = "labels" if _can_stratify(data, count) else None
    parts = data.train_test_split(test_size=count, seed=seed, stratify_by_column=stratify)
    return parts["train"], parts["test"]


def _read_folder(folder: Path, encoding: str) -> dict[str, Dataset]:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        loaded = load_from_disk(str(folder))
        return {str(k): v for k, v in loaded.items()} if isinstance(loaded, DatasetDict) else {"train": loaded}
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix in FORMATS:
            files.setdefault(_SHARD.sub("", file.stem), []).append(file)
    if not files:
        raise ValueError(f"--data {folder}: the folder holds no {', '.join(FORMATS)} file.")
    mixed = next((name for name, group in files.items() if len({f.suffix for f in group}) > 1), None)
    if mixed:
        raise ValueError(f"--data {folder}: the split {mixed!r} is there twice: {[f.name for f in files[mixed]]}.")
    return {name: _read_files(group, encoding) for name, group in files.items()}


def _read_files(files: list[Path], encoding: str) -> Dataset:
    suffix = files[0].suffix
    if suffix not in FORMATS:
        raise ValueError(f"--data {files[0]}: the file is none of {', '.join(FORMATS)}.")
    options: dict[str, Any] = (
        {"sep": "\t" if suffix == ".tsv" else ",", "encoding": encoding} if FORMATS[suffix] == "csv" else {}
    )
    if suffix == ".tsv":
        options["quoting"] = _quoting(files, encoding)
    if suffix == ".csv":
        with files[0].open(encoding=encoding, errors="replace") as text:
            head = text.readline()
        for mark, name in ((";", "semicolons"), ("\t", "tabs")):
            if mark in head and "," not in head:
                raise ValueError(f"--data {files[0]}: it has {name} between its columns. Save it with commas.")
    read = partial(load_dataset, FORMATS[suffix], data_files=[str(f) for f in files], split="train")
    try:
        data = read(**options)
        words = _columns_with_words_left_out(data) if FORMATS[suffix] == "csv" else []
        if words:
            texts = read(**options, usecols=words, keep_default_na=False, na_values=[""])
            kept = [data.remove_columns(words)] if len(words) < len(data.column_names) else []
            data = concatenate_datasets([*kept, texts], axis=1).select_columns(data.column_names)
        return data
    except Exception as error:
        blank = [file for file in files if not file.read_bytes().strip()]
        if blank or "corresponds to no data" in str(error):
            raise ValueError(f"--data {(blank or files)[0]}: the file has no rows.") from error
        cause = error.__cause__ or error
        hint = " Name another with --encoding, such as latin-1." if isinstance(cause, UnicodeDecodeError) else ""
        raise ValueError(f"--data {files[0]} cannot be read: {cause}{hint}") from error


def _columns_with_words_left_out(data: Dataset) -> list[str]:
    """The columns of texts of a csv file some of which are not there: pandas takes NA, null, None and the like for
    nothing, which it is among numbers."""
    columns = {name: data.data.column(name) for name in data.column_names}
    words = [name for name, column in columns.items() if is_text(data.features[name]) or not column.drop_null()]
    return [name for name in words if columns[name].null_count]


def _quoting(files: list[Path], encoding: str) -> int:
    """What quotation marks mean in tab-separated files: where each line has all columns, one that its cell does not
    close is text, and would take the lines up to the next one with it."""
    texts = (file.read_text(encoding, errors="replace") for file in files)
    lines = [line.split("\t") for text in texts for line in text.split("\n") if line]
    is_open = any(cell[:1] == '"' and (len(cell) == 1 or cell[-1] != '"') for cells in lines for cell in cells)
    return csv.QUOTE_NONE if is_open and len({*map(len, lines)}) == 1 else csv.QUOTE_MINIMAL


def _read_from_hub(name: str, subset: str | None) -> dict[str, Dataset]:
    try:
        loaded = load_dataset(name, subset)
    except Exception as error:
        raise ValueError(
            f"--data {name} is neither a file nor a folder here, and the hub gave no such data set: {error}"
        ) from error
    return {str(split): data for split, data in loaded.items()}


def _can_stratify(data: Dataset, count: int) -> bool:
    if not isinstance(data.features.get("labels"), ClassLabel):
        return False
    of_class = Counter(data["labels"][:])
    return min(of_class.values()) >= 2 and min(count, len(data) - count) >= len(of_class)


def _overlap(evaluation: Dataset, others: list[Dataset | None]) -> int:
    def texts(data: Dataset) -> list[str]:  # of chats too
        return [str(row) for row in zip(*(data[c][:] for c in data.column_names if c != "labels"), strict=True)]

    seen = {row for data in others if data is not None for row in texts(data)}
    return sum(row in seen for row in texts(evaluation))
