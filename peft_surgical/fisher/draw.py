"""From whatever data a user has to batches of a known number of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from peft_surgical.fisher.batches import LABELS, Batch, PadRight, forward_names, is_numeric, padded_right, with_names


Collator = Callable[[list[Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Draw:
    """Some samples of data, drawn at random where the length of the data is known.

    Any other loader is read in its own order and batches, no further than needed. Each process gets a part. `prepared`
    data are a trainer's: their collator gets all columns.
    """

    data: Any
    model: nn.Module
    num_samples: int
    data_collator: Collator | None = None
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    prepared: bool = False

    def batches(self, batch_size: int = 16) -> Iterator[Batch]:
        """Put samples in batches of like length, that of the longest first, padded on the right. Those that a batch
        packs end to end are in batches of their own."""
        if isinstance(self.data, DataLoader) and not _only_walks(self.data):
            yield from self._read_loader()
            return
        rows, collate, drawn = self._draw(self.num_samples, batch_size)
        features = [(i, self._feature(rows[place])) for i, place in enumerate(drawn)]
        features.sort(key=lambda pair: _length(pair[1]), reverse=True)
        features = features[self.rank :: self.world_size]

        def batch(part: Sequence[tuple[int, Any]]) -> Batch:
            return Batch(_named(collate([f for _, f in part]), self.model), tuple(i for i, _ in part))

        for first in range(0, len(features), batch_size):
            part = features[first : first + batch_size]
            together = batch(part)
            packed = len(part) > 1 and _find_packed(together.inputs, len(part))
            yield from (
                padded_right(b, self._names) for b in ([batch([one]) for one in part] if packed else [together])
            )

    def apart(self, rows: int | None = None) -> Iterator[Batch]:
        """Make each sample a batch of its own, for a loss that is computed for one sample at a time.

        With a number of `rows` a whole batch is one sample: of so many rows, or as a loader makes it. Batches of
        `prepared` data are taken as they come, with all columns and padding.
        """
        if isinstance(self.data, DataLoader) and (rows or not _only_walks(self.data)):
            yield from self._read_loader(apart=True, whole=rows is not None)
            return
        size = rows or 1
        features, collate, drawn = self._draw(self.num_samples * size, size)
        groups = [drawn[first : first + size] for first in range(0, len(drawn), size)]
        if len(groups) > 1 and len(groups[-1]) < len(groups[0]):
            groups.pop()
        for number in range(self.rank, len(groups), self.world_size):
            inputs = collate([self._feature(features[place]) for place in groups[number]])
            batch = Batch(self._columns(inputs, apart=True), (number,))
            yield batch if rows or self.prepared else padded_right(batch, self._names)

    @cached_property
    def _names(self) -> set[str] | None:
        return forward_names(self.model)

    def _columns(self, inputs: Any, apart: bool) -> dict[str, Any]:
        is_ready = apart and self.prepared and isinstance(inputs, Mapping)
        return dict(inputs) if is_ready else _named(inputs, self.model)

    def _draw(self, count: int, batch_size: int) -> tuple[Any, Collator, list[int]]:
        """Rows, what makes a batch of them, and the places of those that are drawn."""
        _check_positive(num_samples=self.num_samples, batch_size=batch_size)
        data, collator = self.data, self.data_collator
        if isinstance(self.data, DataLoader):
            data, collator = self.data.dataset, self.data.collate_fn
        has_places = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if isinstance(data, (str, bytes, Mapping)) or not (has_places or isinstance(data, Iterable)):
            raise TypeError(
                f"data is a {type(data).__name__}; allowed are a datasets.Dataset, a sequence or an iterable of "
                "feature dicts or of pairs (x, y), each a sample, or a DataLoader, whose items are batches."
            )
        if not has_places:
            data = list(islice(data, count))
        if not len(data):
            raise ValueError("data holds no samples.")
        drawn = torch.randperm(len(data), generator=torch.Generator().manual_seed(self.seed))[:count].tolist()
        return data, collator or PadRight(self.model), drawn

    def _feature(self, row: Any) -> Any:
        """A row as a collator gets it, without the columns that the model's forward does not take."""
        if not isinstance(row, Mapping) or self.prepared:
            return dict(row) if isinstance(row, Mapping) else row
        kept = {k: v for k, v in row.items() if self._names is None or k in self._names or k in LABELS}
        if not kept:
            raise ValueError(
                f"A sample has the columns {sorted(row)}, and the model's forward takes none of them: it takes "
                f"{sorted(self._names or ())}. Tokenize the data first, or rename the columns."
            )
        return kept

    def _read_loader(self, *, apart: bool = False, whole: bool = False) -> Iterator[Batch]:
        """Read a loader in its order. One that is not split among processes is split here, batch by batch."""
        _check_positive(num_samples=self.num_samples)
        split, seen, wanted, world = _is_split(self.data), 0, self.num_samples, self.world_size
        if world > 1 and split:
            wanted = wanted // world + (self.rank < wanted % world)
        for number, inputs in enumerate(self.data if wanted else ()):
            columns = self._columns(inputs, apart)
            count = 1 if whole else _count_samples(columns)
            if apart and count > 1:
                raise ValueError(
                    f"The DataLoader gives {count} samples at a time, and the loss is that of one sample by itself. "
                    "Give it batch_size=1, or rank by whole batches with unit='batch'."
                )
            if count > 1 and (packed := _find_packed(columns, count)):
                raise ValueError(
                    f"The DataLoader gives {count} samples with {len(columns[packed])} rows of {packed}, and nothing "
                    "tells whose they are. Give it batch_size=1."
                )
            size = min(count, wanted - seen)
            offset, stride = (self.rank, world) if split else (0, 1)
            index = tuple(offset + stride * (seen + i) for i in range(count))
            if split or number % world == self.rank:
                batch = Batch(columns, index).select(0, size)
                yield batch if whole else padded_right(batch, self._names)
            seen += size
            if seen >= wanted:
                return


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}; allowed are integers from 1 on.")


def _length(feature: Any) -> int:
    if not isinstance(feature, Mapping):
        return 0
    for name in ("attention_mask", "input_ids"):
        value = feature.get(name)
        if value is not None and is_numeric(value):
            value = torch.as_tensor(value)
            return int(value.sum()) if name == "attention_mask" else value.shape[-1] if value.dim() else 0
    return 0


def _named(inputs: Any, model: nn.Module) -> dict[str, Any]:
    """The columns of a batch by name. A pair is taken for the input and the labels."""
    if isinstance(inputs, (tuple, list)) and all(isinstance(x, (Tensor, Mapping)) for x in inputs):
        inputs = with_names(inputs, model)
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"A batch is a {type(inputs).__name__}; needed is a dict of tensors, so that the columns have names, or a "
            "pair of tensors (inputs, labels). Give a collate_fn or data_collator that returns one."
        )
    named = dict(inputs)
    for name in ("label", "label_ids"):
        if name in named and "labels" not in named:
            named["labels"] = named.pop(name)
    return named


def _find_packed(inputs: Mapping[str, Any], samples: int) -> str | None:
    """The name of a tensor whose first dimension does not run over the samples, such as the patches of all images."""
    return next((k for k, v in inputs.items() if isinstance(v, Tensor) and v.dim() and len(v) != samples), None)


def _count_samples(inputs: Mapping[str, Any]) -> int:
    sizes = {k: len(v) for k, v in inputs.items() if isinstance(v, Tensor) and v.dim()}
    return next((sizes[k] for k in ("labels", "input_ids", *sizes) if k in sizes), 0)


def _only_walks(loader: DataLoader) -> bool:
    """Whether a loader only goes through its data, so that samples can be drawn from the data itself."""
    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        return False
    data = loader.dataset
    sampler: Any = loader.batch_sampler.sampler
    return (
        isinstance(data, Sized)
        and hasattr(data, "__getitem__")
        and type(sampler) in (SequentialSampler, RandomSampler)
        and len(sampler) == len(data)
        and not getattr(sampler, "replacement", False)
    )


def _is_split(loader: DataLoader) -> bool:
    """Whether a loader gives each process rows of its own: accelerate's, or one with a part that counts processes."""
    parts = (loader.dataset, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)) or any(
        getattr(part, name, 1) > 1 for part in parts for name in ("num_replicas", "num_processes")
    )
