"""What the diagonal Fisher costs, against a plain forward and backward pass and against other ways to compute it.

    python -m benchmarks.fisher.speed                      # all that this machine can do
    python -m benchmarks.fisher.speed minilm               # real weights on the CPU, one thread, processor time
    python -m benchmarks.fisher.speed --only bf16          # settings whose name contains this
    python -m benchmarks.fisher.speed minilm --more hooks  # more rounds of the plain pass and of these methods
    python -m benchmarks.fisher.speed --check              # first whether all is right on this GPU, then the table

The methods of a setting run in turns, round after round; times are medians. Memory is the peak above what is allocated
before. The error is the largest relative error of a layer's score, against float64 with the same weights. Writes
`results/fisher_speed-<device>.json`, where settings that were measured before stay, and prints one table at the end.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import logging
import os
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import transformers

from benchmarks.fisher import ours
from benchmarks.fisher.cases import LENGTH, MODELS, SAMPLES, SETTINGS, Setting, build_case
from benchmarks.fisher.checks import check, exact_scores
from benchmarks.fisher.clock import Clock
from benchmarks.fisher.other_ways import (
    Case,
    Method,
    backpack,
    floor_padded,
    floor_sorted,
    layer_scores,
    naive_loop,
    opacus,
    published_loop,
    vmap_of_grad,
)


# ---- methods


@dataclass
class Row:
    """A row of the table, and what is measured of it.

    Args:
        method: What the table calls it.
        run: The method.
        rounds: How often it runs; slow ones run once.
        comparable: Whether its scores should be those of the others.
    """

    method: str
    run: Method
    rounds: int
    comparable: bool = True
    seconds: list[float] = field(default_factory=list)
    peak: float = 0.0
    error: float | None = None
    note: str = ""

    @property
    def time(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("nan")


FLOOR, SORTED_FLOOR = "forward + backward, padded", "forward + backward, sorted"


def rows_of(setting: Setting, quick: bool) -> list[Row]:
    """The methods that make sense in a setting; slow ones run once, and with `quick` not at all."""
    rows = [Row(SORTED_FLOOR, floor_sorted, setting.rounds)]
    if setting.mixed:
        rows.insert(0, Row(FLOOR, floor_padded, setting.rounds))
    rows += [Row(name, run, setting.rounds, "trace" not in name) for name, run in our_rows(setting)]
    return rows if quick or not setting.rivals else rows + list(other_rows(setting))


def our_rows(setting: Setting) -> Iterator[tuple[str, Method]]:
    """Ours in each engine."""
    gpu = setting.device == "cuda"
    yield "ours: hooks", partial(ours.engine, name="hooks")
    yield "ours: hooks, with each sample's share", partial(ours.engine, name="hooks", contributions=True)
    if setting.precision == "high":
        yield "ours: hooks, products in float32", with_float32_products
    if gpu:
        yield "ours: hooks, without Triton", without_kernel
    yield "ours: a pass for each layer", partial(ours.engine, name="layer_major")
    yield "ours: hooks, trace", partial(ours.engine, name="hooks", aggregation="trace")
    yield "ours: rank_layers, data to intervals", partial(ours.whole, batch_size=setting.batch)
    yield "ours: rank_layers without its checks", partial(ours.whole, batch_size=setting.batch, verify=False)


def other_rows(setting: Setting) -> Iterator[Row]:
    """The methods of others."""
    gpu, causal, full = setting.device == "cuda", MODELS[setting.model].causal, setting.dtype == torch.float32
    once, few = 1, 2 if gpu else 1
    if full and not causal:
        yield Row("published loop (another quantity)", published_loop, once, comparable=False)
    yield Row("loop over samples", naive_loop, once)
    if "llama" not in setting.model:
        yield Row("vmap(grad), 8 at a time", vmap_of_grad, few)
    if full and not causal:
        yield Row("Opacus, 8 at a time", opacus, few)
        yield Row("BackPACK, 8 at a time, Linear only", backpack, few, comparable=False)


def with_float32_products(case: Case) -> list[float]:
    """The products of the Fisher in float32, though not those of the model."""
    with ours.with_float32_products():
        return ours.engine(case, "hooks")


def without_kernel(case: Case) -> list[float]:
    """As on a machine without Triton."""
    with ours.without_kernel():
        return ours.engine(case, "hooks")


def reference(case: Case) -> list[float]:
    """The scores in float64; of the largest model that of the last layer, for there is no room for more."""
    if sum(p.numel() for p in case.parameters.values()) > 2**32:
        case = replace(case, layers=f"{case.layers}.{case.model.config.num_hidden_layers - 1}")
        case.model.to(torch.float64)
        return layer_scores(replace(case, layers=case.layers.rsplit(".", 1)[0]), naive_loop(case))
    return exact_scores(case)


# ---- measuring


def add_rounds(setting: Setting, before: list[Row], more: str, deadline: float) -> None:
    """Add rounds of the plain pass and of the methods with names like this to those measured before."""
    rows = {row.method: row for row in before if row.method == SORTED_FLOOR or re.search(more, row.method)}
    for new in run_setting(setting, False, deadline, set(rows)):
        rows[new.method].seconds += new.seconds


def run_setting(setting: Setting, quick: bool, deadline: float, methods: set[str] | None = None) -> list[Row]:
    """Measure all methods of a setting, or some, in turns."""
    torch.set_float32_matmul_precision(setting.precision)
    clock, case, rows = Clock(setting.device), build_case(setting), rows_of(setting, quick)
    rows = [row for row in rows if methods is None or row.method in methods]
    scores: dict[str, list[float]] = {}
    for number in range(0 if clock.gpu else 1, 1 + max(row.rounds for row in rows)):  # on a CPU a run takes seconds
        for row in rows:
            warm_up = number == 0
            if row.note or (warm_up and row.rounds == 1) or number > row.rounds or time.monotonic() > deadline:
                continue
            try:
                seconds, peak, result = clock.measure(lambda row=row: row.run(case))
            except Exception as error:  # a method that does not run here is a row that says so
                row.note = f"{type(error).__name__}: {error}".splitlines()[0][:90]
                logging.debug("%s", row.method, exc_info=True)
                continue
            if not warm_up:
                row.seconds.append(seconds)
                row.peak = peak
            if result is not None and row.comparable:
                scores[row.method] = result if isinstance(result, list) else layer_scores(case, result)
            print(f"  {setting.name}: {row.method}: {seconds * 1e3:.1f} ms, +{peak:.0f} MiB", flush=True)
            del result
    if methods is not None:  # errors are known
        return rows
    try:
        wanted = reference(case)
    except torch.OutOfMemoryError:
        return rows
    for row in rows:
        if row.method in scores:
            pairs = zip(scores[row.method][-len(wanted) :], wanted, strict=True)
            row.error = max(abs(got / right - 1) for got, right in pairs)
    return rows


# ---- results


def as_table(results: dict[str, list[Row]]) -> str:
    """The table, as Markdown. Ratios are to the plain pass over sorted batches (over padded ones in brackets)."""
    lines = ["| | time | x floor | peak memory | x floor's | error |", "|---|---|---|---|---|---|"]
    for name, rows in results.items():
        lines.append(f"| **{name}** | | | | | |")
        floors = {row.method: row for row in rows if row.method in (FLOOR, SORTED_FLOOR)}
        floor, padded = floors[SORTED_FLOOR], floors.get(FLOOR)
        for row in rows:
            if not row.seconds:
                lines.append(f"| {row.method} | {row.note or 'no time left'} | | | | |")
                continue
            ratio = f"{row.time / floor.time:.2f}" + (f" ({row.time / padded.time:.2f})" if padded else "")
            error = "" if row.error is None else f"{row.error:.0e}"
            memory = f"+{row.peak:.0f} MiB | {row.peak / max(floor.peak, 1):.2f}"
            lines.append(f"| {row.method} | {row.time * 1e3:.1f} ms | {ratio} | {memory} | {error} |")
    return "\n".join(lines)


def as_record(results: dict[str, list[Row]], device: str) -> dict:
    """The same for a JSON file."""
    return {
        "device": device,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "triton": triton_version()},
        "samples": SAMPLES,
        "length": LENGTH,
        "settings": {
            name: [{k: v for k, v in asdict(row).items() if k != "run"} for row in rows]
            for name, rows in results.items()
        },
    }


def read_results(path: Path) -> dict[str, list[Row]]:
    """What was measured before, if anything was."""
    if not path.exists():
        return {}
    settings = json.loads(path.read_text())["settings"]
    return {name: [Row(run=lambda case: None, **row) for row in rows] for name, rows in settings.items()}


def triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(settings: list[Setting]) -> str:
    return torch.cuda.get_device_name() if any(s.device == "cuda" for s in settings) else "CPU, one thread"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"some of {', '.join(MODELS)}; all but the tiny ones by default")
    parser.add_argument("--minutes", type=float, default=60, help="start nothing new after this time")
    parser.add_argument("--quick", action="store_true", help="only the plain passes and ours")
    parser.add_argument("--check", action="store_true", help="first check the kernels and the engines on the GPU")
    parser.add_argument("--only", default="", help="only settings whose name contains this")
    parser.add_argument("--more", help="add rounds of the plain pass and of methods with names like this")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parents[1] / "results", help="folder for the JSON file"
    )
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    if args.check:
        check()
    chosen = [s for s in SETTINGS if (s.model in args.models or (not args.models and "tiny" not in s.model))]
    chosen = [s for s in chosen if args.only in s.name and (s.device == "cpu" or torch.cuda.is_available())]
    if any(s.device == "cpu" for s in chosen):
        torch.set_num_threads(1)
    device = device_name(chosen)
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"fisher_speed-{device.split(',')[0].replace(' ', '-')}.json"
    results = read_results(path)
    for setting in chosen:
        if time.monotonic() < deadline:
            try:
                if args.more is None:
                    results[setting.name] = run_setting(setting, args.quick, deadline)
                else:
                    add_rounds(setting, results[setting.name], args.more, deadline)
            except Exception as error:  # the other settings go on: the model may not fit, or its package be missing
                print(f"  {setting.name}: {type(error).__name__}: {error}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            path.write_text(json.dumps(as_record(results, device), indent=1))
    print(f"\n{device}, torch {torch.__version__}, {SAMPLES} samples of at most {LENGTH} tokens\n")
    print(as_table(results))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()
    main()
