"""That vLLM's HTTP server ends when its engine has ended, without vLLM; `test_server.py` ends a real one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest


httpx = pytest.importorskip("httpx")
from fake_vllm import running  # noqa: E402
from fastapi import FastAPI  # noqa: E402
from fastapi.responses import StreamingResponse  # noqa: E402

from peft_surgical.vllm.middleware import EngineWatch  # noqa: E402


def test_what_an_engine_left_unanswered_fails_and_all_else_is_answered():
    app, waiting, broken = FastAPI(), threading.Semaphore(0), []
    app.state.engine_client = SimpleNamespace(errored=False)
    app.add_middleware(EngineWatch)

    async def wait() -> None:
        waiting.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            broken.append("broken off")
            raise

    async def words() -> AsyncIterator[str]:
        yield "word"
        await wait()

    app.add_api_route("/call", wait)
    app.add_api_route("/stream", lambda: StreamingResponse(words()))
    app.add_api_route("/answer", lambda: app.state.engine_client.errored)
    with running(app) as address, ThreadPoolExecutor() as pool:  # a server that waits for ever fails in there
        call, stream = (pool.submit(httpx.get, address + path, timeout=60) for path in ("/call", "/stream"))
        waiting.acquire(timeout=60)
        waiting.acquire(timeout=60)
        assert httpx.get(f"{address}/answer").json() is False
        assert not call.done()
        assert not stream.done()
        app.state.engine_client.errored = True
        assert call.result().status_code == 500
        assert isinstance(stream.exception(), httpx.RemoteProtocolError)
        assert httpx.get(f"{address}/answer").json() is True
    assert broken == ["broken off"] * 2
