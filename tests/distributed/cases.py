"""What is trained in one process and in several: models, data and steps, the same for both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from adapters import make_config, shake
from peft import PeftModel, get_peft_model
from tiny_models import HEADS, INSIDE, LAYERS, WIDTH, batch, build, spread
from torch import nn
from transformers import BeitConfig, BeitForImageClassification, Trainer, TrainerCallback, TrainingArguments

from peft_surgical import StratifiedConfig, SurgicalConfig
from peft_surgical.distributed import shard_by_layer
from peft_surgical.methods.trainer import parameter_groups


STEPS, ROWS = 3, 4
INPUTS = {"bert": "bert", "beit": "vit"}  # family -> the one of `tiny_models` with such inputs


@dataclass(frozen=True)
class Case:
    """A way of tuning.

    Args:
        name: Its name.
        method: The method, `COLUMNS` of weights, or `HEAD` for the head alone.
        checkpointing: Whether with gradient checkpointing.
        family: The family of the model.
        encoding: How the adapter is saved.
        neighbour: Whether a second adapter, which is not active, is on some of the same modules.
    """

    name: str
    method: str
    checkpointing: bool = False
    family: str = "bert"
    encoding: str = "values"
    neighbour: bool = False


METHODS = [Case("surgical", "SURGICAL"), Case("stratified", "STRATIFIED"), Case("head", "HEAD")]
CHECKPOINTED = [
    Case("surgical-checkpointed", "SURGICAL", checkpointing=True),
    Case("stratified-checkpointed", "STRATIFIED", checkpointing=True),
]
COLUMNS = Case("columns", "COLUMNS")
RESUMED = [*METHODS, Case("encoded", "SURGICAL", encoding="lossless"), COLUMNS]
CASES = [
    *METHODS,
    *CHECKPOINTED,
    Case("owners", "SURGICAL", family="beit", encoding="lossless"),  # layers that own parameters themselves
    Case("neighbours", "STRATIFIED", neighbour=True),
    COLUMNS,
]


def make_base(family: str = "bert") -> nn.Module:
    """Without dropout, so that any number of processes computes the same."""
    if family == "bert":
        return build("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = BeitConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INSIDE,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BeitForImageClassification(config)
        spread(model)
    return model.eval()


def make_model(case: Case) -> PeftModel:
    torch.manual_seed(1)
    if case.method == "HEAD":
        config = StratifiedConfig(task_type="SEQ_CLS", strata=[{"layers": "all", "tune": "frozen"}])
    elif case.method == "COLUMNS":
        strata = [{"layers": [0, 3], "tune": "frozen"}, {"layers": [1, 2], "tune": "columns", "columns": 4}]
        config = StratifiedConfig(task_type="SEQ_CLS", strata=strata)
    elif case.family == "beit":
        config = SurgicalConfig(layers=[1, 2], modules_to_save=["classifier"], encoding=case.encoding)
    else:
        config = make_config(case.method, case.family, [1, 2], encoding=case.encoding)
    model = get_peft_model(make_base(case.family), config)
    if case.neighbour:
        model.add_adapter("other", make_config(case.method, case.family, [2, 3]))
    for name in model.peft_config:
        shake(model, name)  # LoRA's A would not move at first
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    groups = parameter_groups(model, lr=0.1, layer_scores=[4.0, 3.0, 2.0, 1.0])
    # AdamW would blow up gradients that are zero but for rounding, as those of the keys' biases are
    return torch.optim.SGD(groups, momentum=0.9)


def batches(family: str = "bert", rank: int = 0, processes: int = 1) -> Iterator[dict[str, torch.Tensor]]:
    """A process's rows of each step's batch."""
    rows = ROWS // processes
    for step in range(STEPS):
        joint = batch(INPUTS[family], n=ROWS, seed=step)
        yield {name: value[rank * rows : (rank + 1) * rows] for name, value in joint.items()}


def samples() -> list[dict[str, torch.Tensor]]:
    """Rows to rank the layers on."""
    joint = batch("bert", n=12, seed=7)
    return [{name: value[i] for name, value in joint.items()} for i in range(12)]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[dict[str, torch.Tensor]],
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> None:
    for inputs in steps:
        backward(model(**inputs).loss)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def logits(model: nn.Module, family: str = "bert") -> torch.Tensor:
    inputs = batch(INPUTS[family], n=ROWS, seed=99, labels=False)
    model.eval()
    return model(**inputs).logits.detach().clone()


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers of engines and checkpointing."""
    return name.replace("_fsdp_wrapped_module.", "").removesuffix("._fsdp_wrapped_module").removeprefix("module.")


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Equal for tensors that are equal bit for bit."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def make_trainer(
    case: Case, folder: Path, callbacks: Iterable[TrainerCallback] = (), optimizer: str = "adamw_torch"
) -> Trainer:
    """A Trainer as a user makes one, with a checkpoint every other step."""
    rows = batch("bert", n=16, seed=5)
    data = [{name: value[i] for name, value in rows.items()} for i in range(16)]
    model = make_model(case)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        optim=optimizer,
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[*callbacks])
    shard_by_layer(trainer.accelerator, model)
    return trainer
