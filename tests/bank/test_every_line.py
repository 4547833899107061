"""An interrupt, and a fork by another thread, at every line that a bank runs: afterwards it answers as before.

The random walks meet by chance what this meets for sure: the one line at which what is half done shows. Sixty of
the lines, unless PEFT_SURGICAL_LINES says how many.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Callable

import pytest
import torch
from forks import HANGS
from lines import interrupt, on_each_line, some_of
from test_bank import X, ask, base, buffers_alive, size_on_device
from test_random_walk import check
from test_threads import in_child, needs_fork

from peft_surgical.bank import DeltaBank


pytestmark = [pytest.mark.slow, needs_fork]
LINES = int(os.environ.get("PEFT_SURGICAL_LINES", 60))
TRACED = ("/peft_surgical/", "contextlib.py")

Line = tuple[int, str, int]
"""The number of a step, a file, and a line of it."""


class Steps:
    """What a bank is asked for, one step after the other, and what it must answer whatever happened in between."""

    def __init__(self, versions, compiled: bool, size: int):
        self.folder, self.answers = versions
        self.size, self.compiled = size, compiled
        self.damaged = self.folder / "damaged"
        if not self.damaged.exists():
            shutil.copytree(self.folder / "a 1", self.damaged)
            with open(self.damaged / "adapter_model.safetensors", "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"?")
        self.bank = DeltaBank(base(), None if compiled else 2 * self.size, self.size, compiled=compiled)
        for name, version in (("a", "a 0"), ("b", "b 1"), ("c", "c 2")):
            self.bank.add(name, self.folder / version)
        with torch.no_grad():
            self.alone = base()(**X).logits

    def batch(self, *rows: str) -> torch.Tensor:
        with self.bank.batch(rows) as model, torch.no_grad():
            return model(**X).logits

    def ask_damaged(self) -> None:
        self.bank.add("damaged", self.damaged)
        with pytest.raises(ValueError, match="checksum"):
            ask(self.bank, "damaged")
        self.bank.remove("damaged")

    def all(self) -> list[Callable]:
        bank = self.bank
        batches: list[Callable] = [lambda: self.batch("a", "a", "__base__", "b"), lambda: self.batch(*"cbbc")]
        return [
            *(lambda: ask(bank, "a"), lambda: ask(bank, "c"), lambda: bank.activate("b"), lambda: ask(bank, None)),
            *([] if self.compiled else batches),
            *(lambda: bank.remove("a"), lambda: bank.add("a", self.folder / "a 2"), lambda: ask(bank, "a")),
            *(lambda: bank.remove("a"), self.ask_damaged),
        ]

    def lines(self) -> list[Line]:
        """Some of the lines that the steps run."""
        found: dict[Line, None] = {}
        self.on_each_line(lambda line: found.setdefault(line))
        return some_of([*found], LINES)

    def on_each_line(self, reached: Callable[[Line], None]) -> None:
        for number, step in enumerate(self.all()):
            on_each_line(step, lambda line, number=number: reached((number, *line)), TRACED)

    def check(self) -> None:
        """Check that the bank is whole, and that nothing of removed tasks is left."""
        bank, answers = self.bank, self.answers
        for name, version in (("b", "b 1"), ("c", "c 2"), ("b", "b 1")):
            assert torch.equal(ask(bank, name), answers[version]), name
        if not self.compiled:
            expected = torch.cat([answers["c 2"][:2], self.alone[2:3], answers["b 1"][3:]])
            assert torch.allclose(self.batch("c", "c", "__base__", "b"), expected, atol=1e-6)
        assert torch.equal(ask(bank, "b"), answers["b 1"])
        assert torch.equal(ask(bank, None), self.alone)
        for name in bank:
            bank.remove(name)
        for version in ("a 0", "a 1"):
            bank.add("a", self.folder / version)
            assert torch.equal(ask(bank, "a"), answers[version]), version
            bank.prefetch("a").result(60)
            bank.remove("a")
        if not self.compiled:
            stats = bank.stats()
            assert stats.device_bytes == stats.host_bytes == buffers_alive(bank) == 0
            assert stats.device_peak <= 2 * self.size
        assert not any(module._forward_pre_hooks for module in bank.model.modules())


def interrupt_every_line(versions, compiled: bool, size: int) -> None:
    for line in Steps(versions, compiled, size).lines():
        steps = Steps(versions, compiled, size)
        *before, step = steps.all()[: line[0] + 1]
        for earlier in before:
            earlier()
        interrupt(step, line[1:].__eq__, TRACED)  # by steps, for what is traced takes five times as long
        try:
            steps.check()
        except BaseException as error:
            raise AssertionError(f"interrupted at {line}") from error


def fork_at_every_line(versions, compiled: bool, size: int) -> None:
    lines = {*Steps(versions, compiled, size).lines()}
    steps = Steps(versions, compiled, size)
    mutexes = steps.bank._lock._mutex, steps.bank._cache.lock
    at: queue.Queue[Line | None] = queue.Queue()
    is_forked = threading.Semaphore(0)

    def wait_for_fork(line: Line) -> None:
        if line in lines and not any(mutex._is_owned() for mutex in mutexes):  # a fork waits for them
            lines.remove(line)
            at.put(line)
            is_forked.acquire()

    def work() -> None:
        steps.on_each_line(wait_for_fork)
        at.put(None)

    threading.Thread(target=work, daemon=True).start()
    while (line := at.get(timeout=60)) is not None:
        assert in_child(steps.check) == 0, f"forked at {line}"
        is_forked.release()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sweep", [interrupt_every_line, fork_at_every_line])
def test_the_bank_is_whole_after(sweep, compiled, versions):
    size = max(size_on_device(versions[0], key) for key in versions[1])
    check(sweep, versions, compiled, size, seconds=HANGS + LINES)
