"""Start a script in several processes by `accelerate launch` with a shipped configuration, on the CPU.

Launcher and workers are forks of the tests' process, for a test of a script in two processes takes three interpreters
otherwise; `fresh=True` takes these, as a user does. The scripts leave their group of processes to the system: to
destroy it hangs at times (pytorch/pytorch#75097).
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.launch import launch_command, launch_command_parser
from filelock import FileLock
from forks import Finished, run_forked, run_script
from torch.distributed.launcher.api import LaunchConfig


ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

# engine -> (its file in examples/accelerate, options on top of it)
ENGINES = {
    "ddp": ("ddp", []),
    "fsdp2": ("fsdp2", []),
    "fsdp1": ("fsdp1", ["--fsdp_sync_module_states", "false"]),  # it asks for the name of a GPU
    "zero1": ("zero2", ["--zero_stage", "1"]),
    "zero2": ("zero2", []),
    "zero3": ("zero3", []),
    "zero3 from birth": ("zero3", ["--zero3_init_flag", "true"]),
}


def skip_if_missing(engine: str) -> None:
    if engine.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    if engine.startswith("fsdp") and "fsdp_version" not in {f.name for f in fields(FullyShardedDataParallelPlugin)}:
        pytest.skip("this accelerate has no FSDP2, and FSDP1 only where it finds a GPU")


def free_port() -> int:
    """A port that nothing listens on; older versions of accelerate do not look for one themselves."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def launch(engine: str, script: Sequence[str], *, fresh: bool = False) -> Finished:
    """Run a script and its arguments, or `-m` and a module's, in two processes.

    A launch that hangs is killed with all its processes, and fails the test.
    """
    name, options = ENGINES[engine]
    command = ["--config_file", str(ROOT / f"examples/accelerate/{name}.yaml"), *options]
    command += ["--num_processes", "2", "--main_process_port", str(free_port())]
    settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if engine == "ddp":
        settings |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}  # not cpu:0, which is no place
    else:
        command.append(str(HERE / "on_cpu.py"))
    return run_forked(_launch_fresh if fresh else _launch_forks, [*command, *script], env=settings)


def _launch_fresh(command: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-m", "accelerate.commands.launch", *command])


def _launch_forks(command: list[str]) -> None:
    _let_torchrun_fork()
    launch_command(launch_command_parser().parse_args(command))


def torchrun(command: list[str]) -> None:
    """`torchrun` with its arguments, in a process of its own, as `run_forked` makes it, with forks for workers."""
    _let_torchrun_fork()
    torch.distributed.run.main(command)


def _let_torchrun_fork() -> None:
    def elastic_launch(config: LaunchConfig, entrypoint: str) -> Callable[..., Any]:
        """As PyTorch's, with forks in place of the interpreters that it would start."""
        assert entrypoint == sys.executable
        config.start_method = "fork"
        start = torch.distributed.launcher.api.elastic_launch(config, run_script)
        return lambda unbuffered, *script: start(script)

    torch.distributed.run.elastic_launch = elastic_launch


def launch_well(engine: str, script: Sequence[str], *, fresh: bool = False) -> str:
    """`launch`, which must succeed; its output."""
    finished = launch(engine, script, fresh=fresh)
    assert finished.code == 0, finished.output[-6000:]
    return finished.output


def once(root: Path, name: str, start: Callable[[Path], str]) -> tuple[Path, str]:
    """The folder and the output of a launch that tests share, also between the workers of pytest-xdist.

    Args:
        root: The folder of temporary files of this pytest process.
        name: The launch's name.
        start: Takes a new folder, launches, and returns the output. Called by the first test that asks.
    """
    shared = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder, record = shared / name, shared / f"{name}.json"
    with FileLock(shared / f"{name}.lock"):
        if not record.exists():
            folder.mkdir()
            try:
                record.write_text(json.dumps({"output": start(folder)}))
            except BaseException as error:
                record.write_text(json.dumps({"error": str(error)}))
                raise
    found = json.loads(record.read_text())
    if "error" in found:
        pytest.fail(f"The launch that this test reads had failed: {found['error']}")
    return folder, found["output"]
