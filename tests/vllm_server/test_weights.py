"""The weights of a worker, with copies in pinned memory, in a model with vLLM's parameters; without a server or a GPU.

Where vLLM is not installed, its reloading is that of the benchmark's stand-in.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import warnings

import pytest
import torch
from torch import nn

from benchmarks.swap import vllm_stand_in, vllm_weights
from benchmarks.swap.vllm_weights import SIZES, Served, save


TASKS = [None, "values", "lossless", "int8", "another"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return folder, save(folder, "tiny", torch.device("cpu"))


@pytest.fixture(autouse=True)
def stand_in():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "vllm" and getattr(sys.modules[name], "__file__", None) is None:
            del sys.modules[name]  # others look for it


@pytest.fixture
def served(place, tmp_path):
    shutil.copytree(place[0], tmp_path / "own")
    return Served(tmp_path / "own", place[1], torch.device("cpu"))


def keep(served: Served, monkeypatch, budget: int | None) -> list[str]:
    """Let it keep copies as on a GPU; gives the names of what is read, in order."""
    read: list[str] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(served.weights, "_is_on_gpu", True)
    monkeypatch.setattr(served.weights, "_kept", type(served.weights._kept)(budget, True))
    get = served.weights._kept.get
    monkeypatch.setattr(
        served.weights._kept, "get", lambda key, state, do: get(key, state, lambda: (read.append(key), do())[1])
    )
    return read


@pytest.mark.parametrize("budget", [0, 400_000, 1_200_000, None])
def test_copies_of_tasks_come_and_go_and_what_is_served_is_always_right(served, monkeypatch, budget):
    keep(served, monkeypatch, budget)
    draw, spare = random.Random(0), served.folder / "spare"
    shutil.copytree(served.folder / "values", spare)
    for _ in range(25):
        if draw.random() < 0.2:  # the task is saved anew
            (served.folder / "another").rename(served.folder / "aside")
            spare.rename(served.folder / "another")
            (served.folder / "aside").rename(spare)
        task = draw.choice(TASKS)
        served.seconds(task)
        served.check(task)
    used = served.weights._kept._kept
    assert used.used == sum(t.nbytes for _, (_, tensors) in used._held.values() for t in tensors.values())
    assert budget is None or used.peak <= budget


def test_what_is_kept_is_not_read_again(served, monkeypatch):
    read = keep(served, monkeypatch, None)
    for task in ["values", "int8", None, "values", "another", "int8", None]:
        served.seconds(task)
    assert sorted(key for key in read if "layers" not in key) == [
        str(served.folder / task) for task in ("another", "int8", "values")
    ]
    assert len(read) == len(set(read)) == 3 + 10
    (served.folder / "values" / "adapter_config.json").touch()
    served.seconds("values")
    assert read[-1] == str(served.folder / "values")


def test_on_a_cpu_tasks_are_kept_and_not_copied(served, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", None)
    read: list[str] = []
    change = served.weights._read
    monkeypatch.setattr(served.weights, "_read", lambda folder: (read.append(folder), change(folder))[1])
    for task in ["values", "int8", None, "values", "another", "int8", None, "values"]:
        served.seconds(task)
        served.check(task)
    assert len(read) == 3
    tensors = [tensor for _, (_, tensors) in served.weights._kept._kept._held.values() for tensor in tensors.values()]
    assert served.weights._kept._kept.used == sum(tensor.nbytes for tensor in tensors)  # nothing of the base
    shutil.copytree(served.folder / "another", served.folder / "new")
    shutil.rmtree(served.folder / "values")
    (served.folder / "new").rename(served.folder / "values")  # saved anew under its name
    served.seconds(None)
    served.seconds("values")
    assert len(read) == 4
    served.check("another")


def test_a_system_that_pins_no_more_memory_serves_all_the_same(served, monkeypatch):
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    keep(served, monkeypatch, None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    for task in ("values", "another", None):
        served.seconds(task)
        served.check(task)
    assert served.weights._kept._kept.used == 0


@pytest.mark.parametrize("decoys", ["two of a name", "of the layers' names"])
def test_layers_that_are_not_known_by_their_names_are_found_by_what_is_loaded(served, decoys):
    base = served.base
    shapes = {name.replace(".layers.", ".blocks."): tuple(tensor.shape) for name, tensor in base.items()}
    model = vllm_stand_in.ServedLlama(shapes, torch.bfloat16, torch.device("cpu"))
    model.parts = {name: model.parts[name.replace(".layers.", ".blocks.")] for name in base}
    for other in ["vision", "audio"] if decoys == "two of a name" else ["vision"]:
        tower = nn.Module()
        tower.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(SIZES["tiny"]["num_hidden_layers"]))
        setattr(model, other, tower)
    served.serve(model)
    for task in ("values", "another", None):
        served.seconds(task)
        served.check(task)
    assert served.weights._keeps_names is (decoys == "two of a name")


def test_every_way_of_the_weights_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vllm_weights", "--check", "--rounds", "1", "--output", str(tmp_path)])
    with warnings.catch_warnings():
        vllm_weights.main()
    (file,) = tmp_path.glob("swap_vllm_weights-*-check.json")
    record = json.loads(file.read_text())
    assert len(record["rows"]) == 3 * 3 + 2
    assert record["rows"][-1]["bytes"] == 2 * record["rows"][0]["bytes"]
    assert vllm_weights.table(record) in capsys.readouterr().out
