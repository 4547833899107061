"""From whatever data a user has to batches of a known number of samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from peft_surgical.layers import find_stacks


LABELS = ("labels", "label", "label_ids", "start_positions", "end_positions", "next_sentence_label")
"""Columns that are the answer, not the question."""


@dataclass(frozen=True)
class Batch:
    """Some samples.

    Args:
        inputs: What the data holds, labels included; the first dimension of each tensor runs over the samples.
        index: The number of each sample among those that were drawn.
    """

    inputs: dict[str, Any]
    index: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.index)

    def select(self, first: int, stop: int) -> Batch:
        """The samples `first` to `stop`."""
        inputs = {k: v[first:stop] if isinstance(v, Tensor) else v for k, v in self.inputs.items()}
        return Batch(inputs, self.index[first:stop])

    def with_copy(self) -> Batch:
        """The same batch, with its first sample once more at the end."""
        inputs = {
            k: torch.cat([v, v[:1]]) if isinstance(v, Tensor) and v.shape[:1] == (len(self),) else v
            for k, v in self.inputs.items()
        }
        return Batch(inputs, (*self.index, self.index[0]))

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.inputs.items()}
        return Batch(inputs, self.index)


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
    """Draw samples and put them in batches of like length.

    Args:
        data: A `datasets.Dataset`, a sequence of feature dicts, or a `DataLoader`. Where the length is known, samples
            are drawn at random. Any other loader is read in its own order, no further than needed.
        model: Its forward decides which columns are kept.
        num_samples: How many samples, at most.
        batch_size: Samples to a batch. A loader that is read in its own order keeps its own.
        data_collator: Makes a batch of features. By default features are padded on the right to the longest.
        seed: Seed of the draw.
        rank: The number of this process.
        world_size: The number of processes. Each gets a part of the draw.

    Yields:
        The batches, that of the longest samples first.

    Raises:
        TypeError: The data or its samples are of another kind.
        ValueError: There are no samples, or a number is not positive.
    """
    for name, value in (("num_samples", num_samples), ("batch_size", batch_size)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}; allowed are integers from 1 on.")
    if isinstance(data, DataLoader) and not _only_walks(data):
        yield from _read_loader(data, num_samples, rank, world_size)
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
    for first in range(0, len(features), batch_size):
        part = features[first : first + batch_size]
        inputs = dict(collate([dict(f) if isinstance(f, Mapping) else f for _, f in part]))
        yield _trimmed(Batch(_named(inputs), tuple(i for i, _ in part)))


class PadRight:
    """Puts features in a batch; sequences are padded on the right to the longest.

    Args:
        model: Its config has the padding token.

    Example:

        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> pad = PadRight(BertModel(config))
        >>> pad([{"input_ids": [5, 6], "label": 1}, {"input_ids": [7], "label": 0}])["attention_mask"].tolist()
        [[1, 1], [1, 0]]
    """

    def __init__(self, model: nn.Module):
        self.pad_token = getattr(getattr(model, "config", None), "pad_token_id", None) or 0

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        rows = [{k: torch.as_tensor(v) for k, v in f.items() if _is_numeric(v)} for f in features]
        if "input_ids" in rows[0]:
            for row in rows:
                row.setdefault("attention_mask", torch.ones_like(row["input_ids"]))
        return {name: self._stack(name, [row[name] for row in rows]) for name in rows[0]}

    def _stack(self, name: str, rows: list[Tensor]) -> Tensor:
        if len({row.shape for row in rows}) == 1:
            return torch.stack(rows)
        longest = max(row.shape[-1] for row in rows)
        fill = -100 if name in LABELS else self.pad_token if name.endswith("input_ids") else 0
        return torch.stack([torch.nn.functional.pad(row, (0, longest - row.shape[-1]), value=fill) for row in rows])


def token_lengths(batch: Batch) -> Tensor | None:
    """The number of real tokens of each sample, (N,), if the batch is padded on the right; else None."""
    mask = batch.inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point():
        return None
    lengths = mask.sum(1)
    padded_right = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    return lengths if bool((padded_right == mask.bool()).all()) else None


class PaddingLengths:
    """The lengths of samples, where a kernel can make use of them: on an accelerator.

    Args:
        model: The model.
        device: Where it is.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        # a decoder has other lengths than the encoder, and an image has none
        seq2seq = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        self.useful = device.type != "cpu" and not seq2seq
        self.model, self.device = model, device

    def find(self, batch: Batch) -> tuple[int, Tensor | None]:
        """The tokens of each sample with padding, and without it, (N,)."""
        lengths = token_lengths(batch) if self.useful else None
        if lengths is None or not self._only_stack:
            return 0, None
        tokens = batch.inputs["attention_mask"].shape[1]
        if bool((lengths == tokens).all()):
            return tokens, None
        return tokens, lengths.to(self.device, torch.int32)

    @cached_property
    def _only_stack(self) -> bool:
        return len(find_stacks(self.model)) == 1


def forward_names(model: nn.Module) -> set[str] | None:
    """The arguments that the model's forward takes; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and not hasattr(model, "config"):
        return None
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def model_inputs(model: nn.Module, batch: Batch, names: set[str] | None) -> dict[str, Any]:
    """The part of a batch that goes into the model. Labels do not, so that it computes no loss of its own."""
    inputs = {k: v for k, v in batch.inputs.items() if k not in LABELS and (names is None or k in names)}
    labels = batch.inputs.get("labels")
    prepare: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    takes = names is not None and "decoder_input_ids" in names and "decoder_input_ids" not in inputs
    if prepare and takes and labels is not None:
        inputs["decoder_input_ids"] = prepare(labels=labels)
    return inputs


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
        if value is not None and _is_numeric(value):
            value = torch.as_tensor(value)
            return int(value.sum()) if name == "attention_mask" else value.shape[-1] if value.dim() else 0
    return 0


def _is_numeric(value: Any) -> bool:
    try:
        torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return value is not None


def _named(inputs: dict[str, Any]) -> dict[str, Any]:
    for name in ("label", "label_ids"):
        if name in inputs and "labels" not in inputs:
            inputs["labels"] = inputs.pop(name)
    return inputs


def _trimmed(batch: Batch) -> Batch:
    """The batch without the columns that are padding in every sample."""
    mask = batch.inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() < 2 or mask.is_floating_point():
        return batch
    rows = mask.reshape(-1, mask.shape[-1]).bool()
    length = int(rows.any(0).nonzero().max()) + 1 if rows.any() else rows.shape[1]
    alike = {k: v for k, v in batch.inputs.items() if isinstance(v, Tensor) and v.shape == mask.shape}
    if length == rows.shape[1] or any(k in LABELS and bool((v[..., length:] != -100).any()) for k, v in alike.items()):
        return batch
    return Batch({**batch.inputs, **{k: v[..., :length] for k, v in alike.items()}}, batch.index)


def _only_walks(loader: DataLoader) -> bool:
    """Whether a loader only goes through its data, so that samples can be drawn from the data itself."""
    return (
        isinstance(loader.dataset, Sized)
        and hasattr(loader.dataset, "__getitem__")
        and type(loader) is DataLoader
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.sampler) in (SequentialSampler, RandomSampler)
    )


def _read_loader(loader: Iterable[Any], num_samples: int, rank: int, world: int) -> Iterator[Batch]:
    """Read a loader in its order. One that is not split among processes is split here, batch by batch."""
    split = type(loader) is not DataLoader or type(getattr(loader, "sampler", None)).__name__ == "DistributedSampler"
    seen = 0
    if world > 1 and split:
        num_samples = num_samples // world + (rank < num_samples % world)
    for number, inputs in enumerate(loader):
        if not isinstance(inputs, Mapping):
            raise TypeError(
                f"The DataLoader gives a {type(inputs).__name__}; needed is a dict of tensors, so that the columns "
                "have names. Give it a collate_fn that returns one."
            )
        batch = Batch(_named(dict(inputs)), ())
        size = next((len(v) for v in batch.inputs.values() if isinstance(v, Tensor) and v.dim()), 0)
        size = min(size, num_samples - seen)
        offset = rank if split else 0
        stride = world if split else 1
        batch = Batch(batch.inputs, tuple(offset + stride * (seen + i) for i in range(size)))
        if split or number % world == rank:
            yield _trimmed(batch.select(0, size))
        seen += size
        if seen >= num_samples:
            return
