"""Batches of samples: their columns, and their padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn


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
        if stop - first == len(self):  # a single sample may have many rows, such as the patches of its images
            return self
        return self._with(lambda v: v[first:stop], self.index[first:stop])

    def with_copy(self) -> Batch:
        """The same batch, with its first sample once more at the end."""
        return self._with(lambda v: torch.cat([v, v[:1]]) if len(v) == len(self) else v, (*self.index, self.index[0]))

    def repeated(self, times: int) -> Batch:
        """A batch of so many copies of its only sample."""
        return self._with(lambda v: torch.cat([v] * times), self.index * times)

    def _with(self, change: Callable[[Tensor], Tensor], index: tuple[int, ...]) -> Batch:
        inputs = {k: change(v) if isinstance(v, Tensor) and v.dim() else v for k, v in self.inputs.items()}
        return Batch(inputs, index)

    def to(self, device: torch.device) -> Batch:
        return Batch(send_to_device(self.inputs, device), self.index)


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


def with_names(pair: Any, model: nn.Module) -> Any:
    """A pair (x, y) as a dict: x is what the model's forward takes first, or a dict of its arguments; y the labels."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return pair
    x, y = pair
    first = next(iter(inspect.signature(model.forward).parameters))
    return {**(x if isinstance(x, Mapping) else {first: x}), "labels": y}


class PadRight:
    """Puts features in a batch; sequences are padded on the right to the longest."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.pad_token = getattr(getattr(model, "config", None), "pad_token_id", None) or 0

    def __call__(self, features: Sequence[Any]) -> dict[str, Tensor]:
        named = [with_names(f, self.model) for f in features]
        rows = [{k: torch.as_tensor(v) for k, v in f.items() if is_numeric(v)} for f in named]
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
