"""What of a vLLM server the client and the router use, without vLLM: a completion is the name of what is served."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from peft_surgical.vllm import UNCHANGED


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """An application on a free port of loopback, while the block runs; gives its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


class FakeServer:
    """Its state, and what was asked of it. A task whose name begins with "damaged" cannot be decoded."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.restart()
        self.app = FastAPI()
        for path, method in {
            "/pause": self.pause,
            "/resume": self.resume,
            "/start_weight_update": self.start,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
            "/update_weight_version": self.set_version,
            "/reset_prefix_cache": self.reset_cache,
            "/v1/completions": self.complete,
        }.items():
            self.app.add_api_route(path, method, methods=["POST"], response_model=None)
        self.app.add_api_route("/weight_info", lambda: {"weight_version": self.version})
        self.app.add_api_route("/v1/models", lambda: {"data": [{"id": "served-base"}]})

    def restart(self) -> None:
        """As it is after a start."""
        self.version, self.weights, self.cached = "default", "base", "base"
        self.paused = self.active = False
        self.running = 0

    async def pause(self, mode: str) -> dict:
        assert mode == "wait"
        self.calls.append("pause")
        self.paused = True
        while self.running:
            await asyncio.sleep(0.002)
        return {}

    async def resume(self) -> dict:
        self.paused = False
        return {}

    async def start(self) -> Any:
        if self.active:
            return failure("start_weight_update called while a weight update is already active.")
        self.active = True
        return {}

    async def update(self, request: Request) -> Any:
        folder = (await request.json())["update_info"]["adapter"]
        assert self.active
        assert self.paused
        assert not self.running, "weights change under a request"
        if folder is not None and Path(folder).name.startswith("damaged"):
            self.active = False
            return failure(f"its checksum is wrong. {UNCHANGED}")
        if folder is not None and Path(folder).name.startswith("half"):
            self.active, self.weights = False, "a mixture"
            return failure("out of memory")
        self.weights = "base" if folder is None else Path(folder).name
        self.calls.append(f"update {self.weights}")
        return {}

    async def finish(self, request: Request) -> dict:
        assert self.active
        self.active = False
        self.version = (await request.json()).get("weight_version", self.version)
        return {}

    async def set_version(self, request: Request) -> dict:
        self.version = (await request.json())["new_version"]
        return {}

    async def reset_cache(self) -> dict:
        self.cached = self.weights
        return {}

    async def complete(self, request: Request) -> Any:
        body = await request.json()
        assert body["model"] == "served-base"
        while self.paused:
            await asyncio.sleep(0.002)
        self.running += 1
        assert self.cached == self.weights, "another task's cache"
        if body.get("stream"):
            return StreamingResponse(self.words(body["tokens"]), media_type="text/event-stream")
        try:
            await asyncio.sleep(body.get("seconds", 0.005))
            return {"text": self.weights}
        finally:
            self.running = max(0, self.running - 1)  # it may have been restarted

    async def words(self, count: int) -> Any:
        try:
            for _ in range(count):
                yield f"data: {self.weights}\n\n"
                await asyncio.sleep(0.01)
        finally:
            self.running = max(0, self.running - 1)


def failure(message: str) -> JSONResponse:
    wrapped = f"Call to collective_rpc method failed: Worker failed with error '{message}', please check the stack"
    return JSONResponse({"error": {"message": wrapped, "code": 500}}, 500)
