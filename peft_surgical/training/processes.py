"""This process among those of a run, as `accelerate launch` or `torchrun` started them."""

from __future__ import annotations

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env


def this_process() -> PartialState:
    """The state of this process: whether it is the first, how many there are, and the device to run on."""
    return PartialState(cpu=runs_on_cpu())


def runs_on_cpu() -> bool:
    """Whether to run on the CPU, for want of an accelerator or by `accelerate launch --cpu`."""
    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
