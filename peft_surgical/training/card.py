"""What a run of training writes into its folder beside the model: its job, its results, and a card to read.

A folder in use is refused, an interrupted run can be resumed, and a finished one has `metrics.json`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from transformers import TrainerState

from peft_surgical import __version__
from peft_surgical.ranking.ranking import LayerRanking
from peft_surgical.training.data import Parts, Task
from peft_surgical.training.job import JOB_FILE, TrainingJob, check_writable
from peft_surgical.training.methods import METHODS


logger = logging.getLogger(__name__)

RANKING_FILE = "ranking.json"
METRICS_FILE = "metrics.json"
CHECKPOINTS = "checkpoints"
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "datasets")


def check_folder(job: TrainingJob, *, resume: bool = False, overwrite: bool = False) -> None:
    """Make sure that a job may write its folder: a new one, or to resume its own, or to overwrite that of any job.

    Raises:
        ValueError: It may not; the message says what to do.
    """
    folder = Path(job.output)
    if resume and overwrite:
        raise ValueError("--resume goes on with what is in the folder and --overwrite empties it. Drop one.")
    check_writable("--output", folder)
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / JOB_FILE).exists():
        raise ValueError(
            f"--output {folder} holds files that were not written by `peft-surgical train`. Choose another folder."
        )
    if not resume and not overwrite:
        raise ValueError(f"--output {folder} is not empty. Use --resume to go on, --overwrite to start over.")
    if resume and (folder / METRICS_FILE).exists():
        raise ValueError(f"--output {folder} holds a finished run. Use --overwrite to start over.")
    old = TrainingJob.load(folder) if resume else job
    for name, now in vars(job).items():
        before = getattr(old, name)
        if before != now and name not in ("output", "keep_checkpoints", "report_to"):
            raise ValueError(
                f"--resume: {name} was {before!r} when the run in {folder} started and is {now!r} now. "
                "A resumed run keeps its options; use --overwrite to start another."
            )


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a folder that was written to its end, or None."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for checkpoint in found:
        try:  # the Trainer writes this file last
            json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
            return checkpoint
        except (OSError, ValueError):
            logger.warning("%s is incomplete and is skipped.", checkpoint)
    return None


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)


def make_results(
    job: TrainingJob,
    task: Task,
    parts: Parts,
    state: TrainerState,
    metric: str,
    evaluation: dict[str, float],
    **measured: Any,
) -> dict[str, Any]:
    """The content of `metrics.json`; `measured` is more of it, as it is."""
    selection = None
    if parts.selection is not None:
        best = state.best_model_checkpoint
        selection = {
            "rows": parts.selection_name,
            "samples": len(parts.selection),
            "metric": metric,
            "best": state.best_metric,
            "best_step": int(best.rpartition("-")[2]) if best else None,
        }
    return {
        "method": job.method,
        "task": {name: getattr(task, name) for name in ("kind", "text_columns", "label_column", "labels")},
        "metric": metric,
        "evaluation": {
            "rows": parts.evaluation_name,
            "samples": len(parts.evaluation),
            **_without_prefix(evaluation, "final_"),
        },
        "selection": selection,
        "training": {"rows": parts.train_name, "samples": len(parts.train), "steps": state.global_step},
        **measured,
        "files": {file.name: file.stat().st_size for file in sorted(Path(job.output).glob("*.safetensors"))},
        "history": _history(state.log_history),
        "versions": {"peft_surgical": __version__, **{name: version(name) for name in _LIBRARIES}},
    }


def write_model_card(
    folder: str | Path, job: TrainingJob, parts: Parts, results: dict[str, Any], ranking: LayerRanking | None
) -> None:
    """Write `README.md` into the folder of a trained model; `results` is the content of `metrics.json`."""
    task, evaluation, training = results["task"], results["evaluation"], results["training"]
    metrics = {name: value for name, value in evaluation.items() if name not in ("rows", "samples")}
    metadata = ModelCardData(
        base_model=job.model,
        library_name="transformers" if job.method == "full" else "peft",
        pipeline_tag="text-classification",
        tags=["peft-surgical", job.method],
        metrics=[name for name in metrics if name != "loss"],
    )
    wanted = f"the classes {', '.join(task['labels'])}" if task["labels"] else "an amount"
    columns = " and ".join(f"`{column}`" for column in task["text_columns"])
    trained, total = results["parameters"]["trained"], results["parameters"]["total"]
    layers = describe_layers(results)
    notes = ""
    if parts.optimistic:
        notes += "\n\n**The checkpoint was chosen on the rows it is measured on, so these numbers are too good.**"
    if parts.overlap:
        notes += (
            f"\n\n{parts.overlap:,} of the {evaluation['samples']:,} evaluation rows have a text that is also in the "
            "training or selection rows."
        )
    if ranking is not None:
        source = f"read from `{job.ranking}`" if job.ranking else "made on training rows before training"
        notes += f"\n\n## Which layers matter\n\nThe ranking was {source}.\n\n```text\n{ranking}\n```"
    config = {**dataclasses.asdict(job), "learning_rate": job.peak_learning_rate}
    text = f"""---
{metadata.to_yaml()}
---

# {Path(job.output).resolve().name}

`{job.model}`, tuned by the method *{job.method}* ({METHODS[job.method].about}) to tell {wanted} from {columns} of \
`{job.data}`.

Trained: {trained:,} of {total:,} parameters ({share(trained, total)}){f", in the layers: {layers}" if layers else ""}.

## Results

Measured on {evaluation["samples"]:,} rows: {evaluation["rows"]}.

| {" | ".join(metrics)} |
|{" ---: |" * len(metrics)}
| {" | ".join(f"{value:.4f}" for value in metrics.values())} |

{describe_majority(results["majority"])}

Trained on {training["samples"]:,} {training["rows"]}. {describe_selection(results)}{notes}

## Use

```python
{_usage(job, task)}
```

## Exact configuration

```json
{json.dumps(config, indent=2)}
```

Made with {", ".join(f"{name} {number}" for name, number in results["versions"].items())}.
"""
    (Path(folder) / "README.md").write_text(text, encoding="utf-8")


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
    return f"Always '{majority['label']}', the class of {share(majority['share'], 1)} of these rows, has {metrics}."


def describe_layers(results: dict[str, Any]) -> str:
    """The layers that were trained, from the content of `metrics.json`."""
    return "; ".join(f"{stack} {', '.join(map(str, chosen))}" for stack, chosen in results["layers"].items())


def _usage(job: TrainingJob, task: dict[str, Any]) -> str:
    """Code that loads the model and asks it."""
    labels, here = task["labels"], Path(job.output).resolve().name
    texts = '"A text"' if len(task["text_columns"]) == 1 else '"A text", "another text"'
    imports = "from transformers import AutoModelForSequenceClassification, AutoTokenizer"
    load = "AutoModelForSequenceClassification.from_pretrained"
    if job.method == "full":
        model = f'model = {load}("{here}")'
    else:
        imports = f"import peft_surgical  # makes the method known to PEFT\nfrom peft import PeftModel\n{imports}"
        model = f'base = {load}("{job.model}", num_labels={len(labels) or 1})\n'
        model += f'model = PeftModel.from_pretrained(base, "{here}").eval()'
    return f"""{imports}


{model}
tokenizer = AutoTokenizer.from_pretrained("{here if job.method == "full" else job.model}")
logits = model(**tokenizer({texts}, return_tensors="pt")).logits
print({f"{[*labels]}[logits.argmax()]" if labels else "float(logits)"})"""


def _without_prefix(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    skip = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    names = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    return {name: value for name, value in names.items() if name not in skip}


def _history(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per epoch: the training loss, and the metrics on the selection rows."""
    epochs: dict[int, dict[str, Any]] = {}
    for entry in log:
        if "loss" in entry or "eval_loss" in entry:
            row = epochs.setdefault(entry["step"], {"epoch": entry["epoch"], "step": entry["step"]})
            if "loss" in entry:
                row["train_loss"] = entry["loss"]
            row.update(_without_prefix(entry, "eval_"))
    return [*epochs.values()]
