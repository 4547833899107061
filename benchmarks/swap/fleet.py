"""Eight full fine-tunes of one model, packed as adapters: disk, memory and requests a second, against eight copies.

python -m benchmarks.swap.fleet models/minilm data --work FOLDER    # or models/mpnet

Fine-tunes are made as in `benchmarks.delta.fine_tunes`, one for each of eight tasks of GLUE and SuperGLUE, and packed
by `pack_checkpoints`. Then the same requests, one text each for a task drawn at random, go to eight copies in memory
and to one bank with room for some of the tasks. Either takes them one by one, or as many as wait together, sorted by
task. Each way runs in a process of its own; memory is what that process alone has after the requests. Every answer is
compared, bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForSequenceClassification

from benchmarks.common.device import device_name, parse_options, result_file
from benchmarks.common.table_format import table as markdown
from benchmarks.delta.fine_tunes import BATCH, RATE, fine_tune
from benchmarks.delta.size import quiet
from peft_surgical import DeltaBank, pack_checkpoints


TASKS = ("mrpc", "rte", "cola", "sst2", "stsb", "wnli", "cb", "wic")
STEPS, TOKENS = {"minilm": 40, "mpnet": 20}, 32
WAYS = {
    "eight copies": None,
    "bank, room for all": 8,
    "bank, room for four": 4,
    "bank, room for one": 1,
}
TOGETHER = 64
"""How many requests wait at a time where they are sorted by task."""

Request = tuple[str, int]
"""A task, and the number that its text is drawn by."""


def text_of(number: int) -> dict[str, torch.Tensor]:
    """A text, as tokens."""
    tokens = torch.randint(1000, 30_000, (1, TOKENS), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def load(folder: Path) -> Any:
    """A model in memory of its own: weights that are mapped may lie at addresses where kernels round otherwise."""
    return copy.deepcopy(AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval())


def open_way(way: str, base: Path, tunes: Path, packed: Path) -> Callable[[Request], torch.Tensor]:
    """What answers requests."""
    if WAYS[way] is None:
        models = {name: load(tunes / name) for name in TASKS}
        return lambda request: models[request[0]](**text_of(request[1])).logits
    largest = max((tunes / name / "model.safetensors").stat().st_size for name in TASKS)
    bank = DeltaBank(load(base), device_budget=WAYS[way] * int(1.01 * largest))  # tensors are aligned
    for name in TASKS:
        bank.add(name, packed / name)

    def answer(request: Request) -> torch.Tensor:
        with bank.task(request[0]) as model:
            return model(**text_of(request[1])).logits

    return answer


@torch.inference_mode()
def measure(way: str, base: Path, tunes: Path, packed: Path, requests: Sequence[Request], pipe: Any) -> None:
    """Send what a way did: answers, requests a second one by one and sorted, and bytes of memory."""
    quiet()
    torch.set_num_threads(1)
    before = psutil.Process().memory_full_info().uss
    answer = open_way(way, base, tunes, packed)
    for name in TASKS:
        answer((name, 0))
    rates, answers = [], {}
    for together in (1, TOGETHER):
        started = time.process_time()
        for first in range(0, len(requests), together):
            for request in sorted(requests[first : first + together]):
                answers[request, together] = answer(request)
        rates.append(len(requests) / (time.process_time() - started))
    memory = psutil.Process().memory_full_info().uss - before
    pipe.send({"way": way, "one by one": rates[0], "sorted": rates[1], "memory": memory})
    pipe.send({key: value.tolist() for key, value in answers.items()})


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train, pack and measure."""
    tunes, base = options.work / "fleet", options.model
    for name in TASKS:
        fine_tune(base, tunes / name, name, options.data, steps=STEPS[base.name], rate=RATE[base.name])
    record: dict[str, Any] = {"model": base.name, "steps": STEPS[base.name], "device": device_name()}
    record |= {"requests": options.requests, "packed": []}
    for form, error in (("auto", 0.0), (f"auto, at most {options.max_error}", options.max_error)):
        started = time.process_time()
        fleet = pack_checkpoints(base, [tunes], options.work / f"packed-{error}", max_error=error)
        if fleet.failed:
            raise SystemExit(str(fleet.failed))
        sizes = {"before": sum(p.nbytes_tuned for p in fleet), "after": sum(p.nbytes for p in fleet)}
        off = max(p.difference for p in fleet)
        record["packed"].append({"form": form, **sizes, "seconds": time.process_time() - started, "off": off})
        print(fleet, flush=True)
    record["max_error"], drawn = options.max_error, random.Random(0)
    requests = [(drawn.choice(TASKS), number) for number in range(options.requests)]
    rows, wanted = [], None
    for error in (0.0, options.max_error):
        for way in WAYS:
            if error and WAYS[way] is None:
                continue
            ours, theirs = multiprocessing.get_context("spawn").Pipe()
            places = (base, tunes, options.work / f"packed-{error}")
            process = multiprocessing.get_context("spawn").Process(
                target=measure, args=(way, *places, requests, theirs)
            )
            process.start()
            row, answers = ours.recv(), ours.recv()
            process.join()
            wanted = wanted or answers
            off = max(abs(a - b) for key in wanted for a, b in zip(answers[key][0], wanted[key][0], strict=True))
            rows.append({**row, "form": "exact" if not error else f"at most {error}", "off": off})
            print(rows[-1], flush=True)
    return {**record, "ways": rows}


def table(record: dict[str, Any]) -> str:
    """The results as tables in Markdown."""
    packed = [
        [p["form"], f"{p['before'] / 1e6:.1f}", f"{p['after'] / 1e6:.1f}", f"{p['after'] / p['before']:.3f}"]
        + [f"{p['seconds'] / len(TASKS):.1f}", "equal" if not p["off"] else f"off by {p['off']:.1e}"]
        for p in record["packed"]
    ]
    ways = [
        [row["way"], row["form"], f"{row['memory'] / 1e6:.0f}", f"{row['one by one']:.1f}", f"{row['sorted']:.1f}"]
        + ["equal" if not row["off"] else f"off by {row['off']:.1e}"]
        for row in record["ways"]
    ]
    head = ["packed", "MB before", "MB after", "of before", "seconds each", "answers"]
    heads = ["served by", "packed", "MB of memory", "requests a second", f"sorted, {TOGETHER} at a time", "answers"]
    trained = f"{', '.join(TASKS)}; {record.get('steps', 40)} steps of {BATCH} rows"
    return (
        f"Eight full fine-tunes of {record['model']} in float32 ({trained}); "
        f"{record['requests']} requests of {TOKENS} tokens, tasks at random; time of the process, on "
        f"{record['device']}.\n\n{markdown(head, packed)}\n\n{markdown(heads, ways)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="the folder of the base")
    parser.add_argument("data", nargs="?", type=Path, help="the folder with glue/")
    parser.add_argument("--work", type=Path, default=Path("models/fine-tunes"), help="where fine-tunes are kept")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-error", type=float, default=0.15)
    options = parse_options(parser, table)
    if options.model is None or options.data is None:
        parser.error("name the model and the data")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    quiet()
    torch.set_num_threads(1)
    file = result_file(options.output, "swap_fleet", options.model.name.replace("minilm", ""))
    record = run(options)
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{table(record)}\n\nwritten to {os.path.relpath(file)}")


if __name__ == "__main__":
    main()
