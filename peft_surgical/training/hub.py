"""A run's folder on the Hugging Face hub."""

from __future__ import annotations

import shlex

from huggingface_hub import HfApi, get_token

from peft_surgical.distributed import this_process
from peft_surgical.training.job import TrainingJob


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
