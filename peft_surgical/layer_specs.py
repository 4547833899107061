"""What a user may write for layers, and the indices in a stack that it means."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any


LayerSpec = str | Sequence[int | str] | Mapping[str, "str | Sequence[int | str]"]
"""What a user may write for layers, see `resolve_layers`."""


def layer_indices(spec: str | Sequence[int | str], stack: Sized) -> list[int]:
    """The indices in one stack that a specification means, ascending; errors as in `resolve_layers`."""
    if isinstance(spec, (Mapping, bytes)) or not isinstance(spec, Iterable):
        raise TypeError(f"layers={spec!r} is a {type(spec).__name__}; allowed are {_FORMS}.")
    indices: list[int] = []
    for item in [spec] if isinstance(spec, str) else spec:
        indices.extend(_parse(item, stack) if isinstance(item, str) else [_in_range(item, stack, spec)])
    twice = [i for i in indices if indices.count(i) > 1]
    if twice or not indices:
        fault = f"layer {twice[0]} more than once; name each layer once" if twice else "no layer"
        raise ValueError(f"layers={spec!r} chooses {fault}. Stack: {stack}.")
    return sorted(indices)


def plain_spec(layers: Any) -> Any:
    """What a user wrote for layers, with ranges, arrays and the like as lists of plain integers.

    Example:

        >>> plain_spec({"decoder": range(2), "encoder": "last:3"})
        {'decoder': [0, 1], 'encoder': 'last:3'}
    """
    if isinstance(layers, Mapping):
        return {stack: plain_spec(spec) for stack, spec in layers.items()}
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        return layers
    return [operator.index(i) if hasattr(i, "__index__") and not isinstance(i, bool) else i for i in layers]


_FORMS = "a list of indices such as [3, -1], 'last:3', 'first:2', 'last:25%', '4-9', '10-', 'all', or {'stack': ...}"
_COUNT = re.compile(r"(first|last):(\d+(?:\.\d+)?)(%?)")
_RANGE = re.compile(r"(\d+)-(\d*)")


def _parse(text: str, stack: Sized) -> range:
    depth = len(stack)
    text = text.strip()
    if text == "all":
        return range(depth)
    if match := _COUNT.fullmatch(text):
        where, number, percent = match.groups()
        share = float(number) / 100 if percent else float(number) / depth
        count = max(1, math.floor(share * depth + 0.5))
        if not 0 < share <= 1 or ("." in number and not percent):
            raise ValueError(
                f"layers={text!r} must ask for 1 to {depth} layers, or 0% < share <= 100%. Stack: {stack}."
            )
        return range(count) if where == "first" else range(depth - count, depth)
    if match := _RANGE.fullmatch(text):
        first, last = int(match[1]), int(match[2] or depth - 1)
        if first > last:
            raise ValueError(f"layers={text!r} chooses no layer. Stack: {stack}.")
        return range(_in_range(first, stack, text), _in_range(last, stack, text) + 1)
    if re.fullmatch(r"-?\d+", text):
        return range(index := _in_range(int(text), stack, text), index + 1)
    raise ValueError(f"layers={text!r} is not understood; allowed are {_FORMS}.")


def _in_range(index: object, stack: Sized, spec: object) -> int:
    # numpy and torch integers are indices too; a truth value is one for Python, but is never meant as a layer
    try:
        if isinstance(index, bool):
            raise TypeError
        i = operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"layers={spec!r} contains {index!r}, a {type(index).__name__}; allowed are {_FORMS}."
        ) from None
    if not -len(stack) <= i < len(stack):
        raise ValueError(f"layers={spec!r}: there is no layer {i}. Stack: {stack}.")
    return i % len(stack)
