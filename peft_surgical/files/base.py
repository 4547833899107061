"""What a saved adapter says about its base model, and the checks before one is loaded.

An adapter is PEFT's two files. `adapter_model.safetensors` holds the trained values of the changed tensors, bit for
bit unless another encoding was asked for; `adapter_config.json` holds, under `base`, what the base model must be like:
its type, depth, vocabulary and a few values of each touched tensor. Everything is checked before the model is changed.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from peft_surgical.files.adapter import decoded_shapes
from peft_surgical.files.safetensors_io import TensorFile
from peft_surgical.layers import find_stacks, unwrap


SAMPLES_PER_TENSOR = 6
_COARSENESS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def describe_base(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What makes a base model the one that an adapter was trained on, as plain data.

    Args:
        model: The base model.
        tensors: The tensors that the adapter changes, with their original values, by name.

    Returns:
        `architecture` (the model's class), `model_type`, `layers` (depth by stack), `vocab_size` and `tensors` (a
        fingerprint by name). Only a handful of values is read per tensor, so this costs milliseconds.
    """
    return {
        "architecture": type(unwrap(model)).__name__,
        **_shape_of_model(model),
        "tensors": {name: fingerprint(tensor) for name, tensor in tensors.items() if _is_comparable(tensor)},
    }


def check_base(
    record: Mapping[str, Any],
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    present_name: Callable[[str], str] = lambda name: name,
) -> None:
    """Check that a model is the base that `describe_base` described, whatever its dtype.

    Args:
        record: The description.
        model: The model.
        tensors: The tensors that the adapter changes, with their original values, by name.
        present_name: The name that a tensor of the record has in the model.

    Raises:
        ValueError: It is another one. The message names the first difference and what to do.
    """
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
    for old_name, wanted in record.get("tensors", {}).items():
        name = present_name(old_name)
        tensor = tensors.get(name)
        if tensor is None:
            raise ValueError(
                f"This adapter was trained on another base model: this {type(model).__name__} has no tensor {name!r}. "
                "If its modules were renamed, say so in the config's key_mapping."
            )
        if _is_comparable(tensor) and not matches(wanted, tensor):
            raise ValueError(
                f"This adapter was trained on another base model: {name!r} has other values here. Load the adapter "
                "onto the checkpoint it was trained on. To load it all the same, set check_base to false in its "
                "adapter_config.json."
            )


def _is_comparable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values that hold on the same base in another form; quantised and empty ones have not."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return plain and tensor.is_floating_point() and tensor.device.type != "meta"


def fingerprint(tensor: torch.Tensor) -> str:
    """A few values of a tensor, with its dtype: 'float32:' and base64 of float32 numbers.

    Example:

        >>> fingerprint(torch.zeros(3, dtype=torch.bfloat16))
        'bfloat16:AAAAAAAAAAAAAAAA'
    """
    values = _sample(tensor).float().numpy().astype("<f4")
    return f"{str(tensor.dtype).removeprefix('torch.')}:{base64.b64encode(values.tobytes()).decode()}"


def matches(wanted: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is the one with this fingerprint, or the same one in another dtype.

    In the same dtype the values must be equal bit for bit; else they are rounded to the coarser of the two dtypes,
    where a value that was rounded twice may be off by one in the last place.
    """
    dtype_name, _, text = wanted.partition(":")
    dtype = getattr(torch, dtype_name)
    values = torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").copy())
    found = _sample(tensor)
    if len(values) != len(found):
        return False
    if dtype == tensor.dtype:
        return torch.equal(values.view(torch.int32), found.float().view(torch.int32))
    coarse = max(dtype, tensor.dtype, key=lambda d: _COARSENESS.index(d) if d in _COARSENESS else len(_COARSENESS))
    values, found = values.to(coarse).double(), found.to(coarse).double()
    info = torch.finfo(coarse)
    return torch.allclose(values, found, rtol=info.eps, atol=info.smallest_normal, equal_nan=True)


def check_file(
    path: str | os.PathLike,
    expected: Mapping[str, torch.Size],
    *,
    is_known: Callable[[str], bool] = lambda name: False,
    present_name: Callable[[str], str] = lambda name: name,
) -> None:
    """Check the header of a file of tensors; no values are read.

    Args:
        path: A safetensors file.
        expected: The shapes that its tensors should have, by name.
        is_known: Whether a tensor that is not expected may be there all the same.
        present_name: The name that a tensor of the file has in the model.

    Raises:
        ValueError: The file is damaged or not a safetensors file, or a tensor is missing, unknown, empty or of another
            shape. The message names the file and the first such tensor.
    """
    file = TensorFile(path, present_name)
    shapes = decoded_shapes({name: file.meta(name).shape for name in file}, expected, str(path))
    check_tensors({n: torch.Size(s) for n, s in shapes.items()}, expected, source=str(path), is_known=is_known)


def check_tensors(
    shapes: Mapping[str, torch.Size],
    expected: Mapping[str, torch.Size],
    *,
    source: str,
    is_known: Callable[[str], bool] = lambda name: False,
) -> None:
    """Check that tensors are just the expected ones; see `check_file`."""
    for name in expected:
        if name not in shapes:
            raise ValueError(f"{source} lacks the tensor {name!r}, which this adapter trains. Save the adapter again.")
    for name, shape in shapes.items():
        if name in expected:
            if shape.numel() == 0 and expected[name].numel() != 0:
                raise ValueError(f"{source}: the tensor {name!r} is empty. {_GATHER}")
            if shape != expected[name]:
                raise ValueError(
                    f"{source}: the tensor {name!r} has shape {tuple(shape)}, this model needs "
                    f"{tuple(expected[name])}. Load the adapter onto the base it was trained on."
                )
        elif not is_known(name):
            raise ValueError(
                f"{source} has a tensor {name!r} that this adapter's configuration does not account for. Were the two "
                "files of the adapter saved together?"
            )


def check_gathered(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size], *, source: str) -> None:
    """Check that tensors which are to be saved are whole.

    Args:
        tensors: The tensors, by name.
        expected: The shapes that they should have.
        source: What to call them in errors.

    Raises:
        ValueError: One is a process's share of a sharded tensor. The message names it.
    """
    partial = [name for name, tensor in tensors.items() if 0 < tensor.numel() < expected[name].numel()]
    for name in sharded(tensors) + partial:
        raise ValueError(f"{source}: the tensor {name!r} is one process's share of it. {_GATHER}")


def sharded(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the tensors that are spread over processes and say so, as those of FSDP2 do."""
    return [name for name, t in tensors.items() if hasattr(t, "full_tensor") or hasattr(t, "local_shards")]


_GATHER = (
    "Sharded weights must be gathered before they are saved: "
    "model.save_pretrained(path, state_dict=accelerator.get_state_dict(model), "
    "is_main_process=accelerator.is_main_process). Trainer does so with fsdp_state_dict_type: FULL_STATE_DICT."
)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.numel()
    count = min(SAMPLES_PER_TENSOR, size)
    where = torch.linspace(0, size - 1, count, dtype=torch.float64).round().long() if count else torch.empty(0).long()
    return torch.take(tensor.detach(), where.to(tensor.device)).cpu()


def _shape_of_model(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return {
        "model_type": getattr(config, "model_type", None),
        "layers": {name: len(stack) for name, stack in find_stacks(model).items()},
        "vocab_size": getattr(text_config, "vocab_size", None),
    }
