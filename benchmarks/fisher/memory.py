"""How many passes ranking a 7 B model takes on cards of several sizes, how long, and how much memory.

    python -m benchmarks.fisher.memory --cards 79 40 24

A smaller card is played by taking up the rest of a large one. 100 sequences of 128 tokens through a Llama 7 B in
bfloat16, random weights. Writes `results/fisher_memory-<device>.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from typing import Any

import torch
import transformers

from benchmarks.common.device import device_name, parse_options, result_file
from benchmarks.fisher.cases import MODELS, SETTINGS, build_case
from benchmarks.fisher.other_ways import Case
from benchmarks.fisher.ours import batches_of
from peft_surgical.fisher.measure import layer_fisher
from peft_surgical.fisher.objective import make_objective
from peft_surgical.layers import choose_stack
from peft_surgical.ranking.scores import aggregate


def measure(case: Case, engine: str, batch: int, taken: int) -> dict[str, Any]:
    """Passes, seconds, the peak in GiB without what is taken up, and the scores.

    Args:
        case: The model and its batches.
        engine: The engine.
        batch: Samples in a batch.
        taken: Bytes that are taken up.
    """
    batches = [b.select(i, i + batch) for b in batches_of(case) for i in range(0, len(b), batch)]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    layers, objective = choose_stack(case.model, None).layers, make_objective(case.model)
    try:
        found = layer_fisher(case.model, layers, batches, objective, engine=engine)
    except torch.OutOfMemoryError:
        return {"engine": engine, "batch": batch, "note": "out of memory"}
    torch.cuda.synchronize()
    return {
        "engine": engine,
        "batch": batch,
        "passes": found.passes,
        "seconds": time.perf_counter() - start,
        "peak_gib": (torch.cuda.max_memory_allocated() - taken) / 2**30,
        "scores": aggregate(found, "frobenius").scores,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, nargs="+", default=[79, 40, 24], help="GiB of the cards")
    parser.add_argument("--model", default="llama-7b", choices=MODELS)
    options = parse_options(parser, table)
    if not torch.cuda.is_available():
        raise SystemExit("This needs a GPU.")
    transformers.logging.set_verbosity_error()
    case = build_case(next(s for s in SETTINGS if s.model == options.model))
    measure(case, "hooks", 4, 0)  # compiles the kernels
    rows = []
    for gib in options.cards:
        taken = max(0, torch.cuda.get_device_properties(0).total_memory - gib * 2**30)
        held = torch.empty(taken, dtype=torch.uint8, device="cuda")
        for engine, batch in (("auto", 20), ("auto", 4), ("layer_major", 4)):
            rows.append({"card_gib": gib, **measure(case, engine, batch, taken)})
            print(table({"rows": rows[-1:]}).splitlines()[-1], flush=True)
        del held
        gc.collect()
        torch.cuda.empty_cache()
    record = {"device": device_name(), "torch": torch.__version__, "model": options.model, "rows": rows}
    result_file(options.output, "fisher_memory").write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


def table(record: dict[str, Any]) -> str:
    """The results as a table in Markdown."""
    lines = [
        "| card | engine | batch | passes | time | peak | score of the last layer |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        found = row.get("note") or "{passes} | {seconds:.2f} s | {peak_gib:.1f} GiB | {last!r}".format(
            **row, last=row["scores"][-1]
        )
        lines.append(f"| {row['card_gib']} GiB | {row['engine']} | {row['batch']} | {found} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
