"""The results of `multi_gpu.py` as tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby


METHODS = ("surgical 5", "plain 5", "SPAFIT-4-9-II", "LoRA-II r=64", "full")
MODELS = ("bert-tiny", "llama-tiny", "bert-large", "llama-1b", "llama-7b")


def table(rows: list[dict]) -> str:
    """Training, and ranking layers."""
    results, rankings = [r for r in rows if "method" in r], [r for r in rows if "rank_seconds" in r]
    parts = [_training(results) if results else (), _ranking(rankings) if rankings else ()]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _training(results: list[dict]) -> Iterator[str]:
    counts = sorted({r["gpus"] for r in results})
    most, one = counts[-1], results[0]
    yield f"{one['card']}, {one['batch_per_gpu']} sequences of {one['length']} tokens per GPU"
    yield ""
    times = " | ".join(f"ms/step, {n} GPU{'s' * (n > 1)}" for n in counts)
    rest = f"efficiency | of LoRA's | GB per GPU, {most} GPUs | save, s | difference"
    yield f"| model | engine | method | {times} | {rest} |"
    yield "|---|---|---|" + "---:|" * (len(counts) + 5)
    loras = [r for r in results if r["method"].startswith("LoRA")]
    lora = {key: _efficiency(group) for key, group in _grouped(loras, ("model", "engine"))}
    for (model, engine, method), group in _grouped(results, ("model", "engine", "method")):
        last, own, of_lora = group[-1], _efficiency(group), lora.get((model, engine))
        changes = [r["difference_to_first"] for r in group[1:] if r["difference_to_first"] is not None]
        cells = [f"{1e3 * r['step_seconds']:.1f}" for r in group]
        cells += [
            f"{own:.2f}",
            f"{own / of_lora:.2f}" if of_lora else "",
            f"{last['peak_bytes_per_gpu'] / 1e9:.2f}",
        ]
        cells += [f"{last['save_seconds']:.2f}", f"{max(changes):.0e}"] if changes else ["", ""]
        yield f"| {model} | {engine} | {method} | {' | '.join(cells)} |"


def _ranking(rankings: list[dict]) -> Iterator[str]:
    counts = sorted({r["gpus"] for r in rankings})
    seconds = " | ".join(f"s, {n} GPU{'s' * (n > 1)}" for n in counts)
    what = f"`rank_layers`, {rankings[0]['samples']} x {rankings[0]['length']} tokens"
    yield f"| {what} | {seconds} | ratio | scores differ by |"
    yield "|---|" + "---:|" * (len(counts) + 2)
    for (model,), group in _grouped(rankings, ("model",)):
        first, last = group[0], group[-1]
        pairs = [pair for r in group for pair in zip(r["scores"], first["scores"], strict=True)]
        change = max(abs(a - b) / abs(b) for a, b in pairs)
        cells = [f"{r['rank_seconds']:.2f}" for r in group]
        cells += [f"{last['rank_seconds'] / first['rank_seconds']:.2f}", f"{change:.0e}"]
        agree = all(r["same_on_every_process"] for r in group)
        yield f"| {model} | {' | '.join(cells)} |" + " the processes disagree |" * (not agree)


def _grouped(rows: list[dict], keys: tuple[str, ...]) -> Iterator[tuple[tuple, list[dict]]]:
    """Rows that have these in common, in the order of the number of GPUs."""

    def place(row: dict) -> tuple:
        of = {"model": MODELS, "method": METHODS}
        return tuple(of[key].index(row[key]) if key in of else row[key] for key in keys)

    for _, group in groupby(sorted(rows, key=lambda r: (*place(r), r["gpus"])), place):
        found = list(group)
        yield tuple(found[0][key] for key in keys), found


def _efficiency(group: list[dict]) -> float:
    """Throughput per GPU of the most GPUs against the fewest."""
    first, last = group[0], group[-1]
    return last["samples_per_second"] / last["gpus"] / (first["samples_per_second"] / first["gpus"])
