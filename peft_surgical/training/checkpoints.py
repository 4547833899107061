"""The checkpoints of a run: where they lie, and which of them training can go on from."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open


logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
TRIED = "tried"


def checkpoint_folders(folder: Path) -> list[Path]:
    """Where the checkpoints of a run are, and with `layers="auto"` those of each choice."""
    return [folder / CHECKPOINTS, *folder.glob(f"{TRIED}/*/{CHECKPOINTS}")]


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a folder that is whole, as is the best one until then; or None. Others are told."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for checkpoint in found:
        if (damaged := _damaged_file(checkpoint)) is None:
            return checkpoint
        logger.warning("%s is missing or cut off: %s is skipped.", damaged, checkpoint.name)
    if found:
        logger.warning("No checkpoint in %s is whole, so the run starts from the beginning.", folder)
    return None


def _damaged_file(checkpoint: Path) -> Path | None:
    """A file of a checkpoint, or of the best one until then, that was not written to its end."""
    state = checkpoint / "trainer_state.json"  # the Trainer writes it last
    try:
        best = json.loads(state.read_text(encoding="utf-8")).get("best_model_checkpoint")
    except (OSError, ValueError):
        return state
    weights_of_best = (checkpoint.parent / Path(best or checkpoint).name).glob("*.safetensors")
    return next(filter(_is_cut_off, [*sorted(checkpoint.rglob("*")), *weights_of_best]), None)


def _is_cut_off(file: Path) -> bool:
    if file.suffix == ".safetensors":
        try:
            safe_open(file, "pt")
        except SafetensorError:
            return True
    return file.suffix in (".bin", ".pt", ".pth") and not zipfile.is_zipfile(file)  # PyTorch's, which end with a list


def is_at_end(checkpoint: Path, steps: float) -> bool:
    """Whether training was over with a checkpoint, after all steps that are asked for or early. A Trainer that goes on
    from it would take one more step, or epoch, before it looks."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    control = state["stateful_callbacks"]["TrainerControl"]["args"]
    return control["should_training_stop"] and state["max_steps"] == math.ceil(steps)


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a folder, and the folder if it holds nothing else."""
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)
    with contextlib.suppress(OSError):  # TensorBoard's files are there
        folder.rmdir()
