"""On paper: one base, a thousand tasks, several replicas, and requests as in Zipf's law.

    python -m benchmarks.swap.replicas            # some seconds; needs the results of the other benchmarks of swapping
    python -m benchmarks.swap.replicas --check    # few requests, to see that everything runs

Two engines are simulated. vLLM serves one task at a time: its requests run side by side, the others wait in the queue
of `peft_surgical.vllm.router`, whose policy is followed step by step, and a switch begins when all that runs is
answered. A `DeltaBank` answers one request at a time in the order in which they come; some tasks are on the card, the
others in host memory, and those that were used least recently leave the card. The times are those that were measured:
`swap_vllm_server-CPU.json`, `swap_serve_load-*.json` and `swap_cost-*.json` in `benchmarks/results`.

Writes `results/swap_replicas-simulated.json` and prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common.device import RESULTS, parse_options
from benchmarks.common.table_format import table as markdown
from benchmarks.swap.queues import Bank, Replica, Request, Vllm, route, simulate, traffic, zipf


WAYS = ("by task", "hot ones anywhere", "anywhere")
WARM = 0.2
"""The share of the requests, the first ones, that are not counted."""
GROWS = 0.05
"""If the last answer is later than the last request by this share of the whole time, a queue grows without end."""


def measured() -> dict[str, dict[str, Any]]:
    """What replicas are simulated with, by name: their class's options, and the requests a second of all together."""
    vllm, service, switch = (
        json.loads((RESULTS / f"swap_{name}.json").read_text())
        for name in ("vllm_server-CPU", "serve_load-NVIDIA-H100-80GB-HBM3", "cost-NVIDIA-H200")
    )
    rate = next(row["rate"] for row in vllm["loads"] if "one task" in row["way"])
    short = {"alone": vllm["clients"] / rate, "together": vllm["clients"]}
    short["cost"] = vllm["switches"]["tiny"]["switch"]
    in_turn = next(row["rate"] for row in vllm["loads"] if "DeltaBank" in row["way"])
    row = next(row for row in service["services"] if row["service"] == "bank, room for all")
    took = {way["way"]: way["seconds"] for way in switch["ways"]}
    bank = {"resident": took["bank, on the device"], "from_host": took["bank, in host memory"]}
    bank["answer"] = row["seconds"] / row["requests"]
    return {
        "vLLM, CPU, 8 tokens": {"engine": "vllm", "options": short, "rates": (20, 60)},
        "vLLM, CPU, 200 tokens": {
            "engine": "vllm",
            "options": {**short, "alone": 25 * short["alone"]},
            "rates": (1, 3),
        },
        "bank, CPU, 8 tokens": {"engine": "bank", "options": {"answer": 1 / in_turn, "room": 1000}, "rates": (20, 60)},
        "bank, GPU, room for 32": {"engine": "bank", "options": {**bank, "room": 32}, "rates": (150, 280)},
        "bank, GPU, room for 256": {"engine": "bank", "options": {**bank, "room": 256}, "rates": (150, 280)},
    }


def run(tasks: int, replicas: int, hot: int, count: int, exponent: float, seed: int) -> dict[str, Any]:
    """All engines, loads and ways of routing."""
    shares = zipf(tasks, exponent)
    record: dict[str, Any] = {
        "tasks": tasks,
        "replicas": replicas,
        "hot": hot,
        "share_of_hot": float(shares[:hot].sum()),
        "requests": count,
        "exponent": exponent,
        "seed": seed,
        "inputs": measured(),
        "rows": [],
    }
    for name, engine in record["inputs"].items():
        for rate in engine["rates"]:
            for way in WAYS:
                kind = Vllm if engine["engine"] == "vllm" else Bank
                own = [kind(**engine["options"]) for _ in range(replicas)]
                done = simulate(own, route(way, own, tasks, hot, seed), traffic(shares, rate, count, seed))
                record["rows"].append({"name": name, "rate": rate, "way": way, **summary(own, done)})
    return record


def summary(replicas: Sequence[Replica], answered: list[Request]) -> dict[str, Any]:
    """Shares of hits, switches a second and their share of the time by replica, and times to answers, in seconds."""
    end, last = max(request.done for request in answered), max(request.came for request in answered)
    kept = sorted(answered, key=lambda request: request.came)[int(WARM * len(answered)) :]
    times = np.array([request.done - request.came for request in kept])
    return {
        "hits": float(np.mean([request.is_hit for request in kept])),
        "switches": sum(replica.switches for replica in replicas) / end / len(replicas),
        "switching": sum(replica.switching for replica in replicas) / end / len(replicas),
        "p50": float(np.median(times)),
        "p99": float(np.quantile(times, 0.99)),
        "grows": bool(end - last > GROWS * last),
    }


def table(record: dict[str, Any]) -> str:
    """The results as a table in Markdown."""
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    for row in record["rows"]:
        rows.setdefault((row["name"], row["rate"]), {})[row["way"]] = row
    lines = []
    for (name, rate), ways in rows.items():
        line = [name, f"{rate}", f"{ways['by task']['switches']:.1f}", f"{ways['by task']['switching']:.0%}"]
        for way in WAYS:
            one = ways[way]
            times = "grows" if one["grows"] else f"{one['p50'] * 1e3:.0f}, {one['p99'] * 1e3:.0f}"
            line += [f"{one['hits']:.2f}", times]
        lines.append(line)
    head = ["each replica", "requests a second", "switches a second", "time in them"]
    for way in WAYS:
        head += [f"{way}: found", "p50, p99 ms"]
    return (
        f"{record['tasks']} tasks by Zipf's law (exponent {record['exponent']:g}), {record['replicas']} replicas, "
        f"{record['requests']} requests at random times; the {record['hot']} hottest tasks have "
        f"{record['share_of_hot']:.0%} of them. Switches are those by task, of one replica.\n\n{markdown(head, lines)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--hot", type=int, default=8, help="how many of the hottest tasks go anywhere")
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf's law")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="few requests, to see that everything runs")
    options = parse_options(parser, table)
    count = 200 if options.check else options.requests
    record = run(options.tasks, options.replicas, options.hot, count, options.exponent, options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / f"swap_replicas-{'check' if options.check else 'simulated'}.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{table(record)}\n\nwritten to {os.path.relpath(file)}")


if __name__ == "__main__":
    main()
