"""Strata: layers that are tuned alike. What a user may write for them, and what it means on a model."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from torch import nn

from peft_surgical.layers import Layer, Stack, choose_stack, describe_stacks, find_stacks, layer_indices, unwrap
from peft_surgical.methods.resolve import by_stack_unless_single
from peft_surgical.methods.stratified.attention_names import attention_names


logger = logging.getLogger(__name__)

TUNINGS = ("frozen", "bitfit", "norm", "columns", "lora", "full")
BIASES = ("other", "all", "none")
_OPTIONS = {  # what a stratum may say beside its layers
    "bitfit": ("add_bias",),
    "columns": ("target_modules", "columns"),
    "lora": ("target_modules", "bias", "add_bias"),
}


# ---- what can be checked without a model


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


def check_columns(columns: Any) -> None:
    """Check how many columns are to be trained, or their share, as far as that goes without a model."""
    is_number = isinstance(columns, (int, float)) and not isinstance(columns, bool)
    if not is_number or not (0 < columns < 1 if isinstance(columns, float) else columns > 0):
        raise ValueError(
            f"columns={columns!r} must be how many input columns of each linear module are trained, 1 or more, or "
            "their share, a fraction between 0 and 1."
        )


def _check_stratum(item: Any) -> None:
    if not isinstance(item, Mapping):
        raise TypeError(f"A stratum is {item!r}; it must be a dict such as {{'layers': '0-4', 'tune': 'frozen'}}.")
    if missing := {"layers", "tune"} - set(item):
        raise ValueError(f"The stratum {dict(item)!r} lacks {' and '.join(map(repr, sorted(missing)))}.")
    if item["tune"] not in TUNINGS:
        raise ValueError(f"tune={item['tune']!r} in the stratum {dict(item)!r}: allowed are {', '.join(TUNINGS)}.")
    allowed = _OPTIONS.get(item["tune"], ())
    for key in set(item) - {"layers", "tune"}:
        if key not in allowed:
            raise ValueError(
                f"{key!r} has no meaning in the stratum {dict(item)!r}; allowed beside 'layers' and 'tune' are "
                f"{', '.join(map(repr, allowed)) or 'no other keys'} with tune={item['tune']!r}."
            )
    if item.get("bias", "none") not in BIASES:
        raise ValueError(f"bias={item['bias']!r} in the stratum {dict(item)!r}: allowed are {', '.join(BIASES)}.")
    if "columns" in item:
        check_columns(item["columns"])
    if isinstance(item["layers"], Mapping):
        raise ValueError(
            f"Name the stack around the strata: strata={{{next(iter(item['layers']), 'stack')!r}: [...]}}."
        )


# ---- what it means on a model


@dataclass(frozen=True)
class Stratum:
    """Layers of one stack that are tuned alike."""

    stack: Stack
    layers: tuple[int, ...]  # ascending
    tune: str  # one of `TUNINGS`
    target_modules: tuple[str, ...] | str | None = None  # as in PEFT; for "lora" and "columns"
    bias: str = "none"  # which bias terms are trained beside LoRA, one of `BIASES`
    add_bias: bool = False  # linear modules without a bias get one, zero at the start; for "lora" and "bitfit"
    columns: int | float | None = None  # how many input columns of each weight are trained, or their share

    def __str__(self) -> str:
        return f"stratum of layers {list(self.layers)} of {self.stack.name} (tune={self.tune!r})"

    @property
    def modules(self) -> list[Layer]:
        return [self.stack.layers[i] for i in self.layers]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, the form in a config."""
        said = {name: getattr(self, name) for name in ("layers", "tune", *_OPTIONS.get(self.tune, ()))}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}
        return {name: value for name, value in plain.items() if value is not None and value is not False}


def groups(n1: float, n2: float, depth: int, reference: int | None = None) -> tuple[int, int]:
    """The number of layers in SPAFIT's group 1, and in groups 1 and 2 together (Arora & Wang 2024, section 3.2).

    n1 and n2 are the index of a group's last layer, or a fraction of the depth; `reference` is the depth that indices
    are meant for, if another: they count as fractions of it.
    """

    def count(n: float) -> int:
        share = n if isinstance(n, float) else (n + 1) / (reference or depth)
        return math.floor(share * depth + 0.5)

    return count(n1), count(n2)


def resolve_strata(model: nn.Module, config: Any) -> list[Stratum]:
    """What a config's `n1`, `n2` or `strata` mean on a model; those of a stack together, by their lowest layers."""
    model = unwrap(model)
    strata = []
    for stack, items in _items_by_stack(model, config).items():
        found = [_make_stratum(item, stack, config) for item in items]
        _check_cover(stack, found)
        strata += sorted(found, key=lambda stratum: stratum.layers[0])
    return [_with_targets(stratum, model, config) for stratum in strata]


def plain_strata(strata: Sequence[Stratum], model: nn.Module) -> list[dict] | dict[str, list[dict]]:
    """Strata as they are stored in a config."""
    return by_stack_unless_single([(stratum.stack.name, stratum.to_dict()) for stratum in strata], model)


def unite_strata(model: nn.Module, configs: Sequence[Any]) -> list[dict] | dict[str, list[dict]]:
    """Strata in which each layer is tuned as by those of several configs with strata that tune it."""
    found: dict[str, Stack] = {}
    tunings: dict[tuple[str, int], Stratum] = {}
    for stratum in [stratum for config in configs for stratum in resolve_strata(model, config)]:
        found[stratum.stack.name] = stratum.stack
        for index in stratum.layers:
            here = replace(stratum, layers=())
            there = tunings.setdefault((stratum.stack.name, index), here)
            if there.tune == "frozen":
                tunings[stratum.stack.name, index] = here
            elif here.tune != "frozen" and here != there:
                raise ValueError(
                    f"Layer {index} of {stratum.stack.name} is tuned in two ways, {there.to_dict()} and "
                    f"{here.to_dict()}, which one configuration cannot express together."
                )
    groups: dict[Stratum, list[int]] = {}
    for (_, index), tuning in sorted(tunings.items(), key=lambda item: item[0][1]):
        groups.setdefault(tuning, []).append(index)
    strata = [replace(tuning, layers=tuple(indices)) for tuning, indices in groups.items()]
    return plain_strata(sorted(strata, key=lambda s: list(found).index(s.stack.name)), model)


def _items_by_stack(model: nn.Module, config: Any) -> dict[Stack, list[Mapping]]:
    stacks = find_stacks(model)
    if isinstance(config.strata, Mapping):
        named = {choose_stack(model, name): items for name, items in config.strata.items()}
        if len(named) < len(config.strata):
            raise ValueError(f"strata names a stack twice: {list(config.strata)}. {describe_stacks(stacks)}")
        return named
    in_pairs = len(stacks) > 1 and getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if config.strata is not None:
        # one stratum for all layers means the same in every stack; where it tunes them, towers are to be named
        if [item["layers"] for item in config.strata] == ["all"] and (
            in_pairs or config.strata[0]["tune"] == "frozen"
        ):
            return {stack: config.strata for stack in stacks.values()}
        return {_only_stack(model, stacks, "strata={'%s': [...]}"): config.strata}
    if not in_pairs:
        stack = _only_stack(model, stacks, "strata={'%s': [...]} in place of n1 and n2")
        return {stack: _group_items(config, stack, [len(stack)])}
    depths = [len(stack) for stack in stacks.values()]
    found = {stack: _group_items(config, stack, depths) for stack in stacks.values()}
    logger.warning(
        "n1=%s and n2=%s apply to each stack of this encoder-decoder model as fractions of its depth: %s. Give "
        "strata={'stack': [...]} to choose otherwise.",
        config.n1,
        config.n2,
        "; ".join(
            f"{s.name}: {', '.join(i['layers'] + ' ' + i['tune'] for i in items)}" for s, items in found.items()
        ),
    )
    return found


def _only_stack(model: nn.Module, stacks: Mapping[str, Stack], how: str) -> Stack:
    if len(stacks) > 1:
        raise ValueError(
            f"{type(model).__name__} has several stacks of layers, so strata need the name of theirs: "
            f"{how % next(iter(stacks))}. Stacks that are not named stay frozen. {describe_stacks(stacks)}"
        )
    return choose_stack(model)


def _group_items(config: Any, stack: Stack, depths: Sequence[int]) -> list[Mapping]:
    first, second = groups(config.n1, config.n2, len(stack), max(depths))
    if not 0 < first < second < len(stack):
        raise ValueError(
            f"n1={config.n1!r} and n2={config.n2!r} leave a group without layers in {stack}: group 1 has "
            f"{min(first, len(stack))}, group 2 {max(0, min(second, len(stack)) - first)}, group 3 "
            f"{max(0, len(stack) - second)}. {_advise(stack, depths)}"
        )
    return [
        {"layers": f"0-{first - 1}", "tune": "frozen"},
        {"layers": f"{first}-{second - 1}", "tune": config.group_2},
        {"layers": f"{second}-", "tune": "lora"},
    ]


def _advise(stack: Stack, depths: Sequence[int]) -> str:
    """What fits stacks of these depths, one of which is given: SPAFIT's groups, and less than three."""
    reference, half = max(depths), len(stack) // 2
    fitting = [
        (n1, n2)
        for n1, n2 in combinations(range(reference), 2)
        if all(0 < first < second < depth for depth in depths for first, second in [groups(n1, n2, depth, reference)])
    ]
    near = min(fitting, key=lambda n: abs(n[0] + 1 - reference / 5) + abs(n[1] + 1 - reference / 2.5), default=None)
    lower = f'{{"layers": "0-{half - 1}", "tune": "bitfit"}}, ' if half else ""
    strata = f'[{lower}{{"layers": "{half}-", "tune": "lora"}}]'
    strata = f'{{"{stack.name}": {strata}}}' if len(depths) > 1 else strata
    fits = f"n1={near[0]} and n2={near[1]} fit" if near else "Three groups need three layers"
    return f"{fits}. To do without a group, name the others: strata={strata}."


def _make_stratum(item: Mapping, stack: Stack, config: Any) -> Stratum:
    tune = item["tune"]
    of_all = {"target_modules": config.target_modules, "columns": config.columns}
    of_all |= {"bias": config.bias_beside_lora, "add_bias": config.add_bias}
    options = {name: item.get(name, of_all[name]) for name in _OPTIONS.get(tune, ())}
    targets = options.get("target_modules")
    if tune == "columns" and not targets:
        options["target_modules"] = "all-linear"
    elif targets is not None and not isinstance(targets, str):
        options["target_modules"] = tuple(sorted(targets))
    return Stratum(stack, tuple(layer_indices(item["layers"], stack)), tune, **options)


def _check_cover(stack: Stack, strata: Sequence[Stratum]) -> None:
    tunings: dict[int, str] = {}
    for stratum in strata:
        for layer in stratum.layers:
            if layer in tunings:
                raise ValueError(
                    f"Layer {layer} of {stack} is in two strata (tune={tunings[layer]!r} and tune={stratum.tune!r}). "
                    "Leave it in one."
                )
            tunings[layer] = stratum.tune
    if gaps := [i for i in range(len(stack)) if i not in tunings]:
        raise ValueError(
            f"Layers {gaps} of {stack} are in no stratum. Add one for them, "
            f'{{"layers": {gaps}, "tune": "frozen"}} to leave them as they are.'
        )


def _with_targets(stratum: Stratum, model: nn.Module, config: Any) -> Stratum:
    if stratum.tune != "lora" or stratum.target_modules is not None:
        return stratum
    names = attention_names(model, stratum.modules, config.variant or "II")
    return replace(stratum, target_modules=tuple(sorted(names)))
