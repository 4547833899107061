"""One GPU against several: throughput, memory, saving time, equality of the saved deltas, and the time to rank layers.

    python -m benchmarks.distributed.multi_gpu --gpus 1 2 --models bert-large llama-1b --engines ddp fsdp2
    python -m benchmarks.distributed.multi_gpu --gpus 1 --models bert-tiny --steps 2  # to see that it runs
    python -m benchmarks.distributed.multi_gpu --show benchmarks/results/distributed_multi_gpu-2-NVIDIA-H200-zero3.json

Starts one process per GPU with torchrun for each number of GPUs, and models side by side where there are GPUs for it.
Writes `results/distributed_multi_gpu-<GPUs>-<device>.json` and prints one table last. Models have random weights;
nothing is downloaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.common.device import parse_options, result_file
from benchmarks.distributed.models import adapt, build
from benchmarks.distributed.tables import METHODS, MODELS, table
from peft_surgical.layers import choose_stack


RANKING = "ranking"
RATE = 1e-2


@dataclass
class Training:
    """How an engine trains a model: a step, and the tensors of all processes."""

    step: Callable[[dict[str, torch.Tensor]], None]
    gather: Callable[[], dict[str, torch.Tensor]]


def start_training(model: nn.Module, engine: str, device: torch.device, batch: int) -> Training:
    """Let an engine train a model by SGD: no state, for what is compared is the engines and the methods."""
    if engine == "zero3":
        return start_deepspeed(model, batch)
    if engine == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        sharded: nn.Module = nn.parallel.DistributedDataParallel(model, device_ids=ids)
    else:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in choose_stack(model).layers:
            fully_shard(layer.module, mesh=mesh)
        sharded = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)

    def step(inputs: dict[str, torch.Tensor]) -> None:
        optimizer.zero_grad()
        sharded(**inputs).loss.backward()
        optimizer.step()

    def gather() -> dict[str, torch.Tensor]:
        return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}

    return Training(step, gather)


def start_deepspeed(model: nn.Module, batch: int) -> Training:
    """The same by ZeRO-3. The copies of parameters that its optimizer steps are float32."""
    import deepspeed

    trainable = [p for p in model.parameters() if p.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": trainable[0].dtype == torch.bfloat16},
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(trainable, lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(inputs: dict[str, torch.Tensor]) -> None:
        engine.backward(engine(**inputs).loss)
        engine.step()

    def gather() -> dict[str, torch.Tensor]:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return {k: v.detach().cpu() for k, v in model.state_dict().items()}

    return Training(step, gather)


def run_worker(args: argparse.Namespace) -> None:
    """What one process does: all configurations, one after the other; the first process writes the results."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    dist.init_process_group("nccl" if cuda else "gloo")
    for work in args.work:
        model, engine = work.split(":")
        for method in args.methods if engine != RANKING else [""]:
            folder = Path(args.folder, f"{model}-{engine}-{method}".replace(" ", "_"))
            if engine == RANKING:
                result = measure_ranking(args, model, device)
            else:
                result = measure(args, model, engine, method, folder, device)
            if dist.get_rank() == 0:
                folder.mkdir(exist_ok=True)
                (folder / "result.json").write_text(json.dumps(result))
                print(json.dumps(result), flush=True)
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def measure(
    args: argparse.Namespace, name: str, engine: str, method: str, folder: Path, device: torch.device
) -> dict[str, object]:
    """Train a few steps on a global batch that is the same for any number of GPUs, save, then time steps."""
    rank, world, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    adapter = adapt(build(name, device), name, method).train()
    for module in adapter.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # so that any number of processes computes the same
    trainable = sum(p.numel() for p in adapter.parameters() if p.requires_grad)
    training = start_training(adapter, engine, device, args.batch)
    generator = torch.Generator().manual_seed(2)

    def batch(rows: slice) -> dict[str, torch.Tensor]:
        ids = torch.randint(1000, 30000, (args.batch, args.length), generator=generator)
        labels = torch.randint(0, 2, (args.batch,), generator=generator) if name.startswith("bert") else ids
        return {"input_ids": ids[rows].to(device), "labels": labels[rows].to(device)}

    def clock() -> float:
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter()

    share = args.batch // world
    for _ in range(3):
        training.step(batch(slice(rank * share, (rank + 1) * share)))
    started = clock()
    state = training.gather()
    if rank == 0 and hasattr(adapter, "peft_config"):
        adapter.save_pretrained(folder, state_dict=state)
    saving = clock() - started
    del state

    inputs = batch(slice(0, args.batch))  # weak scaling: each process a full batch
    training.step(inputs)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(args.steps):
        started = clock()
        training.step(inputs)
        times.append(clock() - started)
    peak = torch.tensor([torch.cuda.max_memory_allocated() if cuda else 0], dtype=torch.float64, device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return {
        "model": name,
        "method": method,
        "engine": engine,
        "gpus": world,
        "card": torch.cuda.get_device_name() if cuda else "CPU",
        "batch_per_gpu": args.batch,
        "length": args.length,
        "step_seconds": statistics.median(times),
        "samples_per_second": world * args.batch / statistics.median(times),
        "peak_bytes_per_gpu": peak.item(),
        "trainable_parameters": trainable,
        "save_seconds": saving,
    }


def measure_ranking(args: argparse.Namespace, name: str, device: torch.device) -> dict[str, object]:
    """Rank a model's layers on samples that are the same for any number of GPUs, each process its share."""
    from peft_surgical import rank_layers

    model = build(name, device)
    generator = torch.Generator().manual_seed(3)
    samples: list[dict[str, torch.Tensor]] = []
    for _ in range(args.rank_samples):
        ids = torch.randint(1000, 30000, (args.length,), generator=generator)
        labels = torch.randint(0, 2, (), generator=generator) if name.startswith("bert") else ids
        samples.append({"input_ids": ids, "labels": labels})
    times = []
    for _ in range(2):  # the first one compiles kernels
        dist.barrier()
        started = time.perf_counter()
        ranking = rank_layers(model, samples, num_samples=len(samples), labels="given", progress=False)
        times.append(time.perf_counter() - started)
    rankings: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(rankings, list(ranking.scores))
    return {
        "model": name,
        "gpus": dist.get_world_size(),
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "samples": args.rank_samples,
        "length": args.length,
        "rank_seconds": times[-1],
        "same_on_every_process": all(scores == rankings[0] for scores in rankings),
        "scores": rankings[0],
        "order": list(ranking.order),
    }


def difference(one: Path, other: Path) -> float | None:
    """The largest difference between the numbers of two saved adapters."""
    from safetensors.torch import load_file

    files = [folder / "adapter_model.safetensors" for folder in (one, other)]
    if not all(file.exists() for file in files):
        return None
    a, b = (load_file(file) for file in files)
    assert set(a) == set(b)
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", default=["bert-large", "llama-1b"], choices=MODELS)
    parser.add_argument("--engines", nargs="*", default=["ddp", "fsdp2"], help="ddp, fsdp2, zero3; none: only rank")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--batch", type=int, default=16, help="samples per GPU in the timed steps")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank-samples", type=int, default=0, help="also rank the layers on so many samples")
    parser.add_argument("--what", default="", help="ends the name of the file, beside results of other options")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # given when this module starts itself
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    args = parse_options(parser, table)
    if args.folder:
        run_worker(args)
        return

    file = result_file(args.output, "distributed_multi_gpu", args.what, cards=max(args.gpus))
    engines = [*args.engines, *([RANKING] if args.rank_samples else [])]
    work = [f"{model}:{engine}" for model in reversed(args.models) for engine in engines]
    results, rankings = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for gpus in args.gpus:
            folder = Path(scratch, str(gpus))
            folder.mkdir()
            run_side_by_side(args, gpus, work, folder)
            for part in sorted(folder.glob("*/result.json")):
                result = json.loads(part.read_text())
                if "rank_seconds" in result:
                    rankings.append(result)
                    continue
                first = Path(scratch, str(args.gpus[0]), part.parent.name)
                results.append({**result, "difference_to_first": difference(first, part.parent)})
            file.write_text(json.dumps(results + rankings, indent=1) + "\n")  # so far
    print(f"\n{table(results + rankings)}\n\nwritten to {os.path.relpath(file)}")


def run_side_by_side(args: argparse.Namespace, gpus: int, work: list[str], folder: Path) -> None:
    """Do the work with so many processes at a time, as many times side by side as there are GPUs for."""
    found = torch.cuda.device_count()
    groups = max(1, min(found // gpus, len(work)))
    running = []
    for group in range(groups):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={gpus}", "--standalone"]
        command += ["-m", __spec__.name, "--folder", str(folder)]
        command += ["--batch", str(args.batch), "--length", str(args.length), "--steps", str(args.steps)]
        command += ["--rank-samples", str(args.rank_samples), "--methods", *args.methods]
        command += ["--work", *work[group::groups]]
        own = ",".join(str(group * gpus + gpu) for gpu in range(gpus))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": own} if found else None
        running.append(subprocess.Popen(command, env=environment))
    if any([process.wait(timeout=1800) for process in running]):
        raise SystemExit("A run failed; its output is above.")


if __name__ == "__main__":
    main()
