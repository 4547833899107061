"""A service before a vLLM server, in which the `model` of a request is its task.

Requests wait by task. One task has its turn: its requests go to the server together, as they come, and when none is
left, or others have waited through the turn's time, the task that has waited longest has the next.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from peft_surgical.vllm.client import NO_REUSE, ServedTasks


_UNKNOWN = object()


class Turns:
    """Lets requests of one task at a time through.

    A request waits for no more than a turn of each other task that waits: `seconds`, the longest answer that was begun
    in them, and a switch.

    Args:
        switch: Makes the server serve a task.
        seconds: How long a task keeps its turn while others wait.
    """

    def __init__(self, switch: Callable[[str | None], Awaitable[None]], seconds: float = 1.0):
        self.task: Any = _UNKNOWN  # whose turn it is
        self.switches = 0
        self._switch, self._seconds = switch, seconds
        self._waiting: dict[str | None, dict[asyncio.Future[None], None]] = {}  # in the order of their first requests
        self._running, self._began = 0, 0.0
        self._change: asyncio.Task[None] | None = None

    def waiting(self) -> dict[str | None, int]:
        return {task: len(requests) for task, requests in self._waiting.items()}

    async def enter(self, task: str | None) -> None:
        """Wait until a request of a task may go to the server; then `leave` must follow.

        Raises:
            Exception: What `switch` raised for this task.
        """
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(task, {})[mine] = None
        self._go_on()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.cancelled():
                self._forget(task, mine)
            elif mine.exception() is None:  # it was let through at the same time
                self.leave()
            raise

    def leave(self) -> None:
        """A request that was let through is answered."""
        self._running -= 1
        self._go_on()

    def doubt(self) -> None:
        """Nothing is known any more of what the server serves, so it is asked for the next request's task again."""
        self.task = _UNKNOWN
        self._go_on()

    def _forget(self, task: str | None, request: asyncio.Future[None]) -> None:
        requests = self._waiting.get(task, {})
        requests.pop(request, None)
        if not requests:
            self._waiting.pop(task, None)
        self._go_on()

    def _open(self, task: Any) -> list[asyncio.Future[None]]:
        """The requests of a task, which then wait no longer, without those that were given up this instant."""
        return [request for request in self._waiting.pop(task, {}) if not request.done()]

    def _go_on(self) -> None:
        if self._change is not None or not self._waiting:
            return
        if list(self._waiting) == [self.task] or time.monotonic() < self._began + self._seconds:
            self._let_through()
        if self._waiting and not self._running:
            self._change = asyncio.create_task(self._change_to(next(iter(self._waiting))))

    def _let_through(self) -> None:
        for request in self._open(self.task):
            self._running += 1
            request.set_result(None)

    async def _change_to(self, task: str | None) -> None:
        try:
            await self._switch(task)
        except Exception as error:
            self.task = _UNKNOWN
            for request in self._open(task):
                request.set_exception(error)
        else:
            self.task, self._began = task, time.monotonic()
            self.switches += 1
            self._let_through()  # those that waited, however short a turn is
        self._change = None
        self._go_on()


class _Relayed(StreamingResponse):
    """An answer of the server, passed on as it comes; its request leaves its turn whatever becomes of the client."""

    def __init__(self, answer: httpx.Response, turns: Turns):
        kept = {n: answer.headers[n] for n in ("content-type", "content-encoding") if n in answer.headers}
        super().__init__(answer.aiter_raw(), answer.status_code, kept)
        self._answer, self._turns = answer, turns

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._turns.leave()
            await self._answer.aclose()


def create_router(served: ServedTasks, seconds: float = 1.0) -> FastAPI:
    """The service before a server.

    Args:
        served: The server and its tasks.
        seconds: How long a task keeps its turn while others wait.

    Returns:
        An application with vLLM's own paths under `/v1/`, and `/tasks`, which tells what is served and who waits.
    """
    turns = Turns(lambda task: asyncio.to_thread(served.switch, task), seconds)
    names: dict[str, str] = {}  # of the base

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        names["base"] = await asyncio.to_thread(served.base)
        options: Any = {"timeout": None, "limits": NO_REUSE, "trust_env": False}
        async with httpx.AsyncClient(base_url=served.server, **options) as app.state.http:
            yield

    app = FastAPI(title="peft-surgical", lifespan=lifespan)

    @app.get("/tasks")
    async def get_tasks() -> dict[str, Any]:
        serving = None if turns.task in (None, _UNKNOWN) else turns.task
        waiting = {task or names["base"]: count for task, count in turns.waiting().items()}
        return {"tasks": served.tasks(), "serving": serving, "waiting": waiting, "switches": turns.switches}

    @app.get("/v1/models")
    async def get_models() -> dict[str, Any]:
        models = [{"id": name, "object": "model", "owned_by": "vllm"} for name in [names["base"], *served.tasks()]]
        return {"object": "list", "data": models}

    @app.post("/v1/{path:path}")
    async def post(path: str, request: Request) -> Response:
        try:
            body = json.loads(await request.body())
            model = body["model"]
        except (ValueError, KeyError, TypeError):
            return _problem(400, "A request is a JSON object with a 'model'.")
        if model != names["base"] and model not in served.tasks():
            return _problem(404, f"There is no task {model!r}; /v1/models lists them.")
        task = None if model == names["base"] else model
        try:
            await turns.enter(task)
        except Exception as error:
            return _problem(503, str(error))
        try:
            if await request.is_disconnected():
                raise RuntimeError("The client has gone.")
            asked = app.state.http.build_request("POST", f"/v1/{path}", json=body | {"model": names["base"]})
            answer = await app.state.http.send(asked, stream=True)
            if await asyncio.to_thread(served.current) != task:  # it was restarted, or another has switched it
                await answer.aclose()
                raise RuntimeError(f"{served.server} no longer serves {model!r}. Ask again.")
        except BaseException as error:
            turns.leave()
            if not isinstance(error, (httpx.HTTPError, RuntimeError, OSError)):
                raise
            turns.doubt()
            return _problem(503, str(error) or repr(error))
        return _Relayed(answer, turns)

    return app


def _problem(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status)
