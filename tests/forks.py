"""Processes of their own that start at once: forks of the tests' process, which has imported PyTorch and PEFT already.

A new interpreter takes six to ten seconds of processor time to import them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState


HANGS = 600
"""Seconds that no work of a test takes, on a busy machine either: after them it hangs."""


@dataclass(frozen=True)
class Finished:
    """How a process ended: its exit code (of a signal, the negative), and all that it and its children wrote."""

    code: int
    output: str


def run_forked(
    function: Callable[..., Any], *arguments: Any, env: Mapping[str, str] | None = None, timeout: int = HANGS
) -> Finished:
    """Call a function in a fork of this process.

    One that takes longer than `timeout` seconds is killed with all its children and fails the test, and so does one
    that leaves a child behind.
    """
    context: Any = multiprocessing.get_context("fork")
    with tempfile.TemporaryFile() as output:
        mark = {"TEST_PROCESS": str(time.monotonic_ns())}
        process = context.Process(target=_run, args=(function, arguments, {**(env or {}), **mark}, output.fileno()))
        process.start()
        process.join(timeout)
        left = [p for p in psutil.process_iter() if p.pid != process.pid and _is_of(p, process.pid, mark)]
        if is_late := process.is_alive():
            for late in (process, *left):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(late.pid, signal.SIGUSR1)  # a fork writes where it stands, another program ends
            time.sleep(1)
            process.kill()
        for child in left:
            child.kill()
        process.join()
        output.seek(0)
        written = output.read().decode(errors="replace")
        if is_late or left:
            pytest.fail(
                f"{f'Not done after {timeout} s' if is_late else f'It left {left} behind'}:\n{written[-20_000:]}"
            )
        return Finished(process.exitcode, written)


def run_script(arguments: Sequence[str]) -> None:
    """Run a script with its arguments, or `-m` and a module with its, as the main program of this process."""
    arguments = [*arguments]
    if is_module := arguments[0] == "-m":
        arguments.pop(0)
    sys.argv = arguments
    try:
        if is_module:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code:  # else the work is done, and who started this process wants to hear so
            raise


def _run(function: Callable[..., Any], arguments: Sequence[Any], env: Mapping[str, str], output: int) -> None:
    os.setsid()  # to be found by, and all children with it
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, sys.stderr)
    os.environ.update(env)
    warnings.resetwarnings()  # to be shown, as in a new interpreter; pytest's are errors
    torch.set_num_threads(1)  # the threads of the parent are not there
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        raise


def _is_of(process: psutil.Process, first: int, mark: Mapping[str, str]) -> bool:
    """Whether a process comes from the first one: a fork is in its session, a new interpreter has its environment."""
    try:
        return os.getsid(process.pid) == first or mark.items() <= process.environ().items()
    except (OSError, psutil.Error):
        return False
