"""How fast the kernel for sums of squared products is with each way to cut its work, beside plain products.

    python -m benchmarks.fisher.tilings                  # on a GPU with Triton

A launch has as many products as the Fisher's hooks would wait for. Prints TFLOP/s, the best of a few runs, and writes
`results/fisher_tilings-<device>.json`. The winner stands in `peft_surgical/fisher/triton.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.device import device_name, parse_options, result_file
from peft_surgical.fisher import triton as kernels
from peft_surgical.fisher.squares import ENTRIES_PER_LAUNCH
from peft_surgical.fisher.triton import Tiling


SHAPES = {
    "BERT-base": (100, 768, 768),
    "BERT-large": (100, 4096, 1024),
    "Llama 1 B": (50, 5632, 2048),
    "Llama 7 B, attention": (20, 4096, 4096),
    "Llama 7 B, MLP": (20, 11008, 4096),
}
"""Samples, outputs and inputs of the linear maps of some models, in the batches that `speed.py` takes."""
TOKENS = 128
TILINGS = [
    *(Tiling(64, 128, 64, 4, stages) for stages in (3, 4)),
    Tiling(64, 128, 128, 4, 2),
    *(Tiling(128, 64, 64, 4, stages) for stages in (3, 4)),
    *(Tiling(128, 128, 64, 8, stages) for stages in (3, 4)),
    Tiling(128, 128, 128, 8, 3),
    *(Tiling(64, 256, 64, 8, stages) for stages in (3, 4)),
    Tiling(256, 64, 64, 8, 3),
    Tiling(128, 256, 32, 8, 4),
    *(Tiling(128, 256, 64, 8, stages) for stages in (3, 4)),
    Tiling(128, 256, 128, 8, 2),
    Tiling(256, 128, 64, 8, 3),
]


def best_seconds(run: Callable[[], object], rounds: int = 5) -> float:
    """The least time of some runs after one that compiles."""
    run()
    times = []
    for _ in range(rounds):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return min(times)


def operands(samples: int, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients at the outputs, and inputs."""
    g, a = (torch.randn(samples, TOKENS, size, device="cuda", dtype=torch.bfloat16) for size in (height, width))
    return g, a


def rate(samples: int, height: int, width: int, tiling: Tiling) -> float | None:
    """TFLOP/s of one launch; None where the card has no room for such tiles."""
    kernels.TILINGS[2, True] = kernels.TILINGS[2, False] = tiling
    g, a = operands(samples, height, width)
    outs = [torch.zeros(height, width, device="cuda") for _ in range(max(1, ENTRIES_PER_LAUNCH // (height * width)))]
    jobs, kinds = zip(*(kernels.make_job(out, g, a, None) for out in outs), strict=True)
    try:
        took = best_seconds(lambda: kernels.launch(list(jobs), kinds[0]))
    except Exception as error:  # whatever Triton raises
        print(f"{tuple(tiling)}: {type(error).__name__}", flush=True)
        return None
    return 2e-12 * samples * TOKENS * height * width * len(outs) / took


def plain_rate(samples: int, height: int, width: int) -> float:
    """TFLOP/s of one product over all tokens, which is what a batch's gradient takes."""
    g, a = (x.flatten(0, 1) for x in operands(samples, height, width))
    return 2e-12 * samples * TOKENS * height * width / best_seconds(lambda: g.T @ a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse_options(parser, table)
    if not torch.cuda.is_available():
        raise SystemExit("The kernel needs a GPU.")
    rates: dict[str, dict[str, float | None]] = {}
    for tiling in TILINGS:
        rates[str(tuple(tiling))] = {name: rate(*shape, tiling) for name, shape in SHAPES.items()}
    rates["plain products"] = {name: plain_rate(*shape) for name, shape in SHAPES.items()}
    record = {"device": device_name(), "torch": torch.__version__, "tokens": TOKENS, "shapes": SHAPES, "tflops": rates}
    result_file(options.output, "fisher_tilings").write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


def table(record: dict[str, Any]) -> str:
    """The results as a table in Markdown."""
    lines = [f"| rows, columns, tokens, warps, stages | {' | '.join(record['shapes'])} |"]
    lines.append("|---|" + "---:|" * len(record["shapes"]))
    for name, found in record["tflops"].items():
        lines.append(
            f"| {name} | {' | '.join('-' if tflops is None else f'{tflops:.0f}' for tflops in found.values())} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
