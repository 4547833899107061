"""`--layers auto`: several choices of layers are trained in turn, and the best on the held-out rows is kept.

`TrainingRun` calls this; so it comes as an argument.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft_surgical.distributed import gather, this_process
from peft_surgical.layers import resolve_layers
from peft_surgical.methods.trainer import CHOICES, best_choice
from peft_surgical.training.checkpoints import CHECKPOINTS, TRIED, remove_checkpoints
from peft_surgical.training.common import Diverged, count_steps
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.options import LOWER_IS_BETTER, write_text


def try_layers(run: Any, begin: Callable[[Any], object]) -> None:
    """Train each choice of layers in a run of its own, and give `run` the model and the trainer of the best.

    Nothing is measured on the evaluation rows. A choice that was trained to its end is not trained again. `begin` is
    called with the run of each choice before it trains; what is tried stands in `run.tried`.
    """
    job, file = run.job, run.folder / TRIED / "tried.json"
    choices: dict[str, dict[str, Any]] = {}
    for choice in CHOICES:
        layers = [layer.index for layer in resolve_layers(run.prepared.model, choice, job.stack)]
        if all(layers != other["layers"] for other in choices.values()):  # as in a model of few layers
            choices[choice] = {"layers": layers, "steps": math.ceil(count_steps(job, len(run.prepared.train)))}
    run.tried = {"metric": run.metric, "kept": None, "choices": choices}
    length = [job.epochs, job.max_steps]
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    done: dict[str, dict[str, Any]] = found["choices"] if found.get("length") == length else {}
    done = gather({name: one for name, one in done.items() if name in choices})[0]  # the first process's
    choices.update(done)
    del run.prepared.model  # the memory is needed
    for choice in choices:
        if choice not in done:
            choices[choice] = done[choice] = gather(_try(run, choice, begin))[0]
            gc.collect()  # a trainer is held by what it holds, and the memory is needed
        values = {name: done[name]["value"] for name in choices if name in done}
        run.tried["kept"] = kept = best_choice(values, larger_is_better=run.metric not in LOWER_IS_BETTER)
        if this_process().is_main_process:
            write_text(file, json.dumps({"length": length, "choices": done}, indent=2) + "\n")
            for beaten in () if job.keep_checkpoints else {*values} - {kept}:
                remove_checkpoints(Path(_job_of(job, beaten).output) / CHECKPOINTS)
    if kept is None:
        raise ValueError("Training diverged with every choice of layers. Lower --learning-rate.")
    best = type(run)(_job_of(job, kept), resume=True)
    best.fit()  # no more steps: it loads what was best
    run.prepared, run.model, run.trainer, run.report = best.prepared, best.model, best.trainer, best.report
    run.seconds["train"] = sum(one["seconds"] for one in choices.values())


def _try(run: Any, choice: str, begin: Callable[[Any], object]) -> dict[str, Any]:
    """Train one choice, and tell what came of it: its layers and parameters, the best value on the held-out rows (None
    if it diverged) and that after each epoch, steps, and seconds."""
    part = type(run)(_job_of(run.job, choice), resume=True, callbacks=run.callbacks)
    begin(part)
    started = time.perf_counter()
    try:
        part.fit()
        value = part.trainer.state.best_metric
    except Diverged:
        value = None
    seconds, state, name = time.perf_counter() - started, part.trainer.state, f"eval_{run.metric}"
    steps, begun = state.global_step, int(part.checkpoint.name.rpartition("-")[2]) if part.checkpoint else 0
    return {
        **run.tried["choices"][choice],
        "parameters": part.report.parameters,
        "value": value,
        "steps": steps,
        # of all its steps, where some were taken before an interruption
        "seconds": round(seconds * steps / (steps - begun) if steps > begun else seconds, 2),
        "history": [[entry["step"], entry[name]] for entry in state.log_history if name in entry],
    }


def _job_of(job: TrainingJob, choice: str) -> TrainingJob:
    """The job of one choice, which keeps its last and its best checkpoint."""
    folder = Path(job.output) / TRIED / re.sub(r"\W+", "-", choice).strip("-")
    return dataclasses.replace(job, layers=choice, output=str(folder), keep_checkpoints=True, push_to_hub=None)
