"""What each process of a launch does under one engine. What it finds goes to files, for the tests to judge.

accelerate launch ... worker.py FOLDER
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, save_fsdp_optimizer
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.utils.data import DataLoader

from distributed.cases import (
    CASES,
    RESUMED,
    Case,
    StopAt,
    batches,
    digest,
    logits,
    make_base,
    make_model,
    make_optimizer,
    make_trainer,
    plain_name,
    samples,
    train,
)
from peft_surgical import SurgicalConfig, rank_layers
from peft_surgical.copies.module import TunedModule
from peft_surgical.distributed import shard_by_layer


class Worker:
    def __init__(self, folder: Path):
        self.folder = folder
        self.accelerator = Accelerator()
        self.rank, self.processes = self.accelerator.process_index, self.accelerator.num_processes
        if self.is_deepspeed:
            settings = self.accelerator.state.deepspeed_plugin.deepspeed_config
            settings["train_micro_batch_size_per_gpu"] = 2
            settings["gradient_clipping"] = 0.0  # else accelerate clips, with DeepSpeed alone
            settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # or nothing so small is sharded

    @property
    def is_deepspeed(self) -> bool:
        return self.accelerator.state.deepspeed_plugin is not None

    @property
    def is_fsdp1(self) -> bool:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        return plugin is not None and getattr(plugin, "fsdp_version", 1) == 1

    def run(self) -> None:
        facts: dict[str, Any] = {"processes": self.processes, "engine": str(self.accelerator.distributed_type)}
        facts["rankings"] = self.rank_layers()
        facts["other weights"] = self.rank_other_weights()
        facts["wrong order"] = self.try_wrong_order()
        if self.is_fsdp1:
            facts["LoRA of PEFT"] = self.save_lora_of_peft()
            self.save_adam_of_plain_model()
        for case in CASES:
            facts[case.name] = self.train(case)
        for case in RESUMED:
            facts.setdefault(case.name, {})["units of Trainer"] = self.resume(case)
        everyone = gather_object([facts])
        if self.rank == 0:
            (self.folder / "facts.json").write_text(json.dumps(everyone, indent=1))
        self.accelerator.wait_for_everyone()

    def prepare(self, model: nn.Module) -> tuple[Any, Any]:
        shard_by_layer(self.accelerator, model)
        return self.accelerator.prepare(model, make_optimizer(model))

    # ---- what is found

    def rank_layers(self) -> dict[str, list[float]]:
        """Of data that all processes have, and of a loader that gives each its own."""
        loader = self.accelerator.prepare(DataLoader(samples(), batch_size=2))
        return {
            "whole": rank_layers(make_base(), samples(), progress=False).scores,
            "split": rank_layers(make_base(), loader, progress=False).scores,
        }

    def rank_other_weights(self) -> str:
        """As where the weights were loaded in the first process alone."""
        model = make_base()
        if self.rank == 1:
            torch.nn.init.zeros_(model.bert.encoder.layer[2].output.dense.weight)
        return error_of(lambda: rank_layers(model, samples(), progress=False))

    def try_wrong_order(self) -> dict[str, str]:
        make_model(CASES[0]).save_pretrained(self.folder / f"untrained-{self.rank}")
        prepared, _ = self.prepare(make_base())
        # inside DDP's and ZeRO-2's wrappers is the plain model, which nothing tells from one that is not prepared
        attempts = {
            "load": lambda: PeftModel.from_pretrained(prepared, self.folder / f"untrained-{self.rank}"),
            "adapt": lambda: get_peft_model(prepared, SurgicalConfig(layers=[1])),
            "rank": lambda: rank_layers(prepared, samples(), progress=False),
        }
        return {name: error_of(attempt) for name, attempt in attempts.items()}

    def train(self, case: Case) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        model, optimizer = self.prepare(make_model(case))
        adapter = self.accelerator.unwrap_model(model)
        facts["units"] = units(model)
        facts["held"] = {plain_name(name): local_size(p) for name, p in model.named_parameters()}

        steps = [*batches(case.family, self.rank, self.processes)]
        backward = self.accelerator.backward
        if self.is_deepspeed:  # accelerate knows one engine, the first

            def backward(loss: torch.Tensor) -> None:
                model.backward(loss)
                model.step()

        backward(model(**steps[0]).loss)
        facts["without gradient"] = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, steps[1:], backward)

        whole = self.gathered(model)
        facts["digest"] = digest(whole[name] for name in sorted(whole))
        facts["frozen digest"] = digest(whole[name] for name in sorted(whole) if ".default." not in name)
        state = self.accelerator.get_state_dict(model)
        main = self.accelerator.is_main_process
        if main or case.method == "SURGICAL":  # both ways are in use
            adapter.save_pretrained(self.folder / case.name, state_dict=state, is_main_process=main)
        self.accelerator.wait_for_everyone()
        facts["not gathered"] = error_of(lambda: adapter.save_pretrained(self.folder / f"raw-{self.rank}"))

        loaded = PeftModel.from_pretrained(make_base(case.family), self.folder / case.name, is_trainable=True)
        again, _ = self.prepare(loaded)
        outputs = {"logits": logits(model, case.family), "logits after loading": logits(again, case.family)}
        with adapter.disable_adapter():
            outputs["logits of the base"] = logits(model, case.family)
        if self.rank == 0:
            torch.save({"weights": whole, **outputs}, self.folder / f"{case.name}.pt")
        return facts

    def gathered(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """All parameters, whole, by a way of their own, for what is saved is compared with them."""
        with ExitStack() as stack:
            if self.is_deepspeed:
                import deepspeed

                stack.enter_context(deepspeed.zero.GatheredParameters([*model.parameters()]))
            elif self.is_fsdp1:
                from torch.distributed.fsdp import FullyShardedDataParallel

                stack.enter_context(FullyShardedDataParallel.summon_full_params(model, writeback=False))
            parameters = {plain_name(name): p.detach() for name, p in model.named_parameters()}
            for path, module in model.named_modules():
                if isinstance(module, TunedModule):  # under FSDP2 what the model no longer lists
                    owner = path.rpartition(".")[0] if module.is_in_place else f"{path}.base_layer"
                    parameters |= {f"{owner}.{name}": module.original(name).detach() for name in module.left_out}
            return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for n, p in parameters.items()}

    def resume(self, case: Case) -> list[str]:
        """Four steps at once, and two with two more from the checkpoint, each saved by Trainer."""
        # of FSDP1 on the CPU, PyTorch saves one state for each parameter rightly, but Adam has two
        optimizer = "rmsprop" if self.is_fsdp1 else "adamw_torch"
        whole = make_trainer(case, self.folder / f"{case.name}-whole", optimizer=optimizer)
        whole.train()
        whole.save_model(str(self.folder / f"{case.name}-whole/end"))
        make_trainer(case, self.folder / f"{case.name}-half", [StopAt(2)], optimizer).train()
        again = make_trainer(case, self.folder / f"{case.name}-half", optimizer=optimizer)
        again.train(resume_from_checkpoint=str(self.folder / f"{case.name}-half/checkpoint-2"))
        again.save_model(str(self.folder / f"{case.name}-half/end"))
        return units(whole.model_wrapped)

    def save_lora_of_peft(self) -> dict[str, Any]:
        """What `shard_by_layer` says to a LoRA model of PEFT's own, and how many tensors of it FSDP would save."""
        model = get_peft_model(make_base(), LoraConfig(target_modules=["query"]))
        error = error_of(lambda: shard_by_layer(self.accelerator, model))
        prepared, _ = self.accelerator.prepare(model, make_optimizer(model))
        state = self.accelerator.get_state_dict(prepared)
        return {"error": error, "saved": len(get_peft_model_state_dict(model, state)) if self.rank == 0 else None}

    def save_adam_of_plain_model(self) -> None:
        """As Trainer saves it."""
        model = make_base()
        shard_by_layer(self.accelerator, model)
        prepared, optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        train(prepared, optimizer, batches(), self.accelerator.backward)
        plugin = self.accelerator.state.fsdp_plugin
        save_fsdp_optimizer(plugin, self.accelerator, optimizer, prepared, str(self.folder / "plain"))


def units(model: nn.Module) -> list[str]:
    """The modules that FSDP made units of."""
    names = ("FSDPModule", "FullyShardedDataParallel")
    found = [name for name, m in model.named_modules() if any(cls.__name__ in names for cls in type(m).__mro__)]
    return [plain_name(name) for name in found]


def local_size(parameter: torch.Tensor) -> int:
    """How many numbers of a parameter this process holds."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.numel()
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel()


def error_of(attempt: Any) -> str:
    try:
        attempt()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    Worker(Path(sys.argv[1])).run()
