"""Give a model a freshly initialized head for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from peft_surgical.fisher.model_state import same_random_numbers
from peft_surgical.layers import unwrap


@contextmanager
def reinitialized_head(model: nn.Module, seed: int) -> Iterator[None]:
    """A context in which the model's head is initialized anew; its parameters are put back afterwards.

    Args:
        model: A model of transformers with a head.
        seed: Seed of the draw.

    Raises:
        ValueError: The model has no head of its own.

    Example:

        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> model = BertForSequenceClassification(config)
        >>> before = model.classifier.weight
        >>> with reinitialized_head(model, seed=1):
        ...     torch.equal(model.classifier.weight, before)
        False
        >>> model.classifier.weight is before
        True
    """
    model = unwrap(model)
    owners = head_modules(model)
    originals = [(module, dict(module._parameters)) for module in owners]
    try:
        for module in owners:
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
        with same_random_numbers(model.parameters(), seed), torch.no_grad():
            for module in owners:
                _initialize(model, module)
        yield
    finally:
        for module, parameters in originals:
            module._parameters.update(parameters)


def head_modules(model: nn.Module) -> list[nn.Module]:
    """The modules outside the base model of transformers that own parameters which the base does not.

    Raises:
        ValueError: There are none.
    """
    base = getattr(model, "base_model", None)
    inside = set(base.modules()) if isinstance(base, nn.Module) and base is not model else set(model.modules())
    shared = {id(p) for p in base.parameters()} if isinstance(base, nn.Module) else set()
    found = [
        module
        for module in model.modules()
        if module not in inside
        and any(p is not None for p in module._parameters.values())
        and not any(id(p) in shared for p in module._parameters.values())
    ]
    if not found:
        raise ValueError(
            f"head_inits initializes the head anew, and {type(model).__name__} has no head with parameters of its "
            "own. Use head_inits=0."
        )
    return found


def _initialize(model: nn.Module, module: nn.Module) -> None:
    initialize: Any = getattr(model, "_init_weights", None)
    reset: Any = getattr(module, "reset_parameters", None)
    if initialize:
        initialize(module)
    elif reset:
        reset()
