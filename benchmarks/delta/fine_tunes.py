"""What whole fine-tunes take as deltas: bytes, times and errors of every encoding, and of what others store.

python -m benchmarks.delta.fine_tunes models data --models minilm mpnet gemma3 --work FOLDER

Each model is fine-tuned in full on a task of GLUE, for some hundred steps of AdamW without weight decay, the default
of transformers' trainer; Gemma answers prompts by one of two words. Base and fine-tune are compared in float32, and
both rounded to bfloat16. Beside this package's encodings stand those of others, written anew in `other_forms.py`: XOR
with the base and zstd (BitX of ZipLLM), and the codes of int4 and sign (BitDelta) as they are, without zstd. Times are
of the process: to write the file, and to have all tensors again. Points are of the fine-tune with its decoded tensors
in their dtype, computed in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.modeling_outputs import SequenceClassifierOutput

from benchmarks.common.device import device_name, parse_options, result_file
from benchmarks.common.table_format import table as markdown
from benchmarks.delta.other_forms import read_bitx, without_zstd, write_bitx
from benchmarks.delta.size import predict, quiet
from benchmarks.evidence import decoders, prompts, tasks, training
from peft_surgical import convert_adapter, diff_checkpoints
from peft_surgical.files.checkpoint import Checkpoint, ModelTensors, empty_model, tied_names
from peft_surgical.methods.config import open_adapter


WEIGHTS = "adapter_model.safetensors"
TASK = {"minilm": "sst2", "mpnet": "sst2", "gemma3": "sst2"}
STEPS = {"minilm": 400, "mpnet": 150, "gemma3": 100}
RATE = {"minilm": 1e-4, "mpnet": 3e-5, "gemma3": 2e-5}
BATCH, ROWS = 8, 400  # rows of a step, and of the validation rows at most
BOUND = 0.15
"""The error that `auto` may make: that of int4 is a tenth of a difference or a bit more."""


def fine_tune(base: Path, folder: Path, name: str, data: Path, *, steps: int, rate: float, seed: int = 0) -> None:
    """Fine-tune all weights of a model, kept in float32, and save it; nothing is done where that was done before."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = open_model(base, name, tokenizer, dtype=torch.float32)
    rows = rows_of(base, name, tokenizer, data).train
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for step in range(steps):
        index = torch.randint(len(rows), (BATCH,))
        inputs = training.cut(rows, index, int(rows.lengths[index].max()))
        loss = training.task_loss(training.logits_of(model.train(), inputs), rows.labels[index])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10) * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"{base.name} {name}: step {step}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)


def open_model(folder: Path, name: str, tokenizer: Any, **options: Any) -> Any:
    """A model that gives the logits of a task's classes; of a decoder those of the answers to a prompt."""
    if not decoders.is_decoder(folder):
        outputs = tasks.TASKS[name].outputs
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=outputs, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    answers = prompts.answers(name, tokenizer)

    def answer(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SequenceClassifierOutput:
        states = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last = states[torch.arange(len(states)), attention_mask.sum(1) - 1]  # padding is on the right
        return SequenceClassifierOutput(logits=nn.functional.linear(last, model.lm_head.weight[answers]))

    model.forward = answer
    return model


def rows_of(folder: Path, name: str, tokenizer: Any, data: Path) -> tasks.TaskData:
    """The rows of a task as such a model takes them."""
    return (prompts if decoders.is_decoder(folder) else tasks).load(name, tokenizer, data)


def halved(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint in bfloat16."""
    if not (target / "config.json").exists():
        target.mkdir(parents=True, exist_ok=True)
        rounded = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors_in(folder).items()}
        save_file(rounded, target / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return target


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


# ---- what is compared


FORMS = {
    "the tensors": ("values", 0.0),
    "lossless": ("lossless", 0.0),
    "auto": ("auto", 0.0),
    "bf16": ("bf16", 0.0),
    "int8": ("int8", 0.0),
    "int4": ("int4", 0.0),
    f"auto, at most {BOUND}": ("auto", BOUND),
    "sign": ("sign", 0.0),
}


def measure(name: str, base: Path, tuned: Path, work: Path, rounds: int, score: Callable[[dict], float]) -> list[dict]:
    """All forms of one fine-tune; `score` gives the points of decoded tensors, by the checkpoint's names."""
    work.mkdir(parents=True, exist_ok=True)
    diff_checkpoints(base, tuned, work / "values")
    saved = open_adapter(work / "values")
    model = empty_model(Checkpoint(tuned))
    old = ModelTensors(Checkpoint(base), model)
    tied = {name for name in tied_names(model) if name not in old.checkpoint}  # others store them once
    trained = {entry.name: saved.decode(entry).clone() for entry in saved.entries if entry.name not in tied}
    whole = sum(tensor.nbytes for tensor in trained.values())
    before = {entry.name: old[entry.name].clone() for entry in saved.entries if entry.is_copy and entry.name in old}
    rows = []

    def add(
        form: str, nbytes: int, write: float | None, load: float | None, found: Mapping[str, torch.Tensor]
    ) -> None:
        rows.append({"model": name, "form": form, "bytes": nbytes, "whole": whole, "write": write, "load": load})
        is_same = len(rows) > 1 and rows[-2]["form"] == f"{form}, without zstd"
        same = {key: rows[-2][key] for key in ("error", "points")} if is_same else None
        rows[-1].update(same or {"error": error_of(found, trained, before), "points": score(dict(found))})
        print(rows[-1], flush=True)

    path = work / "bitx.safetensors"
    write = seconds(lambda: write_bitx(trained, before, path), rounds)
    load = seconds(lambda: read_bitx(path, trained, before), rounds)
    add("XOR and zstd (BitX)", path.stat().st_size, write, load, read_bitx(path, trained, before))
    for form, (encoding, bound) in FORMS.items():
        folder = work / form.replace(" ", "-")
        options: dict[str, Any] = {"encoding": encoding, "max_error": bound, "base": base}
        write = seconds(lambda: convert_adapter(work / "values", folder, **options), rounds)  # noqa: B023
        load = seconds(lambda: dict(decoded(folder, before)), rounds)  # noqa: B023
        found = dict(decoded(folder, before))
        if encoding in ("int4", "sign") and not bound:
            add(f"{form}, without zstd", without_zstd(trained, before, encoding), None, None, found)
        add(form, (folder / WEIGHTS).stat().st_size, write, load, found)
    return rows


def decoded(folder: Path, base: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of an adapter, in memory of their own."""
    saved = open_adapter(folder)
    for entry in saved.entries:
        yield entry.name, saved.decode(entry, base.get(entry.name)).clone()


def error_of(
    found: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]
) -> float:
    """The norm of all errors over that of all differences, with what is decoded rounded to the fine-tune's dtype."""
    errors, moves = [], []
    for name, tensor in trained.items():
        if name in base and base[name].shape == tensor.shape:
            errors.append(float((found[name].to(tensor.dtype).double() - tensor.double()).norm()))
            moves.append(float((tensor.double() - base[name].double()).norm()))
    return math.hypot(*errors) / math.hypot(*moves)


def scorer(tuned: Path, name: str, data: Path, tokenizer: Any) -> Callable[[dict], float]:
    """Gives the points of the fine-tune on validation rows with other values."""
    task = tasks.TASKS[name]
    rows = rows_of(tuned, name, tokenizer, data).validation
    most = ROWS // 2 if decoders.is_decoder(tuned) else ROWS
    rows = rows.take(torch.arange(len(rows))[:: max(1, math.ceil(len(rows) / most))])
    model = open_model(tuned, name, tokenizer, dtype="auto").eval()
    tensors = dict(model.named_parameters())  # tied ones once
    dtypes = {key: tensor.dtype for key, tensor in tensors.items()}
    own, last = {key: tensor.detach().clone() for key, tensor in tensors.items()}, {}

    def score(values: dict[str, torch.Tensor]) -> float:
        rounded = {key: tensor.to(dtypes[key]) for key, tensor in values.items() if key in dtypes}
        is_own = all(torch.equal(tensor, own[key]) for key, tensor in rounded.items())
        if not (is_own and last):  # what restores every bit has the points of the fine-tune itself
            model.load_state_dict({**own, **rounded}, strict=False)
            points = 100 * tasks.score(task, predict(model.float(), rows), rows)[task.metric]
            model.to(next(iter(dtypes.values())))
            if not is_own:
                return points
            last["own"] = points
        return last["own"]

    return score


def seconds(do: Callable[[], object], rounds: int) -> float:
    """The process's time, the median of some rounds."""
    taken = []
    for _ in range(rounds):
        started = time.process_time()
        do()
        taken.append(time.process_time() - started)
    return statistics.median(taken)


def table(record: dict[str, Any]) -> str:
    """The results as a table in Markdown."""
    rows = record["rows"]
    lines = []
    for row in rows:
        file = next(r["bytes"] for r in rows if r["model"] == row["model"] and r["form"] == "the tensors")
        whole = row.get("whole", file)
        times = [f"{1e3 * row[what]:.0f}" if row[what] is not None else "" for what in ("write", "load")]
        error = f"{row['error']:.1e}" if row["error"] else "0"
        sizes = [f"{row['bytes'] / 1e6:.2f}", f"{row['bytes'] / whole:.3f}"]
        lines.append([row["model"], row["form"], *sizes, *times, error, f"{row['points']:.1f}"])
    head = ["fine-tune", "form", "MB", "of the tensors", "write ms", "load ms", "error", "points"]
    trained = ", ".join(f"{name} {steps} on {task}" for name, (steps, task) in record["trained"].items())
    return (
        f"Full fine-tunes, steps of {BATCH} rows: {trained}; points on up to {ROWS} validation rows, of "
        f"Gemma {ROWS // 2}; on "
        f"{record['device']}.\n\n{markdown(head, lines)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="the folder with the models")
    parser.add_argument("data", nargs="?", type=Path, help="the folder with glue/")
    parser.add_argument("--models", nargs="+", default=list(TASK), choices=TASK)
    parser.add_argument("--work", type=Path, default=Path("models/fine-tunes"), help="where fine-tunes are kept")
    parser.add_argument("--rounds", type=int, default=3, help="how often a time is taken")
    options = parse_options(parser, table)
    if options.folder is None or options.data is None:
        parser.error("name the folder of the models and the data")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    quiet()
    file = result_file(options.output, "delta_fine_tunes")
    record: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"trained": {}, "rows": []}
    record["device"] = device_name()
    for name in options.models:  # what is there of the others stays
        record["rows"] = [row for row in record["rows"] if not row["model"].startswith(f"{name},")]
        record["trained"][name] = [STEPS[name], TASK[name]]
        task, work = TASK[name], options.work / f"{name}-{TASK[name]}"
        base = whole_base(options.folder / name, options.work)
        fine_tune(base, work, task, options.data, steps=STEPS[name], rate=RATE[name])
        tokenizer = AutoTokenizer.from_pretrained(base)
        for dtype in ("float32", "bfloat16"):
            pair = [base, work] if dtype == "float32" else [halved(f, Path(f"{f}-bfloat16")) for f in (base, work)]
            score = scorer(pair[1], task, options.data, tokenizer)
            rounds = options.rounds if name != "gemma3" else 1
            record["rows"] += measure(f"{name}, {dtype}", *pair, options.work / f"{name}-{dtype}", rounds, score)
            file.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{table(record)}\n\nwritten to {os.path.relpath(file)}")


def whole_base(folder: Path, work: Path) -> Path:
    """A base as a checkpoint of safetensors in float32; Gemma comes in blocks of a few bits."""
    if not (folder / "model.gguf").exists():
        return folder
    target = work / folder.name
    if not (target / "config.json").exists():
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
        model.hf_quantizer = None  # its tensors are plain ones by now, which transformers does not know
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target


if __name__ == "__main__":
    main()
