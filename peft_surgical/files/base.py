"""What a saved adapter says about its base model, and the checks before one is loaded.

An adapter is PEFT's two files. `adapter_model.safetensors` holds the trained values of the changed tensors, bit for
bit unless another encoding was asked for, and in its header what the base model must be like: its type, depth,
vocabulary and a few values of each tensor. Everything is checked before the model is changed.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from peft_surgical.copies.select import matches_any, own_tensor_names
from peft_surgical.distributed import engine_of, whole_tensor
from peft_surgical.files.safetensors_io import DTYPES
from peft_surgical.layers import find_stacks, unwrap
from peft_surgical.names import OWN_TENSORS


SAMPLES_PER_TENSOR = 6
_COARSENESS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_HALF = ":first half"


def base_tensors(model: nn.Module, path: str = "") -> dict[str, torch.Tensor]:
    """The base's own tensors by name, whatever adapters are around it or merged into it; tied ones by all names."""
    if isinstance(model, AuxiliaryTrainingWrapper):
        return base_tensors(model.original_module, path)
    tuned: Any = model
    if isinstance(model, BaseTunerLayer):
        found = base_tensors(model.get_base_layer(), path)
    else:
        tuned = model._modules.get(OWN_TENSORS)
        found = {f"{path}{name}": getattr(model, name) for name in own_tensor_names(model)}
        for name, child in model._modules.items():
            if child is not None and name != OWN_TENSORS:
                found.update(base_tensors(child, path if name == "_orig_mod" else f"{path}{name}."))
    merged: Mapping[str, torch.Tensor] = getattr(tuned, "_originals", None) or {}  # whose places others have taken
    return found | {f"{path}{name}": tensor for name, tensor in merged.items()}


def describe_base(
    model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]] | None = None, left_out: Sequence[str] = ()
) -> dict[str, Any]:
    """What makes a base model the one that an adapter was trained on, as plain data.

    Modules in `left_out`, heads, are each adapter's own. A handful of values is read per tensor: that costs
    milliseconds.
    """
    shape = _shape_of_model(model)
    marks: dict[str, str] = {}
    for name, tensor in base_tensors(model).items() if tensors is None else tensors:
        with whole_tensor(tensor):
            if _is_comparable(tensor) and not matches_any(name, left_out):
                marks[name] = fingerprint(tensor, shape["vocab_size"])
    return {"architecture": type(unwrap(model)).__name__, **shape, "tensors": marks}


def check_class(
    record: Mapping[str, Any], model: nn.Module, present_name: Callable[[str], str] = lambda name: name
) -> None:
    """Check that a model is no bare one where `describe_base` described one with a head around it."""
    prefix, wanted = getattr(model, "base_model_prefix", ""), record.get("architecture")
    is_bare = prefix and getattr(model, "base_model", None) is model
    if is_bare and any(present_name(name).startswith(f"{prefix}.") for name in record.get("tensors", {})):
        raise ValueError(
            f"This adapter was trained on a {wanted}; this model is a {type(model).__name__}, which has no head. Load "
            f"the base with {wanted}.from_pretrained(...), or the AutoModelFor... class that gives it."
        )


def check_base(
    record: Mapping[str, Any],
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    touched: Collection[str],
    present_name: Callable[[str], str] = lambda name: name,
) -> None:
    """Check that a model is the base that `describe_base` described, whatever its dtype.

    It must have the tensors in `touched`. `present_name` gives the name in the model of a tensor in the record.
    """
    check_class(record, model, present_name)
    found = _shape_of_model(model)
    for key, what in (("model_type", "model type"), ("layers", "number of layers"), ("vocab_size", "vocabulary size")):
        wanted = record.get(key)
        if key == "layers" and wanted is not None and list(wanted.values()) == list(found[key].values()):
            continue  # stacks may have been renamed; their tensors will tell
        if wanted is not None and found[key] is not None and wanted != found[key]:
            hint = ""
            if key == "vocab_size":
                hint = f" If the tokenizer was extended, call model.resize_token_embeddings({wanted}) before loading."
            raise ValueError(
                f"This adapter was trained on another base model: its {what} was {wanted}, this model's is "
                f"{found[key]}. Load the adapter onto the base it was trained on.{hint}"
            )
    in_layers = tuple(f"{layer.path}." for stack in find_stacks(model).values() for layer in stack.layers)
    for old_name, mark in record.get("tensors", {}).items():
        name = present_name(old_name)
        tensor = tensors.get(name)
        if tensor is None and name in touched:
            raise ValueError(
                f"This adapter was trained on another base model: this {type(model).__name__} has no tensor {name!r}. "
                "If its modules were renamed, say so in the config's key_mapping."
            )
        if tensor is None:
            continue
        with whole_tensor(tensor):
            is_another = _is_comparable(tensor) and not matches(mark, tensor)
        if is_another:
            hint = "" if name in touched or name.startswith(in_layers) else _NEW
            raise ValueError(
                f"This adapter was trained on another base model: {name!r} has other values here. Load the adapter "
                f"onto the checkpoint it was trained on.{hint} To load it all the same, set check_base to false in "
                "its adapter_config.json, or call PeftModel.from_pretrained with check_base=False."
            )


def with_vocabulary(record: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The description of a base whose vocabulary may have been resized since."""
    size = _shape_of_model(model)["vocab_size"]
    if size == record.get("vocab_size"):
        return record
    resized = [name for name, mark in record.get("tensors", {}).items() if mark.endswith(_HALF)]
    tensors = base_tensors(model) if engine_of(model) is None else {}  # an engine's hold parts of them
    marks = {name: fingerprint(tensors[name], size) for name in resized if name in tensors}
    kept = {name: mark for name, mark in record.get("tensors", {}).items() if name not in resized}
    return {**record, "vocab_size": size, "tensors": {**kept, **marks}}


def without_resized(
    record: dict[str, Any], stored: Mapping[str, torch.Tensor], model: nn.Module, whole: Collection[str]
) -> dict[str, Any]:
    """The description of a base without the stored tensors that have another size in the model, of more tokens, say.

    An adapter that has these `whole` needs none of their values; for another it is an error.
    """
    marks, wanted = dict(record.get("tensors", {})), model.state_dict()
    for name in [n for n in marks if n in stored and n in wanted and stored[n].shape != wanted[n].shape]:
        if name not in whole:
            raise ValueError(
                f"{name!r} has the shape {tuple(stored[name].shape)}, and had {tuple(wanted[name].shape)} when the "
                "adapter was trained. Resize the base likewise and save it first."
            )
        del marks[name]
    return {**record, "tensors": marks}


def check_record(record: Any) -> None:
    """Check that something is what `describe_base` gives, or a part of it."""
    kinds = {"architecture": str, "model_type": str, "layers": dict, "vocab_size": int, "tensors": dict}
    whole = isinstance(record, dict) and all(
        value is None or (key in kinds and isinstance(value, kinds[key])) for key, value in record.items()
    )
    if not whole or not 0 <= (record.get("vocab_size") or 0) < 2**31:
        raise ValueError("the record of the base is damaged")
    for name, mark in (record.get("tensors") or {}).items():
        try:
            _read(mark)
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"the record of the base's tensor {name!r} is damaged") from error


_NEW = (
    " If its checkpoint lacks this tensor, it is drawn anew each time: name its module in modules_to_save, to train "
    "and save it with the adapter."
)


def _is_comparable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values that hold on the same base in another form; quantised and empty ones have not."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.numel() > 0
    return plain and tensor.dtype in _COARSENESS and tensor.device.type != "meta"


def fingerprint(tensor: torch.Tensor, vocab_size: int | None = None) -> str:
    """A few values of a tensor, with its dtype: 'float32:' and base64 of float32 numbers.

    Of a tensor with a row per token they are of the first half, and the text says so: what was added to a vocabulary
    has values of chance.
    """
    is_half = vocab_size is not None and vocab_size > 1 and tensor.shape[:1] == (vocab_size,)
    values = _sample(tensor, is_half).float().numpy().astype("<f4")
    text = f"{str(tensor.dtype).removeprefix('torch.')}:{base64.b64encode(values.tobytes()).decode()}"
    return f"{text}{_HALF}" if is_half else text


def matches(mark: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is the one with this fingerprint, or the same one in another dtype.

    In the same dtype the values must be equal bit for bit; else they are rounded to the coarser of the two dtypes,
    where a value that was rounded twice may be off by one in the last place.
    """
    dtype, values = _read(mark)
    found = _sample(tensor, mark.endswith(_HALF))
    if len(values) != len(found):
        return False
    if dtype == tensor.dtype:
        return torch.equal(values.view(torch.int32), found.float().view(torch.int32))
    coarse = max(dtype, tensor.dtype, key=lambda d: _COARSENESS.index(d) if d in _COARSENESS else len(_COARSENESS))
    values, found = values.to(coarse).double(), found.to(coarse).double()
    info = torch.finfo(coarse)
    return torch.allclose(values, found, rtol=info.eps, atol=info.smallest_normal, equal_nan=True)


def _read(mark: str) -> tuple[torch.dtype, torch.Tensor]:
    """The dtype and the values in a fingerprint."""
    name, _, text = mark.removesuffix(_HALF).partition(":")
    return _DTYPES[name], torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").copy())


def _sample(tensor: torch.Tensor, is_half: bool) -> torch.Tensor:
    size = tensor.numel() // len(tensor) * (len(tensor) // 2) if is_half else tensor.numel()
    return torch.take(tensor.detach(), _places(size).to(tensor.device)).cpu()


@lru_cache(maxsize=256)
def _places(size: int) -> torch.Tensor:
    count = min(SAMPLES_PER_TENSOR, size)
    return torch.linspace(0, size - 1, count, dtype=torch.float64).round().long() if count else torch.empty(0).long()


def _shape_of_model(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return {
        "model_type": getattr(config, "model_type", None),
        "layers": {name: len(stack) for name, stack in find_stacks(model).items()},
        "vocab_size": getattr(text_config, "vocab_size", None),
    }
