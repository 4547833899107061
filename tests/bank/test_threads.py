"""Locks, interrupts, generators, forks, and other threads of the process that know nothing of a bank."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import gc
import itertools
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings

import pytest
import torch
from test_bank import CONFIGS, X, ask, base, fill, save_task, start_and_wait, wait_until_it_waits
from test_updates import SlowReads, finish
from torch import nn
from torch.utils.hooks import RemovableHandle

from peft_surgical.bank import DeltaBank, lock
from peft_surgical.bank.lock import SwitchLock


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    kinds = ("last", "first", "lora", "dora", "spafit")
    return folder, {name: save_task(folder, name, CONFIGS[name](), seed=i) for i, name in enumerate(kinds)}


def in_thread(work, *args):
    """What a function gives when another thread calls it; an error if that thread hangs."""
    found: list = []

    def call() -> None:
        try:
            found.append(work(*args))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    finish(thread)
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


# ---- interrupts


def test_an_interrupted_wait_gives_its_place_in_the_queue_back(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "first"])
    is_held, may_end, is_interrupted = threading.Event(), threading.Event(), threading.Event()
    main = threading.main_thread()

    def raise_once(*_: object) -> None:
        if not is_interrupted.is_set():
            is_interrupted.set()
            raise KeyboardInterrupt

    def hold() -> None:
        with bank.task("last"):
            is_held.set()
            assert may_end.wait(60)

    def interrupt() -> None:
        wait_until_it_waits(main)
        while not is_interrupted.wait(0.1):  # one that comes just before the system's wait would be seen after it
            signal.pthread_kill(main.ident, signal.SIGINT)

    previous = signal.signal(signal.SIGINT, raise_once)
    holding, interrupting = (threading.Thread(target=work, daemon=True) for work in (hold, interrupt))
    holding.start()
    assert is_held.wait(30)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt), bank.task("first"):
        pass
    finish(interrupting)
    signal.signal(signal.SIGINT, previous)
    assert torch.equal(in_thread(ask, bank, "last"), answers["last"])  # goes in beside the one that holds it
    may_end.set()
    finish(holding)
    assert torch.equal(in_thread(ask, bank, "first"), answers["first"])


def test_whoever_waits_behind_an_interrupted_one_goes_in():
    """The lock is free for the one behind as soon as the one before it gives up."""
    shared = SwitchLock(lambda key: None)
    served = threading.Event()

    def want(key: str, told: list) -> None:
        try:
            with shared.held(key):
                served.set()
        except OSError as error:
            told.append(error)

    class Failing(threading.Condition):
        def wait(self, timeout=None):
            super().wait(timeout)
            if threading.current_thread().name == "fails":
                raise OSError("an error in a wait")

    shared._changed = Failing(shared._mutex)
    told: list[Exception] = []
    with shared.held("a"):
        first = threading.Thread(target=want, args=("b", told), name="fails", daemon=True)
        second = threading.Thread(target=want, args=("a", []), daemon=True)
        start_and_wait(first)
        start_and_wait(second)  # it wants what is in place, but came later
        with shared._changed:
            shared._changed.notify_all()
        assert served.wait(30)
    finish(first)
    finish(second)
    assert len(told) == 1


@pytest.mark.parametrize("alone", [False, True])
def test_an_interrupt_at_any_moment_leaves_the_lock_usable(alone):
    """Python looks for signals when a function begins and after it has called one written in C."""
    count, was_hit = 0, True
    while was_hit:
        keys: list[str] = []
        shared = SwitchLock(keys.append)
        with shared.held("before"):
            pass
        left, was_hit = count, False

        def interrupt(frame, event, arg):
            nonlocal left, was_hit
            is_moment = event == "c_return" or (event == "call" and frame.f_code.co_name != "held")  # which goes on
            if is_moment and frame.f_code.co_filename == lock.__file__ and not was_hit:
                left -= 1
                if left < 0:
                    was_hit = True
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            with shared.held("a", alone=alone):
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)

        def use_it(shared=shared) -> None:
            with shared.held("b"), shared.held("b"):
                pass
            with shared.exclusively():
                pass

        in_thread(use_it)
        assert keys[-1] == "b"
        count += 1
    assert count > 20


def test_an_interrupted_switch_is_made_anew(tasks, monkeypatch):
    folder, answers = tasks
    bank = fill(DeltaBank(base(), compiled=True), folder, ["last", "first"])
    ask(bank, "last")
    copy = torch._foreach_copy_

    def interrupted(targets, sources, **options):
        copy(targets[::2], sources[::2], **options)
        raise KeyboardInterrupt

    for _ in range(2):
        for name in ("first", "last"):
            monkeypatch.setattr(torch, "_foreach_copy_", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ask(bank, name)
            monkeypatch.setattr(torch, "_foreach_copy_", copy)
            assert torch.equal(ask(bank, name), answers[name])


def test_an_interrupted_injection_leaves_nothing(tasks, monkeypatch):
    from peft.tuners.lora import LoraModel

    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["lora", "last"])
    create, calls = LoraModel._create_and_replace, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        create(*args, **kwargs)

    monkeypatch.setattr(LoraModel, "_create_and_replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(bank, "lora")
    assert not [name for name, _ in bank.model.named_modules() if "task_1" in name]
    for name in ("last", "lora", "last"):
        assert torch.equal(ask(bank, name), answers[name])


# ---- who holds the model


@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_interrupt_at_the_end_of_a_batch_leaves_nothing_of_it(at, tasks, monkeypatch):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "first"])
    remove, calls = RemovableHandle.remove, itertools.count()

    def interrupted(handle) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt
        remove(handle)

    rows = ["last", "first", "last", "last"][: len(X["input_ids"])]
    with pytest.raises(KeyboardInterrupt), bank.batch(rows):
        monkeypatch.setattr(RemovableHandle, "remove", interrupted)
    for name in ("first", "last", "first"):
        assert torch.equal(ask(bank, name), answers[name])
    with bank.task("first") as model, torch.no_grad():
        model(**{key: value[:1] for key, value in X.items()})


def test_a_thread_that_ends_within_a_task_holds_it_no_longer(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "first"])
    entered = [bank.task("last")]
    in_thread(entered[0].__enter__)
    entered.clear()
    gc.collect()
    assert torch.equal(in_thread(ask, bank, "first"), answers["first"])


def stream(bank, name: str, count: int = 3):
    """What a server does that answers bit by bit."""
    with bank.task(name) as model, torch.no_grad():
        for _ in range(count):
            yield model(**X).logits


@pytest.mark.parametrize("is_closed_early", [False, True])
def test_a_generator_may_be_stepped_by_any_thread(is_closed_early, tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "first"])
    streaming = stream(bank, "last")
    found = [in_thread(next, streaming)]
    others = [threading.Thread(target=ask, args=(bank, "first"), daemon=True) for _ in range(2)]
    for other in others:
        start_and_wait(other)
    found.append(in_thread(next, streaming))
    if is_closed_early:
        in_thread(streaming.close)
    else:
        found += in_thread(list, streaming)
    for other in others:
        finish(other)
    assert all(torch.equal(logits, answers["last"]) for logits in found)
    assert len(found) == 2 if is_closed_early else 3
    assert torch.equal(in_thread(ask, bank, "first"), answers["first"])


def test_one_thread_may_begin_several_streams_that_others_finish(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "first"])
    first, second = stream(bank, "last"), stream(bank, "first")

    def begin_both() -> list[torch.Tensor]:
        # as asyncio.to_thread and the thread pools of servers do, each call is in a context of its own
        beginnings = [contextvars.copy_context().run(next, first)]
        finishing.start()
        return [*beginnings, contextvars.copy_context().run(next, second)]  # waits until the first stream has ended

    finishing = threading.Thread(target=list, args=(first,), daemon=True)
    beginnings = in_thread(begin_both)
    finish(finishing)
    assert torch.equal(beginnings[0], answers["last"])
    assert torch.equal(beginnings[1], answers["first"])
    # not here: it was begun without gradients, and would leave this thread without them
    assert all(torch.equal(logits, answers["first"]) for logits in in_thread(list, second))


def test_a_task_in_the_loop_over_a_stream_of_another_is_refused(tasks):
    """Nobody else steps the stream, so to wait for its end would be to wait for ever, whatever other threads exist."""
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "first"])
    told, streaming = [], stream(bank, "last")

    def interleave() -> list[torch.Tensor]:
        found = []
        for logits in streaming:
            with pytest.raises(RuntimeError, match="within the task 'last' already and cannot switch to the task 'f"):
                ask(bank, "first")
            found.append(logits)
        return found

    other = threading.Thread(target=lambda: told.append(ask(bank, "first")), daemon=True)
    next(streaming)
    with pytest.raises(RuntimeError, match="a stream counts until it ends or is closed"):
        ask(bank, "first")
    start_and_wait(other)
    assert torch.equal(ask(bank, "last"), answers["last"])  # past the one that waits, for which it would wait for ever
    streaming.close()
    finish(other)
    assert torch.equal(told[0], answers["first"])
    streaming = stream(bank, "last")
    assert [torch.equal(logits, answers["last"]) for logits in in_thread(interleave)] == [True] * 3
    assert torch.equal(ask(bank, "first"), answers["first"])


@contextlib.contextmanager
def serving(bank, name: str):
    with bank.task(name) as model:
        yield model


class Serving:
    def __init__(self, bank, name: str):
        self.task = bank.task(name)

    def __enter__(self):
        return self.task.__enter__()

    def __exit__(self, *details):
        return self.task.__exit__(*details)


@pytest.mark.parametrize("way", [DeltaBank.task, serving, Serving])
def test_a_task_within_another_is_refused_however_it_is_entered(way, tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "first"])

    def nest() -> torch.Tensor:
        with way(bank, "last"), way(bank, "last"):
            with pytest.raises(RuntimeError, match="within the task 'last' already and cannot switch to the task 'f"):
                way(bank, "first").__enter__()
            with pytest.raises(RuntimeError, match="cannot switch to a batch"), bank.batch(["last", "first"] * 2):
                pass
            with pytest.raises(RuntimeError, match="cannot switch to a change of the bank"):
                bank.remove("first")
            return ask(bank, "last")

    assert torch.equal(in_thread(nest), answers["last"])
    assert torch.equal(ask(bank, "first"), answers["first"])


def test_an_event_loop_is_told_that_it_would_wait_for_itself(tasks):
    folder, _ = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "first"])

    async def answer(name: str) -> None:
        with bank.task(name):
            await asyncio.sleep(0.01)

    async def answer_both():
        return await asyncio.gather(answer("last"), answer("last"), answer("first"), return_exceptions=True)

    told = in_thread(asyncio.run, answer_both())
    assert told[:2] == [None, None]
    assert isinstance(told[2], RuntimeError)


# ---- the rest of the process


def test_other_threads_build_models_while_banks_fill(tasks):
    folder, answers = tasks
    register, filters = nn.Module.register_parameter, list(warnings.filters)
    wrong: list[str] = []
    are_filled = threading.Event()

    def build() -> None:
        while not are_filled.is_set() and not wrong:
            made = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(3, 4))
            wrong.extend(name for name, p in made.named_parameters() if p.is_meta)
            wrong.extend("clone" for tensor in made.parameters() if tensor.clone().is_meta)
            if nn.Module.register_parameter is not register:
                wrong.append("register_parameter")

    bases = [base() for _ in range(9)]  # here, for each sets the seed of the process

    def fill_one(number: int) -> None:
        names = list(answers)
        try:
            for model in bases[number::3]:
                bank = fill(DeltaBank(model), folder, answers)
                for name in names[number:] + names[:number]:
                    if not torch.equal(ask(bank, name), answers[name]):
                        wrong.append(name)
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")

    builders = [threading.Thread(target=build, daemon=True) for _ in range(2)]
    fillers = [threading.Thread(target=fill_one, args=(i,), daemon=True) for i in range(3)]
    for thread in (*builders, *fillers):
        thread.start()
    for thread in fillers:
        thread.join(120)
    are_filled.set()
    for thread in (*builders, *fillers):
        finish(thread)
    assert wrong == []
    assert nn.Module.register_parameter is register
    assert warnings.filters == filters
    assert not nn.Linear(2, 2).weight.is_meta


def test_no_tensor_of_a_model_in_use_is_without_values(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, answers)
    for name in answers:
        ask(bank, name)
    assert not [n for n, t in [*bank.model.named_parameters(), *bank.model.named_buffers()] if t.is_meta]


# ---- os.fork


def in_child(work) -> int:
    """The exit code of a child process that does something; -1 if it hangs, unless in a kernel of PyTorch, which waits
    for a lock that another thread of the parent held: that is not the bank's (see `finish`), and tells nothing."""
    stack = tempfile.TemporaryFile()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            faulthandler.register(signal.SIGUSR1, stack)  # a thread's timer of the parent would be waited for
            torch.set_num_threads(1)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGUSR1)  # to write where it stands
    time.sleep(1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    stack.seek(0)
    written = stack.read().decode()
    print(written, file=sys.stderr)
    innermost = next((line for line in written.splitlines() if "File" in line), "")
    return 0 if "/torch/nn/" in innermost else -1


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


@needs_fork
@pytest.mark.parametrize("during", ["prefetch", "switch", "use", "wait"])
@pytest.mark.filterwarnings("ignore:This process")
def test_a_child_process_serves_all_tasks(during, tasks, monkeypatch):
    folder, answers = tasks
    bank = fill(DeltaBank(base(), device_budget="1MB", host_budget="1MB"), folder, answers)
    ask(bank, "first")
    slow = SlowReads(monkeypatch, "last")
    helpers = []
    streaming = stream(bank, "lora")
    if during == "prefetch":
        prefetched = bank.prefetch("last")
        bank.prefetch("dora")
    elif during == "switch":
        helpers = [threading.Thread(target=ask, args=(bank, "last"), daemon=True)]
    else:
        in_thread(next, streaming)
        if during == "wait":
            helpers = [threading.Thread(target=ask, args=(bank, "spafit"), daemon=True)]
    for helper in helpers:
        (start_and_wait if during == "wait" else threading.Thread.start)(helper)
    if during in ("prefetch", "switch"):
        assert slow.have_begun.wait(30)

    def serve() -> None:
        slow.may_go_on.set()
        for name in [*answers, *answers]:
            assert torch.equal(ask(bank, name), answers[name]), name
            bank.prefetch("last").result(20)
        bank.remove("last")
        assert bank.stats().device_bytes <= 10**6

    assert in_child(serve) == 0
    slow.may_go_on.set()
    streaming.close()
    for helper in helpers:
        finish(helper)
    if during == "prefetch":
        prefetched.result(30)
    for name in answers:
        assert torch.equal(in_thread(ask, bank, name), answers[name])


@needs_fork
@pytest.mark.filterwarnings("ignore:This process")
def test_a_child_process_is_free_of_the_batch_of_another_thread(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "first"])
    rows = ["last", "first", "__base__", "last"][: len(X["input_ids"])]
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with bank.batch(rows):
            is_held.set()
            assert may_end.wait(60)

    def serve() -> None:
        for name in ("first", "last"):
            assert torch.equal(ask(bank, name), answers[name]), name
        with bank.batch(rows) as model, torch.no_grad():
            logits = model(**X).logits
        for i, name in enumerate(rows):
            if name in answers:
                torch.testing.assert_close(logits[i], answers[name][i])

    holding = threading.Thread(target=hold, daemon=True)
    holding.start()
    assert is_held.wait(30)
    assert in_child(serve) == 0
    may_end.set()
    finish(holding)
    assert torch.equal(ask(bank, "first"), answers["first"])


@needs_fork
@pytest.mark.filterwarnings("ignore:This process")
def test_a_child_process_goes_on_within_a_task(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "first"])

    def serve() -> None:
        with torch.no_grad():
            assert torch.equal(bank.model(**X).logits, answers["last"])

    with bank.task("last"):
        assert in_child(serve) == 0
    assert torch.equal(ask(bank, "first"), answers["first"])
