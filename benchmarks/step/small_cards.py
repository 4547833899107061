"""Whole layers on small cards: what each part of a training step takes, beside LoRA and QLoRA.

    python -m benchmarks.step.small_cards --limit-gb 24         # a GPU; needs bitsandbytes
    python -m benchmarks.step.small_cards --shapes llama-7b --methods "QLoRA r=16"
    python -m benchmarks.step.small_cards --shapes tiny         # seconds, also on a CPU, where no peak is measured

Llamas with random weights in bfloat16, rows of 1024 tokens, batches of one row, two to a step, gradient checkpointing,
gradients clipped to a norm of 1. Surgical: five layers at equal distances. Where the base is quantised, its tuned
layers are not, and their own values wait in host memory (`base_copies="auto"`). With --limit-gb each method is first
given so much memory; one that does not fit is measured without a limit.

A row is written as soon as it is there; a run goes on with the rows that its file lacks. Rows that were not measured
are computed in the table. Writes `results/step_small_cards-<device>.json`.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import statistics
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from benchmarks.common.device import device_name, parse_options, result_file
from benchmarks.common.table_format import table as markdown
from benchmarks.step.small_card_methods import METHODS, SHAPES, Method, compute, make_model, make_optimizers
from peft_surgical.training.memory import memory_of


TOKENS, ROWS_OF_STEP, WARM_UP, STEPS = 1024, 2, 2, 4
PARTS = ("weights", "copies", "gradients", "optimizer", "activations")


def measure(shape: dict[str, int], method: Method, device: torch.device, tokens: int) -> dict[str, Any]:
    """The bytes of each part, the peak, and the seconds of each step."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    model = make_model(shape, method, device)
    optimizers = make_optimizers(model, method)
    trained = [p for p in model.parameters() if p.requires_grad]
    row: dict[str, Any] = {"trained": sum(p.numel() for p in trained), "seconds": []}
    row["made_peak_bytes"] = torch.cuda.max_memory_allocated() if is_cuda else None
    ids = torch.randint(shape["vocab_size"], (ROWS_OF_STEP, 1, tokens), device=device)
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP and is_cuda:
            torch.cuda.reset_peak_memory_stats()
        is_last = number == WARM_UP + STEPS - 1
        began = time.perf_counter()
        for index, batch in enumerate(ids):
            before = torch.cuda.memory_allocated() if is_cuda else 0
            loss = model(input_ids=batch, labels=batch).loss
            if is_last and index == 0 and is_cuda:
                row["activations"] = torch.cuda.memory_allocated() - before
            (loss / ROWS_OF_STEP).backward()
            loss.item()  # waits for the device
            del loss
        if is_last:
            row |= parts_of(model, optimizers)
        if not method.in_backward:
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizers[0].step()
            optimizers[0].zero_grad()
        if is_cuda:
            torch.cuda.synchronize()
        if number >= WARM_UP:
            row["seconds"].append(time.perf_counter() - began)
    if is_cuda:
        row["peak_bytes"], row["reserved_bytes"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return row


def parts_of(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, int]:
    """The bytes that are there at the end of a backward pass."""
    memory = [memory_of(model, optimizer) for optimizer in optimizers]
    found = {name: getattr(memory[0], name) for name in ("weights", "copies", "gradients")}
    return found | {"optimizer": sum(each.optimizer for each in memory)}


# ---- the table


def table(record: dict[str, Any]) -> str:
    """The results as a table in Markdown, with computed rows where none was measured."""
    limit = record.get("limit_gb")
    header = ["model, method", "trained, M", *PARTS, "sum", "peak", "ms a step"]
    header += [f"fits {limit:g} GB"] if limit else []
    measured = {(row["shape"], row["method"]): row for row in record["rows"]}
    lines = []
    for name in [name for name in SHAPES if name in record["shapes"]]:
        for method in METHODS:
            row = measured.get((name, method.name))
            is_measured = row is not None and "peak_bytes" in row
            found: Any = row if is_measured else compute(SHAPES[name], method, record["tokens"])
            total = sum(found[part] for part in PARTS)
            cells = [f"{name}, {method.name}", f"{found['trained'] / 1e6:.1f}"]
            cells += [f"{found[part] / 1e9:.2f}" for part in PARTS]
            cells += [f"{total / 1e9:.1f}"]
            cells += (
                [f"{found['peak_bytes'] / 1e9:.1f}", f"{statistics.median(found['seconds']) * 1e3:.0f}"]
                if is_measured
                else ["computed", ""]
            )
            if limit:
                fits = None if row is None else row.get("fits")
                cells.append("" if fits is None else "yes" if fits else "does not fit")
            lines.append(cells)
    return (
        f"{record['device']}; {record['tokens']} tokens a row, {ROWS_OF_STEP} rows a step, one at a time, gradient "
        f"checkpointing; GB.\n\n{markdown(header, lines)}"
    )


# ---- the run


def attempts(limit: float | None) -> Iterator[float | None]:
    """The limits to try, until one is enough."""
    if limit is not None:
        yield limit
    yield None


def try_method(
    shape: dict[str, int], method: Method, device: torch.device, tokens: int, limit: float | None
) -> dict[str, Any]:
    """A row; `fits` says whether the limit was enough."""
    for allowed in attempts(limit):
        if device.type == "cuda":
            whole = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(1.0 if allowed is None else min(1.0, allowed * 1e9 / whole))
        try:
            found = measure(shape, method, device, tokens)
        except torch.OutOfMemoryError:
            found = None
        gc.collect()
        torch.cuda.empty_cache()
        if (left := torch.cuda.memory_allocated()) > 2**28:
            raise RuntimeError(f"{left / 1e9:.2f} GB of {method.name} are still on the card.")
        if found is not None:
            return found | ({} if limit is None else {"fits": allowed is not None})
    return {"fits": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [method.name for method in METHODS]
    shapes = ["llama-7b", "llama-13b", "llama-1b"]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=shapes, help=", ".join(SHAPES))
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--limit-gb", type=float, help="what the allocator may take, in GB")
    options = parse_options(parser, table)
    transformers_logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    file = result_file(options.output, "step_small_cards", "tiny" if "tiny" in options.shapes else "")
    tokens = 32 if "tiny" in options.shapes else TOKENS
    record: dict[str, Any] = {
        "device": device_name(),
        "tokens": tokens,
        "limit_gb": options.limit_gb,
        "versions": {p: importlib.metadata.version(p) for p in ("torch", "transformers", "peft", "bitsandbytes")},
        "shapes": options.shapes,
        "rows": [],
    }
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        same = all(before[key] == record[key] for key in ("device", "tokens", "limit_gb", "versions"))
        if same:
            record |= {"rows": before["rows"], "shapes": [*dict.fromkeys([*before["shapes"], *options.shapes])]}
    done = {(row["shape"], row["method"]) for row in record["rows"]}
    for name in options.shapes:
        for method in METHODS:
            if method.name not in options.methods or (name, method.name) in done:
                continue
            began = time.perf_counter()
            try:
                row = try_method(SHAPES[name], method, device, tokens, options.limit_gb)
            except (ImportError, RuntimeError):  # of a library on this device; the other rows do not need it
                traceback.print_exc()
                continue
            record["rows"].append({"shape": name, "method": method.name, **row})
            file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            peak = f"{row['peak_bytes'] / 1e9:.1f} GB" if "peak_bytes" in row else ""
            fits = {True: "fits", False: "does not fit"}.get(row.get("fits"), "")
            print(f"{name}, {method.name}: {peak} {fits} ({time.perf_counter() - began:.0f} s)", flush=True)
    print(f"\n{table(record)}\n\nwritten to {file}")


if __name__ == "__main__":
    main()
