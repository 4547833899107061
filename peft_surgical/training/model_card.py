"""The card that is saved beside a trained model: what was tuned and why, how it was measured, how to use it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCardData

from peft_surgical.training.held_out import Parts
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.methods import METHODS


if TYPE_CHECKING:
    from peft_surgical.ranking.rank import LayerRanking


def write_model_card(
    folder: str | Path, job: TrainingJob, parts: Parts, results: dict[str, Any], ranking: LayerRanking | None
) -> None:
    """Write `README.md` into the folder of a trained model.

    Args:
        folder: The folder.
        job: What was asked.
        parts: The rows by use.
        results: The content of `metrics.json`.
        ranking: The ranking that chose the layers, if one did.
    """
    sections = [
        f"---\n{_metadata(job, results)}\n---",
        f"# {Path(job.output).resolve().name}",
        _summary(job, results),
        _results_section(parts, results),
        _ranking_section(job, results, ranking),
        _usage_section(job, results),
        _exact_section(job, results),
    ]
    text = "\n\n".join(section for section in sections if section)
    (Path(folder) / "README.md").write_text(text + "\n", encoding="utf-8")


def _metadata(job: TrainingJob, results: dict[str, Any]) -> str:
    adapter = job.method != "full"
    data = ModelCardData(
        base_model=job.model,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-classification",
        tags=["peft-surgical", job.method],
        metrics=[name for name in results["evaluation"] if name not in ("rows", "samples", "loss")],
    )
    return data.to_yaml()


def _summary(job: TrainingJob, results: dict[str, Any]) -> str:
    parameters = results["parameters"]
    share = 100 * parameters["trained"] / parameters["total"]
    layers = "; ".join(f"{stack} {', '.join(map(str, found))}" for stack, found in results["layers"].items())
    task = results["task"]
    wanted = f"the classes {', '.join(task['labels'])}" if task["labels"] else "an amount"
    return (
        f"`{job.model}`, tuned by the method *{job.method}* ({METHODS[job.method].about}) to tell {wanted} from "
        f"{' and '.join(f'`{c}`' for c in task['text_columns'])} of `{job.data}`.\n\n"
        f"Trained: {parameters['trained']:,} of {parameters['total']:,} parameters ({share:.2g}%)"
        + (f", in the layers: {layers}." if layers else ".")
    )


def _results_section(parts: Parts, results: dict[str, Any]) -> str:
    evaluation = results["evaluation"]
    names = [name for name in evaluation if name not in ("rows", "samples")]
    rows = [
        f"Measured on {evaluation['samples']:,} rows: {evaluation['rows']}.",
        f"| {' | '.join(names)} |\n|{' ---: |' * len(names)}\n| {' | '.join(f'{evaluation[n]:.4f}' for n in names)} |",
        f"Trained on {results['training']['samples']:,} {results['training']['rows']}. {describe_selection(results)}",
    ]
    if parts.optimistic:
        rows.append("**The checkpoint was chosen on the rows it is measured on, so these numbers are too good.**")
    if parts.overlap:
        rows.append(
            f"{parts.overlap:,} of the {evaluation['samples']:,} evaluation rows have a text that was trained on or "
            "chosen by too."
        )
    return "## Results\n\n" + "\n\n".join(rows)


def describe_selection(results: dict[str, Any]) -> str:
    """How the checkpoint was chosen, in a sentence or two.

    Args:
        results: The content of `metrics.json`.
    """
    selection = results["selection"]
    if selection is None:
        return "The last checkpoint was taken; none was chosen by its quality."
    best = "" if selection["best"] is None else f" ({selection['best']:.4f} at step {selection['best_step']})"
    return (
        f"The checkpoint with the best {selection['metric']}{best} was taken, measured on {selection['samples']:,} "
        f"rows: {selection['rows']}."
    )


def _ranking_section(job: TrainingJob, results: dict[str, Any], ranking: LayerRanking | None) -> str:
    if ranking is None:
        return ""
    source = f"read from `{job.ranking}`" if job.ranking else "made on training rows before training"
    return f"## Which layers matter\n\nThe ranking was {source}.\n\n```text\n{ranking}\n```"


def _usage_section(job: TrainingJob, results: dict[str, Any]) -> str:
    labels = results["task"]["labels"]
    base = f'AutoModelForSequenceClassification.from_pretrained("{job.model}", num_labels={len(labels) or 1})'
    here = Path(job.output).resolve().name
    if job.method == "full":
        code = f'model = AutoModelForSequenceClassification.from_pretrained("{here}")'
        imports = "from transformers import AutoModelForSequenceClassification, AutoTokenizer"
        tokenizer = here
    else:
        code = f'base = {base}\nmodel = PeftModel.from_pretrained(base, "{here}").eval()'
        imports = (
            "import peft_surgical  # makes the method known to PEFT\nfrom peft import PeftModel\n"
            "from transformers import AutoModelForSequenceClassification, AutoTokenizer"
        )
        tokenizer = job.model
    texts = '"A text"' if len(results["task"]["text_columns"]) == 1 else '"A text", "another text"'
    return (
        f'## Use\n\n```python\n{imports}\n\n\n{code}\ntokenizer = AutoTokenizer.from_pretrained("{tokenizer}")\n'
        f'logits = model(**tokenizer({texts}, return_tensors="pt")).logits\n'
        + (f"print({[*labels]}[logits.argmax()])\n```" if labels else "print(float(logits))\n```")
    )


def _exact_section(job: TrainingJob, results: dict[str, Any]) -> str:
    config = {**dataclasses.asdict(job), "learning_rate": job.peak_learning_rate}
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return f"## Exact configuration\n\n```json\n{json.dumps(config, indent=2)}\n```\n\nMade with {versions}."
