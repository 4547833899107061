"""Load on the example service over loopback: right answers, throughput and latency, against two other services.

    python -m benchmarks.swap.serve_load  # a random encoder of BERT's shape; on a GPU where there is one
    python -m benchmarks.swap.serve_load --size tiny --requests 50
    python -m benchmarks.swap.serve_load --show benchmarks/results/swap_serve_load-NVIDIA-H100-80GB-HBM3.json

Clients ask for random tasks, some more often than others, each again as soon as it has its answer. The services have
the same application around them: `examples/serve.py` over a bank that has room for half of the tasks, or for all;
PEFT's `set_adapter` with all tasks in the model, one request at a time; and a whole checkpoint per task, loaded when
another task is asked for. Every answer is compared with the task's own model's. Requests and time are bounded.

Writes `results/swap_serve_load-<device>.json` and prints the table.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
import uvicorn
from fastapi import FastAPI
from peft import PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from benchmarks.common.device import device_name, parse_options, result_file
from peft_surgical import SurgicalConfig
from peft_surgical.bank import DeltaBank


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import serve  # noqa: E402


SIZES = {
    "tiny": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 6},
    "small": {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_hidden_layers": 6},
    "base": {},
}
WORDS = [f"w{i}" for i in range(1000)]
TEXTS = [" ".join(random.Random(i).choices(WORDS, k=24)) for i in range(8)]
TOLERANCE = 1e-4

Question = tuple[str, str]
"""A task and a text."""


# ---- what is served


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def make_base(size: str, device: str) -> BertForSequenceClassification:
    """The base, always with the same weights."""
    torch.manual_seed(0)
    with torch.device(device):
        return BertForSequenceClassification(BertConfig(**SIZES[size], num_labels=3)).eval()


def save_tasks(folder: Path, size: str, device: str, count: int) -> dict[Question, list[float]]:
    """Save adapters of two layers each, and whole checkpoints; gives what each task's own model answers."""
    tokenizer, answers = make_tokenizer(), {}
    for number in range(count):
        model: Any = get_peft_model(make_base(size, device), SurgicalConfig(task_type="SEQ_CLS", **_layers(number)))
        generator = torch.Generator(device).manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator, device=device))
        model.eval().save_pretrained(folder / "adapters" / f"task{number}")
        for text in TEXTS:
            with torch.inference_mode():
                logits = model(**tokenizer(text, return_tensors="pt").to(device)).logits[0]
            answers[f"task{number}", text] = logits.tolist()
        model.merge_and_unload().save_pretrained(folder / "whole" / f"task{number}")
    return answers


def _layers(number: int) -> dict[str, list[int]]:
    return {"layers": sorted(random.Random(number).sample(range(6), 2))}


# ---- the services


def with_bank(folder: Path, size: str, device: str, budget: int | None) -> tuple[FastAPI, Callable[[], int]]:
    """The example service."""
    bank = DeltaBank(make_base(size, device), budget)
    serve.add_all(bank, folder / "adapters")
    return serve.serve_bank(bank, make_tokenizer()), lambda: bank.stats().switches


def one_at_a_time(folder: Path, pick: Callable[[str], Any]) -> tuple[FastAPI, Callable[[], int]]:
    """A service that makes one model ready for a task, answers, and only then takes the next request."""
    lock, tokenizer, active, switches = threading.Lock(), make_tokenizer(), [""], [0]
    names = sorted(path.name for path in (folder / "adapters").iterdir())

    def answer(request: serve.Request) -> serve.Answer:
        with lock, torch.inference_mode():
            switches[0] += request.task != active[0]
            active[0] = request.task
            model = pick(request.task)
            inputs = tokenizer(request.text, return_tensors="pt").to(model.device)
            logits = model(**inputs).logits[0].tolist()
        labels = [f"LABEL_{i}" for i in range(len(logits))]
        return serve.Answer(label=labels[logits.index(max(logits))], logits=dict(zip(labels, logits, strict=True)))

    return serve.create_app(answer, lambda: names, dict), lambda: switches[0]


def with_set_adapter(folder: Path, size: str, device: str) -> tuple[FastAPI, Callable[[], int]]:
    """PEFT's `set_adapter`, everything resident."""
    first, *others = sorted(path.name for path in (folder / "adapters").iterdir())
    model = PeftModel.from_pretrained(make_base(size, device), folder / "adapters" / first, adapter_name=first).eval()
    for name in others:
        model.load_adapter(folder / "adapters" / name, adapter_name=name)

    def pick(task: str) -> Any:
        if model.active_adapter != task:
            model.set_adapter(task)
        return model

    return one_at_a_time(folder, pick)


def with_reloading(folder: Path, device: str) -> tuple[FastAPI, Callable[[], int]]:
    """A whole checkpoint per task."""
    loaded: dict[str, Any] = {}

    def pick(task: str) -> Any:
        if task not in loaded:
            loaded.clear()
            loaded[task] = BertForSequenceClassification.from_pretrained(folder / "whole" / task).eval().to(device)
        return loaded[task]

    return one_at_a_time(folder, pick)


# ---- the load


@contextmanager
def running(app: FastAPI) -> Iterator[int]:
    """A service on a free port of loopback, while the block runs; gives the port."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("The service did not start.")
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)


def load(
    port: int, answers: dict[Question, list[float]], *, clients: int, requests: int, seconds: float
) -> dict[str, Any]:
    """Ask until there were so many requests or the time is up; gives times, and how many answers were wrong."""
    times: list[float] = []
    wrong: list[str] = []
    deadline = time.monotonic() + seconds
    left = iter(range(requests))  # next() on it is atomic
    tasks = sorted({task for task, _ in answers})

    def ask_on(number: int) -> None:
        chance, connection = random.Random(number), http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while time.monotonic() < deadline and next(left, None) is not None:
            question = tasks[min(int(chance.expovariate(3 / len(tasks))), len(tasks) - 1)], chance.choice(TEXTS)
            started = time.perf_counter()
            body = json.dumps({"task": question[0], "text": question[1]})
            connection.request("POST", "/predict", body, {"content-type": "application/json"})
            response = connection.getresponse()
            data = response.read()
            times.append(time.perf_counter() - started)
            if problem := _problem(response.status, data, answers[question]):
                wrong.append(f"{question[0]}: {problem}")
        connection.close()

    started = time.perf_counter()
    threads = [threading.Thread(target=ask_on, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - started
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {
        "requests": len(times),
        "wrong": len(wrong),
        "problems": wrong[:3],
        "seconds": took,
        "p50": cuts[49],
        "p99": cuts[98],
    }


def _problem(status: int, data: bytes, wanted: list[float]) -> str:
    if status != 200:
        return f"{status}: {data.decode()[:200]}"
    found = list(json.loads(data)["logits"].values())
    worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    return f"off by {worst:g}" if worst > TOLERANCE else ""


# ---- the program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--size", choices=SIZES, default="base" if cuda else "small")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2000 if cuda else 500, help="at most, for each service")
    parser.add_argument("--seconds", type=float, default=20.0, help="at most, for each service")
    parser.add_argument("--folder", type=Path, help="where the files go; a temporary folder by default")
    options = parse_options(parser, table)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # of libraries to one another
    device = "cuda" if cuda else "cpu"
    bounds = {"clients": options.clients, "requests": options.requests, "seconds": options.seconds}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder, size = Path(temporary), options.size
        answers = save_tasks(folder, size, device, options.tasks)
        budget = (folder / "adapters/task0/adapter_model.safetensors").stat().st_size * (options.tasks + 1) // 2
        services: dict[str, Callable[[], tuple[FastAPI, Callable[[], int]]]] = {
            "bank, room for half of the tasks": lambda: with_bank(folder, size, device, budget),
            "bank, room for all": lambda: with_bank(folder, size, device, None),
            "`set_adapter`, everything resident": lambda: with_set_adapter(folder, size, device),
            "a whole checkpoint per task": lambda: with_reloading(folder, device),
        }
        rows = []
        for service, make in services.items():
            app, switches = make()
            with running(app) as port:
                load(port, answers, clients=4, requests=2 * options.tasks, seconds=options.seconds)  # warms up
                before = switches()
                row = load(port, answers, **bounds)
            rows.append({"service": service, **row, "switches": switches() - before})
            print(f"{service}: {row['requests'] / row['seconds']:.1f} a second, {row['wrong']} wrong", flush=True)
            del app, switches
            gc.collect()
    versions = {package: version(package) for package in ("torch", "transformers", "peft", "fastapi", "uvicorn")}
    about = {"device": device_name(), "model": size, "tasks": options.tasks, **bounds, "versions": versions}
    record = {**about, "services": rows}
    file = result_file(options.output, "swap_serve_load")
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{table(record)}\n\nwritten to {os.path.relpath(file)}")


def table(record: dict[str, Any]) -> str:
    """The results as a table in Markdown."""
    lines = [
        f"{record['tasks']} tasks of two layers on a {record['model']} encoder, {record['clients']} clients, one text"
        f" a request, on {record['device']}; clients and service share one process.",
        "",
        "| service | requests | wrong | a second | p50 ms | p99 ms | switches |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in record["services"]:
        numbers = (row["requests"], row["wrong"], f"{row['requests'] / row['seconds']:.1f}")
        times = (f"{row['p50'] * 1e3:.0f}", f"{row['p99'] * 1e3:.0f}", row["switches"])
        lines.append(f"| {' | '.join(map(str, (row['service'], *numbers, *times)))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
