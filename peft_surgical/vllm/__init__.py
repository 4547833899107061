"""Adapters of this package in a vLLM server: the whole server changes its task, by patches of its weights.

`worker` runs in vLLM's workers, where `--worker-extension-cls` puts it; `client` asks a server for another task;
`router` is a service before one, in which a request's `model` is its task; `middleware` lets one end. Only `worker`
imports vLLM.
"""
