"""Tasks that are removed, added anew and asked for at the same time."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import pytest
import torch
from test_bank import X, ask, base, buffers_alive, fill, start_and_wait, storages

from peft_surgical.bank import DeltaBank
from peft_surgical.bank.memory import TaskFile


class SlowReads:
    """Reads of the files in one folder stop until they are let go on."""

    def __init__(self, monkeypatch, folder: str):
        self.have_begun, self.may_go_on = threading.Event(), threading.Event()
        self.buffers: list[weakref.ref] = []
        read = TaskFile.read

        def slow_read(file, layout, buffer):
            if file.path.parent.name == folder:
                self.buffers.append(weakref.ref(buffer))
                self.have_begun.set()
                assert self.may_go_on.wait(60)
            read(file, layout, buffer)

        monkeypatch.setattr(TaskFile, "read", slow_read)


def finish(thread: threading.Thread) -> None:
    thread.join(30)
    assert not thread.is_alive()
    # MKL gives back a thread's buffers under a lock while the system ends the thread, which is after Python's join; a
    # child that is forked then finds the lock held for ever (9 of 809 forks; none of 2,847 after this)
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        time.sleep(0.001)


def update(bank, folder, name: str, version: int) -> None:
    bank.remove(name)
    bank.add(name, folder / f"{name} {version}")


@pytest.mark.parametrize("name", ["a", "c"])
@pytest.mark.parametrize("host_budget", [0, "1MB"])
def test_an_update_during_a_prefetch_is_answered_with_the_new_version(name, host_budget, versions, monkeypatch):
    folder, answers = versions
    bank = DeltaBank(base(), host_budget=host_budget)
    bank.add(name, folder / f"{name} 0")
    slow = SlowReads(monkeypatch, f"{name} 0")
    prefetched = bank.prefetch(name)
    assert slow.have_begun.wait(30)
    updating = threading.Thread(target=update, args=(bank, folder, name, 1), daemon=True)
    updating.start()
    finish(updating)  # it does not wait for the file
    slow.may_go_on.set()
    prefetched.result(30)
    assert bank.stats().device_bytes == bank.stats().host_bytes == 0
    gc.collect()
    assert [buffer() for buffer in slow.buffers] == [None] * len(slow.buffers)
    assert torch.equal(ask(bank, name), answers[f"{name} 1"])
    assert torch.equal(ask(bank, name), answers[f"{name} 1"])


def test_an_update_before_a_prefetch_that_waits_is_answered_with_the_new_version(versions, monkeypatch):
    folder, answers = versions
    bank = DeltaBank(base())
    for name in "abc":
        bank.add(name, folder / f"{name} 0")
    slow = SlowReads(monkeypatch, "b 0")
    prefetched = [bank.prefetch("b"), bank.prefetch("a"), bank.prefetch("c")]  # one after the other
    assert slow.have_begun.wait(30)
    update(bank, folder, "a", 1)
    bank.remove("c")
    slow.may_go_on.set()
    for future in prefetched:
        future.result(30)
    assert torch.equal(ask(bank, "a"), answers["a 1"])
    assert torch.equal(ask(bank, "b"), answers["b 0"])
    update(bank, folder, "a", 2)
    bank.remove("b")
    assert torch.equal(ask(bank, "a"), answers["a 2"])
    bank.remove("a")
    assert bank.stats().device_bytes == buffers_alive(bank) == 0


def test_who_had_looked_a_task_up_before_its_update_gets_the_new_version(versions, monkeypatch):
    folder, answers = versions
    bank = DeltaBank(base())
    bank.add("a", folder / "a 0")
    bank.add("b", folder / "b 0")
    slow = SlowReads(monkeypatch, "a 0")
    found = []
    asking = threading.Thread(target=lambda: found.append(ask(bank, "a")), daemon=True)
    asking.start()
    assert slow.have_begun.wait(30)  # it knows the first version, and waits for its file
    updating = threading.Thread(target=update, args=(bank, folder, "a", 1), daemon=True)
    updating.start()
    finish(updating)
    slow.may_go_on.set()
    finish(asking)
    assert torch.equal(found[0], answers["a 1"])
    assert torch.equal(ask(bank, "a"), answers["a 1"])


def test_nothing_of_removed_tasks_stays(versions):
    folder, _ = versions
    bank = DeltaBank(base(), host_budget="1MB")
    model = bank.model
    bank.add("c", folder / "c 0")
    ask(bank, "c")
    bank.remove("c")
    before = storages(model), _entries(model)
    for version in range(3):
        bank.add("c", folder / f"c {version}")
        ask(bank, "c")
        bank.prefetch("c").result(30)
        bank.remove("c")
    assert (storages(model), _entries(model)) == before
    assert bank.stats().device_bytes == bank.stats().host_bytes == 0


def _entries(model) -> int:
    """How many entries the tables of all modules have."""
    tables = [table for module in model.modules() for table in vars(module).values()]
    return sum(len(table) for table in tables if isinstance(table, (dict, set, list)))


def test_an_active_task_stays_active_when_another_is_removed(versions):
    folder, answers = versions
    model = base()
    alone = model(**X).logits.detach()
    bank = DeltaBank(model)
    bank.add("five", folder / "a 1", labels={"num_labels": 2, "id2label": {0: "no", 1: "yes"}})
    bank.add("b", folder / "b 0")
    ask(bank, "b")
    bank.activate("five")
    bank.remove("b")
    with torch.no_grad():
        assert torch.equal(model(**X).logits, answers["a 1"])
        assert model.config.id2label[1] == "yes"
        bank.remove("five")
        assert torch.equal(model(**X).logits, alone)
    assert model.config.id2label[1] == "LABEL_1"


def test_one_that_waits_is_told_or_served_when_its_task_is_updated(versions):
    folder, answers = versions
    bank = fill(DeltaBank(base()), folder, ["b 0"])
    bank.add("a", folder / "a 0")
    found: list[object] = []

    def ask_for_it() -> None:
        try:
            found.append(ask(bank, "a"))
        except ValueError as error:
            found.append(str(error))

    threads = [threading.Thread(target=update, args=(bank, folder, "a", 1)), threading.Thread(target=ask_for_it)]
    with bank.task("b 0"):
        for thread in threads:
            start_and_wait(thread)
    for thread in threads:
        finish(thread)
    if isinstance(found[0], str):
        assert "There is no task 'a'" in found[0]
    else:
        assert torch.equal(found[0], answers["a 1"])
    assert torch.equal(ask(bank, "a"), answers["a 1"])
