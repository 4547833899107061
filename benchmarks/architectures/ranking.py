"""Whether `rank_layers` is right on every architecture of transformers, tiny and random.

python -m benchmarks.architectures.ranking                 # all; an hour of a CPU
python -m benchmarks.architectures.ranking llama whisper

Each is ranked by hooks in batches of mixed lengths, padded on the right and on the left, and by a plain loop over
samples without padding that differentiates the model's own loss, in float64. Then in float32, bfloat16 and float16,
where only false alarms are looked for. A line of the result says for each what was seen.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.architectures.round_trip import words_of
from benchmarks.architectures.tiny_models import Architecture, architectures, batch, build, loss_of, over
from benchmarks.common.device import parse_options, result_file
from benchmarks.common.table_format import table as markdown
from peft_surgical import rank_layers
from peft_surgical.fisher.tasks import NoLikelihood, find_reader
from peft_surgical.layers import find_stacks


LENGTHS = (9, 4, 7, 6)
ALLOWED = 1e-4
"""Relative error of a score: root mean square norms take float32, also in a float64 model."""


def examine(entry: Architecture, dtypes: tuple[torch.dtype, ...] = ()) -> dict[str, Any]:
    """What ranking an architecture gives: `right`, `refused` with the words, `wrong`, or `no oracle`."""
    model = build(entry)
    if hasattr(model, "set_experts_implementation"):  # the grouped product knows no float64
        model.set_experts_implementation("eager")
    model = model.double()
    for module in model.modules():  # T5Gemma answers otherwise with a cache, where labels are padded on the left
        if getattr(getattr(module, "config", None), "use_cache", None):
            module.config.use_cache = False
    stacks = list(find_stacks(model).values())
    if not stacks:
        return {"outcome": "no layers"}
    outcomes, notes = {}, Counter()
    for side in ("right", "left"):
        whole = batch(model, entry, lengths=LENGTHS, padding_side=side)
        for stack in stacks:
            try:
                layers, samples = [layer.module for layer in stack.layers], list(alone(model, whole))
                truth = oracle(model, layers, samples, known=has_reader(model))
            except (NoOracle, AssertionError) as reason:  # Reformer has no backward pass in evaluation
                truth = str(reason)
            outcomes[f"{side} {stack.name}"] = compare(model, whole, stack.name, truth, notes)
    is_right = all(outcome == "right" for outcome, _ in outcomes.values())
    for dtype in dtypes if is_right else ():
        outcomes |= alarms(entry, dtype, singly="one at a time" in notes)
    worst = max(outcomes.values(), key=lambda outcome: ORDER.index(outcome[0]))
    return {"outcome": worst[0], "words": worst[1], "ways": sorted(notes), "all": outcomes}


ORDER = ("right", "no loss", "refused", "no oracle", "random", "false alarm", "wrong")


def compare(model: nn.Module, whole: dict[str, Any], stack: str, truth: list[float] | str, notes: Counter) -> tuple:
    """The outcome for a stack, with words."""
    with heard() as messages:
        try:
            ranking = rank(model, whole, stack)
        except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
            unused = "No layer gets a gradient" in str(error) and truth == UNUSED
            return ("right" if unused else "refused", f"{type(error).__name__}: {str(error).splitlines()[0]}")
    if any("random" in message for message in messages):
        return ("random", "")
    notes.update("one at a time" for message in messages if "one at a time" in message)
    if isinstance(truth, str):
        return ("no oracle", truth)
    errors = [abs(a - b) / max(truth) for a, b in zip(ranking.scores, truth, strict=True)]
    return ("right", f"{max(errors):.0e}") if max(errors) <= ALLOWED else ("wrong", f"{max(errors):.1e}")


def alarms(entry: Architecture, dtype: torch.dtype, singly: bool) -> dict[str, tuple]:
    """What is said of rounding in another type, where all is right in float64; `singly`: one sample at a time."""
    name = str(dtype).removeprefix("torch.")
    try:
        model = build(entry, dtype=dtype)
        whole = batch(model, entry, lengths=LENGTHS)
    except RuntimeError:  # FNet's Fourier transforms know no bfloat16
        return {}
    found = {}
    for stack in find_stacks(model).values():
        with heard() as messages:
            try:
                rank(model, whole, stack.name)
                said = [m for m in messages if "one at a time" in m and not singly]
                off = [m for m in messages if "off the most" in m]
                found[f"{name} {stack.name}"] = ("false alarm", said[0]) if said else ("right", " ".join(off[:1]))
            except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
                alarm, unused = "not that of autograd" in str(error), "No layer gets a gradient" in str(error)
                outcome = "false alarm" if alarm else "right" if unused else "refused"  # float64 told what is unused
                found[f"{name} {stack.name}"] = (outcome, str(error).splitlines()[0])
    return found


def rank(model: nn.Module, whole: dict[str, Any], stack: str) -> Any:
    def rows(numbers: list[int]) -> dict[str, Any]:
        return {k: v[numbers] if isinstance(v, Tensor) else v for k, v in whole.items()}

    data = list(range(len(LENGTHS)))
    return rank_layers(model, data, data_collator=rows, batch_size=3, stack=stack, progress=False, verify=True)


class heard:
    """What the package logs meanwhile."""

    def __enter__(self) -> list[str]:
        self.messages: list[str] = []
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self.messages.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("peft_surgical.fisher")
        self.level = logger.level
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self.handler)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("peft_surgical.fisher")
        logger.removeHandler(self.handler)
        logger.setLevel(self.level)


# ---- the oracle


UNUSED = "the loss does not depend on the layers"


class NoOracle(Exception):
    """The model's loss is no log-likelihood of a sample."""


def alone(model: nn.Module, whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each sample by itself, without padding."""
    mask = whole.get("attention_mask")
    seq2seq = "decoder_input_ids" in inspect.signature(model.forward).parameters
    for n in range(len(LENGTHS)):
        one = {k: v[n : n + 1] if isinstance(v, Tensor) else v for k, v in whole.items()}
        if mask is not None and mask.dim() == 2:
            shown = mask[n].bool()
            first = int(shown.int().argmax())
            for k, v in one.items():
                of_tokens = isinstance(v, Tensor) and v.shape[:2] == (1, len(shown)) and not v.is_floating_point()
                if of_tokens and not (k == "labels" and seq2seq):
                    one[k] = v[:, shown]
                elif k in ("start_positions", "end_positions"):
                    one[k] = v - first
        yield one


def has_reader(model: nn.Module) -> bool:
    """Whether log p(y|x) is known for the model's head; else its loss is taken as it is."""
    try:
        find_reader(model)
    except NoLikelihood:
        return False
    return True


def oracle(model: nn.Module, layers: list[nn.Module], samples: list[dict[str, Any]], known: bool) -> list[float]:
    """The score of each layer by its definition, from the model's own loss; `known`: a mean over its labels."""
    seen: set[int] = set()
    groups = []
    for layer in layers:
        groups.append([p for p in layer.parameters() if id(p) not in seen and p.is_floating_point()])
        seen |= {id(p) for p in groups[-1]}
    flat = [p for group in groups for p in group]
    total = [torch.zeros_like(p) for p in flat]
    flags = [p.requires_grad for p in flat]
    for p in flat:
        p.requires_grad_()
    drawn = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    for number, place in enumerate(drawn):  # the numbers of the draw, which random numbers of a loss follow
        sample = samples[place]
        transformers.set_seed(number)
        outputs = model(**sample)
        loss = loss_of(outputs)
        for p in flat:
            p.grad = None
        if loss.requires_grad:  # `backward`, since Reformer's own function hides the parameters
            (loss * (slots(model, outputs, sample) if known else 1)).backward()
        grads = [p.grad for p in flat]
        if all(g is None for g in grads):
            raise NoOracle(UNUSED)
        for t, g in zip(total, grads, strict=True):
            t += 0 if g is None else g.square() / len(samples)
    model.zero_grad()
    for p, flag in zip(flat, flags, strict=True):
        p.requires_grad_(flag)
    sums = iter(float(t.double().square().sum()) for t in total)
    return [math.sqrt(sum(next(sums) for _ in group)) for group in groups]


def slots(model: nn.Module, outputs: Any, sample: dict[str, Any]) -> float:
    """How many label slots the loss is a mean of, found by computing it from the logits in the ways there are."""
    loss = float(loss_of(outputs).detach())
    if "start_positions" in sample:
        return 2.0
    labels, logits = sample.get("labels"), getattr(outputs, "logits", None)
    if not isinstance(labels, Tensor) or not isinstance(logits, Tensor):
        raise NoOracle("no logits or no labels")
    logits = logits.detach().double()
    if labels.dim() == 1:
        mean = nn.functional.cross_entropy(logits.view(1, -1), labels) if not labels.is_floating_point() else None
        if mean is None or abs(float(mean) - loss) > 1e-4 * abs(loss):
            raise NoOracle(f"the loss {loss:.4f} is not that of the logits, {mean}")
        return 1.0
    if logits.dim() == 3 and labels.dim() == 2 and not labels.is_floating_point():
        found = {}
        for shift in (1, 0):
            if logits.shape[1] == labels.shape[1]:
                target = labels[:, shift:].flatten()
                mean = nn.functional.cross_entropy(logits[:, : logits.shape[1] - shift].flatten(0, 1), target)
                found[abs(float(mean) - loss) / abs(loss)] = float((target != -100).sum())
        if found and min(found) < 1e-4:
            return found[min(found)]
    raise NoOracle(f"the loss {loss:.4f} is not that of the logits")


# ---- the table


def table(record: Mapping[str, Any]) -> str:
    """The counts as a table in Markdown, and what is refused with which words."""
    rows = record["rows"]
    built = [row for row in rows if "outcome" in row]
    counts = Counter(row["outcome"] for row in built)
    singly = sum(row["outcome"] == "right" and "one at a time" in row["ways"] for row in built)
    head = (
        f"transformers {record['transformers']}: {len(built)} architectures; {len(rows) - len(built)} cannot be built"
    )
    lines = [[what, str(counts[outcome])] for outcome, what in OUTCOMES.items() if counts[outcome]]
    lines.insert(1, ["of these, samples one at a time", str(singly)])
    reasons = Counter(words_of(row["words"]) for row in built if row["outcome"] == "refused")
    refused = [[f"`{why}`", str(count)] for why, count in reasons.most_common()]
    parts = [f"{head} or take too long.", "", markdown(["", "architectures"], lines), ""]
    return "\n".join([*parts, markdown(["refused with", ""], refused)])


OUTCOMES = {
    "right": "equal to the loop",
    "refused": "refused",
    "no oracle": "ranked; the model's own loss is no log-likelihood of its labels",
    "random": "random in evaluation mode, which a warning says",
    "no layers": "no stack of layers",
    "false alarm": "false alarm",
    "wrong": "wrong",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="all by default")
    parser.add_argument("--all-tasks", action="store_true", help="every class, not the first of each model type")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--lines", type=Path, help="a file that each row is written to as it comes")
    options = parse_options(parser, table)
    dtypes = tuple(getattr(torch, name) for name in options.dtypes)
    entries = architectures(all_tasks=options.all_tasks)
    if options.model_types:
        entries = [entry for entry in entries if entry.model_type in options.model_types]
    rows = []
    for entry, found in over(lambda entry: examine(entry, dtypes), entries):
        rows.append({**entry._asdict(), **found})
        print(
            entry.class_name,
            found.get("outcome", "crash"),
            found.get("words", found.get("crash", ""))[:150],
            flush=True,
        )
        if options.lines:
            with options.lines.open("a") as lines:
                lines.write(json.dumps(rows[-1]) + "\n")
    record = {"transformers": transformers.__version__, "rows": rows}
    print(table(record))
    if not options.model_types:
        result_file(options.output, "architectures_ranking").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
