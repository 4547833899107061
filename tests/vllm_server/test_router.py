"""The client and the router, with a fake server: whose turn it is, and what is left when something breaks off."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner


pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
from fake_vllm import FakeServer, running  # noqa: E402

from peft_surgical.cli import app as cli  # noqa: E402
from peft_surgical.vllm import router  # noqa: E402
from peft_surgical.vllm.client import ServedTasks  # noqa: E402
from peft_surgical.vllm.router import Turns, create_router  # noqa: E402


TASKS = ["alpha", "beta", "gamma", "damaged"]


@pytest.fixture
def fake(tmp_path):
    """A server, a client of it, and its state."""
    for task in [*TASKS, "half"]:
        (tmp_path / task).mkdir()
        (tmp_path / task / "adapter_config.json").write_text("{}")
    state = FakeServer()
    with running(state.app) as address:
        yield SimpleNamespace(state=state, address=address, folder=tmp_path, client=ServedTasks(address, tmp_path))


# ---- turns


class Office:
    """Counts who is inside, and writes down the order of switches and entries."""

    def __init__(self, seconds: float = 1.0):
        self.turns = Turns(self.switch, seconds)
        self.inside: list = []
        self.log: list = []
        self.served: object = "nothing"

    async def switch(self, task):
        assert not self.inside, "a switch under a request"
        await asyncio.sleep(0)
        if task == "bad":
            raise ValueError("cannot be served")
        self.served = task
        self.log.append(f"to {task}")

    async def visit(self, task, until: asyncio.Event | None = None):
        await self.turns.enter(task)
        assert self.served == task
        self.inside.append(task)
        self.log.append(task)
        try:
            await (until.wait() if until else asyncio.sleep(0))
        finally:
            self.inside.remove(task)
            self.turns.leave()


def soon(*coroutines) -> list[asyncio.Task]:
    return [asyncio.create_task(coroutine) for coroutine in coroutines]


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_one_switch_serves_all_that_wait_for_a_task():
    async def scene():
        office = Office()
        await asyncio.gather(*soon(*(office.visit("abcd"[i % 4]) for i in range(100))))
        assert [entry for entry in office.log if entry.startswith("to ")] == ["to a", "to b", "to c", "to d"]
        assert office.turns.switches == 4
        assert office.turns.waiting() == {}

    asyncio.run(scene())


def test_a_turn_goes_on_while_nobody_waits_and_ends_in_time_when_somebody_does(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(router, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def scene():
        office, done = Office(seconds=5), asyncio.Event()
        first = soon(office.visit("a", done))
        await settle()
        now[0] = 100
        soon(office.visit("a"))
        await settle()
        assert office.log == ["to a", "a", "a"]  # alone, a turn has no end
        other = soon(office.visit("b"))
        late = soon(office.visit("a"))
        await settle()
        assert office.turns.waiting() == {"b": 1, "a": 1}  # it was a's for long enough
        done.set()
        await asyncio.gather(*first, *other, *late)
        assert office.log == ["to a", "a", "a", "to b", "b", "to a", "a"]

    asyncio.run(scene())


def test_in_its_time_a_task_goes_on_before_those_who_wait(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(router, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def scene():
        office, done = Office(seconds=5), asyncio.Event()
        visits = soon(office.visit("a", done), office.visit("b"))
        await settle()
        now[0] = 4
        visits += soon(office.visit("a", done))
        await settle()
        assert office.inside == ["a", "a"]
        now[0] = 6
        visits += soon(office.visit("a", done), office.visit("c"))
        await settle()
        assert office.inside == ["a", "a"]
        done.set()
        await asyncio.gather(*visits)
        assert [entry for entry in office.log if entry.startswith("to ")] == ["to a", "to b", "to a", "to c"]

    asyncio.run(scene())


def test_a_task_that_cannot_be_served_fails_alone():
    async def scene():
        office = Office()
        results = await asyncio.gather(
            *soon(*(office.visit(task) for task in ["a", "bad", "b", "bad", "a"])), return_exceptions=True
        )
        assert [str(result) for result in results] == ["None", "cannot be served", "None", "cannot be served", "None"]
        with pytest.raises(ValueError, match="cannot"):
            await office.visit("bad")
        await office.visit("a")

    asyncio.run(scene())


@pytest.mark.parametrize("seed", range(20))
def test_whoever_gives_up_leaves_nothing_behind(seed):
    async def scene():
        draw = random.Random(seed)
        office = Office(seconds=draw.choice([0, 1e-4, 1]))
        visits = []
        for _ in range(100):
            visits += soon(office.visit(draw.choice([None, "a", "b", "bad"])))
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
            if draw.random() < 0.4:
                draw.choice(visits).cancel()
            if draw.random() < 0.05:
                office.turns.doubt()
        results = await asyncio.wait_for(asyncio.gather(*visits, return_exceptions=True), 30)
        kinds = {type(result) for result in results}
        assert kinds <= {type(None), ValueError, asyncio.CancelledError}
        assert office.turns.waiting() == {}
        assert not office.inside
        await asyncio.wait_for(office.visit("a"), 30)

    asyncio.run(scene())


# ---- the client


def test_a_switch_pauses_flushes_and_is_kept_in_the_server(fake):
    assert fake.client.tasks() == ["alpha", "beta", "damaged", "gamma", "half"]
    assert (fake.client.base(), fake.client.current()) == ("served-base", None)
    fake.client.switch("alpha")
    fake.client.switch("alpha")
    assert fake.state.calls == ["pause", "serve alpha"]
    assert ServedTasks(fake.address, fake.folder).current() == "alpha"
    assert (fake.state.cached, fake.state.paused) == ("alpha", False)
    fake.client.switch(None)
    assert (fake.client.current(), fake.state.weights) == (None, "base")


def test_a_task_that_cannot_be_decoded_leaves_the_one_before(fake):
    fake.client.switch("beta")
    with pytest.raises(ValueError, match="'damaged' cannot be served: its checksum is wrong"):
        fake.client.switch("damaged")
    with pytest.raises(ValueError, match="There is no task 'nothing' in .*; there are .'alpha'"):
        fake.client.switch("nothing")
    assert (fake.client.current(), fake.state.weights, fake.state.paused) == ("beta", "beta", False)


def test_a_server_with_a_mixture_answers_nobody_until_the_next_switch(fake):
    with pytest.raises(RuntimeError, match="out of memory"):
        fake.client.switch("half")
    assert fake.state.paused
    with pytest.raises(RuntimeError, match="serves no task as a whole .it was broken off.. Switch it to one again"):
        fake.client.current()
    with pytest.raises(RuntimeError, match="checksum"):  # what was before it is not served
        fake.client.switch("damaged")
    assert fake.state.paused
    fake.client.switch(None)
    assert (fake.client.current(), fake.state.weights, fake.state.paused) == (None, "base", False)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("wanted", ["alpha", "beta", None])
@pytest.mark.parametrize("call", range(6))
def test_after_a_client_that_was_killed_the_next_one_goes_on(fake, call, wanted, monkeypatch):
    fake.client.switch("alpha")
    ask, count = ServedTasks._ask, [0]

    def ask_until_killed(self, *arguments, **query):
        if count[0] == call:
            raise Killed
        count[0] += 1
        return ask(self, *arguments, **query)

    with monkeypatch.context() as patch:
        patch.setattr(ServedTasks, "_ask", ask_until_killed)
        try:
            fake.client.switch("beta")
        except Killed:
            pass
        else:
            assert call == 5, "there are fewer calls than this test thinks"
    ServedTasks(fake.address, fake.folder).switch(wanted)
    assert fake.client.current() == wanted
    assert fake.state.weights == fake.state.cached == (wanted or "base")
    assert not fake.state.paused


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ConnectionError, match="127.0.0.1:9/v1/models gave no answer"):
        ServedTasks("http://127.0.0.1:9", ".").base()


def test_the_command_starts_the_router_or_says_what_is_missing(fake, tmp_path, monkeypatch):
    seen: dict = {}
    monkeypatch.setattr("uvicorn.run", lambda app, **options: seen.update(options, app=app))

    def call(*arguments: str):
        return CliRunner().invoke(cli, ["serve-vllm", *arguments])

    result = call(fake.address, "--tasks", str(fake.folder), "--port", "1234", "--turn", "3")
    assert result.exit_code == 0
    assert "5 tasks on served-base at http://127.0.0.1:1234/v1" in result.output
    assert (seen["app"].title, seen["port"]) == ("peft-surgical", 1234)
    found = [call(fake.address, "--tasks", str(tmp_path / "alpha")), call("http://127.0.0.1:9", "--tasks", ".")]
    found += [call(f"{fake.address}/nowhere", "--tasks", str(tmp_path))]
    assert [one.exit_code for one in found] == [2, 2, 2]
    for one, said in zip(found, ["no folder with a saved adapter", "gave no answer", "answered 404"], strict=True):
        assert said in one.output


# ---- the router


@pytest.fixture
def service(fake):
    with (
        running(create_router(fake.client, seconds=0.02)) as address,
        httpx.Client(base_url=address, timeout=60, trust_env=False) as fake.http,
    ):
        fake.ask = lambda task: fake.http.post("/v1/completions", json={"model": task})
        yield fake


def test_every_answer_is_of_the_task_that_was_asked_for(service):
    names = ["alpha", "beta", "gamma", "served-base"]

    def ask_on(number: int) -> list[tuple[str, str]]:
        draw = random.Random(number)
        asked = [draw.choice(names) for _ in range(12)]
        return [(task, service.ask(task).json()["text"]) for task in asked]

    with ThreadPoolExecutor(16) as pool:
        answers = [answer for found in pool.map(ask_on, range(16)) for answer in found]
    assert len(answers) == 192
    assert all(text == task.removeprefix("served-") for task, text in answers)
    told = service.http.get("/tasks").json()
    assert 4 <= told["switches"] < 100
    assert told["waiting"] == {}


def test_what_cannot_be_answered_is_an_error_of_its_own(service):
    models = service.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["served-base", "alpha", "beta", "damaged", "gamma", "half"]
    assert service.ask("alpha").json() == {"text": "alpha"}
    found = {task: service.ask(task) for task in ["damaged", "nothing", "../alpha", "half", 7, None]}
    assert [answer.status_code for answer in found.values()] == [503, 404, 404, 503, 404, 404]
    assert "checksum" in found["damaged"].json()["error"]["message"]
    assert service.http.post("/v1/completions", content=b"[1").status_code == 400
    assert service.ask("beta").json() == {"text": "beta"}


def test_a_server_that_was_started_anew_gives_no_answer_of_another_task(service):
    assert service.ask("alpha").json() == {"text": "alpha"}
    service.state.restart()
    answer = service.ask("alpha")
    assert answer.status_code == 503
    assert "no longer serves 'alpha'" in answer.json()["error"]["message"]
    assert service.ask("alpha").json() == {"text": "alpha"}


def test_streams_hold_the_turn_until_they_end_or_are_closed(service):
    body = {"model": "alpha", "stream": True, "tokens": 20}
    with ThreadPoolExecutor(1) as pool:
        with service.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "data: alpha"
            other = pool.submit(service.ask, "beta")
            assert [line for line in lines if line] == ["data: alpha"] * 19
        assert other.result(60).json() == {"text": "beta"}
    body["tokens"] = 10**6
    with service.http.stream("POST", "/v1/completions", json=body) as stream:
        assert next(stream.iter_lines()) == "data: alpha"
    assert service.ask("beta").json() == {"text": "beta"}
