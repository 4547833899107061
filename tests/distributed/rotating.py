"""What each process of a launch does to train layers in turns. What it finds goes to files, for the tests to judge.

accelerate launch ... rotating.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from adapters import make_config
from peft import PeftModel, get_peft_model
from tiny_models import batch, build
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from distributed.cases import digest
from peft_surgical import RotateLayers, shard_by_layer
from peft_surgical.copies import host
from peft_surgical.distributed import ddp_around, engine_of


ROWS = 4  # of a step, in all processes
CASES = {"plain": {}, "accumulating": {"gradient_accumulation_steps": 2}}


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)


class Count(TrainerCallback):
    """Notes how many tensors have an optimizer state and, under DDP, how many are reduced."""

    def __init__(self):
        self.with_state, self.reduced = [], []

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.with_state.append(len([p for p in model.parameters() if optimizer.state.get(p)]))
        for wrapper in ddp_around(model)[:1]:
            self.reduced.append(wrapper._get_ddp_logging_data()["num_parameter_tensors"])


def make(dtype: torch.dtype = torch.float32) -> PeftModel:
    model = build("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).to(dtype)
    return get_peft_model(model, make_config("SURGICAL", "bert", range(4)))


def trainer_of(
    folder: Path, case: str, processes: int, model: PeftModel | None = None, at_rest: str = "host", **options
) -> InOrder:
    rows = batch("bert", n=64, seed=5)
    model = model or make()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=5,
        save_steps=3,
        per_device_train_batch_size=ROWS // processes,
        learning_rate=1e-3,
        optim="adamw_torch",
        adam_epsilon=1e-3,  # or it would blow up gradients that are zero but for rounding
        average_tokens_across_devices=False,
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **CASES[case],
        **options,
    )
    data = [{name: value[i] for name, value in rows.items()} for i in range(64)]
    callbacks = [RotateLayers(2, every=2, at_rest=at_rest), Count()]
    trainer = InOrder(model, arguments, train_dataset=data, callbacks=callbacks)
    shard_by_layer(trainer.accelerator, model)
    return trainer


def run(folder: Path) -> None:
    facts = {case: train(folder, case) for case in CASES}
    facts["rounded"] = error_of(lambda: trainer_of(folder / "rounded", "plain", 2, at_rest="rounded").train())
    facts["at rest"] = {at_rest: train_half(folder / at_rest, at_rest) for at_rest in ("host", "device")}
    everyone = gather_object([facts])
    if PartialState().is_main_process:
        (folder / "facts.json").write_text(json.dumps(everyone, indent=1))
    PartialState().wait_for_everyone()


def train(folder: Path, case: str) -> dict[str, Any]:
    trainer = trainer_of(folder / case, case, 2)
    error = error_of(trainer.train)
    if error:  # FSDP2 cannot resume
        trainer = trainer_of(folder / case, case, 2)
        trainer.args.save_only_model = True
        trainer.train()
    trainer.save_model(str(folder / case / "end"))
    count = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Count))
    facts = {"engine": engine_of(trainer.model_wrapped), "with state": count.with_state, "reduced": count.reduced}
    facts |= {"error": error, "digest": digest(whole(trainer.model))}
    if not error:
        # on a model that DDP has wrapped before
        again = trainer_of(folder / "again", case, 2, trainer.model)
        again.train(resume_from_checkpoint=str(folder / case / "checkpoint-3"))
        facts["digest after resuming"] = digest(whole(again.model))
    return facts


def train_half(folder: Path, at_rest: str) -> str:
    """What a base in half precision is trained to, as on an accelerator with memory of its own."""
    with patch.object(host, "_HOSTS", ()):
        trainer = trainer_of(folder, "plain", 2, make(torch.bfloat16), at_rest=at_rest, save_strategy="no")
        trainer.train()
    return digest([tensor.float() for tensor in whole(trainer.model)])


def error_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return ""


def whole(model: torch.nn.Module) -> list[torch.Tensor]:
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in model.parameters()]


if __name__ == "__main__":
    run(Path(sys.argv[1]))
