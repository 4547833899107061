"""A small text classification service: one model, many tasks, each a saved adapter of any PEFT method.

    pip install ".[serve]"
    python examples/serve.py MODEL ADAPTERS --device-budget 2GB       # ADAPTERS: a folder with a folder per task
    curl localhost:8000/predict -d '{"task": "rte", "text": "..."}' -H 'content-type: application/json'

`GET /tasks` lists the tasks, `GET /stats` tells what the bank did. Requests run in threads: those of one task side by
side, and a switch to another task waits for those that run.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, Field
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from peft_surgical import DeltaBank


MOST_TEXT, MOST_BYTES = 20_000, 200_000  # characters of a text, and bytes of a whole request


def whole_text(text: str) -> str:
    """Refuse half of a character (a lone surrogate), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a character at {error.start}") from None
    return text


Text = Annotated[str, Field(max_length=MOST_TEXT), AfterValidator(whole_text)]


class Request(BaseModel):
    """What is asked."""

    task: Annotated[str, Field(max_length=200), AfterValidator(whole_text)]
    text: Text
    text_pair: Text | None = None


class Answer(BaseModel):
    """The task's answer: its best label, and the logits of all labels."""

    label: str
    logits: dict[str, float]


def predict(bank: DeltaBank, tokenizer: Any, request: Request) -> Answer:
    """Answer one request. Any number of threads may do so at once."""
    inputs = tokenizer(request.text, request.text_pair, truncation=True, max_length=512, return_tensors="pt")
    with bank.task(request.task) as model, torch.inference_mode():
        logits = model(**inputs.to(model.device)).logits[0].float().tolist()
        names = [model.config.id2label[i] for i in range(len(logits))]
    return Answer(
        label=names[max(range(len(logits)), key=logits.__getitem__)], logits=dict(zip(names, logits, strict=True))
    )


class Limited:
    """Refuses requests of more than `MOST_BYTES` before they are read whole."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Called by the server with each request."""
        messages: list[Any] = []
        while scope["type"] == "http" and (not messages or messages[-1].get("more_body")):
            messages.append(await receive())
            if sum(len(message.get("body", b"")) for message in messages) > MOST_BYTES:
                refusal = JSONResponse({"detail": f"A request may have {MOST_BYTES:,} bytes."}, 422)
                return await refusal(scope, receive, send)

        async def again() -> Any:
            return messages.pop(0) if messages else await receive()

        await self.app(scope, again, send)


def create_app(
    answer: Callable[[Request], Answer], tasks: Callable[[], list[str]], stats: Callable[[], dict[str, Any]]
) -> FastAPI:
    """The service around a function that answers requests."""
    app = FastAPI(title="peft-surgical")
    app.add_middleware(Limited)

    @app.exception_handler(RequestValidationError)
    def refuse(_: Any, error: RequestValidationError) -> JSONResponse:
        # without what was asked, which need not be anything that can be sent
        return JSONResponse({"detail": [f"{list(e['loc'])}: {e['msg']}" for e in error.errors()]}, 422)

    @app.post("/predict")
    def post_predict(request: Request) -> Answer:
        if request.task not in tasks():
            raise HTTPException(404, f"There is no task {request.task!r}.")
        try:
            return answer(request)
        except ValueError as error:  # this task cannot be served; the others can
            raise HTTPException(503, str(error)) from error

    @app.get("/tasks")
    def get_tasks() -> list[str]:
        return tasks()

    @app.get("/stats")
    def get_stats() -> dict[str, Any]:
        return stats()

    return app


def serve_bank(bank: DeltaBank, tokenizer: Any) -> FastAPI:
    """The service around a bank."""
    return create_app(
        lambda request: predict(bank, tokenizer, request), lambda: list(bank), lambda: asdict(bank.stats())
    )


def add_all(bank: DeltaBank, folder: Path) -> None:
    """Add every adapter in a folder; what cannot be added is told, and the others are served."""
    for config in sorted(folder.glob("*/adapter_config.json")):
        try:
            bank.add(config.parent.name, config.parent)
        except ValueError as error:
            logging.getLogger("serve").error("%s", error)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the base model: a folder, or a name on the hub")
    parser.add_argument("adapters", type=Path, help="a folder with a folder per task")
    parser.add_argument("--device-budget", default=None, help="memory for tasks on the device, e.g. 2GB")
    parser.add_argument("--host-budget", default=None, help="pinned host memory for tasks, e.g. 16GB")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForSequenceClassification.from_pretrained(options.model).to(device)
    bank = DeltaBank(model, options.device_budget, options.host_budget)
    add_all(bank, options.adapters)
    app = serve_bank(bank, AutoTokenizer.from_pretrained(options.model))
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
