"""What a task costs on disk and what that does to its quality: every encoding of a delta, beside PEFT's LoRA.

    python -m benchmarks.delta.size models/minilm data --seeds 0 1 2       # see benchmarks/README.md for both
    python -m benchmarks.delta.size --show benchmarks/results/delta_size-NVIDIA-H100-80GB-HBM3.json

For each task and seed a surgical adapter of the best layers by a score and LoRA adapters are trained in step. Each is
saved, with every encoding, loaded onto a fresh base and measured on the validation rows in float32. Times are those of
one adapter of each kind, medians of several rounds, measured alone; on a CPU, of the process's time.

Writes `results/delta_size-<device>.json` after each task and seed, and prints the table at the end.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from benchmarks.common.device import device_name, parse_options, result_file
from benchmarks.delta.size_table import TASKS, table
from benchmarks.evidence import models, tasks, training
from peft_surgical import SurgicalConfig, rank_layers, resolve_layers
from peft_surgical.convert.convert import distil_scales
from peft_surgical.methods.stratified.attention_names import attention_names


ENCODINGS = ("values", "lossless", "bf16", "int8", "int4", "sign", "sign, distilled")
WANTED = {"int8": 0.2, "int4": 0.5, "sign, distilled": 1.0}
"""How many points an encoding may cost."""
RANKS = (8, 64)
DISTIL_BATCH = 32


@dataclass(frozen=True)
class Setting:
    """What is the same for all tasks and seeds.

    Args:
        model: The pretrained model: a folder, or a name on the hub.
        data: The folder with the tasks.
        cache: Where tokenised tasks are kept.
        device: What it runs on.
        score: How the layers are ranked.
        top_k: How many layers a surgical adapter tunes.
        rates: The learning rates of surgical adapters and of LoRA.
        rows: The most rows of a split, if not as many as the task has.
        epochs: The most epochs, if not as many as the task has.
        rounds: How often a time is taken.
        distil_rows: On how many training rows the step sizes of signs are distilled.
    """

    model: str
    data: Path
    cache: Path
    device: str
    score: str
    top_k: int
    rates: tuple[float, float]
    rows: int | None
    epochs: int | None
    rounds: int
    distil_rows: int

    def task(self, name: str) -> tasks.Task:
        """A task, perhaps shorter."""
        task = tasks.TASKS[name]
        return replace(task, epochs=min(task.epochs, self.epochs or task.epochs))

    def splits(self, name: str) -> tasks.TaskData:
        """The rows of a task on the device, perhaps a part of them, drawn evenly."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.model)
        found = tasks.load_cached(name, tokenizer, self.data, self.cache)
        return tasks.TaskData(*(self._some(part) for part in (found.train, found.held_out, found.validation)))

    def base(self, name: str, seed: int) -> nn.Module:
        """The pretrained model with a fresh head."""
        return models.load(self.model, tasks.TASKS[name].outputs, seed=seed, device=self.device)

    def _some(self, rows: tasks.Rows) -> tasks.Rows:
        step = max(1, math.ceil(len(rows) / (self.rows or len(rows))))
        return rows.take(torch.arange(len(rows))[::step]).to(self.device)


# ---- training


def adapters(
    base: nn.Module, layers: Sequence[int], seed: int, rates: tuple[float, float]
) -> Iterator[tuple[str, nn.Module, float]]:
    """The adapters that are compared: name, model and learning rate."""
    surgical_rate, lora_rate = rates
    torch.manual_seed(seed)
    config = SurgicalConfig(task_type="SEQ_CLS", layers=list(layers))
    yield "surgical", get_peft_model(copy.deepcopy(base), config), surgical_rate
    for rank in RANKS:
        targets = attention_names(base, resolve_layers(base, "all"), "II")
        options = {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "task_type": "SEQ_CLS"}
        yield f"LoRA r={rank}", get_peft_model(copy.deepcopy(base), LoraConfig(**options)), lora_rate


def train(setting: Setting, name: str, seed: int) -> tuple[nn.Module, dict[str, nn.Module], list[int]]:
    """Train all adapters of a task; gives the base, the models by name, and the surgical adapter's layers."""
    data, base = setting.splits(name), setting.base(name, seed)
    features = data.train.to("cpu").features()
    layers = rank_layers(base, features, score=setting.score, seed=seed, progress=False).top(setting.top_k)
    made = list(adapters(base, layers, seed, setting.rates))
    trainees = [training.Trainee(model, rate) for _, model, rate in made]
    training.fit(trainees, setting.task(name), data.train, data.held_out, seed=seed)
    return base, {label: model for label, model, _ in made}, sorted(layers)


# ---- saving, loading, measuring


def save(model: nn.Module, encoding: str, folder: Path, batches: Sequence[dict[str, torch.Tensor]]) -> None:
    """Write the adapter of a model with an encoding; `sign, distilled` changes the model."""
    if encoding == "sign, distilled":
        distil_scales(model, batches)  # sets the encoding
    elif encoding != "values":
        model.peft_config["default"].encoding = encoding
    model.save_pretrained(folder)


def load(base: nn.Module, folder: Path) -> nn.Module:
    """An adapter on a base."""
    return PeftModel.from_pretrained(base, folder).eval()


def forms(trained: dict[str, nn.Module]) -> Iterator[tuple[str, str, nn.Module]]:
    """All that is written: the name in the table, the encoding, and the model. Distilling comes last."""
    for encoding in ENCODINGS:
        yield f"surgical, {encoding}", encoding, trained["surgical"]
    for label, model in trained.items():
        if label != "surgical":
            yield label, "values", model


def distil_batches(setting: Setting, rows: tasks.Rows) -> list[dict[str, torch.Tensor]]:
    """A few batches of training rows, for the step sizes of signs."""
    index = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[: setting.distil_rows]
    index = index.to(rows.labels.device)
    return [training.cut(rows, part, int(rows.lengths[part].max())) for part in index.split(DISTIL_BATCH)]


@torch.no_grad()
def predict(model: nn.Module, rows: tasks.Rows, batch: int = 128) -> torch.Tensor:
    """The logits of a model in float32, (rows, outputs)."""
    order = rows.lengths.argsort(descending=True)
    parts = [
        model(**training.cut(rows, index, int(rows.lengths[index[0]]))).logits.float() for index in order.split(batch)
    ]
    logits = torch.cat(parts)
    return torch.empty_like(logits).index_copy_(0, order, logits)


def quiet() -> None:
    """Keep libraries from printing."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # of libraries to one another


def measure(setting: Setting, name: str, seed: int) -> list[dict[str, Any]]:
    """Train, write, load and measure one task with one seed: a row for each form."""
    quiet()
    torch.set_num_threads(1)
    base, trained, layers = train(setting, name, seed)
    task, data = setting.task(name), setting.splits(name)
    batches = distil_batches(setting, data.train)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for label, encoding, model in forms(trained):
            path = Path(folder) / label
            save(model, encoding, path, batches)
            logits = predict(load(copy.deepcopy(base), path), data.validation)
            row = {"task": name, "seed": seed, "form": label, "metric": task.metric, "layers": layers}
            row["points"] = 100 * tasks.score(task, logits, data.validation)[task.metric]
            row["bytes"] = (path / "adapter_model.safetensors").stat().st_size
            found.append(row)
    return found


def times(setting: Setting, name: str) -> list[dict[str, Any]]:
    """Seconds to write and to load each form of a task's adapters, after a short training."""
    short = replace(setting, rows=256, epochs=1)
    base, trained, _ = train(short, name, 0)
    batches = distil_batches(short, short.splits(name).train)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for label, encoding, model in forms(trained):
            path = Path(folder) / label
            rounds = 1 if encoding == "sign, distilled" else setting.rounds
            saving = [_seconds(lambda: save(model, encoding, path, batches)) for _ in range(rounds)]  # noqa: B023
            fresh = [copy.deepcopy(base) for _ in range(setting.rounds)]
            loading = [_seconds(lambda: load(empty, path)) for empty in fresh]  # noqa: B023
            found.append({"form": label, "write": statistics.median(saving), "load": statistics.median(loading)})
    return found


def _seconds(do: Callable[[], object]) -> float:
    # on a CPU other processes would count as well
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    started = clock()
    do()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started


def run(
    setting: Setting, work: Sequence[tuple[int, str]], processes: int, seconds: float
) -> Iterator[list[dict[str, Any]]]:
    """Measure tasks with seeds in several processes, 0 for this one; what is not done in time is left out."""
    if not processes:
        yield from (measure(setting, name, seed) for seed, name in work)
        return
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    futures = [pool.submit(measure, setting, name, seed) for seed, name in work]
    try:
        for future in as_completed(futures, timeout=max(1.0, seconds)):
            yield future.result()
    except TimeoutError:
        for process in list(pool._processes.values()):
            process.terminate()
    pool.shutdown(wait=True, cancel_futures=True)


# ---- the program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, or a name on the hub")
    parser.add_argument("data", nargs="?", type=Path, help="the folder with glue/")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=tasks.TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--score", default="fisher", help="how the layers of the surgical adapter are ranked")
    parser.add_argument("--top-k", type=int, default=2, help="layers of the surgical adapter")
    parser.add_argument("--rates", type=float, nargs=2, default=(2e-4, 1e-3), help="learning rates, surgical and LoRA")
    parser.add_argument("--rows", type=int, help="the most rows of a split")
    parser.add_argument("--epochs", type=int, help="the most epochs of a task")
    parser.add_argument("--rounds", type=int, default=5, help="how often a time is taken")
    parser.add_argument("--distil-rows", type=int, default=256, help="training rows that signs are distilled on")
    parser.add_argument("--processes", type=int, default=1, help="tasks and seeds at a time; 0: in this process")
    parser.add_argument("--seconds", type=float, default=1e9, help="what is not done by then is left out")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "peft_surgical_tasks")
    options = parse_options(parser, table)
    if options.model is None or options.data is None:
        parser.error("name the model and the data")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    quiet()
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cache = options.cache / Path(options.model).name
    tuned = (options.score, options.top_k, tuple(options.rates))
    limits = (options.rows, options.epochs, options.rounds, options.distil_rows)
    setting = Setting(options.model, options.data, cache, device, *tuned, *limits)
    depth = transformers.AutoConfig.from_pretrained(options.model).num_hidden_layers
    record = {
        "model": Path(options.model).name,
        "score": options.score,
        "layers": f"{options.top_k} of {depth}",
        "rows_at_most": options.rows,
        "epochs_at_most": options.epochs,
        "distil_rows": options.distil_rows,
        "rates": dict(zip(("surgical", "lora"), setting.rates, strict=True)),
        "device": device_name(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
    }
    file = result_file(options.output, "delta_size")
    steps = {name: len(setting.splits(name).train) * setting.task(name).epochs for name in options.tasks}
    record["times"] = times(setting, options.tasks[0])
    print(f"{time.monotonic() - began:5.0f} s  times of {options.tasks[0]}", flush=True)
    longest_first = sorted(options.tasks, key=steps.__getitem__, reverse=True)
    work = list(itertools.product(options.seeds, longest_first))
    rows: list[dict[str, Any]] = []
    for found in run(setting, work, options.processes, options.seconds - (time.monotonic() - began)):
        rows += found
        ordered = sorted(rows, key=lambda row: (row["task"], row["seed"]))
        file.write_text(json.dumps({**record, "rows": ordered}, indent=1) + "\n")
        print(f"{time.monotonic() - began:5.0f} s  {found[0]['task']}, seed {found[0]['seed']}", flush=True)
    print(f"{len(work) - len({(row['task'], row['seed']) for row in rows})} left out")
    if not rows:
        raise SystemExit("Nothing was done in time. Give it more --seconds.")
    print(f"\n{table(json.loads(file.read_text()))}\n\nwritten to {os.path.relpath(file)}")


if __name__ == "__main__":
    main()
