"""What it costs to go from one task to another, in every way there is, against what the hardware allows.

    python -m benchmarks.swap.cost                    # a BERT-base of random weights; on a GPU where there is one
    python -m benchmarks.swap.cost --size tiny        # to see that everything runs
    python -m benchmarks.swap.cost --show benchmarks/results/swap_cost-NVIDIA-H200.json

Two tasks take turns; a time is the median over the switches, up to the moment at which the device is done. On a CPU it
is the time of the process, which other processes do not add to; give it one thread. Each way is checked to give the
answers of each task's own model. Files are in the page cache. Copies of as many bytes are measured
in the same run. Registering two hundred tasks and switching a compiled model are measured too.

Writes `results/swap_cost-<device>.json` after each way, and prints the table at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from benchmarks.common.device import device_name, parse_options, result_file
from benchmarks.swap.ways import LAYERS, SIZES, WEIGHTS, Bench, Way, fill_bank, prepare, ways
from peft_surgical import DeltaBank


def measure(bench: Bench, name: str, adapter: str, make: Callable[[], Way], seconds: float) -> dict[str, Any]:
    """Time a way of switching for so many seconds, at least four switches, and check its answers."""
    way = make()

    def check() -> None:
        for task in (0, 1):
            answer = bench.answer(way.switch(task))
            torch.testing.assert_close(answer, bench.answers[f"{adapter} {task}"], atol=1e-4, rtol=1e-4)
            way.afterwards()

    check()
    times: list[float] = []
    while len(times) < 4 or (sum(times) < seconds and len(times) < 200):
        times.append(bench.seconds(lambda: way.switch(len(times) % 2)))
        way.afterwards()
    check()
    file = "model.safetensors" if adapter == "whole" else WEIGHTS
    nbytes = (bench.folder / f"{adapter} 0" / file).stat().st_size
    print(f"{name}: {statistics.median(times) * 1e3:.3f} ms", flush=True)
    return {"way": name, "seconds": statistics.median(times), "switches": len(times), "bytes": nbytes}


# ---- what the hardware allows, and what is counted


def limits(bench: Bench, rounds: int = 7) -> dict[str, float]:
    """Seconds to move as many bytes as a surgical adapter has, in the ways there are."""
    path = bench.folder / "surgical 0" / WEIGHTS
    nbytes = path.stat().st_size
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=bench.device.type == "cuda").fill_(1)
    here, there = (torch.ones(nbytes, dtype=torch.uint8, device=bench.device) for _ in range(2))
    data = host.numpy().data

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            file.readinto(data)

    found = {
        "copy on the device": lambda: there.copy_(here),
        "file to host memory": read,
        "`load_file`, mapped only": lambda: load_file(path),
        "`load_file`, every byte read": lambda: [tensor.clone() for tensor in load_file(path).values()],
    }
    if bench.device.type == "cuda":
        found["pinned host memory to device"] = lambda: there.copy_(host, non_blocking=True)
        found["`load_file` to the device"] = lambda: load_file(path, device="cuda")
    return {
        name: statistics.median([bench.seconds(do) for _ in range(rounds + 1)][1:])  # the first one warms up
        for name, do in found.items()
    }


def register(bench: Bench, count: int = 200) -> dict[str, Any]:
    """Seconds to add many tasks, and how many bytes that reads."""
    bank = DeltaBank(bench.base())
    for i in range(count):  # links to two files, which the bank cannot know
        source, target = bench.folder / f"surgical {i % 2}", bench.folder / f"many {i}"
        target.mkdir()
        for name in ("adapter_config.json", WEIGHTS):
            os.link(source / name, target / name)
    before = _bytes_read()
    seconds = bench.seconds(lambda: [bank.add(f"task {i}", bench.folder / f"many {i}") for i in range(count)])
    whole = (bench.folder / "surgical 0" / WEIGHTS).stat().st_size
    return {
        "tasks": count,
        "seconds": seconds,
        "bytes_read": None if before is None else _bytes_read() - before,
        "bytes_of_weights_read": bank.stats().bytes_read,
        "bytes_of_all_files": count * whole,
    }


def _bytes_read() -> Any:
    """How many bytes this process has read, from the page cache too; None where the system does not tell."""
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except OSError:
        return None


def compile_once(bench: Bench, switches: int = 100) -> dict[str, Any]:
    """How often a model over a compiled bank is compiled while tasks are switched."""
    bank, compiled = fill_bank(bench, compiled=True), []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = torch.compile(bank.model, backend=backend, fullgraph=True)
    for number in range(switches):
        task = str(number % 2)
        with bank.task(task):
            torch.testing.assert_close(bench.answer(model), bench.answers[f"surgical {task}"], atol=1e-4, rtol=1e-4)
    return {"switches": bank.stats().switches, "compilations": len(compiled)}


# ---- the program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each way is timed")
    parser.add_argument("--folder", type=Path, help="where the files go; a temporary folder by default")
    options = parse_options(parser, table)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")  # of libraries to one another
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = prepare(Path(folder), options.size, device)
        record: dict[str, Any] = {
            "device": device_name(),
            "clock": "wall" if device.type == "cuda" else "process",
            "model": f"BERT-{options.size}",
            "layers": LAYERS,
            "versions": {package: version(package) for package in ("torch", "transformers", "peft")},
            "delta_bytes": (bench.folder / "surgical 0" / WEIGHTS).stat().st_size,
            "limits": limits(bench),
            "registering": register(bench),
            "ways": [],
        }
        file = result_file(options.output, "swap_cost")
        record["compiling"] = compile_once(bench)
        for way in ways(bench):
            record["ways"].append(measure(bench, *way, options.seconds))
            file.write_text(json.dumps(record, indent=1) + "\n")  # so far
            gc.collect()
    print(f"\n{table(record)}\n\nwritten to {os.path.relpath(file)}")


def table(record: dict[str, Any]) -> str:
    """The results as tables in Markdown."""
    nbytes, limit = record["delta_bytes"], record["limits"]
    lines = [
        f"{record['model']}, random weights, on {record['device']}; surgical adapters of 5 of 12 layers, "
        f"{nbytes / 1e6:.0f} MB in float32{'; time of the process' * (record['clock'] == 'process')}.",
        "",
        "| switch | ms | MB |",
        "|---|---:|---:|",
    ]
    lines += [f"| {way['way']} | {_ms(way['seconds'])} | {way['bytes'] / 1e6:.1f} |" for way in record["ways"]]
    lines += ["", f"| to move {nbytes / 1e6:.0f} MB | ms | GB/s |", "|---|---:|---:|"]
    lines += [f"| {name} | {_ms(took)} | {nbytes / took / 1e9:.1f} |" for name, took in limit.items()]
    lines += ["", "| wanted | seen |", "|---|---|", *(f"| {wanted} | {seen} |" for wanted, seen in _wanted(record))]
    return "\n".join(lines)


def _wanted(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    took = {way["way"]: way["seconds"] for way in record["ways"]}
    limit, registering, compiling = record["limits"], record["registering"], record["compiling"]
    lora = [took[name] for name in took if name.startswith("`set_adapter`, LoRA")]
    yield (
        "a resident switch no slower than LoRA's `set_adapter`",
        f"`set_adapter` {_ms(took['`set_adapter`, surgical, resident'])} ms, bank "
        f"{_ms(took['bank, on the device'])} ms; LoRA {' and '.join(_ms(t) for t in lora)} ms",
    )
    if "bank, in host memory" in took:
        share = limit["pinned host memory to device"] / took["bank, in host memory"]
        yield "host to device at 0.8 of the copy bandwidth or more", f"{share:.2f}"
    disk = took["bank, on disk"]
    shares = [
        f"{took / disk:.2f} of {name}" for name, took in limit.items() if "file" in name and "mapped" not in name
    ]
    yield "disk at 0.7 of `load_file` or more", ", ".join(shares)
    yield (
        f"{registering['tasks']} tasks registered in under 2 s, no weights read",
        f"{registering['seconds']:.2f} s, {registering['bytes_of_weights_read']} bytes of weights, "
        f"{(registering['bytes_read'] or 0) / 1e6:.1f} MB in all of {registering['bytes_of_all_files'] / 1e9:.0f} GB",
    )
    yield (
        "no recompilation over 100 switches",
        f"{compiling['compilations'] - 1} after the first, over {compiling['switches']} switches",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


if __name__ == "__main__":
    main()
