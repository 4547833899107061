"""What a training step costs: SPAFIT, LoRA, BitFit, surgical and last-k against full fine-tuning and plain PyTorch.

    python -m benchmarks.step.cost                          # BERT-base and BERT-large on a GPU; a small BERT on a CPU
    python -m benchmarks.step.cost base --precisions bf16 --rounds 30
    python -m benchmarks.step.cost --check                  # seconds: a tiny BERT, to see that everything runs
    python -m benchmarks.step.cost --show benchmarks/results/step_cost-NVIDIA-H100-80GB-HBM3.json

A step is forward, backward, AdamW and zero_grad. For every method of ours, `plain` is the same set of parameters
trained without this package: frozen parameters in plain PyTorch, with PEFT's own LoRA where there is LoRA. The methods
of a size run in turns, in a new random order each round, each one right before or after its plain counterpart, so that
a busy or throttling machine slows all alike; times are medians over the rounds, and ratios are medians of the ratios
within a round. Peak memory is measured apart, with one model on the
device at a time.

Writes `results/step_cost-<device>.json` and prints one table at the end.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import random
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification
from transformers.utils import logging as transformers_logging

from benchmarks.common.device import device_name, parse_options, result_file
from benchmarks.step.methods import Method, methods


SIZES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 2, "intermediate_size": 128},
    "small": {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
PRECISIONS = ("fp32", "tf32", "bf16")


# ---- measuring


@dataclass
class Trainee:
    """A model with its optimizer, and how to take a step with it."""

    model: nn.Module
    precision: str

    def __post_init__(self) -> None:
        self.model.train()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.parameters = sum(p.numel() for p in trained)
        device = trained[0].device
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.01, fused=device.type == "cuda")
        self.device = device

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Forward, backward, update; the loss."""
        bf16 = self.precision == "bf16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16) if bf16 else nullcontext():
            loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def seconds(self, batch: dict[str, torch.Tensor], steps: int) -> float:
        """Seconds for a step, over so many steps in a row."""
        # on a CPU other processes would count as well
        clock = time.perf_counter if self.device.type == "cuda" else time.process_time
        _wait(self.device)
        start = clock()
        for _ in range(steps):
            self.step(batch)
        _wait(self.device)
        return (clock() - start) / steps


@dataclass
class Setting:
    """What is the same for all methods of a block of the table."""

    size: str
    precision: str
    device: torch.device
    batch: int
    length: int
    rounds: int
    steps: int

    def model(self) -> nn.Module:
        """A fresh model with random weights, always the same ones."""
        torch.manual_seed(0)
        with self.device:
            return BertForSequenceClassification(BertConfig(**SIZES[self.size], num_labels=2))

    def data(self) -> dict[str, torch.Tensor]:
        """A batch of random tokens without padding."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1000, 30_000, (self.batch, self.length), generator=generator)
        labels = torch.randint(0, 2, (self.batch,), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}


def measure(setting: Setting) -> list[dict]:
    """All methods of a setting: one row each, with the times of every round."""
    torch.set_float32_matmul_precision("highest" if setting.precision == "fp32" else "high")
    chosen = methods(SIZES[setting.size]["num_hidden_layers"])
    batch = setting.data()
    rows = [{"method": method.name, **_alone(method, setting, batch)} for method in chosen]
    trainees: dict[tuple[str, bool], Trainee] = {}
    for method in chosen:
        trainees[method.name, True] = Trainee(method.make(setting.model()), setting.precision)
        if method.plain:
            trainees[method.name, False] = Trainee(method.plain(setting.model()), setting.precision)
            _check_pair(trainees[method.name, True], trainees[method.name, False], method.name)
    times: dict[tuple[str, bool], list[float]] = {key: [] for key in trainees}
    order = list(chosen)
    for trainee in trainees.values():
        trainee.seconds(batch, 3)  # warms up
    shuffle = random.Random(0)
    for round_number in range(setting.rounds):
        shuffle.shuffle(order)
        for method in order:
            pair = [(method.name, True), (method.name, False)] if method.plain else [(method.name, True)]
            for key in shuffle.sample(pair, len(pair)):
                times[key].append(trainees[key].seconds(batch, setting.steps))
        print(f"{setting.size} {setting.precision}: round {round_number + 1} of {setting.rounds}", flush=True)
    for row, method in zip(rows, chosen, strict=True):
        mine = times[method.name, True]
        row["seconds"] = statistics.median(mine)
        row["to_full"] = _ratio(mine, times["full fine-tuning", True])
        row["to_lora"] = _ratio(mine, times["PEFT LoRA-II", True])
        row["to_plain"] = _ratio(mine, times[method.name, False]) if method.plain else None
        row["rounds"] = {"ours": mine, "plain": times.get((method.name, False))}
    return rows


def _ratio(mine: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, others, strict=True))


def _alone(method: Method, setting: Setting, batch: dict[str, torch.Tensor]) -> dict:
    """What a method trains, and on a GPU its peak memory with and without this package."""
    found: dict = {}
    for name, make in (("peak_bytes", method.make), ("plain_peak_bytes", method.plain)):
        if make is None:
            continue
        trainee = Trainee(make(setting.model()), setting.precision)
        found["parameters"] = trainee.parameters
        if setting.device.type == "cuda":
            for _ in range(2):
                trainee.step(batch)
            torch.cuda.reset_peak_memory_stats()
            trainee.step(batch)
            _wait(setting.device)
            found[name] = torch.cuda.max_memory_allocated()
        del trainee
        gc.collect()
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _check_pair(ours: Trainee, plain: Trainee, name: str) -> None:
    if ours.parameters != plain.parameters:
        raise AssertionError(f"{name} trains {ours.parameters} numbers, its plain counterpart {plain.parameters}")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---- the program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("sizes", nargs="*", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["tf32", "bf16"] if cuda else ["fp32"])
    parser.add_argument("--batch", type=int, default=16 if cuda else 4, help="rows in a batch; the paper has 16")
    parser.add_argument("--length", type=int, default=128 if cuda else 64, help="tokens in a row")
    parser.add_argument("--rounds", type=int, default=30 if cuda else 7)
    parser.add_argument("--steps", type=int, default=4 if cuda else 1, help="steps in a row; a time is their mean")
    parser.add_argument("--check", action="store_true", help="a tiny model, to see that everything runs")
    options = parse_options(parser, table)
    transformers_logging.set_verbosity_error()
    device = torch.device("cuda" if cuda else "cpu")
    sizes = options.sizes or (["tiny"] if options.check else ["base", "large"] if cuda else ["small"])
    if unknown := set(sizes) - set(SIZES):
        parser.error(f"unknown sizes {sorted(unknown)}; allowed are {', '.join(SIZES)}")
    if options.check:
        options.batch, options.length, options.rounds, options.steps = 2, 16, 2, 1
    blocks = []
    for size in sizes:
        for precision in options.precisions:
            setting = Setting(size, precision, device, options.batch, options.length, options.rounds, options.steps)
            blocks.append({"size": size, "precision": precision, "rows": measure(setting)})
            gc.collect()
    record = {
        "device": device_name(),
        "batch": options.batch,
        "length": options.length,
        "rounds": options.rounds,
        "steps": options.steps,
        "versions": {p: importlib.metadata.version(p) for p in ("torch", "transformers", "peft")},
        "blocks": blocks,
    }
    file = result_file(options.output, "step_cost", "check" if options.check else "")
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"\n{table(record)}\n\nwritten to {os.path.relpath(file)}")


def table(record: dict) -> str:
    """The results as a table in Markdown."""
    lines = [
        f"A training step on {record['device']}, batches of {record['batch']} x {record['length']} tokens, AdamW; "
        f"median of {record['rounds']} rounds of {record['steps']} steps in random order.",
        "",
        "| model, precision | method | trained | ms | / full | / LoRA-II | / plain | peak GB | / full | / plain |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for block in record["blocks"]:
        full = block["rows"][0].get("peak_bytes")
        for row in block["rows"]:
            peak, plain = row.get("peak_bytes"), row.get("plain_peak_bytes")
            cells = [
                f"BERT-{block['size']}, {block['precision']}",
                row["method"],
                f"{row['parameters'] / 1e6:.2f} M",
                f"{row['seconds'] * 1e3:.1f}",
                f"{row['to_full']:.3f}",
                f"{row['to_lora']:.3f}",
                f"{row['to_plain']:.3f}" if row["to_plain"] else "",
                f"{peak / 1e9:.2f}" if peak else "",
                f"{peak / full:.3f}" if peak and full else "",
                f"{peak / plain:.3f}" if peak and plain else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
