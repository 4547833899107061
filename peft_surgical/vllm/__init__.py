"""Adapters of this package in a vLLM server: the whole server changes its task, by patches of its weights.

`engine` runs in vLLM's workers, which load it by the entry point in `pyproject.toml`; `client` asks a server for
another task; `router` is a service before one, in which a request's `model` is its task. vLLM itself is imported by
`engine` alone.
"""

BACKEND = "peft_surgical"
"""The name of the engine in vLLM: `--weight-transfer-config '{"backend": "peft_surgical"}'`."""
UNCHANGED = "The task before is still served."
"""The end of every error of the engine before which it has changed nothing."""
