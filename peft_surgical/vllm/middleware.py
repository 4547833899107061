"""A part of vLLM's HTTP server, with which it ends when its engine has ended."""

from __future__ import annotations

import asyncio
from typing import Any


class EngineWatch:
    """Breaks off what the engine can no longer answer: `--middleware peft_surgical.vllm.middleware.EngineWatch`.

    Calls that are under way when the engine ends may wait for ever, and so does the HTTP server for them, whatever
    signal it gets (vLLM 0.31 to 0.33; for control calls see its pull request 56416).
    """

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        answer = asyncio.ensure_future(self._app(scope, receive, send))
        try:
            while not (await asyncio.wait([answer], timeout=1))[0]:  # vLLM has a second to answer by itself
                if scope["app"].state.engine_client.errored:
                    answer.cancel()
            await answer
        finally:
            answer.cancel()
