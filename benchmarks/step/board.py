"""PEFT's board, without its data: what a step of each method takes on Llama-3.2-3B, in time, memory and file.

    python -m benchmarks.step.board                          # all methods; a GPU of 80 GB
    python -m benchmarks.step.board --methods "LoRA r=32" "surgical 6 of 28" --buckets 8
    python -m benchmarks.step.board --check                  # seconds, also on a CPU: a tiny Llama

The set-up is that of `method_comparison/MetaMathQA` of huggingface/peft (commit 5d602fd): a model in bfloat16,
adapters in PEFT's dtype (float32) and full fine-tuning in bfloat16, batches of 4, AdamW of PyTorch with a weight decay
of 0.1, gradients clipped to a norm of 1, no gradient checkpointing, buckets of 20 batches sorted from long to short,
the cache of the allocator emptied every 10 steps. Weights and tokens are random. Lengths are drawn from a lognormal
distribution cut at 650 tokens: its mean is the 209.9 tokens a row of the published runs, its width and cut give the
ratios of their mean, 99th percentile and peak of memory. All methods see the same batches, the first 80 of the 5000 of
a run: once by themselves, and at last the longest, for the memory; then in turns with a reference that lies beside
them on the card, for the time.

Published times are those of the steps alone (the sum of "train time" over 5000 steps); their `train_time`, 942 s for
LoRA of rank 32, holds the final test too. Published memory is what the allocator reserved, as here.

Writes `results/step_board-<device>.json`.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.common.device import device_name, parse_options, result_file
from benchmarks.common.table_format import table as markdown
from peft_surgical import RotateLayers, StratifiedConfig, SurgicalConfig, resolve_layers


SHAPES = {
    "llama-3.2-3b": {
        "vocab_size": 128_256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 28,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
PUBLISHED = {  # NVIDIA L40S, torch 2.13.0, transformers 5.13.1, July 2026; results/<file>.json of the board
    "LoRA r=32": ("lora--llama-3.2-3B-rank32", 0.11704, 22_292_725_760, 14_397_338_969, 36_715_216),
    "LoRA r=64": ("lora--llama-3.2-3B-rank64", 0.11890, 22_552_772_608, 14_680_105_104, 73_415_408),
    "DoRA r=32": ("lora--llama-3.2-3B-rank32-dora", 0.14132, 24_532_484_096, 15_414_576_807, 37_181_760),
    "full": ("full-finetuning--llama-3.2-3B-lr_0.00001", 0.36259, 38_868_615_168, 34_338_935_878, 6_425_499_648),
}
BATCH, BATCHES_OF_BUCKET, BUCKETS, EMPTY_CACHE_EVERY = 4, 20, 250, 10
LOG_MEDIAN, WIDTH, LONGEST = 5.285, 0.35, 650  # of the tokens of a row, 209.9 in the mean


@dataclass(frozen=True)
class Method:
    """A way of fine-tuning the model.

    Args:
        name: What the table calls it.
        config: The adapter's; None trains the model itself.
        half: Whether what is trained is in bfloat16 too, as in full fine-tuning, and not in float32.
        frozen: Freezes a part of the model itself.
        rotate: Trains the adapter's layers in turns.
    """

    name: str
    config: PeftConfig | None = None
    half: bool = False
    frozen: Callable[[PreTrainedModel], object] | None = None
    rotate: RotateLayers | None = None


def _lora(r: int, **options: Any) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=r, lora_alpha=2 * r, **options)


def _surgical(layers: str) -> SurgicalConfig:
    return SurgicalConfig(task_type="CAUSAL_LM", layers=layers)


def _freeze_all_but(layers: str) -> Callable[[PreTrainedModel], object]:
    def freeze(model: PreTrainedModel) -> None:
        model.requires_grad_(False)
        for layer in resolve_layers(model, layers):
            layer.module.requires_grad_(True)

    return freeze


SPAFIT = StratifiedConfig(
    task_type="CAUSAL_LM",
    n1=0.2,
    n2=0.4,
    group_2="norm",
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    r=64,
    lora_alpha=128,
)
COLUMNS = StratifiedConfig(strata=[{"layers": "all", "tune": "columns", "columns": 16}], task_type="CAUSAL_LM")
METHODS = [
    Method("LoRA r=32", _lora(32)),
    Method("LoRA r=64", _lora(64)),
    Method("DoRA r=32", _lora(32, use_dora=True)),
    Method("full", half=True),
    *(Method(f"surgical {k} of 28", _surgical(f"spread:{k}")) for k in (2, 3, 6, 9)),
    *(Method(f"surgical {k} of 28, bf16", _surgical(f"spread:{k}"), half=True) for k in (2, 3, 6, 9)),
    Method("plain freezing, 6 of 28, bf16", half=True, frozen=_freeze_all_but("spread:6")),
    Method("SPAFIT-4-10", SPAFIT),
    Method("LoRA r=8, all linear", _lora(8, target_modules="all-linear")),
    Method("columns, 16 of all linear", COLUMNS),
    Method("rotating, 2 of 28 at a time", _surgical("all"), rotate=RotateLayers(2, every=20)),
    Method("rotating, rounded at rest", _surgical("all"), rotate=RotateLayers(2, every=20, at_rest="rounded")),
]


def draw_lengths(buckets: int) -> list[list[int]]:
    """The lengths of the rows of each batch, in the order of training."""
    draw = random.Random(0)
    lengths: list[list[int]] = []
    for _ in range(buckets):
        bucket: list[int] = []
        while len(bucket) < BATCH * BATCHES_OF_BUCKET:
            length = round(draw.lognormvariate(LOG_MEDIAN, WIDTH))
            bucket += [length] * (length <= LONGEST)
        bucket.sort(reverse=True)
        lengths += [bucket[i : i + BATCH] for i in range(0, len(bucket), BATCH)]
    return lengths


def make_batch(lengths: list[int], vocabulary: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tokens, padded on the right; the first padding is learnt as the end of the text, the rest is no label."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(vocabulary, (len(lengths), max(lengths)), generator=generator)
    places = torch.arange(max(lengths))
    mask = places < torch.tensor(lengths)[:, None]
    labels = ids.masked_fill(places > torch.tensor(lengths)[:, None], -100)
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}


class Run:
    """A model in training by a method.

    Args:
        method: The method.
        shape: The model's.
        device: Where it is.
    """

    def __init__(self, method: Method, shape: dict[str, int], device: torch.device):
        torch.manual_seed(0)
        with device:
            config = LlamaConfig(**shape, tie_word_embeddings=True, use_cache=False)
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if method.frozen:
            method.frozen(model)
        if method.config:
            model = get_peft_model(model, method.config, autocast_adapter_dtype=not method.half)
        self.method, self.device, self.model = method, device, model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)
        self.state = SimpleNamespace(global_step=0)
        self.events = {"args": None, "state": self.state, "control": None, "model": model, "optimizer": self.optimizer}
        if method.rotate:
            method.rotate.on_train_begin(**self.events)

    def step(self, number: int, lengths: list[int]) -> float:
        """A step on a batch of rows of these lengths; its seconds."""
        batch = make_batch(lengths, self.model.config.vocab_size, self.device)
        start = time.perf_counter()
        self.state.global_step = number
        if self.method.rotate:
            self.method.rotate.on_step_begin(**self.events)
        self.optimizer.zero_grad()
        loss = self.model(**batch, num_items_in_batch=batch["attention_mask"].sum().item()).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        loss.item()  # waits for the device
        return time.perf_counter() - start


def measure(
    method: Method,
    reference: Method,
    shape: dict[str, int],
    lengths: list[list[int]],
    longest: list[int],
    device: torch.device,
) -> dict[str, Any]:
    """One row: the memory of a run by itself, its seconds in turns with those of a reference, the size of the file."""
    run = Run(method, shape, device)
    for number in (0, len(lengths) // 2, len(lengths) - 1, 0):  # warms up
        run.step(0, lengths[number])
    is_cuda, reserved = device.type == "cuda", []
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for number, rows in enumerate(lengths):
        run.step(number, rows)
        if is_cuda:
            reserved.append(torch.cuda.memory_reserved())
            if (number + 1) % EMPTY_CACHE_EVERY == 0:
                torch.cuda.empty_cache()
    for number in (len(lengths), len(lengths) + 1):  # at the first step of a turn there are no states yet
        run.step(number, longest)
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    row: dict[str, Any] = {"method": method.name, "trained": trained}
    if is_cuda:
        row["peak_bytes"], row["mean_bytes"] = torch.cuda.max_memory_reserved(), statistics.mean(reserved)
        row["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
    beside = Run(reference, shape, device)
    for rows in lengths[:: len(lengths) // 3]:
        beside.step(0, rows)
    row["seconds"], row["reference_seconds"] = [], []
    both = [(run, row["seconds"]), (beside, row["reference_seconds"])]
    for number, rows in enumerate(lengths):
        for one, seconds in both if number % 2 else both[::-1]:
            seconds.append(one.step(len(lengths) + 2 + number, rows))
        if is_cuda and (number + 1) % EMPTY_CACHE_EVERY == 0:
            torch.cuda.empty_cache()
    if method.rotate:
        method.rotate.on_train_end(**run.events)
    row["file_bytes"] = saved_bytes(run.model) if method.config else sum(p.numel() * 2 for p in run.model.parameters())
    return row


def saved_bytes(model: Any) -> int:
    """The size of an adapter's file."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return Path(folder, "adapter_model.safetensors").stat().st_size


def table(record: dict[str, Any]) -> str:
    """The results as a table in Markdown."""
    header = ["method", "trained, M", "step, ms", "/ reference", "mean, ms", "peak, GB", "mean, GB", "allocated, GB"]
    header += ["file, MB", "published: ms", "peak, GB", "mean, GB", "file, MB"]
    rows = []
    for row in record["rows"]:
        seconds = row["seconds"]
        ratio = statistics.median(a / b for a, b in zip(seconds, row["reference_seconds"], strict=True))
        cells = [row["method"], f"{row['trained'] / 1e6:.1f}", f"{statistics.median(seconds) * 1e3:.1f}"]
        cells += [f"{ratio:.2f}", f"{statistics.mean(seconds) * 1e3:.1f}"]
        for name in ("peak_bytes", "mean_bytes", "peak_allocated_bytes"):
            cells.append(f"{row[name] / 1e9:.1f}" if name in row else "")
        cells.append(f"{row['file_bytes'] / 1e6:,.0f}")
        _, mean, peak, average, size = PUBLISHED.get(row["method"], [None] * 5)
        cells += [
            f"{mean * 1e3:.0f}" if mean else "",
            *(f"{number / 1e9:.1f}" if number else "" for number in (peak, average)),
            f"{size / 1e6:,.0f}" if size else "",
        ]
        rows.append(cells)
    return (
        f"{record['shape']} on {record['device']}; {record['batches']} batches of {BATCH} rows, "
        f"{record['tokens'] / record['batches'] / BATCH:.0f} tokens a row. Steps: median, and mean with the turns of "
        f"rotating layers; the ratio is the median over steps in turns with {record['reference']}. Memory reserved by "
        "the allocator, of each method by itself. Published: the same set-up on an NVIDIA L40S (mean).\n\n"
        f"{markdown(header, rows)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [method.name for method in METHODS]
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--reference", choices=names, default="LoRA r=32", metavar="NAME", help="timed beside each")
    parser.add_argument("--buckets", type=int, default=4, help=f"to time, of {BATCHES_OF_BUCKET} batches each")
    parser.add_argument("--check", action="store_true", help="a tiny model and four batches, to see that all runs")
    options = parse_options(parser, table)
    transformers_logging.set_verbosity_error()
    shape = "tiny" if options.check else "llama-3.2-3b"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lengths = draw_lengths(BUCKETS)
    longest = max(lengths, key=max)
    lengths = lengths[: options.buckets * BATCHES_OF_BUCKET]
    if options.check:
        lengths = [[length // 20 for length in batch] for batch in lengths[::BATCHES_OF_BUCKET]]
        longest = lengths[0]
    record: dict[str, Any] = {
        "device": device_name(),
        "shape": shape,
        "reference": options.reference,
        "batches": len(lengths),
        "tokens": sum(map(sum, lengths)),
        "versions": {p: importlib.metadata.version(p) for p in ("torch", "transformers", "peft")},
        "published": {name: file for name, (file, *_) in PUBLISHED.items()},
        "rows": [],
    }
    file = result_file(options.output, "step_board", "check" if options.check else "")
    reference = next(method for method in METHODS if method.name == options.reference)
    for method in METHODS:
        if method.name in options.methods:
            start = time.perf_counter()
            record["rows"].append(measure(method, reference, SHAPES[shape], lengths, longest, device))
            print(f"{method.name}: {time.perf_counter() - start:.0f} s", flush=True)
            file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            gc.collect()
            torch.cuda.empty_cache()
            if (left := torch.cuda.memory_allocated()) > 2**30:
                raise RuntimeError(f"{left / 1e9:.1f} GB of {method.name} are still on the card.")
    print(f"\n{table(record)}\n\nwritten to {os.path.relpath(file)}")


if __name__ == "__main__":
    main()
