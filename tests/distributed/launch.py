"""Start a script in several processes by `accelerate launch` with a shipped configuration, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import psutil
import pytest
from accelerate import FullyShardedDataParallelPlugin
from filelock import FileLock


ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TIMEOUT = 300

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


@dataclass(frozen=True)
class Finished:
    """How a launch ended: its exit code, and all that its processes wrote."""

    code: int
    output: str


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


def launch(engine: str, script: Sequence[str], *, timeout: int = TIMEOUT) -> Finished:
    """Run a script and its arguments, or `-m` and a module's, in two processes.

    A launch that takes longer than `timeout` seconds is killed with all its processes, and fails the test.
    """
    name, options = ENGINES[engine]
    config = str(ROOT / f"examples/accelerate/{name}.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, *options]
    command += ["--num_processes", "2", "--main_process_port", str(free_port())]
    settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if engine == "ddp":
        settings |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}  # not cpu:0, which is no place
    else:
        command.append(str(HERE / "on_cpu.py"))
    process = subprocess.Popen(
        [*command, *script],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        family = [*psutil.Process(process.pid).children(recursive=True), process]
        for member in family:
            member.kill()
        output, _ = process.communicate()
        pytest.fail(f"The launch took longer than {timeout} seconds:\n{output[-4000:]}")
    return Finished(process.returncode, output)


def launch_well(engine: str, script: Sequence[str]) -> str:
    """`launch`, which must succeed; its output."""
    finished = launch(engine, script)
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
