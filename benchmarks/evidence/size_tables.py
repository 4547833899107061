"""The tables about what methods cost in time, memory and bytes: question 7."""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import fmean

from benchmarks.common.table_format import MISSING, number, points, table
from benchmarks.delta import size_table
from benchmarks.evidence import methods, records
from benchmarks.evidence.findings import Results


ENCODED = ("bf16", "int8", "int4", "sign, distilled")


def costs(results: Results) -> str:
    """What each method costs; its part of full tuning is that of one run on one idle device."""
    measured, rows = measured_costs(results), []
    if not measured:
        return ""
    for tuning, m in measured.items():
        memory = f"{m['peak_bytes'] / 2**30:.2f}" if m["peak_bytes"] else MISSING
        rows.append(
            [
                tuning,
                f"{m['trained_parameters'] / 1e6:.2f}",
                f"{m['delta_bytes'] / 1e6:.1f}",
                f"{1000 * m['step_seconds']:.1f}",
                f"{1000 * m['graph_seconds']:.1f}" if m["graph_seconds"] else MISSING,
                f"{m['graph_seconds'] / m['full']['graph_seconds']:.2f}" if m["graph_seconds"] else MISSING,
                memory,
                points(results.average(tuning, results.tasks), 2),
            ]
        )
    header = ["method", "trained, M", "delta, MB", "step, ms", "its graph, ms", "of full", "peak memory, GiB"]
    has_average = any(row[-1] != MISSING for row in rows)  # runs with all the questions' tasks
    return table([*header, *["average metric"] * has_average], [row if has_average else row[:-1] for row in rows])


def measured_costs(results: Results) -> dict[str, dict]:
    """What a step of each method took in the last run that has it, with that run's own `full` tuning."""
    runs = [run["methods"] for run in records.read(results.folder / "cost.jsonl")]
    return {tuning: {**of_one, "full": run["full"]} for run in runs for tuning, of_one in run.items()}


def file_sizes(results: Results) -> str:
    """The file of a task in MB: as saved, and by the bytes that each encoding takes for a value."""
    k, rows = results.k, []
    counts = dict.fromkeys((methods.part(2, results.depth), methods.part(3, results.depth), k))
    for plan in (
        "full",
        f"alternate:{k}",
        f"middle:{k}",
        *(f"last:{n}" for n in counts),
        "lora-II",
        "lora-I",
        "bitfit",
    ):
        run = results.run(plan, results.tasks[0], results.seeds[0])
        if run is None:
            continue
        encoded = {} if plan.startswith("lora") else encoded_megabytes(results, run)
        cells = [number(encoded[e], 1) if e in encoded else MISSING for e in ENCODED]
        average = points(results.average(plan, results.tasks), 2)
        rows.append([plan, average, results.seeds_of(plan), number(run["delta_bytes"] / 1e6, 1), *cells])
    return table(["method", "average metric", "seeds", "float32", *(f"{e}, computed" for e in ENCODED)], rows)


def encoded_megabytes(results: Results, run: dict) -> dict[str, float]:
    """How large a surgical delta is with each encoding, by the bytes that each takes for a value."""
    by_form = _sizes_by_form(results)
    whole = run["delta_bytes"] / 1e6
    return {e: whole * by_form[f"surgical, {e}"] / by_form["surgical, values"] for e in ENCODED if by_form}


def encoded(results: Results) -> str:
    """What the encodings of a delta cost in points, beside LoRA in files of all sizes."""
    record = _delta_sizes(results)
    return size_table.table(record) if record else ""


def _delta_sizes(results: Results) -> dict:
    """What `benchmarks.delta.size` measured with this model."""
    files = sorted(results.folder.glob("delta_size-*.json"))
    return json.loads(files[0].read_text()) if files else {}


def _sizes_by_form(results: Results) -> dict[str, float]:
    """The mean bytes of each form of a delta."""
    sizes = defaultdict(list)
    for row in _delta_sizes(results).get("rows", ()):
        sizes[row["form"]].append(row["bytes"])
    return {form: fmean(found) for form, found in sizes.items()}
