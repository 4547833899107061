"""The weights' way into vLLM alone: from an adapter's file, or from host memory, into their places on the device.

    python -m benchmarks.swap.vllm_weights            # without vLLM; 60 GB of memory, 40 GB of a GPU, a minute or two
    python -m benchmarks.swap.vllm_weights --check    # a tiny model, to see that everything runs

A Llama of 8 B parameters with random weights in bfloat16, five of its 32 layers tuned, saved as values, lossless and
int8. The code that is timed is `peft_surgical.vllm.worker`; in the place of vLLM is a stand-in that has its parameters
(q, k and v in one, gate and up in one) and the steps of its reloading. Where vLLM is installed, its own reloading is
used. After each kind of switch, what is served is compared with what was saved. Beside each is the bare copy of the
tensors that it moves, from pinned host memory. Times are medians; files are in the page cache.

Writes `results/swap_vllm_weights-<device>.json` and prints the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.device import device_name, parse_options, result_file
from benchmarks.common.table_format import table as markdown
from benchmarks.swap import vllm_stand_in
from peft_surgical import SurgicalConfig
from peft_surgical.methods.config import open_adapter


SIZES = {
    "8 B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128_256},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 1000},
}
LAYERS = {"values": (1, 3, 5, 7, 9), "another": (2, 4, 6, 8, 10)}
ENCODINGS = ("values", "lossless", "int8")
HAS_VLLM = importlib.util.find_spec("vllm") is not None
SHARED_MEMORY = Path("/dev/shm")
EXACT = {"atol": 0.0, "rtol": 0.0}
Tensors = dict[str, torch.Tensor]


def save(folder: Path, size: str, device: torch.device) -> Tensors:
    """Save a base and its adapters, called as in `LAYERS` and `ENCODINGS`; gives the base's tensors."""
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM._from_config(LlamaConfig(**SIZES[size]), dtype=torch.bfloat16)
    model.save_pretrained(folder / "base", max_shard_size="2GB")
    base = dict(model.state_dict())
    for name, layers in LAYERS.items():
        config = SurgicalConfig(task_type="CAUSAL_LM", layers=list(layers))
        tuned: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
        with torch.no_grad():
            for parameter in tuned.parameters():
                if parameter.requires_grad:
                    parameter.add_(1e-4 * torch.randn_like(parameter))
        for encoding in ENCODINGS if name == "values" else ("values",):
            tuned.peft_config["default"].encoding = encoding
            tuned.save_pretrained(folder / (encoding if name == "values" else name))
        model = tuned.unload()
    return base


class Served:
    """A worker's weights, and what they must be."""

    def __init__(self, folder: Path, base: Tensors, device: torch.device):
        if not HAS_VLLM:
            vllm_stand_in.install()
        from peft_surgical.vllm import worker

        worker.get_world_group = vllm_stand_in.one_worker  # which vLLM has only in a server
        self.folder, self.base, self.device = folder, base, device
        shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
        self.serve(vllm_stand_in.ServedLlama(shapes, torch.bfloat16, device))

    def serve(self, model: vllm_stand_in.ServedLlama) -> None:
        """Let the worker have this model, with the base's weights."""
        from peft_surgical.vllm import worker

        self.model = model
        model.load_weights(self.base.items())
        if HAS_VLLM:
            from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

            with self.device:
                record_metadata_for_reloading(model)
        model_config = SimpleNamespace(model=str(self.folder / "base"), revision=None, dtype=torch.bfloat16)
        config = SimpleNamespace(model_config=model_config, lora_config=None, additional_config={})
        self.weights = worker.ServedWeights(model, config)

    def seconds(self, task: str | None) -> float:
        """Switch to a task; gives the time that it takes."""
        folder = None if task is None else str(self.folder / task)
        return self.timed(lambda: self.weights.change_to(folder))

    def timed(self, do: Callable[[], object]) -> float:
        """The time of a call, until the device is done."""
        self._wait()
        started = time.perf_counter()
        do()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def check(self, task: str | None) -> None:
        """Compare all that is served with the base's and with what a task's file was written from."""
        wanted = dict(self.base)
        if task is not None:
            saved = open_adapter(self.folder / ("values" if task in ENCODINGS else task))
            wanted.update((entry.name, saved.decode(entry)) for entry in saved.entries)
        for name, tensor in wanted.items():
            off = {"atol": 2e-5, "rtol": 2.0**-7} if task == "int8" and tensor is not self.base[name] else EXACT
            torch.testing.assert_close(self.model.served(name), tensor.to(self.device), **off)

    def copy(self, tensors: Iterable[torch.Tensor]) -> float:
        """The time to copy such tensors to the device, all from pinned memory of their own."""
        is_on_gpu = self.device.type == "cuda"
        pairs = [(torch.ones_like(t, device="cpu", pin_memory=is_on_gpu), torch.empty_like(t)) for t in tensors]

        def copy() -> None:
            for host, place in pairs:
                place.copy_(host, non_blocking=True)

        return statistics.median([self.timed(copy) for _ in range(6)][1:])


def measure(served: Served, rounds: int) -> Iterator[dict[str, Any]]:
    """The ways in which a task comes, each with its time, its bytes, and the time to copy as many."""
    moved = {
        name: [t for n, t in served.base.items() if n.startswith(tuple(f"model.layers.{i}." for i in layers))]
        for name, layers in LAYERS.items()
    }

    def row(way: str, times: list[float], tensors: list[torch.Tensor]) -> dict[str, Any]:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return {"way": way, "seconds": statistics.median(times), "bytes": nbytes, "copy": served.copy(tensors)}

    back: list[float] = []
    for encoding in ENCODINGS:
        first = [served.seconds(encoding)]
        yield row(f"{encoding}, from its file, for the first time", first, moved["values"])
        served.check(encoding)
        served.seconds(None)
        served.check(None)
        times = []
        for _ in range(min(rounds, 2)):
            (served.folder / encoding / "adapter_config.json").touch()  # so it counts as written anew
            times.append(served.seconds(encoding))
            served.seconds(None)
        yield row(f"{encoding}, from its file", times, moved["values"])
        times = []
        for _ in range(rounds):
            times.append(served.seconds(encoding))
            back.append(served.seconds(None))
        served.seconds(encoding)
        served.check(encoding)
        served.seconds(None)
        yield row(f"{encoding}, from host memory", times, moved["values"])
    yield row("the base again", back, moved["values"])
    times = [served.seconds(task) for _ in range(rounds + 1) for task in ("values", "another")][2:]
    served.check("another")
    yield row("another task's values in their place", times, moved["values"] + moved["another"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the files go; shared memory if there is enough")
    parser.add_argument("--check", action="store_true", help="a tiny model, to see that everything runs")
    options = parse_options(parser, table)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")  # of libraries to one another
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = "tiny" if options.check else "8 B"
    if options.folder is None and SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 40e9:
        options.folder = SHARED_MEMORY
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        served = Served(Path(folder), save(Path(folder), size, device), device)
        record = {
            "device": device_name(),
            "model": size,
            "reloading": "vLLM's own" if HAS_VLLM else "a stand-in",
            "versions": {package: version(package) for package in ("torch", "transformers", "peft")},
            "files": {name: sum(f.stat().st_size for f in Path(folder, name).iterdir()) for name in ENCODINGS},
            "rows": [],
        }
        for row in measure(served, options.rounds):
            record["rows"].append(row)
            print(row, flush=True)
    file = result_file(options.output, "swap_vllm_weights", "check" if options.check else "")
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{table(record)}\n\nwritten to {os.path.relpath(file)}")


def table(record: dict[str, Any]) -> str:
    """The results as a table in Markdown."""
    rows = [
        [row["way"], f"{row['bytes'] / 1e6:.0f}", f"{row['seconds'] * 1e3:.1f}", f"{row['copy'] * 1e3:.1f}"]
        + [f"{row['copy'] / row['seconds']:.2f}"]
        for row in record["rows"]
    ]
    files = ", ".join(f"{nbytes / 1e6:.0f} MB as {name}" for name, nbytes in record["files"].items())
    head = ["what comes", "MB", "ms", "bare copy, ms", "share of the bandwidth"]
    return (
        f"A Llama of {record['model']} in bfloat16, five layers tuned ({files}), on {record['device']}; the "
        f"reloading of vLLM is {record['reloading']}.\n\n{markdown(head, rows)}"
    )


if __name__ == "__main__":
    main()
