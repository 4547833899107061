"""Run a script under FSDP or DeepSpeed without a GPU: `accelerate launch ... on_cpu.py SCRIPT ...`, or `-m MODULE`.

accelerate offers these engines where it finds GPUs. Here it is told that this is such a machine, whose device is the
CPU and whose processes talk by gloo; all else, the engines included, is as on GPUs.
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from accelerate import DistributedType, PartialState
from forks import run_script
from torch.distributed.fsdp import FullStateDictConfig


def pretend() -> None:
    """Let accelerate take the CPU for a GPU."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    else:
        dist.init_process_group("gloo")
    PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
    # FSDP1 crashes where it is to move tensors to the CPU that are there
    FullStateDictConfig.offload_to_cpu = property(lambda self: False, lambda self, value: None)


if __name__ == "__main__":
    pretend()
    run_script(sys.argv[1:])
