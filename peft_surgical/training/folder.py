"""The folder that a run of training writes: refused if in use, resumable, and marked finished by its metrics."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from peft_surgical.training.job import JOB_FILE, TrainingJob


logger = logging.getLogger(__name__)

RANKING_FILE = "ranking.json"
METRICS_FILE = "metrics.json"
CHECKPOINTS = "checkpoints"


def check_folder(job: TrainingJob, *, resume: bool = False, overwrite: bool = False) -> None:
    """Make sure that a job may write its folder.

    Args:
        job: The job.
        resume: Accept the folder of the same job, if it is not finished.
        overwrite: Accept the folder of any job.

    Raises:
        ValueError: The folder is in use otherwise; the message says what to do.
    """
    folder = Path(job.output)
    if resume and overwrite:
        raise ValueError("--resume goes on with what is in the folder and --overwrite empties it. Drop one.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / JOB_FILE).exists():
        raise ValueError(f"--output {folder} holds files that no training wrote. Choose another folder.")
    if resume and (folder / METRICS_FILE).exists():
        raise ValueError(f"--output {folder} holds a finished run. Use --overwrite to start over.")
    if resume:
        _refuse_other_job(TrainingJob.load(folder), job)
    elif not overwrite:
        raise ValueError(f"--output {folder} is not empty. Use --resume to go on, --overwrite to start over.")


def open_folder(job: TrainingJob, *, overwrite: bool = False) -> None:
    """Make a job's folder, emptied if it is to be overwritten, and write the job into it."""
    folder = Path(job.output)
    if overwrite:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    job.save(folder)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a folder that was written to its end, or None."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for checkpoint in found:
        try:  # the Trainer writes this file last
            json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
            return checkpoint
        except (OSError, ValueError):
            logger.warning("%s was not written to its end and is passed over.", checkpoint)
    return None


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)


def _refuse_other_job(old: TrainingJob, new: TrainingJob) -> None:
    for name in vars(new):
        before, now = getattr(old, name), getattr(new, name)
        if before != now and name not in ("output", "keep_checkpoints", "report_to"):
            raise ValueError(
                f"--resume: {name} was {before!r} when the run in {new.output} started and is {now!r} now. "
                "A resumed run keeps its options; use --overwrite to start another."
            )
