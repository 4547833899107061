"""What a step costs beside plain freezing when several GPUs train: time in alternating pairs, memory, bytes sent.

    python -m benchmarks.distributed.pairs --gpus 2
    python -m benchmarks.distributed.pairs --gpus 2 --models bert-tiny llama-tiny --length 8 --pairs 2  # CPU, seconds
    python -m benchmarks.distributed.pairs --show benchmarks/results/distributed_pairs-2-NVIDIA-H200.json

Both models of a pair are in the memory of the same processes and take the same batch, ours first and plain first in
turns; a ratio is the median of those of the pairs. Memory is the highest during a step, less what the other model
holds. Bytes (`--traffic`) are those that a process hands to collectives in a step. Tensors are bfloat16, the optimizer
AdamW. Trained columns stand beside the whole layers that they are columns of.

Writes `results/distributed_pairs-<GPUs>-<device>.json` after each row. Models have random weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.device import parse_options, result_file
from benchmarks.common.table_format import table as make_table
from benchmarks.distributed.models import adapt, build
from benchmarks.distributed.tables import MODELS
from peft_surgical.distributed import leave_base_out_of_units
from peft_surgical.layers import choose_stack


METHODS = ("surgical 5", "columns 5")
STEPS = {8: 4, 32: 2}
"""By rows of a batch: steps in a row whose time is one half of a pair; else one."""


class Traffic(TorchDispatchMode):
    """Counts what a process hands to collectives: calls and bytes, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._opname.strip("_")
            sent = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if torch.is_tensor(t)]
            self.calls[name] += 1
            self.bytes[name] += max((t.numel() * t.element_size() for t in sent), default=0)
        return func(*args, **kwargs or {})


def shard(model: nn.Module, engine: str, device: torch.device) -> nn.Module:
    """The model as an engine trains it; FSDP2 with a unit for each layer."""
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    options: Any = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
    leave_base_out_of_units(model, device)
    for layer in choose_stack(model).layers:
        fully_shard(layer.module, **options)
    return fully_shard(model, **options)


class Trainee:
    """A model that an engine trains, and what its steps take of the memory."""

    def __init__(self, name: str, method: str, engine: str, device: torch.device, is_compiled: bool):
        self.device = device
        self.before = self.allocated()
        model = adapt(build(name, device, torch.bfloat16), name, method).train()
        for layer in choose_stack(model).layers if is_compiled else ():
            layer.module.compile()
        self.model = shard(model, engine, device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda")

    def allocated(self, peak: bool = False) -> int:
        if self.device.type != "cuda":
            return 0
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()

    def step(self, inputs: dict[str, torch.Tensor]) -> None:
        self.model(**inputs).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak(self, inputs: dict[str, torch.Tensor]) -> int:
        """The most that a step takes, in bytes."""
        for _ in range(2):
            self.step(inputs)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.step(inputs)
        wait(self.device)
        return self.allocated(peak=True) - self.before

    def seconds(self, inputs: dict[str, torch.Tensor], steps: int) -> float:
        wait(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.step(inputs)
        wait(self.device)
        return (time.perf_counter() - start) / steps

    def traffic(self, inputs: dict[str, torch.Tensor]) -> dict[str, dict[str, int]]:
        with Traffic() as traffic:
            self.step(inputs)
        return {"calls": dict(traffic.calls), "bytes": dict(traffic.bytes)}


def wait(device: torch.device) -> None:
    """Until all processes are done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measure(
    name: str, engine: str, method: str, args: argparse.Namespace, device: torch.device, keep: Callable[[dict], None]
) -> None:
    """One pair of models, with each size of batch a row."""
    pair: dict[str, Trainee] = {}
    inputs = {batch: inputs_of(name, batch, args.length, device) for batch in args.batches}
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for kind, how in (("ours", method), ("plain", "plain 5")):
        trainee = pair[kind] = Trainee(name, how, engine, device, args.compile)
        for batch in args.batches:
            of = found[batch, kind] = {"seconds": [], "peak_bytes": trainee.peak(inputs[batch])}
            if args.traffic:
                of["traffic"] = trainee.traffic(inputs[batch])
    for batch in args.batches:
        ours, plain = found[batch, "ours"], found[batch, "plain"]
        for number in range(args.pairs):
            for kind in list(pair)[:: -1 if number % 2 else 1]:
                found[batch, kind]["seconds"].append(pair[kind].seconds(inputs[batch], STEPS.get(batch, 1)))
        ratio = statistics.median(a / b for a, b in zip(ours["seconds"], plain["seconds"], strict=True))
        keep(
            {
                "model": name,
                "engine": engine,
                "method": method,
                "batch": batch,
                "to_plain": ratio,
                "ours": ours,
                "plain": plain,
            }
        )


def inputs_of(name: str, batch: int, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(1000, 30000, (batch, length), generator=generator)
    labels = torch.randint(0, 2, (batch,), generator=generator) if name.startswith("bert") else ids
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def run_worker(args: argparse.Namespace) -> None:
    """What one process does: all pairs, one after the other; the first process writes."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    for engine in args.engines:  # what the libraries take for themselves is no model's
        Trainee("llama-tiny", "plain 5", engine, device, False).step(inputs_of("llama-tiny", 2, 8, device))
    record = {
        "card": torch.cuda.get_device_name() if cuda else "CPU",
        "gpus": dist.get_world_size(),
        "length": args.length,
        "pairs": args.pairs,
        "rows": [],
    }
    file = result_file(args.output, "distributed_pairs", args.what, cards=dist.get_world_size())

    def keep(row: dict) -> None:
        record["rows"].append(row)
        if dist.get_rank() == 0:
            file.write_text(json.dumps(record, indent=1) + "\n")
            print(table({**record, "rows": [row]}).splitlines()[-1], flush=True)

    for method in args.methods:
        for name in args.models:
            for engine in args.engines:
                measure(name, engine, method, args, device, keep)
                gc.collect()
                if cuda:
                    torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        print(f"\n{table(record)}\n\nwritten to {os.path.relpath(file)}")
    dist.barrier()
    dist.destroy_process_group()


def table(record: dict) -> str:
    """The results as a table in Markdown."""
    rows = []
    for row in record["rows"]:
        ours, plain = row["ours"], row["plain"]
        cells = [f"{row['model']}, {row['engine']}, {row['method']}", str(row["batch"])]
        cells += [f"{1e3 * statistics.median(of['seconds']):.1f}" for of in (ours, plain)]
        cells += [f"{row['to_plain']:.3f}", f"{ours['peak_bytes'] / 1e9:.2f}"]
        cells.append(f"{ours['peak_bytes'] / plain['peak_bytes']:.3f}" if plain["peak_bytes"] else "")
        sent = [sum(of["traffic"]["bytes"].values()) for of in (ours, plain) if "traffic" in of]
        rows.append([*cells, f"{sent[0] / sent[1]:.3f}"] if sent else cells)
    header = ["model, engine, trained", "rows", "ms", "plain, ms", "ratio", "GB per GPU", "/ plain", "bytes / plain"]
    header = header[: len(rows[0])]
    return (
        f"{record['gpus']} x {record['card']}, sequences of {record['length']} tokens, bfloat16, AdamW; medians of "
        f"{record['pairs']} pairs.\n\n{make_table(header, rows)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["bert-large", "llama-1b"], choices=MODELS)
    parser.add_argument("--engines", nargs="+", default=["fsdp2", "ddp"], choices=["fsdp2", "ddp"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32], help="rows of a process")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="compile each layer")
    parser.add_argument("--traffic", action="store_true", help="also count what the processes send")
    parser.add_argument("--what", default="", help="ends the name of the file, beside results of other options")
    args = parse_options(parser, table)
    if "LOCAL_RANK" in os.environ:
        run_worker(args)
        return
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={args.gpus}", "--standalone"]
    raise SystemExit(subprocess.run([*command, "-m", __spec__.name, *sys.argv[1:]], check=False).returncode)


if __name__ == "__main__":
    main()
