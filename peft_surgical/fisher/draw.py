"""From whatever data a user has to batches of a known number of samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from peft_surgical.fisher.batches import LABELS, Batch, PadRight, forward_names, is_numeric, padded_right


def draw_batches(
    data: Any,
    model: nn.Module,
    *,
    num_samples: int,
    batch_size: int = 16,
    data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """Draw samples and put them in batches of like length, that of the longest first, padded on the right.

    Samples are drawn at random where the length of the data is known. Any other loader is read in its own order and
    batches, no further than needed. Each process gets a part. Samples that a batch packs end to end are in batches of
    their own.
    """
    for name, value in (("num_samples", num_samples), ("batch_size", batch_size)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}; allowed are integers from 1 on.")
    if isinstance(data, DataLoader) and not _only_walks(data):
        yield from _read_loader(data, model, num_samples, rank, world_size)
        return
    if isinstance(data, DataLoader):
        data, data_collator = data.dataset, data.collate_fn
    if isinstance(data, (str, bytes, Mapping)) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise TypeError(
            f"data is a {type(data).__name__}; allowed are a datasets.Dataset, a sequence of feature dicts, or a "
            "DataLoader. Wrap an iterable in a DataLoader."
        )
    if not len(data):
        raise ValueError("data holds no samples.")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(data), generator=generator)[:num_samples].tolist()
    names = forward_names(model)
    keep = None if names is None else names | set(LABELS)
    features = [(i, _feature(data[place], keep)) for i, place in enumerate(drawn)]
    features.sort(key=lambda pair: _length(pair[1]), reverse=True)
    features = features[rank::world_size]
    collate = data_collator or PadRight(model)

    def batch(part: Sequence[tuple[int, Any]]) -> Batch:
        inputs = collate([dict(f) if isinstance(f, Mapping) else f for _, f in part])
        return Batch(_named(inputs, model), tuple(i for i, _ in part))

    for first in range(0, len(features), batch_size):
        part = features[first : first + batch_size]
        together = batch(part)
        packed = len(part) > 1 and _find_packed(together.inputs, len(part))
        yield from (padded_right(b, names) for b in ([batch([one]) for one in part] if packed else [together]))


def _feature(feature: Any, keep: set[str] | None) -> Any:
    if keep is None or not isinstance(feature, Mapping):
        return feature
    kept = {k: v for k, v in feature.items() if k in keep}
    if not kept:
        raise ValueError(
            f"A sample has the columns {sorted(feature)}, and the model's forward takes none of them: it takes "
            f"{sorted(keep - set(LABELS))}. Tokenize the data first, or rename the columns."
        )
    return kept


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
    if isinstance(inputs, (tuple, list)) and len(inputs) == 2 and all(isinstance(x, Tensor) for x in inputs):
        inputs = {next(iter(inspect.signature(model.forward).parameters)): inputs[0], "labels": inputs[1]}
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
    return (
        isinstance(loader.dataset, Sized)
        and hasattr(loader.dataset, "__getitem__")
        and type(loader) is DataLoader
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.sampler) in (SequentialSampler, RandomSampler)
    )


def _read_loader(loader: Iterable[Any], model: nn.Module, num_samples: int, rank: int, world: int) -> Iterator[Batch]:
    """Read a loader in its order. One that is not split among processes is split here, batch by batch."""
    split = type(loader) is not DataLoader or type(getattr(loader, "sampler", None)).__name__ == "DistributedSampler"
    seen, names = 0, forward_names(model)
    if world > 1 and split:
        num_samples = num_samples // world + (rank < num_samples % world)
    for number, inputs in enumerate(loader):
        inputs = _named(inputs, model)
        whole = _count_samples(inputs)
        packed = _find_packed(inputs, whole)
        if whole > 1 and packed:
            raise ValueError(
                f"The DataLoader gives {whole} samples with {len(inputs[packed])} rows of {packed}, and nothing tells "
                "whose they are. Give it batch_size=1."
            )
        size = min(whole, num_samples - seen)
        offset, stride = (rank, world) if split else (0, 1)
        index = tuple(offset + stride * (seen + i) for i in range(whole))
        if split or number % world == rank:
            yield padded_right(Batch(inputs, index).select(0, size), names)
        seen += size
        if seen >= num_samples:
            return
