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
from fastapi.responses import StreamingResponse


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
    """Its state, and what was asked of it. The task "damaged" cannot be decoded."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.restart()
        self.app = FastAPI()
        for path, method in {
            "/pause": self.pause,
            "/resume": self.resume,
            "/collective_rpc": self.call,
            "/reset_prefix_cache": self.reset_cache,
            "/v1/completions": self.complete,
        }.items():
            self.app.add_api_route(path, method, methods=["POST"], response_model=None)
        self.app.add_api_route("/is_paused", lambda: {"is_paused": self.paused})
        self.app.add_api_route("/v1/models", lambda: {"data": [{"id": "served-base"}]})

    def restart(self) -> None:
        """As it is after a start."""
        self.folder: str | None = None
        self.weights = self.cached = "base"
        self.is_whole, self.paused = True, False
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

    async def call(self, request: Request) -> dict:
        body = await request.json()
        problem = None
        if body["method"] == "serve_adapter":
            problem = self.serve(body["kwargs"]["folder"])
        told = {"folder": self.folder, "is_whole": self.is_whole}
        return {"results": [told | {"problem": problem} if body["method"] == "serve_adapter" else told] * 2}

    def serve(self, folder: str | None) -> str | None:
        assert self.paused
        assert not self.running, "weights change under a request"
        name = "base" if folder is None else Path(folder).name
        if name == "damaged":
            return "its checksum is wrong"
        if name == "half":
            self.weights, self.is_whole = "a mixture", False
            return "out of memory"
        self.folder, self.weights, self.is_whole = folder, name, True
        self.calls.append(f"serve {name}")
        return None

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
