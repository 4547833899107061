"""A round trip of both methods on every architecture of transformers, and of LoRA as control where one is not right.

python -m benchmarks.architectures.round_trip                 # all of them; half an hour on a CPU
python -m benchmarks.architectures.round_trip bert zamba

Train two steps, as a plain model of which the same tensors are trained by hand; save, load on a fresh base; a second
adapter with other layers, switch, disable, delete; merge, save, load with plain transformers. Each output must be what
it was, bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from benchmarks.architectures.tiny_models import Architecture, architectures, batch, build, loss_of, over
from benchmarks.common.device import parse_options, result_file
from benchmarks.common.table_format import table as markdown
from peft_surgical import StratifiedConfig, SurgicalConfig, find_stacks


METHODS = ("SURGICAL", "STRATIFIED", "LORA")
STEPS = ["config", "wrap", "train", "train, by hand", "save", "load", "second adapter", "switch"]
STEPS += ["second adapter, save and load", "delete, unload", "merge", "merge, save", "merge, save, load"]
TASK_TYPES = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS",
}


_IN_BASE = re.compile(r"\.base_layer|\.own_tensors|\.surgical_params\.\w+|\.modules_to_save\.\w+|\.original_module")


class Wrong(Exception):
    """An answer that is not what it should be."""


def round_trip(entry: Architecture) -> dict[str, Any]:
    """What came of each method on one architecture."""
    warnings.simplefilter("ignore")
    pristine = build(entry)
    inputs = batch(pristine, entry)
    if difference(outputs(pristine, inputs), outputs(pristine, inputs)):
        return {"skipped": "its own answers differ from call to call"}
    plain = _fault(lambda: _check_plain_loading(pristine, inputs))
    row: dict[str, Any] = {"plain": plain or "right"}
    for method in METHODS:
        if method != "LORA" or any(row[ours]["result"] != "right" for ours in METHODS[:2]):
            row[method] = _try(method, pristine, entry, inputs, merges=plain is None)
    return row


def _fault(function: Callable[[], None]) -> str | None:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:400]
    return None


def _check_plain_loading(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Whether transformers itself saves and loads the model without a change."""
    with tempfile.TemporaryDirectory() as folder:
        again: Any = copy.deepcopy(model)
        again.save_pretrained(folder)
        _same("plain save and load", outputs(model, inputs), outputs(type(model).from_pretrained(folder), inputs))


def _try(
    method: str, pristine: nn.Module, entry: Architecture, inputs: dict[str, Any], merges: bool
) -> dict[str, Any]:
    trip = Trip(method, pristine, entry, inputs, merges)
    try:
        trip.run()
    except Wrong as error:
        return {"result": "wrong", "at": trip.step, "why": str(error)}
    except Exception as error:
        return {"result": "refused", "at": trip.step, "why": f"{type(error).__name__}: {error}"[:600]}
    return {"result": "right", "by hand": trip.is_compared}


class Trip:
    def __init__(
        self, method: str, pristine: nn.Module, entry: Architecture, inputs: dict[str, Any], merges: bool = True
    ):
        self.method, self.pristine, self.entry, self.inputs, self.merges = method, pristine, entry, inputs, merges
        self.step = "config"
        self.is_compared = False  # with training by hand

    def run(self) -> None:
        base = outputs(self.pristine, self.inputs)
        self.step = "wrap"
        model = self.wrapped(copy.deepcopy(self.pristine), 0)
        _same("a new adapter", base, outputs(model, self.inputs))
        self.step = "train"
        train(model, self.inputs)
        first = outputs(model, self.inputs)
        if not difference(base, first):
            raise Wrong("training changed nothing")
        if self.method == "SURGICAL" and (plain := by_hand(model, copy.deepcopy(self.pristine))) is not None:
            self.step, self.is_compared = "train, by hand", True
            train(plain, self.inputs)
            _same("a plain model, trained by hand", outputs(plain, self.inputs), first)
        with tempfile.TemporaryDirectory() as place:
            self.step = "save"
            model.save_pretrained(f"{place}/one")
            self.step = "load"
            loaded = PeftModel.from_pretrained(copy.deepcopy(self.pristine), f"{place}/one", is_trainable=True).eval()
            _same("loaded", first, outputs(loaded, self.inputs))
            self.step = "second adapter"
            loaded.add_adapter("two", self.config(1))
            loaded.set_adapter("two")
            _same("a new second adapter", base, outputs(loaded, self.inputs))
            train(loaded, self.inputs)
            second = outputs(loaded, self.inputs)
            self.step = "switch"
            loaded.set_adapter("default")
            _same("after switching", first, outputs(loaded, self.inputs))
            with loaded.disable_adapter():
                _same("with adapters disabled", base, outputs(loaded, self.inputs))
            self.step = "second adapter, save and load"
            loaded.save_pretrained(f"{place}/both")
            other = PeftModel.from_pretrained(
                copy.deepcopy(self.pristine), f"{place}/both/two", adapter_name="x"
            ).eval()
            other.load_adapter(f"{place}/one", "y")
            _same("the second, loaded", second, outputs(other, self.inputs))
            other.set_adapter("y")
            _same("the first, loaded beside it", first, outputs(other, self.inputs))
            self.step = "delete, unload"
            other.delete_adapter("x")
            _same("after deleting another", first, outputs(other, self.inputs))
            _same("unloaded", base, outputs(other.unload(), self.inputs))
            self.step = "merge"
            model.merge_adapter()
            merged = outputs(model, self.inputs)
            self.about("merged", first, merged)
            model.unmerge_adapter()
            self.about("unmerged", first, outputs(model, self.inputs))
            plain: Any = model.merge_and_unload()
            _same("merged and unloaded", merged, outputs(plain, self.inputs))
            if not self.merges:
                return
            self.step = "merge, save"
            plain.save_pretrained(f"{place}/merged")
            self.step = "merge, save, load"
            again = type(plain).from_pretrained(f"{place}/merged").eval()
            _same("merged, saved, loaded", merged, outputs(again, self.inputs))

    def about(self, what: str, right: list[torch.Tensor], seen: list[torch.Tensor]) -> None:
        """A merge of LoRA adds, which rounds; one of copies does not."""
        _same(what, right, seen, 0 if self.method == "SURGICAL" else 2e-3)

    def wrapped(self, model: Any, number: int) -> Any:
        torch.manual_seed(number)
        return get_peft_model(model, self.config(number)).eval()

    def config(self, number: int) -> Any:
        task_type = TASK_TYPES.get(self.entry.task)
        options: dict[str, Any] = {"task_type": task_type}
        if self.method == "LORA":
            return LoraConfig(r=2, target_modules="all-linear", init_lora_weights=True, **options)
        stacks = find_stacks(self.pristine)
        if not stacks:
            raise ValueError("no stacks")
        if self.method == "SURGICAL":
            chosen = {name: _layers(len(stack), number) for name, stack in stacks.items()}
            return SurgicalConfig(layers=chosen if len(stacks) > 1 else next(iter(chosen.values())), **options)
        strata = {name: _strata(stack, number) for name, stack in stacks.items()}
        plan = strata if len(stacks) > 1 else next(iter(strata.values()))
        return StratifiedConfig(strata=plan, r=2, target_modules="all-linear", **options)


def _layers(depth: int, number: int) -> list[int]:
    """The second and the last layer, or the first and the second."""
    return sorted({min(1, depth - 1), depth - 1} if number == 0 else {0, min(1, depth - 1)})


def _strata(stack: Any, number: int) -> list[dict[str, Any]]:
    depth = len(stack)
    tunes = ["frozen", "bitfit", "lora"] if number == 0 else ["full", "frozen", "lora"]
    tunes = tunes[-depth:]
    ends = [*range(len(tunes) - 1), depth - 1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    strata = []
    for start, end, tune in zip(starts, ends, tunes, strict=True):
        layers = [layer.module for layer in stack.layers[start : end + 1]]
        if tune == "bitfit" and not _has_biases(layers[0]):
            tune = "norm" if all(_has_norms(layer) for layer in layers) else "full"
        if tune == "lora" and not all(_has_linear(layer) for layer in layers):
            tune = "full"
        strata.append({"layers": list(range(start, end + 1)), "tune": tune})
    return strata


def _has_norms(module: nn.Module) -> bool:
    return any("norm" in type(inner).__name__.lower() and inner._parameters for inner in module.modules())


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(inner, nn.Linear) for inner in module.modules())


def _has_biases(module: nn.Module) -> bool:
    return any(name.endswith(".bias") for name, _ in module.named_parameters())


def by_hand(adapted: nn.Module, plain: nn.Module) -> nn.Module | None:
    """A plain model, of which the tensors are trained that an adapter trains.

    None where that is no comparison: running statistics move in a plain model and not under an adapter, and a tensor
    that several layers share is trained for all of them.
    """
    if any("running_" in name for name, _ in plain.named_buffers()):
        return None
    counts = Counter(id(p) for _, p in plain.named_parameters(remove_duplicate=False))
    plain.requires_grad_(False)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            tensor = plain.get_parameter(_IN_BASE.sub("", name.removeprefix("base_model.model.")).replace("|", "."))
            if counts[id(tensor)] > 1:
                return None
            tensor.requires_grad_()
    return plain


def train(model: nn.Module, inputs: dict[str, Any]) -> None:
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        transformers.set_seed(step)  # NumPy too, which draws the masks of speech
        loss_of(model(**inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def outputs(model: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors of a model's answer."""
    model.eval()
    torch.manual_seed(0)
    found: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, Mapping):
            for part in value.values():
                collect(part)
        elif isinstance(value, (list, tuple)):
            for part in value:
                collect(part)

    collect(model(**copy.deepcopy(inputs)))
    return found


def difference(right: list[torch.Tensor], seen: list[torch.Tensor]) -> float:
    if [t.shape for t in right] != [t.shape for t in seen]:
        return float("inf")
    worst = 0.0
    for a, b in zip(right, seen, strict=True):
        if not torch.equal(a, b) and not torch.equal(a.isnan(), b.isnan()):
            return float("inf")
        if a.numel():
            worst = max(worst, (a.double().nan_to_num() - b.double().nan_to_num()).abs().max().item())
    return worst


def _same(what: str, right: list[torch.Tensor], seen: list[torch.Tensor], tolerance: float = 0) -> None:
    apart = difference(right, seen)
    if apart > tolerance:
        raise Wrong(f"{what}: differs by {apart:.1e}")


# ---- the table


def outcome(row: Mapping[str, Any], method: str) -> str:
    """What a row says of a method: right, refused, wrong, or that LoRA has no answer either."""
    result = row[method]["result"]
    if result == "right":
        return "right"
    # what goes wrong at the same step or before with LoRA is the architecture's or PEFT's
    if row["LORA"]["result"] != "right" and STEPS.index(row["LORA"]["at"]) <= STEPS.index(row[method]["at"]):
        return "LoRA fails as well"
    return result


def table(record: Mapping[str, Any]) -> str:
    """The counts as a table in Markdown."""
    rows = [row for row in record["rows"] if "SURGICAL" in row]
    others = Counter(_why_not(row) for row in record["rows"] if row not in rows)
    by_hand = sum(row["SURGICAL"].get("by hand", False) for row in rows)
    kinds = ["right", "refused", "LoRA fails as well", "wrong"]
    lines = []
    for method in METHODS[:2]:
        counts = Counter(outcome(row, method) for row in rows)
        lines.append([method, *(str(counts[kind]) for kind in kinds)])
    tail = "".join(f"; {count} {what}" for what, count in others.items())
    counted = f"{len(rows)} architectures{tail}; {by_hand} compared with training by hand"
    head = f"transformers {record['transformers']}: {counted}."
    reasons: Counter[str] = Counter()
    for row in rows:
        for method in METHODS[:2]:
            if outcome(row, method) == "refused":
                reasons[words_of(row[method]["why"])] += 1
    refused = [[f"`{why}`", str(count)] for why, count in reasons.most_common()]
    parts = [head, "", markdown(["", *kinds], lines)]
    return "\n".join([*parts, *(["", markdown(["refused with", ""], refused)] if refused else [])])


def _why_not(row: Mapping[str, Any]) -> str:
    if "crash" in row:
        return "took too long" if row["crash"].startswith("took longer") else "cannot be built"
    return "skipped, for their own answers differ from call to call"


def words_of(why: str) -> str:
    """An error without folders, names and numbers, so that like ones are counted together."""
    line = re.sub(r"(?<!\w)/\S*/", "", why.splitlines()[0])
    line = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\{[^}]*\}|\d+|\w+(\.\w+){2,}", "…", line)
    return line[:120].replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="all by default")
    parser.add_argument("--skip", type=Path, help="the lines of an earlier run, whose rows are taken as they are")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--lines", type=Path, help="a file that each row is written to as it comes")
    options = parse_options(parser, table)
    wanted = options.model_types
    entries = [entry for entry in architectures() if not wanted or entry.model_type in wanted]
    rows = [json.loads(line) for line in options.skip.read_text().splitlines()] if options.skip else []
    entries = [entry for entry in entries if entry.model_type not in {row["model_type"] for row in rows}]
    random.Random(0).shuffle(entries)  # so that what is done so far is like the rest
    for entry, answer in over(round_trip, entries, processes=options.processes, seconds=240):
        row = {**entry._asdict(), **answer}
        rows.append(row)
        print(
            entry.model_type,
            answer.get("crash", "")[:200],
            *(f"{m}={_short(row[m])}" for m in METHODS if m in row),
            flush=True,
        )
        if options.lines:
            with options.lines.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
    record = {"transformers": transformers.__version__, "rows": rows}
    print(table(record))
    if not wanted:
        result_file(options.output, "architectures_round_trip").write_text(json.dumps(record, indent=1) + "\n")


def _short(result: Mapping[str, Any]) -> str:
    return (
        result["result"]
        if result["result"] == "right"
        else f"{result['result']} at {result['at']}: {result['why'][:160]};"
    )


if __name__ == "__main__":
    main()
