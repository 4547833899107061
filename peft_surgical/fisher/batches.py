"""From whatever data a user has to batches of a known number of samples, padded on the right."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler


LABELS = ("labels", "label", "label_ids", "start_positions", "end_positions", "next_sentence_label")
"""Columns that are the answer, not the question."""


@dataclass(frozen=True)
class Batch:
    """Some samples."""

    inputs: dict[str, Any]  # what the data holds, labels included; the first dimension of each tensor is the samples
    index: tuple[int, ...]  # the number of each sample among those that were drawn

    def __len__(self) -> int:
        return len(self.index)

    def select(self, first: int, stop: int) -> Batch:
        """The samples `first` to `stop`."""
        if stop - first == len(self):  # a single sample may have many rows, such as the patches of its images
            return self
        inputs = {k: v[first:stop] if isinstance(v, Tensor) and v.dim() else v for k, v in self.inputs.items()}
        return Batch(inputs, self.index[first:stop])

    def with_copy(self) -> Batch:
        """The same batch, with its first sample once more at the end."""
        inputs = {
            k: torch.cat([v, v[:1]]) if isinstance(v, Tensor) and v.shape[:1] == (len(self),) else v
            for k, v in self.inputs.items()
        }
        return Batch(inputs, (*self.index, self.index[0]))

    def repeated(self, times: int) -> Batch:
        """A batch of so many copies of its only sample."""
        inputs = {
            k: torch.cat([v] * times) if isinstance(v, Tensor) and v.dim() else v for k, v in self.inputs.items()
        }
        return Batch(inputs, self.index * times)

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.inputs.items()}
        return Batch(inputs, self.index)


def forward_names(model: nn.Module) -> set[str] | None:
    """The arguments that the model's forward takes; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and not hasattr(model, "config"):
        return None
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def model_inputs(model: nn.Module, batch: Batch, names: set[str] | None) -> dict[str, Any]:
    """The part of a batch that goes into the model. Labels do not, so that it computes no loss of its own, but where
    only the model knows how to make the decoder's inputs of them."""
    inputs = {k: v for k, v in batch.inputs.items() if k not in LABELS and (names is None or k in names)}
    labels = batch.inputs.get("labels")
    prepare: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if type(model).__name__.endswith("EncoderDecoderModel"):  # which makes a mask of them, too
        prepare = None
    given = {"decoder_input_ids", "decoder_inputs_embeds"} & inputs.keys()
    of_tokens = isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()
    if of_tokens and names and "decoder_input_ids" in names and not given:
        inputs |= {"decoder_input_ids": prepare(labels=labels)} if prepare else {"labels": labels}
    return inputs


class PadRight:
    """Puts features in a batch; sequences are padded on the right to the longest."""

    def __init__(self, model: nn.Module):
        self.pad_token = getattr(getattr(model, "config", None), "pad_token_id", None) or 0

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        rows = [{k: torch.as_tensor(v) for k, v in f.items() if is_numeric(v)} for f in features]
        if "input_ids" in rows[0]:
            for row in rows:
                row.setdefault("attention_mask", torch.ones_like(row["input_ids"]))
        return {name: self._stack(name, [row[name] for row in rows]) for name in rows[0]}

    def _stack(self, name: str, rows: list[Tensor]) -> Tensor:
        if len({row.shape for row in rows}) == 1:
            return torch.stack(rows)
        if len({row.shape[:-1] for row in rows}) > 1:
            raise ValueError(
                f"{name} has the shapes {sorted({tuple(row.shape) for row in rows})} in different samples, which "
                "padding cannot make alike. Give data_collator=, the one that you train with."
            )
        longest = max(row.shape[-1] for row in rows)
        fill = -100 if name in LABELS else self.pad_token if name.endswith("input_ids") else 0
        return torch.stack([torch.nn.functional.pad(row, (0, longest - row.shape[-1]), value=fill) for row in rows])


def padded_right(batch: Batch, names: set[str] | None) -> Batch:
    """The batch with all padding on the right, so that each sample begins where it does alone, and without the columns
    that are padding in every sample. `names` are the arguments of the model's forward."""
    mask = batch.inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() < 2 or mask.is_floating_point() or not mask.any():
        return batch
    shown, length = mask.bool(), mask.shape[-1]
    apart = {"labels"} if names and "decoder_input_ids" in names else set()  # they belong to the decoder's tokens
    tokens = {
        k: v
        for k, v in batch.inputs.items()
        if isinstance(v, Tensor)
        and v.shape[: mask.dim()] == mask.shape
        and (k in _SEQUENCES or not v.is_floating_point())
        and not (k in apart or k.startswith("decoder_"))
    }
    if not _SEQUENCES & tokens.keys():
        return batch
    hidden = shown.int().argmax(-1, keepdim=True)  # tokens before the first that is shown
    if hidden.any():
        places = (torch.arange(length, device=mask.device) + hidden) % length
        tokens = {k: _take(v, places) for k, v in tokens.items()}
        for k in ("start_positions", "end_positions"):
            if k in batch.inputs:
                tokens[k] = batch.inputs[k] - hidden.view_as(batch.inputs[k])
        shown = tokens["attention_mask"].bool()
    stop = int(shown.flatten(0, -2).any(0).nonzero().max()) + 1
    axis = mask.dim() - 1
    tokens = {k: v.narrow(axis, 0, stop) if v.shape[: axis + 1] == mask.shape else v for k, v in tokens.items()}
    return Batch({**batch.inputs, **tokens}, batch.index)


_SEQUENCES = {"input_ids", "inputs_embeds", "input_values", "input_features"}
"""What an attention mask is for."""


def _take(x: Tensor, places: Tensor) -> Tensor:
    extra = x.shape[places.dim() :]
    return x.gather(places.dim() - 1, places.view(*places.shape, *(1 for _ in extra)).expand(*places.shape, *extra))


def token_lengths(batch: Batch) -> Tensor | None:
    """The number of real tokens of each sample, (N,), if the batch is padded on the right; else None."""
    mask = batch.inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point():
        return None
    lengths = mask.sum(1)
    padded_right = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    return lengths if bool((padded_right == mask.bool()).all()) else None


def is_numeric(value: Any) -> bool:
    """Whether a tensor can be made of a value."""
    try:
        torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return value is not None


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
