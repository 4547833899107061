"""What the Fisher costs besides arithmetic: the operations that Python starts, and the time that it takes for them.

    python -m benchmarks.fisher.overhead

A GPU is often faster than Python can feed it. This runs the GPU's path on a CPU, with the kernels replaced by
nothing, on a model as deep as BERT-base and so narrow that arithmetic takes no time: what is left is Python.
Thresholds that are counted in entries of a parameter are smaller by as much as the parameters are. Needs Triton (not a
GPU), and one idle core. Writes `results/fisher_overhead-<card>.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.device import RESULTS, result_file
from benchmarks.fisher import ours
from benchmarks.fisher.other_ways import Case, floor_sorted
from peft_surgical.fisher import contributions, gradients, guard, listen, squares
from peft_surgical.fisher import triton as kernels


WIDTH, SAMPLES, TOKENS = 32, 4, 8
SHRINK = (768 // WIDTH) ** 2
THRESHOLDS = ((squares, "ENTRIES_PER_LAUNCH"), (listen, "_TOGETHER"), (contributions, "_TOGETHER"))
VIEWS = {"view", "t", "transpose", "detach", "slice", "expand", "unsqueeze", "squeeze", "select", "unbind", "split"}
VIEWS |= {"split_with_sizes", "promote_types", "_unsafe_view", "alias", "lift_fresh", "permute", "as_strided"}

METHODS: dict[str, Callable[[Case], object]] = {
    "forward + backward": floor_sorted,
    "hooks": lambda case: ours.engine(case, "hooks"),
    "hooks, with each sample's share": lambda case: ours.engine(case, "hooks", contributions=True),
    "hooks, trace": lambda case: ours.engine(case, "hooks", aggregation="trace"),
    "a pass for each layer": lambda case: ours.engine(case, "layer_major"),
    "rank_layers, data to intervals": lambda case: ours.whole(case, SAMPLES),
    "rank_layers without its checks": lambda case: ours.whole(case, SAMPLES, verify=False),
}


class Operations(TorchDispatchMode):
    """Counts operations that a device would have to do: all but those that only look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


class NoKernel:
    """Takes a kernel's place. What a kernel would write is zero, if that is read."""

    launches = 0

    def __init__(self, written: int | None = None):
        self.written = written

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            NoKernel.launches += 1
            if self.written is not None:
                args[self.written].zero_()

        return launch


@contextlib.contextmanager
def path_of_a_gpu() -> Iterator[None]:
    """As on a GPU with Triton, as far as a CPU can."""
    with contextlib.ExitStack() as stack:

        def patch(module: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        patch(kernels, "_squared_products", NoKernel())
        patch(kernels, "_normalized_sums", NoKernel(written=2))
        patch(kernels, "_has_copy_engine", lambda device: hasattr(kernels.triton, "set_allocator"))
        patch(guard.Guard, "_find_wrong", lambda *_: None)  # what the kernels would write is wrong
        patch(squares, "has_kernel", lambda grad_outputs, dtype: dtype == torch.float32)
        for module, name in THRESHOLDS:
            patch(module, name, getattr(module, name) // SHRINK)
        for module in (listen, contributions, gradients):
            patch(module, "on_cpu", lambda x: False)
        yield


def build_case(layers: int = 12) -> Case:
    """A narrow BERT in bfloat16, and a batch."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": 2}
    config = transformers.BertConfig(num_labels=2, vocab_size=2000, intermediate_size=4 * WIDTH, **sizes)
    model = transformers.BertForSequenceClassification(config).to(torch.bfloat16).eval().requires_grad_(False)
    ids = torch.randint(10, 2000, (SAMPLES, TOKENS))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(SAMPLES) % 2}
    samples = [{k: v[n : n + 1] for k, v in batch.items()} for n in range(SAMPLES)]
    return Case(model, "bert.encoder.layer", [batch], [batch], samples, causal=False)


def measure(case: Case, rounds: int) -> dict[str, dict[str, float]]:
    """For each method the operations and launches that it starts, and the processor time that it takes."""
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for number in range(rounds + 2):
        for name, run in METHODS.items():
            start = time.process_time()
            run(case)
            if number > 1:
                seconds[name].append(time.process_time() - start)
    found = {}
    for name, run in METHODS.items():
        NoKernel.launches = 0
        with Operations() as operations:
            run(case)
        found[name] = {"operations": operations.count, "kernels": NoKernel.launches, "seconds": min(seconds[name])}
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="the least time of so many rounds is told")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with path_of_a_gpu():
        found = measure(build_case(), args.rounds)
    floor = found["forward + backward"]["seconds"]
    print("| | operations | kernels of our own | time | x forward + backward |\n|---|---|---|---|---|")
    for name, row in found.items():
        time_ms, ratio = row["seconds"] * 1e3, row["seconds"] / floor
        print(f"| {name} | {row['operations']} | {row['kernels']} | {time_ms:.1f} ms | {ratio:.2f} |")
    about = {"model": "BERT, 12 layers, bfloat16", "torch": torch.__version__, "rounds": args.rounds}
    record = {**about, "methods": found}
    result_file(args.output, "fisher_overhead").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
