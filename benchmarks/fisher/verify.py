"""What the checks of `rank_layers` cost: rankings with and without `verify`, in turns.

    python -m benchmarks.fisher.verify           # BERT and Llama on a GPU, a tiny BERT on a CPU
    python -m benchmarks.fisher.verify --rounds 15

100 samples, from the data to the intervals; medians of the times, and of the ratios of neighbours. Writes
`results/fisher_verify-<card>.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks.common.device import device_name, parse_options, result_file
from benchmarks.common.table_format import table as markdown
from benchmarks.fisher import ours
from benchmarks.fisher.cases import SAMPLES, Setting, build_case
from benchmarks.fisher.clock import Clock


DEFAULT = 16
"""The batch of `rank_layers` where none is given."""


def settings() -> list[Setting]:
    """Models, types and batches on this machine."""
    if not torch.cuda.is_available():
        return [Setting("BERT of 3 layers, float32", "tiny", "cpu", torch.float32, mixed=True, batch=DEFAULT)]
    rows = [
        ("BERT-base, bfloat16", "bert-base", torch.bfloat16, DEFAULT),
        ("BERT-base, float32", "bert-base", torch.float32, DEFAULT),
        ("BERT-large, bfloat16", "bert-large", torch.bfloat16, DEFAULT),
        ("Llama 1 B, bfloat16", "llama-1b", torch.bfloat16, DEFAULT),
        ("BERT-base, bfloat16", "bert-base", torch.bfloat16, SAMPLES),
        ("Llama 1 B, bfloat16", "llama-1b", torch.bfloat16, 25),
    ]
    return [Setting(name, model, "cuda", dtype, mixed=True, batch=batch) for name, model, dtype, batch in rows]


def measure(setting: Setting, rounds: int) -> dict[str, Any]:
    """Seconds of each ranking, with the checks and without; the first of each is not counted."""
    clock, case = Clock(setting.device), build_case(setting)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for verify in (True, False) if number % 2 else (False, True):
            took, _, _ = clock.measure(partial(ours.whole, case, setting.batch, verify))
            if number:
                seconds[verify].append(took)
    return {"setting": setting.name, "batch": setting.batch, "with": seconds[True], "without": seconds[False]}


def table(record: dict[str, Any]) -> str:
    """The table, as Markdown."""
    rows = []
    for found in record["settings"]:
        ratios = [a / b for a, b in zip(found["with"], found["without"], strict=True)]
        times = [f"{statistics.median(found[key]) * 1e3:.0f} ms" for key in ("with", "without")]
        quartiles = statistics.quantiles(ratios, n=4)
        spread = f"{statistics.median(ratios):.2f} ({quartiles[0]:.2f} to {quartiles[2]:.2f})"
        rows.append([found["setting"], str(found["batch"]), *times, spread])
    head = ["", "batch", "with the checks", "without", "ratio (middle half)"]
    return markdown(head, rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    options = parse_options(parser, table)
    transformers.logging.set_verbosity_error()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    record: dict[str, Any] = {"device": device_name(), "versions": versions, "settings": []}
    for setting in settings():
        record["settings"].append(measure(setting, options.rounds))
        print(json.dumps(record["settings"][-1]), flush=True)
        result_file(options.output, "fisher_verify").write_text(json.dumps(record, indent=1))
    print(table(record))


if __name__ == "__main__":
    main()
