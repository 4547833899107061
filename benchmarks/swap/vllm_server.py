"""A vLLM server that changes its task: the time of a switch, and requests a second, beside other ways.

    VLLM_CPU_KVCACHE_SPACE=1 python -m benchmarks.swap.vllm_server      # needs vLLM, see docs/vllm.md
    python -m benchmarks.swap.vllm_server --show benchmarks/results/swap_vllm_server-CPU.json

Random Llamas in float32, surgical adapters of two layers each. A switch is timed as a client sees it, over HTTP,
beside vLLM's own reloading of the merged checkpoint and the start of a server. Under load, clients ask for random
tasks, each again as soon as it has its answer: vLLM through the router, vLLM with one task, and a `DeltaBank`.

Writes `results/swap_vllm_server-<device>.json` and prints the table.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.device import device_name, parse_options, result_file
from benchmarks.swap.serve_load import make_tokenizer, running
from peft_surgical import DeltaBank, SurgicalConfig, merge_checkpoint
from peft_surgical.vllm.client import NO_REUSE, ServedTasks
from peft_surgical.vllm.router import create_router


SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 8},
    "large": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_hidden_layers": 32},
    "deep": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_hidden_layers": 64},
}
PROMPT, ANSWER = 16, 8  # tokens
LENGTH = 64
Answer = Callable[[str, list[int]], None]


def save_tasks(folder: Path, size: str, count: int, merged: int) -> None:
    """Save a base, adapters of two of its layers, and the first few tasks' merged checkpoints."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], num_key_value_heads=2, vocab_size=1002, max_position_embeddings=LENGTH)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    make_tokenizer().save_pretrained(folder / "base")
    for number in range(count):
        layers = sorted(random.Random(number).sample(range(config.num_hidden_layers), 2))
        base = LlamaForCausalLM.from_pretrained(folder / "base")
        model: Any = get_peft_model(base, SurgicalConfig(task_type="CAUSAL_LM", layers=layers))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.02 * torch.randn_like(parameter))
        model.save_pretrained(folder / "tasks" / f"task{number}")
        if number < merged:
            merge_checkpoint(folder / "base", folder / "tasks" / f"task{number}", folder / "merged" / f"task{number}")


@contextmanager
def serving(folder: Path, port: int) -> Iterator[tuple[str, float]]:
    """A server with the extension; gives its address and how long it took to start, in seconds."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "base")]
    command += ["--port", str(port), "--enforce-eager", "--max-model-len", str(LENGTH), "--dtype", "float32"]
    command += ["--worker-extension-cls", "peft_surgical.vllm.worker.TaskWorker", "--host", "127.0.0.1"]
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    started, address = time.perf_counter(), f"http://127.0.0.1:{port}"
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(command, env={**kept, "VLLM_SERVER_DEV_MODE": "1"}, stdout=log, stderr=log)
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError((folder / "server.log").read_text()[-2000:])
            try:
                if httpx.get(f"{address}/health", trust_env=False).is_success:
                    break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield address, time.perf_counter() - started
    finally:
        process.terminate()
        process.wait(60)


def measure_switches(folder: Path, port: int, rounds: int) -> dict[str, Any]:
    """Times of switches, of reloading, and of a start, in seconds; sizes in bytes."""
    tasks = sorted(path.name for path in (folder / "tasks").iterdir())
    with serving(folder, port) as (address, start), httpx.Client(base_url=address, timeout=600) as http:
        served = ServedTasks(address, folder / "tasks")
        for task in tasks:
            served.switch(task)  # each is checked when it is first served
        switches = [_timed(served.switch, tasks[i % len(tasks)]) for i in range(rounds)]
        served.switch(None)

        def reload(task: str) -> None:
            asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder / "merged" / task)}}
            http.post("/pause", params={"mode": "wait"}).raise_for_status()
            http.post("/collective_rpc", json=asked).raise_for_status()
            http.post("/resume").raise_for_status()

        merged = sorted(path.name for path in (folder / "merged").iterdir())
        reload(merged[0])
        reloads = [_timed(reload, merged[i % len(merged)]) for i in range(rounds // 2)]
    size = {kind: next((folder / kind).rglob("*model.safetensors")).stat().st_size for kind in ("base", "tasks")}
    return {
        "start": start,
        "switch": statistics.median(switches),
        "reload": statistics.median(reloads),
        "bytes": size["base"],
        "task_bytes": size["tasks"],
    }


def _timed(call: Callable[..., None], *arguments: Any) -> float:
    started = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started


def load(answer: Answer, tasks: list[str], clients: int, seconds: float) -> dict[str, Any]:
    """Ask from so many threads for so long; gives the rate and the times of answers, in seconds."""
    times: list[float] = []
    deadline = time.monotonic() + seconds

    def ask_on(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < deadline:
            task, prompt = draw.choice(tasks), [draw.randrange(2, 1000) for _ in range(PROMPT)]
            times.append(_timed(answer, task, prompt))

    threads = [threading.Thread(target=ask_on, args=(number,)) for number in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - started
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {"rate": len(times) / took, "requests": len(times), "p50": cuts[49], "p99": cuts[98]}


def measure_load(folder: Path, port: int, clients: int, seconds: float) -> list[dict[str, Any]]:
    """Requests a second, by way."""
    tasks = sorted(path.name for path in (folder / "tasks").iterdir())
    rows = []
    with serving(folder, port) as (address, _), httpx.Client(timeout=600, limits=NO_REUSE, trust_env=False) as http:
        served = ServedTasks(address, folder / "tasks")

        def over_http(place: str, model: str | None = None) -> Answer:
            def answer(task: str, prompt: list[int]) -> None:
                body = {"model": model or task, "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True}
                http.post(f"{place}/v1/completions", json=body).raise_for_status()

            return answer

        for turn in (0.2, 1.0):
            with running(create_router(served, turn)) as own_port:
                place = f"http://127.0.0.1:{own_port}"
                load(over_http(place), tasks, clients, 3)  # warms up
                row = load(over_http(place), tasks, clients, seconds)
                switches = http.get(f"{place}/tasks").json()["switches"]
            rows.append({"way": f"vLLM, router, turns of {turn} s", **row, "switches": switches})
        row = load(over_http(address, served.base()), tasks, clients, seconds)
        rows.append({"way": "vLLM, one task, no router", **row, "switches": 0})
    bank = DeltaBank(LlamaForCausalLM.from_pretrained(folder / "base").eval())
    for task in tasks:
        bank.add(task, folder / "tasks" / task)

    def by_bank(task: str, prompt: list[int]) -> None:
        with bank.task(task) as model, torch.inference_mode():
            model.generate(torch.tensor([prompt]), min_new_tokens=ANSWER, max_new_tokens=ANSWER, do_sample=False)

    load(by_bank, tasks, clients, 3)
    before = bank.stats().switches
    row = load(by_bank, tasks, clients, seconds)
    return [*rows, {"way": "DeltaBank, in one process", **row, "switches": bank.stats().switches - before}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--port", type=int, default=8147)
    options = parse_options(parser, table)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    switches = {}
    for place, size in enumerate(SIZES):
        with tempfile.TemporaryDirectory() as temporary:
            save_tasks(Path(temporary), size, options.tasks, merged=2)
            switches[size] = measure_switches(Path(temporary), options.port + place, options.rounds)
            print(size, switches[size], flush=True)
            if size == "tiny":
                loads = measure_load(Path(temporary), options.port + 8, options.clients, options.seconds)
    packages = ("torch", "transformers", "peft", "vllm-cpu")
    record = {
        "device": device_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "tasks": options.tasks,
        "clients": options.clients,
        "versions": {package: version(package) for package in packages},
        "switches": switches,
        "loads": loads,
    }
    file = result_file(options.output, "swap_vllm_server")
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{table(record)}\n\nwritten to {os.path.relpath(file)}")


def table(record: dict[str, Any]) -> str:
    """The results as tables in Markdown."""
    lines = [
        f"Random Llamas in float32, {record['tasks']} surgical tasks of two layers each, vLLM "
        f"{record['versions']['vllm-cpu']} on {record['cpus']} CPU cores ({record['device'].partition(',')[0]}).",
        "",
        "| model, MB | task, MB | switch, ms | vLLM reloads a merged checkpoint, ms | a server starts, s |",
        "|---:|---:|---:|---:|---:|",
    ]
    for row in record["switches"].values():
        size, times = (row["bytes"] / 1e6, row["task_bytes"] / 1e6), (row["switch"] * 1e3, row["reload"] * 1e3)
        cells = (f"{size[0]:.1f}", f"{size[1]:.1f}", f"{times[0]:.0f}", f"{times[1]:.0f}", f"{row['start']:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Under load: the smallest, {record['clients']} clients, {PROMPT} tokens in and {ANSWER} out.",
        "",
        "| way | requests a second | p50 ms | p99 ms | switches | requests |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in record["loads"]:
        cells = (row["way"], f"{row['rate']:.1f}", f"{row['p50'] * 1e3:.0f}", f"{row['p99'] * 1e3:.0f}")
        lines.append(f"| {' | '.join((*cells, str(row['switches']), str(row['requests'])))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
