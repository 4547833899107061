"""What a user may write for strata, as far as it can be checked without a model."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any


TUNINGS = ("frozen", "bitfit", "norm", "lora", "full")
BIASES = ("other", "all", "none")
_KEYS = {"bitfit": ("add_bias",), "lora": ("target_modules", "bias", "add_bias")}


def check_form(strata: Any) -> None:
    """Check what can be checked of strata without a model."""
    for stack, items in strata.items() if isinstance(strata, Mapping) else [(None, strata)]:
        if isinstance(items, (str, Mapping)) or not isinstance(items, Sequence):
            raise TypeError(f"strata={strata!r} must be a list of dicts, or {{'stack': [dicts], ...}}.")
        if not items:
            raise ValueError(f"strata has an empty list{f' for {stack!r}' if stack else ''}. Name the strata.")
        for item in items:
            _check_stratum(item)


def check_depth_marks(n1: Any, n2: Any) -> tuple[int | float, int | float]:
    """Check `n1` and `n2` as far as that goes without a model."""
    if n1 is None or n2 is None:
        raise ValueError(f"n1={n1!r} and n2={n2!r} must be given together: the last layer of group 1 and of group 2.")
    marks = []
    for name, value in (("n1", n1), ("n2", n2)):
        try:
            if isinstance(value, bool):
                raise TypeError
            mark = float(value) if isinstance(value, float) else operator.index(value)
        except TypeError:
            raise TypeError(
                f"{name}={value!r} is a {type(value).__name__}; allowed are the index of a layer or a fraction of the "
                "depth."
            ) from None
        if not (0 < mark < 1 if isinstance(mark, float) else mark >= 0):
            raise ValueError(f"{name}={value!r} must be a layer's index, 0 or more, or a fraction between 0 and 1.")
        marks.append(mark)
    if type(marks[0]) is type(marks[1]) and marks[0] >= marks[1]:
        raise ValueError(f"n1={n1!r} must be below n2={n2!r}: group 2 lies between them.")
    return marks[0], marks[1]


def _check_stratum(item: Any) -> None:
    if not isinstance(item, Mapping):
        raise TypeError(f"A stratum is {item!r}; it must be a dict such as {{'layers': '0-4', 'tune': 'frozen'}}.")
    if missing := {"layers", "tune"} - set(item):
        raise ValueError(f"The stratum {dict(item)!r} lacks {' and '.join(map(repr, sorted(missing)))}.")
    if item["tune"] not in TUNINGS:
        raise ValueError(f"tune={item['tune']!r} in the stratum {dict(item)!r}: allowed are {', '.join(TUNINGS)}.")
    allowed = _KEYS.get(item["tune"], ())
    for key in set(item) - {"layers", "tune"}:
        if key not in allowed:
            raise ValueError(
                f"{key!r} has no meaning in the stratum {dict(item)!r}; allowed beside 'layers' and 'tune' are "
                f"{', '.join(map(repr, allowed)) or 'no other keys'} with tune={item['tune']!r}."
            )
    if item.get("bias", "none") not in BIASES:
        raise ValueError(f"bias={item['bias']!r} in the stratum {dict(item)!r}: allowed are {', '.join(BIASES)}.")
    if isinstance(item["layers"], Mapping):
        raise ValueError(
            f"Name the stack around the strata: strata={{{next(iter(item['layers']), 'stack')!r}: [...]}}."
        )
