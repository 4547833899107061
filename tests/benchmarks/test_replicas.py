"""The simulated replicas: a case by hand, formulas of queueing, and the router itself in simulated time."""

from __future__ import annotations

import asyncio
import json
import random
import selectors
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.common.device import RESULTS
from benchmarks.swap import replicas
from benchmarks.swap.queues import Bank, Request, Vllm, route, simulate, traffic, zipf


def answer(replica, *requests: tuple[int, float], **options) -> list[float]:
    """When requests, given as task and time, were answered, in their order."""
    asked = [Request(*request) for request in requests]
    simulate([replica], lambda task: 0, asked, **options)
    return [request.done for request in asked]


def test_a_case_by_hand_of_a_server_behind_the_router():
    server = Vllm(cost=2, alone=10, together=2, turn=5)
    # task 1 is switched to until 2 and has its turn until 7: so the request of 4 is answered beside the first, at 14,
    # and that of 8 waits. Task 2 is switched to until 16 and answered at 26, then task 1 again until 28
    done = answer(server, (1, 0.0), (2, 3.0), (1, 4.0), (1, 8.0))
    assert done == pytest.approx([12, 26, 14, 38])
    assert server.switches == 3
    assert server.switching == 6
    three = Vllm(cost=0, alone=10, together=2, turn=5)
    # alone 10 s; three at once share two places: 15 s each
    assert answer(three, (0, 0.0), (0, 0.0), (0, 0.0)) == pytest.approx([15, 15, 15])


def test_a_case_by_hand_of_a_bank():
    bank = Bank(answer=10, resident=1, from_host=3, room=2)
    # a: 3 + 10; b: 3 + 10; a again, on the card: 1 + 10; c: 3 + 10, for which b leaves; c again: 10; b: 3 + 10
    done = answer(bank, *((task, 0.0) for task in (0, 1, 0, 2, 2, 1)))
    assert done == pytest.approx(np.cumsum([13, 13, 11, 13, 10, 13]))
    assert bank.switches == 5
    assert bank.switching == 13


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_task_waits_as_the_formulas_of_queueing_say(load):
    requests = traffic(zipf(1), load, 20_000, seed=0)
    waits = np.mean([request.done - request.came for request in simulate([Bank()], lambda task: 0, requests)]) - 1
    assert waits == pytest.approx(load / (2 * (1 - load)), rel=0.06)  # M/D/1, in order
    requests = traffic(zipf(1), load, 20_000, seed=0)
    times = [request.done - request.came for request in simulate([Vllm()], lambda task: 0, requests)]
    assert np.mean(times) == pytest.approx(1 / (1 - load), rel=0.06)  # M/D/1, shared
    requests = traffic(zipf(1), load, 1000, seed=0)
    times = [request.done - request.came for request in simulate([Vllm(together=1e9)], lambda task: 0, requests)]
    assert times == pytest.approx([1] * 1000)  # M/D/infinity


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop that waits for nothing: its clock goes on to what is due next."""

    def __init__(self):
        super().__init__(selectors.DefaultSelector())
        self.now, select = 0.0, self._selector.select

        def pass_time(timeout: float | None) -> list:
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = pass_time

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", range(8))
def test_the_policy_is_that_of_the_router(seed, monkeypatch):
    router = pytest.importorskip("peft_surgical.vllm.router")
    draw, cost, alone, turn = random.Random(seed), 0.7, 1.3, [0.5, 2.0, 5.0, 20.0][seed % 4]
    came = sorted(draw.uniform(0, 60) for _ in range(80))
    requests = [Request(draw.randrange(5), at) for at in came]
    loop, served = SimulatedTime(), [None]
    monkeypatch.setattr(router, "time", SimpleNamespace(monotonic=lambda: loop.now + 1000))
    done = {}

    async def switch(task: int) -> None:
        await asyncio.sleep(cost if task != served[0] else 0)
        served[0] = task

    turns = router.Turns(switch, turn)

    async def ask(number: int, request: Request) -> None:
        await asyncio.sleep(request.came)
        await turns.enter(request.task)
        assert served[0] == request.task
        await asyncio.sleep(alone)
        done[number] = loop.now
        turns.leave()

    async def ask_all() -> None:
        await asyncio.gather(*(ask(number, request) for number, request in enumerate(requests)))

    loop.run_until_complete(ask_all())
    loop.close()
    server = Vllm(cost=cost, alone=alone, together=1e9, turn=turn)
    simulate([server], lambda task: 0, requests)
    assert [request.done for request in requests] == pytest.approx([done[n] for n in range(80)])


@pytest.mark.parametrize("turn", [0.2, 1.0])
def test_clients_that_ask_again_are_answered_about_as_often_as_by_the_real_server(turn):
    measured = json.loads((RESULTS / "swap_vllm_server-CPU.json").read_text())
    options, draw = replicas.measured()["vLLM, CPU, 8 tokens"]["options"], random.Random(0)
    clients = [Request(draw.randrange(8), 0.0) for _ in range(measured["clients"])]

    def again(answered: Request) -> Request | None:
        return Request(draw.randrange(8), answered.done) if answered.done < 20 else None

    done = simulate([Vllm(**options, turn=turn)], lambda task: 0, clients, again)
    row = next(row for row in measured["loads"] if row["way"] == f"vLLM, router, turns of {turn} s")
    times = [request.done - request.came for request in done]
    assert len(done) / done[-1].done == pytest.approx(row["rate"], rel=0.15)
    assert np.median(times) == pytest.approx(row["p50"], rel=0.15)


def test_tasks_go_where_the_balancer_sends_them():
    own = [Vllm(), Vllm(), Vllm()]
    by_task, some, anywhere = (route(way, own, 100, 2, seed=0) for way in ("by task", "hot ones anywhere", "anywhere"))
    own[0].count, own[1].count, own[2].count, own[2].task = 1, 0, 0, 7
    assert {len({by_task(task) for _ in range(3)}) for task in range(100)} == {1}
    assert {by_task(task) for task in range(100)} == {0, 1, 2}
    assert [some(task) for task in (0, 1, 50)] == [1, 1, by_task(50)]
    assert [anywhere(task) for task in (0, 7)] == [1, 2]


def test_zipfs_law():
    assert zipf(3) == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert zipf(2, 2) == pytest.approx([0.8, 0.2])


def test_the_benchmark_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["replicas", "--check", "--output", str(tmp_path)])
    replicas.main()
    record = json.loads((tmp_path / "swap_replicas-check.json").read_text())
    assert len(record["rows"]) == 5 * 2 * 3
    assert replicas.table(record) in capsys.readouterr().out
