"""For training with `transformers.Trainer`: parameter groups for the optimizer, the best checkpoint at the end, the
best of several choices of layers."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peft import PeftModel, load_peft_weights, set_peft_model_state_dict
from torch import nn
from transformers import TrainerCallback, trainer_pt_utils

from peft_surgical.layers import find_stacks, unwrap
from peft_surgical.methods.surgical import DEFAULT_LAYERS


# as in transformers' Trainer
_WITHOUT_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.01,
    layer_scores: Sequence[float] | Mapping[str, Sequence[float]] | None = None,
) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into groups for an optimizer. No group is empty.

    Args:
        model: The model, with or without adapters. Frozen parameters are left out.
        lr: The learning rate.
        weight_decay: The weight decay of weight matrices. Biases and the weights of norms get none, as in
            transformers' Trainer.
        layer_scores: A score per layer (`ranking.scores`), or one sequence per stack. A layer's learning rate is `lr`
            times its score over the best score of the stack, which with `score="rgn"` is Auto-RGN (Lee et al. 2023,
            section 4). Everything outside the layers keeps `lr`.

    Returns:
        Groups with `params`, `lr` and `weight_decay`, which together hold each trainable parameter once.

    Raises:
        ValueError: Nothing is trainable, or there is not one score of 0 or more for each layer.

    Example:

        >>> groups = parameter_groups(nn.Linear(2, 2), lr=1e-3)
        >>> [(group["weight_decay"], len(group["params"])) for group in groups]
        [(0.01, 1), (0.0, 1)]
    """
    decayed = set(trainer_pt_utils.get_parameter_names(model, [nn.LayerNorm], _WITHOUT_DECAY))
    factors = _layer_factors(model, layer_scores)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            settings = lr * factors.get(id(parameter), 1.0), weight_decay if name in decayed else 0.0
            group = groups.setdefault(settings, {"params": [], "lr": settings[0], "weight_decay": settings[1]})
            group["params"].append(parameter)
    if not groups:
        raise ValueError(
            "No parameter of the model is trainable. An adapter that was loaded for inference is frozen: load it with "
            "is_trainable=True."
        )
    return list(groups.values())


def _layer_factors(
    model: nn.Module, layer_scores: Sequence[float] | Mapping[str, Sequence[float]] | None
) -> dict[int, float]:
    """By id of the parameter, what its learning rate is multiplied with."""
    if layer_scores is None:
        return {}
    stacks = find_stacks(unwrap(model))
    if not isinstance(layer_scores, Mapping):
        if len(stacks) != 1:
            raise ValueError(f"The model has the stacks {list(stacks)}: give layer_scores={{stack: [...]}}.")
        layer_scores = {next(iter(stacks)): layer_scores}
    factors: dict[int, float] = {}
    for name, scores in layer_scores.items():
        if name not in stacks:
            raise ValueError(f"layer_scores names the stack {name!r}; the model has {list(stacks)}.")
        layers = stacks[name].layers
        if len(scores) != len(layers) or min(scores) < 0 or max(scores) <= 0:
            raise ValueError(
                f"layer_scores of {name} must be {len(layers)} numbers of 0 or more, one for each layer, with a "
                f"positive one among them; got {list(scores)}."
            )
        for layer, score in zip(layers, scores, strict=True):
            factors.update({id(p): score / max(scores) for p in layer.module.parameters()})
    return factors


class BestAdapterCallback(TrainerCallback):
    """Loads the best checkpoint's adapters at the end of a `Trainer` run with `load_best_model_at_end=True`.

    PEFT saves an adapter that is not called "default" in a folder of its own, where `Trainer` does not look for it: it
    says that it could not locate the best model, and goes on with the last one. So does `SentenceTransformerTrainer`
    with any adapter inside its model.

    Raises:
        FileNotFoundError: At the end of training, if the best checkpoint has no active adapter of the model.

    Example:

        >>> callback = BestAdapterCallback()  # for Trainer(..., callbacks=[callback])
    """

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        checkpoint = state.best_model_checkpoint
        if not args.load_best_model_at_end or checkpoint is None:
            return
        peft_model = next((part for part in model.modules() if isinstance(part, PeftModel)), None)
        if peft_model is None:
            return
        for name in peft_model.active_adapters:
            folder = checkpoint if name == "default" else os.path.join(checkpoint, name)
            if not os.path.isfile(os.path.join(folder, "adapter_config.json")):
                raise FileNotFoundError(f"The best checkpoint {checkpoint} has no adapter {name!r}.")
            set_peft_model_state_dict(peft_model, load_peft_weights(folder, device="cpu"), adapter_name=name)


CHOICES = (DEFAULT_LAYERS, "alternate:40%", "middle:40%")
"""The choices that did best in this project's benchmarks, none of which looks at the data; the best first."""


def best_choice(values: Mapping[str, float | None], *, larger_is_better: bool) -> str | None:
    """The choice with the best value, of equal ones the first; None if there is no finite value.

    Example:

        >>> best_choice({"a": 0.8, "b": 0.9, "c": 0.9, "d": math.nan}, larger_is_better=True)
        'b'
    """
    finite = {choice: value for choice, value in values.items() if value is not None and math.isfinite(value)}
    return (max if larger_is_better else min)(finite, key=finite.__getitem__, default=None)


@dataclass(frozen=True)
class TriedLayers:
    """What `choose_layers` found; its text is a table.

    Args:
        trainer: The trainer of the best choice, trained.
        layers: The best choice.
        metric: What was compared.
        values: The metric of each choice.
        seconds: How long each took.
    """

    trainer: Any
    layers: str
    metric: str
    values: dict[str, float]
    seconds: dict[str, float]

    def __str__(self) -> str:
        width = max(map(len, self.values))
        lines = [f"{'layers':<{width}}  {self.metric:>10}  seconds"]
        lines += [
            f"{name:<{width}}  {value:>10.4g}  {self.seconds[name]:>7.0f}{'  kept' * (name == self.layers)}"
            for name, value in self.values.items()
        ]
        return "\n".join(lines)


def choose_layers(
    make_trainer: Callable[[str], Any], choices: Sequence[str] = CHOICES, *, metric: str | None = None
) -> TriedLayers:
    """Train several choices of layers in turn, and keep the one that is best on the rows held out for evaluation.

    This costs as many trainings as there are choices. What it gains over the first alone is small (docs/results.md).

    Args:
        make_trainer: Gives for a choice, as `SurgicalConfig(layers=...)` takes it, a new trainer with a new model and
            an `eval_dataset`. Each needs an `output_dir` of its own if it saves.
        choices: The choices.
        metric: What `trainer.evaluate()` is asked for; by default the `metric_for_best_model` of the trainer's
            arguments, else `"eval_loss"`. The larger the better, unless its name ends in `loss` or the arguments'
            `greater_is_better` says otherwise.

    Returns:
        The best choice with its trainer. Of equal ones the first.

    Raises:
        ValueError: There are no choices, or none gave a finite number.
        KeyError: The trainer does not measure the metric.

    Example:

        >>> def make_trainer(layers):
        ...     model = get_peft_model(load_base(), SurgicalConfig(task_type="SEQ_CLS", layers=layers))
        ...     return Trainer(model, args, train_dataset=train, eval_dataset=held_out, data_collator=collator)
        >>> tried = choose_layers(make_trainer)  # doctest: +SKIP
        >>> tried.trainer.save_model("best")  # doctest: +SKIP
    """
    best: TriedLayers | None = None
    values: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for choice in dict.fromkeys(choices):
        started = time.perf_counter()
        trainer = make_trainer(choice)
        name = metric or trainer.args.metric_for_best_model or "eval_loss"
        name = name if name.startswith("eval_") else f"eval_{name}"
        trainer.train()
        measured = trainer.evaluate()
        if name not in measured:
            raise KeyError(f"The trainer does not measure {name!r}; it gives {sorted(measured)}.")
        values[choice], seconds[choice] = float(measured[name]), time.perf_counter() - started
        of_args = trainer.args.metric_for_best_model or "loss"
        told = trainer.args.greater_is_better if name in (of_args, f"eval_{of_args}") else None
        larger = not name.endswith("loss") if told is None else told
        if best_choice(values, larger_is_better=larger) == choice:
            best = TriedLayers(trainer, choice, name, values, seconds)
        del trainer  # the memory is needed for the next one
    if best is None:
        raise ValueError(f"No choice of layers gave a finite number: {values or 'there are no choices'}.")
    return best
