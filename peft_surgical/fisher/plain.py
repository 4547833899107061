"""Units of plain models, which need not be run to be found.

In most language models each parameter belongs to a module with a rule, and each such module sees all tokens of all
samples: the first dimension of its input and of its output runs over the samples, and one of the others over the
tokens. That is assumed here at first, and checked in every call (`hooks.py`). Where it does not hold,
`find_units` finds out what does, from two runs of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.calls import CallLayout
from peft_surgical.fisher.owners import Owner
from peft_surgical.fisher.rules import find_rule
from peft_surgical.fisher.units import Unit, is_inherited


PLAIN = CallLayout([0], [0])


class NotPlain(Exception):
    """A module does not see all tokens of all samples, or is not called."""


def plain_units(owners: Iterable[Owner]) -> list[Unit] | None:
    """The modules to listen to if the model is plain; None if it cannot be.

    Args:
        owners: The modules that own the parameters whose gradients are wanted, from `find_owners`.

    Example:

        >>> from peft_surgical.fisher.owners import find_owners
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        >>> [unit.name for unit in plain_units(find_owners(model, model.parameters()))]
        ['0', '1']
    """
    units = []
    for path, module, own in owners:
        rule = find_rule(module)
        if rule is None or not is_inherited(module, rule):
            return None
        units.append(Unit(path, module, own, rule, [PLAIN], plain=True))
    return units


def tokens_of(batch: Batch) -> int:
    """The tokens of each sample, padding included; 0 if it has none."""
    ids = batch.inputs.get("input_ids")
    return ids.shape[1] if isinstance(ids, Tensor) and ids.dim() == 2 else 0


@contextmanager
def checking_plain(units: Sequence[Unit], shape: tuple[int, int]) -> Iterator[None]:
    """A context for a forward pass, which checks that units are plain.

    Args:
        units: The units.
        shape: Samples and tokens.

    Raises:
        NotPlain: One does not see all tokens of all samples, or is not called.
    """
    called = set()

    def check(unit: Unit, module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        called.add(unit.name)
        check_plain(unit, shape, first_input(args, kwargs), output)

    handles = [u.module.register_forward_hook(partial(check, u), with_kwargs=True) for u in units]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for unit in units:
        if unit.name not in called:
            raise NotPlain(unit.name)


def first_input(args: tuple, kwargs: dict) -> Any:
    """What a module with a rule is called with: one tensor."""
    return args[0] if args else tree_flatten(kwargs)[0][0]


def check_plain(unit: Unit, shape: tuple[int, int], *tensors: object) -> None:
    """Check the tensors of a call.

    Args:
        unit: The unit.
        shape: Samples and tokens.
        tensors: Its input and output.

    Raises:
        NotPlain: One is no tensor of all tokens of all samples.
    """
    samples, tokens = shape
    for x in tensors:
        if not isinstance(x, Tensor) or not x.dim() or x.shape[0] != samples or tokens not in x.shape[1:]:
            raise NotPlain(unit.name)
