"""Many threads at once, against an oracle that knows which versions an answer may have.

Longer with PEFT_SURGICAL_WALK=2000 (steps of each thread) and PEFT_SURGICAL_STRESS=60 (seconds). Each runs in a
process of its own, whose main thread is interrupted as by Ctrl-C, and which shows where all threads stand if it hangs.
"""

from __future__ import annotations

import copy
import faulthandler
import itertools
import os
import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forks import HANGS, run_forked
from peft import PeftModel, get_peft_model
from test_bank import X, ask, base, buffers_alive, size_on_device
from test_threads import in_child, needs_fork, stream
from tiny_models import batch

from peft_surgical import SurgicalConfig
from peft_surgical.bank import DeltaBank


pytestmark = needs_fork
NAMES = ("a", "b", "c")
STEPS = int(os.environ.get("PEFT_SURGICAL_WALK", 25))
SECONDS = float(os.environ.get("PEFT_SURGICAL_STRESS", 4))


class Oracle:
    """What was called when, and which answers that allows. Times are numbers that no two calls share."""

    def __init__(self, answers: dict[str, torch.Tensor]):
        self.clock = itertools.count()
        self.answers = answers
        self.lives: dict[str, list[dict[str, int]]] = {name: [] for name in NAMES}
        self.asked: list[tuple[str, list[int], int, torch.Tensor | str, int]] = []
        self.counts: Counter[str] = Counter()

    def note(self, name: str, started: int, found: torch.Tensor | str, rows: list[int] | None = None) -> None:
        self.asked.append((name, rows or [*range(len(X["input_ids"]))], started, found, next(self.clock)))

    def judge(self) -> list[str]:
        """All answers that cannot be right."""
        wrong = ((name, self._wrong(name, *rest)) for name, *rest in self.asked)
        return [f"{name}: {self._what(found)}" for name, found in wrong if found is not None]

    def _what(self, found: torch.Tensor | str) -> str:
        if isinstance(found, str):
            return found
        alike = [(answer, key) for key, answer in self.answers.items() if answer.shape == found.shape]
        far, key = min([(float((answer - found).abs().max()), key) for answer, key in alike], default=(-1, "?"))
        return f"{far:.1e} from the answer of {key}"

    def _wrong(
        self, name: str, rows: list[int], started: int, found: torch.Tensor | str, ended: int
    ) -> torch.Tensor | str | None:
        forever = next(self.clock) + 1
        for life in self.lives[name]:
            if isinstance(found, str):  # it must have been there all the time to make an error wrong
                if life.get("added", forever) < started and life.get("removing", forever) > ended:
                    return found
            elif life["adding"] < ended and life.get("removed", forever) > started:
                expected = self.answers[f"{name} {life['version']}"][rows]
                # rows of a batch are computed beside those of others
                is_whole = len(rows) == len(X["input_ids"])
                if torch.equal(found, expected) if is_whole else torch.allclose(found, expected, atol=1e-6):
                    return None
        return None if isinstance(found, str) and found.startswith("There is no task") else found


class Walk:
    """A bank, and what threads do with it.

    Args:
        versions: The folder of the tasks, and what each answers.
        budgets: For the bank, in tasks.
        goes_on: Called with the number of steps that a thread has made: whether it makes another.
    """

    def __init__(self, versions, budgets: tuple[int | None, int], goes_on: Callable[[int], bool]):
        self.folder, answers = versions
        self.goes_on = goes_on
        self.size = max(size_on_device(self.folder, key) for key in answers)
        self.budgets = budgets
        self.bare = copy.deepcopy(base())
        self.bank = DeltaBank(base(), *(budget if not budget else budget * self.size for budget in budgets))
        with torch.no_grad():
            self.alone = self.bare(**X).logits
        self.oracle = Oracle(answers)
        self.failures: list[str] = []
        self.threads: list[threading.Thread] = []
        self.may_be_interrupted = self.is_over = False

    # ---- what threads do

    def keep_changing(self, name: str) -> None:
        chance, clock = random.Random(name), self.oracle.clock
        for step in itertools.takewhile(self.goes_on, itertools.count()):
            life = {"version": step % 3, "adding": next(clock)}
            self.oracle.lives[name].append(life)
            self.bank.add(name, self.folder / f"{name} {step % 3}")
            life["added"] = next(clock)
            for _ in range(chance.randrange(3)):
                self.do_something(chance)
            life["removing"] = next(clock)
            self.bank.remove(name)
            life["removed"] = next(clock)
            self.oracle.counts["updates"] += 1

    def keep_asking(self, seed: int) -> None:
        chance = random.Random(seed)
        for _ in itertools.takewhile(self.goes_on, itertools.count()):
            self.do_something(chance)

    def do_something(self, chance: random.Random) -> None:
        """Ask a task, the base or a batch, activate, or prefetch; the answer is noted, also that there is no task."""
        what = chance.choices(["ask", "prefetch", "batch", "base", "activate"], [10, 6, 2, 1, 1])[0]
        self.oracle.counts[what] += 1
        name, started = chance.choice(NAMES), next(self.oracle.clock)
        if what == "base":
            assert torch.equal(ask(self.bank, None), self.alone), "the base answers otherwise"
            return
        try:
            if what == "prefetch":
                self.bank.prefetch(name)
            elif what == "activate":
                self.bank.activate(name)
            elif what == "ask":
                self.oracle.note(name, started, ask(self.bank, name))
            else:
                rows = [chance.choice(NAMES) for _ in X["input_ids"]]
                with self.bank.batch(rows) as model, torch.no_grad():
                    logits = model(**X).logits
                for name in {*rows}:
                    its = [i for i, row in enumerate(rows) if row == name]
                    self.oracle.note(name, started, logits[its], its)
        except ValueError as error:
            if what != "batch":
                self.oracle.note(name, started, str(error))
            elif not any(right in str(error) for right in ("There is no task", "does not fit")):
                raise

    def keep_streaming(self) -> None:
        """As a server does that answers bit by bit, each bit in another thread."""
        chance = random.Random(7)
        for _ in itertools.takewhile(self.goes_on, itertools.count()):
            name, started = chance.choice(NAMES), next(self.oracle.clock)
            streaming = stream(self.bank, name, chance.randrange(1, 4))
            while (bit := _in_thread(next, streaming, None)) is not None:
                self.oracle.note(name, started, str(bit) if isinstance(bit, ValueError) else bit)
                self.oracle.counts["streamed"] += 1
                if isinstance(bit, ValueError) or chance.random() < 0.2:
                    break
            _in_thread(streaming.close)

    def keep_training(self) -> None:
        """Train an adapter on a model of its own, always the same way, so always to the same weights."""
        inputs, first = batch("bert"), None
        for _ in itertools.takewhile(self.goes_on, itertools.count()):
            model = get_peft_model(copy.deepcopy(self.bare), SurgicalConfig(task_type="SEQ_CLS", layers=[1, 3]))
            tuned = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(tuned, lr=1e-2)
            for _ in range(3):
                model(**inputs).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            first = first or [p.detach().clone() for p in tuned]
            assert all(torch.equal(p, q) for p, q in zip(tuned, first, strict=True)), "training went otherwise"
            self.oracle.counts["trained"] += 1

    def keep_loading(self) -> None:
        """Load adapters as PEFT does, onto bases that no bank has."""
        for step in itertools.takewhile(self.goes_on, itertools.count()):
            key = f"{NAMES[step % 3]} {step % 2}"
            model = PeftModel.from_pretrained(copy.deepcopy(self.bare), self.folder / key).eval()
            with torch.no_grad():
                assert torch.equal(model(**X).logits, self.oracle.answers[key]), f"{key} was loaded otherwise"
            self.oracle.counts["loaded"] += 1

    def keep_forking(self) -> None:
        """A child finds the bank whole, whatever other threads were at."""

        def serve() -> None:
            self.bank.add("z", self.folder / "a 1")
            assert torch.equal(ask(self.bank, "z"), self.oracle.answers["a 1"])
            self.bank.prefetch("z").result(20)
            self.bank.remove("z")

        for _ in itertools.takewhile(self.goes_on, itertools.count()):
            assert in_child(serve) == 0, "a child failed"
            self.oracle.counts["forks"] += 1

    # ---- the main thread, and the end

    def start(self, work: Callable[..., None], *arguments: object) -> None:
        def guarded() -> None:
            try:
                work(*arguments)
            except Exception:
                self.failures.append(f"{work.__name__}: {traceback.format_exc()}")

        self.threads.append(threading.Thread(target=guarded, daemon=True))
        self.threads[-1].start()

    def ask_under_interrupts(self) -> None:
        """What the main thread does. Once an interrupt is through, the bank must serve as before."""
        signal.signal(signal.SIGINT, self._interrupt)
        threading.Thread(target=self._keep_interrupting, daemon=True).start()
        chance = random.Random(99)
        for _ in itertools.takewhile(self.goes_on, itertools.count()):
            try:
                self.may_be_interrupted = True
                self.do_something(chance)
                self.may_be_interrupted = False
            except KeyboardInterrupt:
                self.oracle.counts["interrupted"] += 1
        self.is_over = True

    def _interrupt(self, *_: object) -> None:
        if self.may_be_interrupted:
            self.may_be_interrupted = False
            raise KeyboardInterrupt

    def _keep_interrupting(self) -> None:
        chance = random.Random(5)
        while not self.is_over:
            time.sleep(chance.random() / 10)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def finish(self) -> None:
        for thread in self.threads:
            thread.join()
        assert self.failures == []
        assert self.oracle.judge() == []
        self.bank.add("a", self.folder / "a 0")
        self.bank.prefetch("a").result(60)  # the last one
        self.bank.remove("a")
        stats = self.bank.stats()
        assert stats.device_bytes == stats.host_bytes == buffers_alive(self.bank) == 0
        assert self.budgets[0] is None or stats.device_peak <= self.budgets[0] * self.size
        answered = sum(isinstance(found, torch.Tensor) for _, _, _, found, _ in self.oracle.asked)
        print(f"{answered} answers, none wrong;", ", ".join(f"{k} {n}" for k, n in sorted(self.oracle.counts.items())))


def _in_thread(work: Callable, *arguments: object) -> object:
    found: list[object] = []

    def call() -> None:
        try:
            found.append(work(*arguments))
        except ValueError as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found[0]


def check(work: Callable[..., None], *arguments: object, seconds: float) -> None:
    """Run in a process of its own, which shows all its threads if it hangs."""

    def watched() -> None:
        faulthandler.dump_traceback_later(seconds, exit=True)
        work(*arguments)
        faulthandler.cancel_dump_traceback_later()

    done = run_forked(watched, timeout=int(seconds) + 30)
    print(done.output)
    assert done.code == 0, done.output


def walk(versions, budgets: tuple[int | None, int]) -> None:
    walking = Walk(versions, budgets, lambda done: done < STEPS)
    for name in NAMES:
        walking.start(walking.keep_changing, name)
    for seed in range(2):
        walking.start(walking.keep_asking, seed)
    walking.ask_under_interrupts()
    walking.finish()


def stress(versions) -> None:
    kinds = ("ask", "updates", "streamed", "trained", "loaded", "forks", "interrupted")
    end = time.monotonic() + SECONDS

    def goes_on(_: int) -> bool:
        did = walking.oracle.counts
        return time.monotonic() < end or not (walking.failures or all(did[kind] for kind in kinds))

    walking = Walk(versions, (2, 1), goes_on)
    for name in NAMES:
        walking.start(walking.keep_changing, name)
    walking.start(walking.keep_asking, 0)
    for work in (walking.keep_streaming, walking.keep_training, walking.keep_loading, walking.keep_forking):
        walking.start(work)
    walking.ask_under_interrupts()
    walking.finish()


@pytest.mark.parametrize("budgets", [(None, 0), (1, 0), (2, 2)], ids=str)
def test_a_random_walk_of_several_threads_has_only_answers_that_the_order_of_calls_allows(budgets, versions):
    check(walk, versions, budgets, seconds=HANGS + STEPS)


@pytest.mark.slow
def test_banks_trainers_loading_streams_forks_and_interrupts_side_by_side(versions: tuple[Path, dict]):
    check(stress, versions, seconds=HANGS + 2 * SECONDS)
