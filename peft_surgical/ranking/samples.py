"""What is differentiated and on which samples: of a model and data, or of a trainer, which is left as it was."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from peft_surgical.fisher.batches import Batch, forward_names
from peft_surgical.fisher.draw import Draw
from peft_surgical.fisher.engine import Runner
from peft_surgical.fisher.guard import agree_with_loss
from peft_surgical.fisher.model_state import same_random_numbers, untouched
from peft_surgical.fisher.objective import LossObjective, Objective, TaskObjective, make_objective
from peft_surgical.fisher.tasks import IGNORED, NoLikelihood
from peft_surgical.layers import Layer


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """What a trainer trains on."""

    trainer: Any  # a copy that keeps its metrics to itself, and whose processes do not wait for one another

    @property
    def model(self) -> nn.Module:
        """The model that it trains."""
        return self.trainer.model

    def data(self, whole_batches: bool) -> tuple[Any, Any]:
        """Its loader of batches, of all processes; or its rows as it prepared them, and its collator."""
        loader = self.trainer.get_train_dataloader()
        return (loader, None) if whole_batches else (loader.dataset, loader.collate_fn)

    def has_likelihood(self) -> bool:
        """Whether its loss is the one that the model computes, as far as classes and options tell."""
        t = self.trainer
        function = getattr(t.compute_loss, "__func__", t.compute_loss)
        of_trl = function.__module__.startswith("trl.") and function.__qualname__ == "SFTTrainer.compute_loss"
        config = getattr(t.model, "config", None)
        return (
            (function.__module__ == "transformers.trainer" or (of_trl and t.args.loss_type == "nll"))
            and t.label_smoother is None
            and t.compute_loss_func is None
            and not getattr(getattr(config, "text_config", config), "output_router_logits", False)  # a batch's loss
        )

    def loss(self, batch: Batch) -> Any:
        """Its loss of a batch. Where its steps weigh all tokens alike, this is the sum over them, not the mean."""
        t, inputs = self.trainer, dict(batch.inputs)
        _, items = t.get_batch_samples(iter([inputs]), 1, t.args.device)
        one = {} if items is None else {"num_items_in_batch": torch.ones_like(torch.as_tensor(items))}
        return t.compute_loss(t.model, inputs, **one)

    def other_modules(self) -> list[nn.Module]:
        """The modules of its loss, its reference and whatever else it has beside the model."""
        inside, found = set(self.model.modules()), []
        for value in vars(self.trainer).values():
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            found += [m for v in values if isinstance(v, nn.Module) for m in v.modules() if m not in inside]
        return list(dict.fromkeys(found))


def read_trainer(value: Any) -> Training | None:
    """What a trainer of transformers, or one like it, trains on; None for a model."""
    parts = ("model", "args", "accelerator", "compute_loss", "get_train_dataloader")
    if isinstance(value, nn.Module) or not all(hasattr(value, name) for name in parts):
        return None
    aside = copy.copy(value)
    vars(aside).update({k: _own(v) for k, v in vars(value).items()})
    aside.args, aside.accelerator = copy.copy(value.args), copy.copy(value.accelerator)
    aside.args.average_tokens_across_devices = False
    for name in ("prepare", "gather", "gather_for_metrics", "reduce", "pad_across_processes"):
        setattr(aside.accelerator, name, lambda value, *_, **__: value)
    return Training(aside)


def _own(value: Any) -> Any:
    """A list or dict of one's own, in which all else is shared."""
    if type(value) is list:
        return [_own(v) for v in value]
    if type(value) in (dict, defaultdict, OrderedDict):
        copied = copy.copy(value)
        copied.update({k: _own(v) for k, v in value.items()})
        return copied
    return value


def own_loss(model: nn.Module) -> Callable[[Batch], Any]:
    """The loss that a model computes itself."""
    names = forward_names(model)

    def loss(batch: Batch) -> Any:
        inputs = {k: v for k, v in batch.inputs.items() if names is None or k in names}
        if names and "return_loss" in names:
            inputs["return_loss"] = True
        found = getattr(model(**inputs), "loss", None)
        if found is None:
            raise ValueError(
                f"{type(model).__name__} computes no loss of its own, and has no head for a known task. Use a model "
                "with a head, such as AutoModelForSequenceClassification, or give log_likelihood=, a function "
                "(outputs, batch) -> (N,)."
            )
        return found

    return loss


def read_samples(
    model: nn.Module,
    last_layer: Layer,
    draw: Draw,
    training: Training | None,
    *,
    batch_size: int,
    seed: int,
    log_likelihood: Callable[[Any, Mapping[str, Any]], Tensor] | str | None,
    verify: bool,
    **of_labels: Any,
) -> tuple[Objective, list[Batch]]:
    """What is differentiated, and the samples: log p(y|x) of samples in batches, where that is defined and is what a
    trainer trains on; else a loss of one sample at a time. `of_labels` are the options of `make_objective`."""
    unit = of_labels["unit"]

    def listed(batches: Iterator[Batch]) -> list[Batch]:
        with same_random_numbers(model.parameters(), seed), torch.inference_mode(False):
            return list(batches)

    usual = {"labels": "given", "unit": unit if unit == "batch" else "sequence", "draws": 1, "ignore_index": IGNORED}
    by_loss = log_likelihood == "loss" or (unit == "batch" and log_likelihood is None)
    if not by_loss and (training is None or log_likelihood is not None or training.has_likelihood()):
        objective: Objective | None = None
        try:
            objective = make_objective(model, seed=seed, log_likelihood=log_likelihood, **of_labels)
            batches = listed(draw.batches(batch_size))
            if isinstance(objective, TaskObjective) and verify:
                with untouched(model, seed):
                    objective = agree_with_loss(Runner(model, objective), batches, last_layer)
            return objective, batches
        except NoLikelihood as reason:
            if of_labels != usual or (training is None and objective is not None):
                raise
            logger.warning("The loss of one sample at a time is differentiated, which is slow: %s", reason)
    if of_labels != usual:
        changed = ", ".join(f"{k}={v!r}" for k, v in of_labels.items() if v != usual[k])
        raise ValueError(
            f"{changed} is for log p(y|x), and what is differentiated is a loss as it is. Leave it out, or give "
            "log_likelihood=, a function (outputs, batch) -> (N,)."
        )
    loss = own_loss(model) if training is None else training.loss
    batches = listed(draw.apart(batch_size if unit == "batch" else None))
    return LossObjective(loss, model, seed, of_batches=unit == "batch"), batches
