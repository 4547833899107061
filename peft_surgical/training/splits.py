"""Read labelled data: a file, a folder of splits, or a data set of the hub, as data sets by split name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk


FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
}
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "eval")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def read_splits(data: str, *, subset: str | None = None, encoding: str = "utf-8") -> dict[str, Dataset]:
    """Read labelled data.

    Args:
        data: A .parquet, .csv, .tsv, .jsonl or .json file; a folder of such files, each named after its split
            (`train.parquet`, `validation.csv`, shards such as `train-00000-of-00002.parquet`); a folder written by
            `save_to_disk`; or the name of a data set on the hub.
        subset: Which of the subsets of a data set on the hub.
        encoding: How the text of csv files is encoded.

    Returns:
        The data sets by split name. A single file is called after its name if that is the name of a split, else
        `train`.

    Raises:
        ValueError: There is no such data, or it cannot be read.
    """
    path = Path(data).expanduser()
    if path.is_file():
        name = path.stem if _is_split_name(path.stem) else "train"
        return {name: _read_files([path], encoding)}
    if path.is_dir():
        return _read_folder(path, encoding)
    if path.suffix in FORMATS or data.startswith((".", "/", "~")):
        raise ValueError(f"--data {data}: there is no such file or folder.")
    return _read_from_hub(data, subset)


def find_split(splits: Mapping[str, Any] | Iterable[str], role: str) -> str | None:
    """The name of the split that plays a role: `"train"`, `"validation"` (also `dev`, `val`, `valid`) or `"test"`.

    Returns:
        The split of exactly that name, else the first one whose name starts so (`validation_matched`), else None.

    Example:

        >>> find_split(["train", "validation_matched", "validation_mismatched"], "validation")
        'validation_matched'
    """
    starts = VALIDATION_NAMES if role == "validation" else (role,)
    names = [*splits]
    for start in starts:
        if start in names:
            return start
    return next((name for name in names if name.startswith(starts)), None)


def _is_split_name(name: str) -> bool:
    return any(find_split([name], role) for role in ("train", "validation", "test"))


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
    builder, options = FORMATS[suffix]
    if builder == "csv":
        options = {**options, "encoding": encoding}
    try:
        return load_dataset(builder, data_files=[str(f) for f in files], split="train", **options)
    except Exception as error:
        cause = error.__cause__ or error
        hint = " Name another with --encoding, such as latin-1." if isinstance(cause, UnicodeDecodeError) else ""
        raise ValueError(f"--data {files[0]} cannot be read: {cause}{hint}") from error


def _read_from_hub(name: str, subset: str | None) -> dict[str, Dataset]:
    try:
        loaded = load_dataset(name, subset)
    except Exception as error:
        raise ValueError(
            f"--data {name} is neither a file nor a folder here, nor a data set that the hub gave: {error}"
        ) from error
    return {str(split): data for split, data in loaded.items()}
