"""The folder of a run of training: what may be in it, its card to read, and its way to the hub.

A folder in use is refused, an interrupted run can be resumed, and a finished one has `metrics.json`.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData, get_token
from torch import nn

from peft_surgical.distributed import this_process
from peft_surgical.layers import unwrap
from peft_surgical.methods.card import CARD_FILE, TAG, AdapterCard, loading_code, place_of
from peft_surgical.methods.config import DeltaConfig
from peft_surgical.training.checkpoints import checkpoint_folders, newest_checkpoint
from peft_surgical.training.job import JOB_FILE, TrainingJob
from peft_surgical.training.options import CAUSAL_LM, check_writable
from peft_surgical.training.progress import describe_tried


RANKING_FILE = "ranking.json"
METRICS_FILE = "metrics.json"


def check_folder(job: TrainingJob, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any] | None:
    """Make sure that a job may write its folder: a new one, or to resume its own, or to overwrite that of any job.
    Gives the results of the run that is to be resumed, if it is finished and the job asks for no more."""
    folder = Path(job.output)
    if resume and overwrite:
        raise ValueError("--resume goes on with what is in the folder and --overwrite empties it. Drop one.")
    check_writable("--output", folder)
    if not folder.exists() or not any(folder.iterdir()):
        return None
    if not (folder / JOB_FILE).exists():
        raise ValueError(
            f"--output {folder} holds files that were not written by `peft-surgical train`. Choose another folder."
        )
    if not resume and not overwrite:
        raise ValueError(f"--output {folder} is not empty. Use --resume to go on, --overwrite to start over.")
    old = TrainingJob.load(folder) if resume else job
    for name, now in vars(job).items():
        before = getattr(old, name)
        may_change = name in ("output", "keep_checkpoints", "report_to", "log_every", "push_to_hub")
        if before != now and not may_change and not _is_longer(name, before, now):
            raise ValueError(
                f"--resume: {name} was {before!r} when the run in {folder} started and is {now!r} now. A resumed run "
                "keeps its options, but for more --epochs or --max-steps; use --overwrite to start another."
            )
    if not resume or not (folder / METRICS_FILE).exists():
        return None
    if not any(_is_longer(name, getattr(old, name), now) for name, now in vars(job).items()):
        return json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
    if not any(newest_checkpoint(place) for place in checkpoint_folders(folder)):
        raise ValueError(
            f"--output {folder} holds a finished run without the checkpoints that it could go on from, which "
            "--keep-checkpoints keeps. Use --overwrite to start over."
        )
    return None


def check_rows(folder: Path, rows: dict[str, Any]) -> None:
    """Make sure that a run that is resumed has the rows that it began with, as far as its folder tells."""
    file = folder / JOB_FILE
    before = json.loads(file.read_text(encoding="utf-8")).get("rows") if file.exists() else None
    if before not in (None, rows):
        counts = f"{before['count']:,} rows then and {rows['count']:,} now"
        what = counts if before["count"] != rows["count"] else "as many rows, with other contents or labels"
        raise ValueError(
            f"--resume: the training data are not those that the run in {folder} began with: {what}. Put the data "
            "back as they were, or use --overwrite to start over with these."
        )


def _is_longer(name: str, before: Any, now: Any) -> bool:
    """Whether an option makes a run that is resumed longer; -1 steps are as many as the epochs need."""
    return name in ("epochs", "max_steps") and before != now and (now == -1 or 0 < before < now)


def check_login(name: str) -> None:
    """Make sure that somebody is logged in to the hub, on whose account a repository of this name can be written."""
    if get_token() is None:
        raise ValueError(f"--push-to-hub {name}: you are not logged in. Run `hf auth login`, or set HF_TOKEN.")


def make_repository(name: str) -> str:
    """Make a repository for a model on the hub, if there is none of this name; gives its name with its owner."""
    check_login(name)
    try:
        return HfApi().create_repo(name, exist_ok=True).repo_id
    except Exception as error:  # of the library of HTTP that the hub's version takes
        raise ValueError(f"--push-to-hub {name}: {error}") from error


def push(job: TrainingJob) -> str | None:
    """Upload what a finished run has saved, without checkpoints, if its job says to where; gives the address, on the
    first process alone. If it fails, a `ValueError` has the command that tries again."""
    if job.push_to_hub is None or not this_process().is_main_process:
        return None
    try:
        repository = make_repository(job.push_to_hub)
        HfApi().upload_folder(repo_id=repository, folder_path=job.output, ignore_patterns=["*/*"])
    except Exception as error:
        again = f"peft-surgical train --output {shlex.quote(job.output)} --resume --push-to-hub {job.push_to_hub}"
        raise ValueError(
            f"The run is saved in {job.output}, but not on the hub. {error}\nTo push it: {again}"
        ) from error
    return f"{HfApi().endpoint}/{repository}"


def write_model_card(run: Any, results: dict[str, Any]) -> None:
    """Write `README.md` into the folder of a `TrainingRun`; `results` is the content of `metrics.json`."""
    job, parts, ranking = run.job, run.prepared.parts, run.ranking
    is_language = results["task"]["kind"] == CAUSAL_LM
    task, evaluation, training = results["task"], results["evaluation"], results["training"]
    metrics = {name: value for name, value in evaluation.items() if name not in ("rows", "samples")}
    metadata = ModelCardData(
        base_model=None if Path(job.model).exists() else job.model,  # the hub refuses a card that names a folder
        library_name="transformers" if job.method == "full" else "peft",
        pipeline_tag="text-generation" if is_language else "text-classification",
        tags=[TAG, job.method, *(["sft", "trl"] if is_language else [])],
        metrics=[name for name in metrics if name != "loss"],
    )
    columns = " and ".join(f"`{column}`" for column in task["text_columns"])
    wanted = f"the classes {', '.join(task['labels'])}" if task["labels"] else "an amount"
    aim = f"to write as in {columns}" if is_language else f"to tell {wanted} from {columns}"
    trained, total = results["parameters"]["trained"], results["parameters"]["total"]
    notes, beside = "", describe_majority(results["majority"])
    if results.get("base"):
        reached = ", ".join(f"{name} {value:.4f}" for name, value in results["base"].items())
        beside = f"The base model by itself has {reached}."
    if parts.optimistic:
        notes += "\n\n**The checkpoint was chosen on the rows it is measured on, so these numbers are too good.**"
    if parts.overlap:
        notes += (
            f"\n\n{parts.overlap:,} of the {evaluation['samples']:,} evaluation rows have a text that is also in the "
            "training or selection rows."
        )
    if results.get("answers"):
        notes += "\n\n## Answers\n\nTo the first evaluation rows."
        for row in results["answers"]:
            said = {"asked": row["prompt"], "answered": row["answer"], "the data has": row["reference"]}
            notes += "\n\n" + "\n".join(f"- *{name}*: {' '.join(text.split())}" for name, text in said.items())
    if results.get("tried"):
        notes += "\n\n## Layers tried\n\nEach in turn; what was best on the rows that choose the checkpoint is kept."
        notes += f"\n\n```text\n{describe_tried(results['tried'])}\n```"
    if ranking is not None:
        source = f"read from `{job.ranking}`" if job.ranking else "made on training rows before training"
        notes += f"\n\n## Ranking of the layers\n\nThe ranking was {source}.\n\n```text\n{ranking}\n```"
    config = {**dataclasses.asdict(job), "learning_rate": run.learning_rate}
    text = f"""---
{metadata.to_yaml()}
---

# {Path(job.output).resolve().name}

`{job.model}`, tuned by the method *{job.method}* ({job.about}) {aim} of \
`{job.data}`.

Trained: {trained:,} of {total:,} parameters ({share(trained, total)}).

## Results

Measured on {evaluation["samples"]:,} rows: {evaluation["rows"]}.

| {" | ".join(metrics)} |
|{" ---: |" * len(metrics)}
| {" | ".join(f"{value:.4f}" for value in metrics.values())} |

{beside}

Trained on {training["samples"]:,} {training["rows"]}. {describe_selection(results)}{notes}

{_use(run.folder, job, task, run.model)}

## Exact configuration

```json
{json.dumps(config, indent=2)}
```

Made with {", ".join(f"{name} {number}" for name, number in results["versions"].items())}.
"""
    (run.folder / CARD_FILE).write_text(text, encoding="utf-8")


def share(part: float, whole: float) -> str:
    """A share in percent, with two significant digits.

    Example:

        >>> share(770, 22_713_986), share(1, 3), share(4, 3), share(1, 10**8)
        ('0.0034%', '33%', '133%', '<0.001%')
    """
    percent = 100 * part / whole
    if 0 < percent < 0.001:
        return "<0.001%"
    return f"{percent:.2g}%" if percent < 99.5 else f"{percent:.0f}%"


def describe_selection(results: dict[str, Any]) -> str:
    """How the checkpoint was chosen, in a sentence or two, from the content of `metrics.json`."""
    selection = results["selection"]
    if selection is None:
        return "The last checkpoint was taken; none was chosen by its quality."
    best = "" if selection["best"] is None else f" ({selection['best']:.4f} at step {selection['best_step']})"
    return (
        f"The checkpoint with the best {selection['metric']}{best} was taken, measured on {selection['samples']:,} "
        f"rows: {selection['rows']}."
    )


def describe_majority(majority: dict[str, Any] | None) -> str:
    """What is reached by always saying the most frequent class, in a sentence; nothing for regression."""
    if majority is None:
        return ""
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in majority.items() if name not in ("label", "share"))
    part = share(majority["share"], 1)
    return f"Always answering '{majority['label']}', the class of {part} of these rows, gives {metrics}."


def describe_layers(layers: dict[str, list[int]]) -> str:
    """The layers that are trained, by stack, in words."""
    return "; ".join(f"{stack} {', '.join(map(str, chosen))}" for stack, chosen in layers.items()) or "none"


def _use(folder: Path, job: TrainingJob, task: dict[str, Any], model: nn.Module) -> str:
    """The section with code that loads the model from its folder and asks it."""
    is_language = task["kind"] == CAUSAL_LM
    base = place_of(job.model, folder)
    source = "." if job.method == "full" or is_language else base
    ask = f'tokenizer = AutoTokenizer.from_pretrained("{source}")\n'
    ask += _ask_language(task) if is_language else _ask_classifier(task)
    config = getattr(model, "peft_config", {}).get("default")
    if isinstance(config, DeltaConfig):
        return AdapterCard(folder, "default", type(unwrap(model))).section(config, ["AutoTokenizer"], ask)
    kind = type(unwrap(model)).__name__
    if job.method == "full":
        load = f'from transformers import {kind}, AutoTokenizer\n\nmodel = {kind}.from_pretrained(".")'
    else:
        number = "" if is_language else f", num_labels={len(task['labels']) or 1}"
        load = loading_code(kind, base, method=None, options=number, tools=["AutoTokenizer"])
    return f"## Load it\n\nIn the folder of this card:\n\n```python\n{load}\n{ask}\n```"


def _ask_classifier(task: dict[str, Any]) -> str:
    labels = task["labels"]
    texts = '"A text"' if len(task["text_columns"]) == 1 else '"A text", "another text"'
    return f"""logits = model(**tokenizer({texts}, return_tensors="pt")).logits
print({f"{[*labels]}[logits.argmax()]" if labels else "float(logits)"})"""


def _ask_language(task: dict[str, Any]) -> str:
    if task["form"] == "text":
        inputs = 'tokenizer("Once upon a time", return_tensors="pt")'
    else:
        chat = '[{"role": "user", "content": "A question"}]'
        inputs = f'tokenizer.apply_chat_template(\n    {chat}, add_generation_prompt=True, return_tensors="pt", '
        inputs += "return_dict=True\n)"
    return f"""inputs = {inputs}
said = model.generate(**inputs, max_new_tokens=64)
print(tokenizer.decode(said[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""
