"""The results of `size.py` as a table."""

from __future__ import annotations

import statistics
from typing import Any


TASKS = ("rte", "cola", "mrpc", "sst2")


def table(record: dict[str, Any]) -> str:
    """The results as a table in Markdown."""
    rows = record["rows"]
    names = [name for name in TASKS if any(row["task"] == name for row in rows)]
    names += sorted({row["task"] for row in rows} - set(names))
    metric = {row["task"]: row["metric"] for row in rows}
    seeds = {name: len({row["seed"] for row in rows if row["task"] == name}) for name in names}
    plain = sum(_mean(rows, "surgical, values", name, "bytes") for name in names) / len(names)
    shorter = "".join(
        f", at most {record[key]} {what}"
        for key, what in (("rows_at_most", "rows of a split"), ("epochs_at_most", "epochs"))
        if record[key]
    )
    counts = ", ".join(f"{name} {seeds[name]}" for name in names)
    lines = [
        f"{record['model']}, surgical: the first {record['layers']} layers by `{record['score']}`{shorter}; "
        f"on {record['device']}. Signs are distilled on {record['distil_rows']} rows. Points on the validation rows, "
        f"means over the seeds ({counts}); behind them, the change from `values`.",
        "",
        "| | MB | of `values` | write ms | load ms | "
        + " | ".join(f"{name}, {metric[name]}" for name in names)
        + " | mean change |",
        "|---|" + "---:|" * (5 + len(names)),
    ]
    for took in record["times"]:
        form = took["form"]
        size = sum(_mean(rows, form, name, "bytes") for name in names) / len(names)
        points = [_mean(rows, form, name, "points") for name in names]
        changes = [p - _mean(rows, "surgical, values", n, "points") for p, n in zip(points, names, strict=True)]
        is_encoded = form.startswith("surgical") and form != "surgical, values"
        cells = [f"{p:.1f}" + (f" ({c:+.2f})" if is_encoded else "") for p, c in zip(points, changes, strict=True)]
        mean = f"{statistics.mean(changes):+.2f}" if is_encoded else ""
        numbers = [
            f"{size / 1e6:.2f}",
            f"{size / plain:.3f}",
            *(f"{1e3 * took[what]:.0f}" for what in ("write", "load")),
        ]
        lines.append(f"| {' | '.join([form, *numbers, *cells, mean])} |")
    return "\n".join(lines)


def _mean(rows: list[dict[str, Any]], form: str, task: str, what: str) -> float:
    return statistics.mean(row[what] for row in rows if row["form"] == form and row["task"] == task)
