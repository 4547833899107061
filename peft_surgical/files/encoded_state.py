"""The tensors of an adapter as they stand in its file.

An encoded tensor takes the place of the plain one: `...weight` becomes `...weight:int8` and `...weight:int8_scale`. So
the file says by itself how each tensor is encoded, and tensors that an encoding does not suit (biases, norms, heads,
values that are not finite) stay plain beside the encoded ones. The suffix has no dot, so it survives PEFT's
translation of names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from peft_surgical.copies.in_place import TunedInPlace
from peft_surgical.copies.module import TunedModule
from peft_surgical.files.encoding import Shape, difference
from peft_surgical.files.encodings import ENCODINGS, find_encoding
from peft_surgical.names import as_attribute, without_engines


SEPARATOR = ":"
ERROR = "error"


def encode_tensor(name: str, trained: torch.Tensor, base: torch.Tensor, encoding: str) -> dict[str, torch.Tensor]:
    """Write one tensor with an encoding, or plain where the encoding does not suit it.

    Args:
        name: The tensor's plain name in the file.
        trained: The trained tensor.
        base: The base's own tensor, of the same shape and any dtype.
        encoding: `"values"`, or a name in `ENCODINGS`.

    Returns:
        The tensors for the file, by name. Tensors of one dimension (biases, norms) stay plain, as do those that would
        not get smaller, and those with values that are not finite where the encoding is lossy. Lossy encodings add
        `name:error`, a float32 tensor of shape (2,): the norm of the error and the norm of the difference.

    Example:

        >>> parts = encode_tensor("weight", torch.ones(2, 8), torch.zeros(2, 8), "sign")
        >>> sorted(parts)
        ['weight:error', 'weight:sign', 'weight:sign_scale']
    """
    trained, base = trained.detach(), base.detach().to(trained.device)
    if encoding == "values":
        return {name: trained}
    chosen = find_encoding(encoding)
    if trained.ndim < 2 or not trained.numel():
        return {name: trained}
    if chosen.lossy and not (trained.is_floating_point() and base.is_floating_point()):
        return {name: trained}
    parts = chosen.encode(trained, base)
    if chosen.lossy:
        exact = trained.to(torch.promote_types(trained.dtype, torch.float32))
        norms = [(chosen.decode(parts, base) - exact).norm(), difference(trained, base).norm()]
        parts[ERROR] = torch.stack(norms).float()
    is_smaller = sum(part.nbytes for part in parts.values()) < trained.nbytes
    if not is_smaller or (chosen.lossy and not torch.isfinite(parts[ERROR]).all()):
        return {name: trained}
    return {f"{name}{SEPARATOR}{suffix}": part for suffix, part in parts.items()}


def decode_tensors(tensors: Mapping[str, torch.Tensor], bases: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Turn encoded tensors into trained ones; plain ones pass through.

    Args:
        tensors: The tensors of a file, by name.
        bases: The base's own tensors, by the plain name of the trained ones.

    Raises:
        ValueError: An encoded tensor has no base, cannot be decoded, or was not encoded against this base.
    """
    decoded = {}
    for name, parts in group_parts(tensors).items():
        if "" in parts:
            decoded[name] = parts[""]
            continue
        if name not in bases:
            raise ValueError(
                f"The tensor {name!r} is encoded ({', '.join(parts)}), but the model has no such tensor to decode it "
                "against. Load the adapter onto the base it was trained on."
            )
        base = bases[name].detach()
        parts = {suffix: part.to(base.device) for suffix, part in parts.items()}
        try:
            decoded[name] = find_encoding(encoding_of(parts)).decode(parts, base)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"The tensor {name!r} cannot be decoded: {error}.") from error
    return decoded


def decoded_shapes(shapes: Mapping[str, Shape], expected: Mapping[str, Shape], source: str) -> dict[str, Shape]:
    """The shapes that a file's tensors will have once decoded, from its header alone.

    Args:
        shapes: The shapes in the file, by name.
        expected: The shapes of the trained tensors, by plain name.
        source: What to call the file in errors.

    Raises:
        ValueError: The parts of an encoded tensor are not just those of an encoding, with the shapes that it needs.
    """
    decoded: dict[str, Shape] = {}
    for name, parts in group_parts(shapes).items():
        if "" in parts or name not in expected:
            decoded[name] = parts.get("", ())
            continue
        try:
            encoding = encoding_of(parts)
        except ValueError as error:
            raise ValueError(f"{source}: the tensor {name!r}: {error}") from error
        needed = find_encoding(encoding).part_shapes(expected[name])
        for suffix, shape in needed.items():
            if suffix not in parts:
                raise ValueError(f"{source} lacks the tensor {name + SEPARATOR + suffix!r}. Save the adapter again.")
            if shape is not None and tuple(parts[suffix]) != shape:
                raise ValueError(
                    f"{source}: the tensor {name + SEPARATOR + suffix!r} has shape {tuple(parts[suffix])}, this model "
                    f"needs {shape}. Load the adapter onto the base it was trained on."
                )
        decoded[name] = expected[name]
    return decoded


def group_parts(tensors: Mapping[str, object]) -> dict[str, dict]:
    """What a file holds for each plain name: by suffix, the suffix of a plain tensor being empty.

    Example:

        >>> group_parts({"a": 1, "b:int8": 2, "b:int8_scale": 3})
        {'a': {'': 1}, 'b': {'int8': 2, 'int8_scale': 3}}
    """
    groups: dict[str, dict] = {}
    for key, value in tensors.items():
        name, _, suffix = key.partition(SEPARATOR)
        groups.setdefault(name, {})[suffix] = value
    return groups


def encoding_of(suffixes: Mapping[str, object]) -> str:
    """The encoding that the parts of one tensor belong to.

    Raises:
        ValueError: It is not known.
    """
    if "" in suffixes:
        return "values"
    for name in ENCODINGS:
        if name in suffixes:
            return name
    raise ValueError(
        f"its parts {', '.join(suffixes)} are of no known encoding ({', '.join(ENCODINGS)}). Was the file written by "
        "a newer version of peft_surgical?"
    )


# ---- adapters in a model


def encode_state(
    model: nn.Module,
    adapter_name: str,
    state: Mapping[str, torch.Tensor],
    encoding: str,
    model_state: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Encode the tensors of an adapter that are copies of the base's own; others pass through.

    Args:
        model: The model with the adapter in it.
        adapter_name: The adapter.
        state: The adapter's tensors, by their names in the model.
        encoding: `"values"`, or a name in `ENCODINGS`.
        model_state: The state of the model. It has the whole tensors of the base where a sharded model has none.
    """
    bases = dict(_bases(model, adapter_name, model_state)) if encoding != "values" else {}
    encoded: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        encoded.update(encode_tensor(name, tensor, bases[name], encoding) if name in bases else {name: tensor})
    return encoded


def is_encoded(names: Iterable[str]) -> bool:
    """Whether any of a file's tensors is encoded, by their names."""
    return any(SEPARATOR in name for name in names)


def decode_state(
    model: nn.Module,
    adapter_name: str,
    state: Mapping[str, torch.Tensor],
    name_in_file: Callable[[str, str], str],
) -> dict[str, torch.Tensor]:
    """Decode an adapter's tensors, by their names in its file; what is not encoded passes through.

    Args:
        model: The model with the adapter in it.
        adapter_name: The adapter.
        state: The tensors of its file.
        name_in_file: Gives a tensor's name in the file from its name in the model and the adapter.
    """
    if not is_encoded(state):
        return dict(state)
    bases: dict[str, torch.Tensor] = {}
    for name, base in _bases(model, adapter_name, {}):
        name = name_in_file(name, adapter_name)
        bases[name] = bases[f"base_model.model.{name}"] = base  # a model without PeftModel around it has no prefix
    return decode_tensors(state, bases)


def _bases(
    model: nn.Module, adapter_name: str, state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The base's own tensors, by the names in the model of the adapter's copies."""
    for path, module in model.named_modules():
        if not isinstance(module, TunedModule) or adapter_name not in module.tuned:
            continue
        path = without_engines(path)
        owner = path.rpartition(".")[0] if isinstance(module, TunedInPlace) else f"{path}.base_layer"
        for name in module.tuned[adapter_name].names:
            base = module.original(name)
            if not module.merged:  # a gathered state has the whole tensor where the module holds a shard
                base = state.get(f"{owner}.{name}", base)
            yield f"{path}.{module.adapter_layer_names[0]}.{adapter_name}.{as_attribute(name)}", base
