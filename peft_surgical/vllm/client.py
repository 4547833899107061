"""Another task for a vLLM server, asked for over HTTP."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import httpx


NO_REUSE = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""vLLM drops the connection of a call that failed, just when the next one is using it."""


class ServedTasks:
    """The tasks that one vLLM server can serve, one at a time.

    The server runs with the extension of this package and its control endpoints; `docs/vllm.md` has the line. What is
    served is asked of its workers, so any number of clients may switch it, and one that is killed leaves nothing that
    the next does not put right.

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
        """The task that is served; None for the base. One of another folder is told by its path.

        Raises:
            ConnectionError: The server does not answer, or was not started as it should.
            RuntimeError: A switch has failed half-way; the server answers nobody until the next.
        """
        folder = self._served(self._call("served_adapter"))
        return folder if folder is None or Path(folder).parent != self.folder else Path(folder).name

    def switch(self, task: str | None) -> None:
        """Serve another task, or (None) the base. Requests that run are answered before.

        Args:
            task: Its name.

        Raises:
            ValueError: There is no such task, its files are damaged or for another base; what was served still is.
            ConnectionError: The server does not answer, or was not started as it should.
            RuntimeError: It has failed half-way; the server answers nobody until the next switch.
        """
        if task is not None and task not in self.tasks():
            raise ValueError(f"There is no task {task!r} in {self.folder}; there are {self.tasks()}.")
        folder = None if task is None else str(self.folder / task)
        with self._lock:
            wanted = {"folder": folder, "is_whole": True}
            is_served = all(worker == wanted for worker in self._call("served_adapter"))
            if not is_served or self._ask("GET", "/is_paused")["is_paused"]:  # by a client that was killed
                self._ask("POST", "/pause", mode="wait")
                told = self._call("serve_adapter", folder=folder)
                self._served(told)  # else it stays paused
                self._ask("POST", "/reset_prefix_cache")
                self._ask("POST", "/resume")
                if told[0]["problem"]:
                    raise ValueError(f"The task {task!r} cannot be served: {told[0]['problem']}")

    def _served(self, told: list[dict[str, Any]]) -> str | None:
        folders = {worker["folder"] for worker in told}
        if len(folders) > 1 or not all(worker["is_whole"] for worker in told):
            why = next((worker["problem"] for worker in told if worker.get("problem")), "it was broken off")
            raise RuntimeError(f"{self.server} serves no task as a whole ({why}). Switch it to one again.")
        return folders.pop()

    def _call(self, method: str, **arguments: Any) -> list[dict[str, Any]]:
        return self._ask("POST", "/collective_rpc", {"method": method, "kwargs": arguments})["results"]

    def _ask(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        try:
            answer = self._http.request(method, path, json=body, params=query)
            if answer.is_success:
                return answer.json()
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise ConnectionError(f"{self.server}{path} gave no answer ({error!r}).") from error
        told = f"{self.server}{path} answered {answer.status_code}: {answer.text[:500]}"
        raise ConnectionError(f"{told}. Was the server started as docs/vllm.md says?")
