"""The ways of going from one task to another that `cost.py` measures, and the files that they work with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from peft_surgical import DeltaBank, SurgicalConfig, prepare_model_for_hotswap


SIZES = {
    "tiny": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 1000},
    "base": {},
}
LAYERS = ([7, 8, 9, 10, 11], [1, 3, 5, 9, 11])
"""Of 12: what the two surgical tasks tune."""
WEIGHTS = "adapter_model.safetensors"


@dataclass
class Bench:
    """What all ways of switching work with.

    Args:
        folder: Where everything is saved.
        config: The model's config.
        device: The device.
        inputs: A batch to check answers with.
        answers: What each task's own model answers, by the name of its adapter.
    """

    folder: Path
    config: BertConfig
    device: torch.device
    inputs: dict[str, torch.Tensor]
    answers: dict[str, torch.Tensor]

    def base(self) -> nn.Module:
        """The base, always with the same weights."""
        torch.manual_seed(0)
        with self.device:
            return BertForSequenceClassification(self.config).eval()

    def save(self, name: str, config: PeftConfig, seed: int) -> None:
        """Save an adapter that answers otherwise than the base, and what it answers."""
        model = get_peft_model(self.base(), config).eval()
        generator = torch.Generator(self.device).manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=generator, device=self.device)
                    parameter.add_(0.02 * noise)
        self.answers[name] = self.answer(model)
        model.save_pretrained(self.folder / name)
        if name.startswith("surgical"):
            whole = name.replace("surgical", "whole")
            model.merge_and_unload().save_pretrained(self.folder / whole)
            self.answers[whole] = self.answers[name]

    def answer(self, model: nn.Module) -> torch.Tensor:
        """What a model says of the batch."""
        with torch.inference_mode():
            return model(**self.inputs).logits

    def wait(self) -> None:
        """Until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, do: Callable[[], object]) -> float:
        """How long something takes, the device's work included; on a CPU, what it takes of this process's time."""
        clock = time.perf_counter if self.device.type == "cuda" else time.process_time
        self.wait()
        started = clock()
        do()
        self.wait()
        return clock() - started


def prepare(folder: Path, size: str, device: torch.device) -> Bench:
    """Save the base's adapters, and a whole checkpoint."""
    config = BertConfig(**SIZES[size], num_labels=2)
    ids = torch.randint(5, 900, (1, 16), generator=torch.Generator().manual_seed(0)).to(device)
    bench = Bench(folder, config, device, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {})
    for i, layers in enumerate(LAYERS):
        bench.save(f"surgical {i}", SurgicalConfig(task_type="SEQ_CLS", layers=layers), i)
        for kind, task_type, targets in (
            ("LoRA", "SEQ_CLS", ["query", "value"]),
            ("LoRA all", "SEQ_CLS", "all-linear"),
            ("LoRA bare", None, ["query", "value"]),  # PEFT's hotswap_adapter takes no head
        ):
            lora = LoraConfig(task_type=task_type, r=8, target_modules=targets, init_lora_weights=False)
            bench.save(f"{kind} {i}", lora, i)
    return bench


# ---- the ways


@dataclass
class Way:
    """A way of switching.

    Args:
        switch: Makes task 0 or 1 the active one; gives the model to call.
        afterwards: What follows each switch and is not timed.
    """

    switch: Callable[[int], nn.Module]
    afterwards: Callable[[], object] = lambda: None


def resident(bench: Bench, kind: str) -> Way:
    """PEFT's `set_adapter`, both adapters in the model."""
    model = PeftModel.from_pretrained(bench.base(), bench.folder / f"{kind} 0", adapter_name="task 0")
    model.load_adapter(bench.folder / f"{kind} 1", adapter_name="task 1")

    def switch(task: int) -> nn.Module:
        model.set_adapter(f"task {task}", inference_mode=True)
        return model

    return Way(switch)


def loading(bench: Bench, kind: str) -> Way:
    """PEFT's `load_adapter` and `set_adapter`; then the adapter before is deleted."""
    model = PeftModel.from_pretrained(bench.base(), bench.folder / f"{kind} 0", adapter_name="none")
    names = ["none"]

    def switch(task: int) -> nn.Module:
        names.append(f"adapter_{len(names)}")
        model.load_adapter(bench.folder / f"{kind} {task}", adapter_name=names[-1])
        model.set_adapter(names[-1])
        return model

    return Way(switch, lambda: model.delete_adapter(names[-2]))


def hotswapping(bench: Bench, kind: str) -> Way:
    """PEFT's `hotswap_adapter`."""
    paths = [str(bench.folder / f"{kind} {i}") for i in (0, 1)]
    model = PeftModel.from_pretrained(bench.base(), paths[0])
    if kind == "surgical":
        prepare_model_for_hotswap(model, adapters=paths)

    def switch(task: int) -> nn.Module:
        hotswap_adapter(model, paths[task], adapter_name="default", torch_device=str(bench.device))
        return model

    return Way(switch)


def banking(bench: Bench, tier: str) -> Way:
    """A `DeltaBank` whose tasks come from the device, from host memory, or from their files."""
    bank = fill_bank(bench, compiled=tier == "compiled")
    if tier in ("host", "disk"):
        bank.activate("0")
        one = bank.stats()
        bank = fill_bank(bench, one.device_bytes, one.host_bytes if tier == "disk" else None)

    def switch(task: int) -> nn.Module:
        bank.activate(str(task))
        return bank.model

    def check_tier() -> None:
        stats = bank.stats()
        wanted = stats.switches if tier == "disk" else min(stats.switches, 2)
        assert stats.disk_hits == wanted, f"{tier}: tasks came from elsewhere: {stats}"

    return Way(switch, check_tier)


def fill_bank(bench: Bench, device: int | None = None, host: int | None = None, compiled: bool = False) -> DeltaBank:
    """A bank with both surgical tasks."""
    bank = DeltaBank(bench.base(), device, host, compiled=compiled)
    for i in (0, 1):
        bank.add(str(i), bench.folder / f"surgical {i}")
    return bank


def reloading(bench: Bench) -> Way:
    """The whole model anew."""

    def switch(task: int) -> nn.Module:
        model = BertForSequenceClassification.from_pretrained(bench.folder / f"whole {task}")
        return model.eval().to(bench.device)

    return Way(switch)


def ways(bench: Bench) -> Iterator[tuple[str, str, Callable[[], Way]]]:
    """Name, adapter, and what makes the way."""
    yield "`set_adapter`, surgical, resident", "surgical", lambda: resident(bench, "surgical")
    yield "`set_adapter`, LoRA on query and value, resident", "LoRA", lambda: resident(bench, "LoRA")
    yield "`set_adapter`, LoRA on all linear modules, resident", "LoRA all", lambda: resident(bench, "LoRA all")
    yield "bank, on the device", "surgical", lambda: banking(bench, "device")
    yield "bank, compiled, on the device", "surgical", lambda: banking(bench, "compiled")
    if bench.device.type == "cuda":
        yield "bank, in host memory", "surgical", lambda: banking(bench, "host")
    yield "bank, on disk", "surgical", lambda: banking(bench, "disk")
    yield "`hotswap_adapter`, surgical", "surgical", lambda: hotswapping(bench, "surgical")
    yield "`hotswap_adapter`, LoRA without a head", "LoRA bare", lambda: hotswapping(bench, "LoRA bare")
    yield "`load_adapter` and `set_adapter`, surgical", "surgical", lambda: loading(bench, "surgical")
    yield "`load_adapter` and `set_adapter`, LoRA on query and value", "LoRA", lambda: loading(bench, "LoRA")
    yield "`from_pretrained`, the whole model", "whole", lambda: reloading(bench)
