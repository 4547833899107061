"""Another task for a vLLM server, asked for over HTTP."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import httpx

from peft_surgical.vllm import UNCHANGED


_TASK, _BASE, _CHANGING = "task:", "base", "changing to "
_UNTOUCHED = "default"  # what vLLM says before anyone has told it of a version
NO_REUSE = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""vLLM drops the connection of a call that failed, just when the next one is using it."""


class ServedTasks:
    """The tasks that one vLLM server can serve, one at a time.

    The server runs with the engine of this package and its control endpoints; `docs/vllm.md` has the line. What it
    serves is kept in the server itself, as the version of its weights, so that a client that was killed leaves
    nothing behind that the next does not see.

    Args:
        server: The server's address.
        folder: A folder with a saved adapter per task, which the server can read under the same path.
        timeout: How long a switch may wait for the requests that run, in seconds.

    Example:

        >>> tasks = ServedTasks("http://127.0.0.1:8000", "adapters")
        >>> tasks.switch("rte")  # doctest: +SKIP
        >>> tasks.current()  # doctest: +SKIP
        'rte'
    """

    def __init__(self, server: str, folder: str | os.PathLike, *, timeout: float = 600.0):
        self.server, self.folder = server.rstrip("/"), Path(os.path.abspath(folder))
        self._http = httpx.Client(base_url=self.server, timeout=timeout, limits=NO_REUSE, trust_env=False)
        self._lock = threading.Lock()

    def tasks(self) -> list[str]:
        """The names of the tasks in the folder, as it is now."""
        return sorted(path.parent.name for path in self.folder.glob("*/adapter_config.json"))

    def base(self) -> str:
        """What the server calls its base model."""
        return self._ask("GET", "/v1/models")["data"][0]["id"]

    def current(self) -> str | None:
        """The task that is served; None for the base.

        Raises:
            RuntimeError: The server does not answer, or a switch was broken off; it answers nobody until the next.
        """
        version = self._version()
        if version.startswith(_CHANGING):
            raise RuntimeError(f"{self.server} was {version!r} when that was broken off. Switch to a task again.")
        return version.removeprefix(_TASK) if version.startswith(_TASK) else None

    def switch(self, task: str | None) -> None:
        """Serve another task, or (None) the base. Requests that run are answered before, others wait.

        Args:
            task: Its name.

        Raises:
            ValueError: There is no such task, its files are damaged or for another base; what was served still is.
            RuntimeError: The server did not do it, and answers nobody until a switch is done.
        """
        if task is not None and task not in self.tasks():
            raise ValueError(f"There is no task {task!r} in {self.folder}; there are {self.tasks()}.")
        wanted = _BASE if task is None else _TASK + task
        with self._lock:
            before = self._version()
            if before != wanted:
                self._ask("POST", "/pause", mode="wait")
                self._ask("POST", "/update_weight_version", {"new_version": _CHANGING + wanted})
                try:
                    self._update(None if task is None else str(self.folder / task))
                except RuntimeError as error:
                    if UNCHANGED in str(error) and not before.startswith(_CHANGING):
                        self._ask("POST", "/update_weight_version", {"new_version": before})
                        self._ask("POST", "/resume")
                        raise ValueError(f"The task {task!r} cannot be served: {error}") from error
                    raise
                self._ask("POST", "/reset_prefix_cache")
                self._ask("POST", "/finish_weight_update", {"weight_version": wanted})
            self._ask("POST", "/resume")  # also if a client was killed just before it

    def _version(self) -> str:
        version = self._ask("GET", "/weight_info")["weight_version"]
        return _BASE if version == _UNTOUCHED else version

    def _update(self, adapter: str | None) -> None:
        try:
            self._ask("POST", "/start_weight_update")
        except RuntimeError as error:
            if "already active" not in str(error):
                raise
            self._ask("POST", "/finish_weight_update", {})  # one that was killed has begun another
            self._ask("POST", "/start_weight_update")
        self._ask("POST", "/update_weights", {"update_info": {"adapter": adapter}})

    def _ask(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        try:
            answer = self._http.request(method, path, json=body, params=query)
            data = answer.json()
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise RuntimeError(f"{self.server}{path} gave no answer ({error!r}).") from error
        if answer.is_success:
            return data
        said = data.get("error", data)
        text = str(said.get("message", said) if isinstance(said, dict) else said)
        text = text.partition("Worker failed with error '")[2] or text  # what vLLM puts around an engine's own words
        raise RuntimeError(f"{text.partition(UNCHANGED)[0]}{UNCHANGED if UNCHANGED in text else ''}")
