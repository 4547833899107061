"""Layers trained in turns by two processes, under each engine, are those of one process."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from distributed.launch import HERE, launch, launch_well, once, skip_if_missing
from distributed.rotating import CASES, trainer_of


cases = pytest.mark.parametrize("case", CASES)


@pytest.fixture(params=["ddp", "fsdp2"])
def found(request, tmp_path_factory):
    skip_if_missing(request.param)
    folder, _ = once(
        tmp_path_factory.getbasetemp(),
        f"rotating-{request.param}",
        lambda folder: launch_well(request.param, [str(HERE / "rotating.py"), str(folder)]),
    )
    return request.param, folder, json.loads((folder / "facts.json").read_text())


@cases
def test_two_processes_train_the_turns_of_one(found, case, tmp_path):
    engine, folder, facts = found
    first, second = (of_process[case] for of_process in facts)
    assert first == second
    assert first["engine"] == {"ddp": "DDP", "fsdp2": "FSDP2"}[engine]
    of_turn, of_head = 2 * 16, 2
    assert first["with state"] == [of_turn + of_head] * 5
    assert first["reduced"] == ([of_turn + of_head] * 5 if engine == "ddp" else [])
    trainer = trainer_of(tmp_path, case, 1)
    trainer.train()
    trainer.save_model(str(tmp_path / "end"))
    expected = load_file(tmp_path / "end/adapter_model.safetensors")
    saved = load_file(folder / case / "end/adapter_model.safetensors")
    assert set(saved) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-6)


@cases
def test_a_training_goes_on_from_the_middle_of_a_turn(found, case):
    engine, _, facts = found
    for of_process in facts:
        if engine == "ddp":
            assert of_process[case]["digest"] == of_process[case]["digest after resuming"]
        else:
            assert "save_only_model=True" in of_process[case]["error"]


def test_fsdp2_keeps_the_dtype_of_layers_at_rest(found):
    engine, _, facts = found
    assert all(("which FSDP2 does not allow" in f["rounded"]) == (engine == "fsdp2") for f in facts)


def test_rest_in_host_memory_changes_nothing(found):
    _, _, facts = found
    digests = {digest for of_process in facts for digest in of_process["at rest"].values()}
    assert len(digests) == 1


def test_fsdp1_is_refused(tmp_path):
    skip_if_missing("fsdp1")
    finished = launch("fsdp1", [str(HERE / "rotating.py"), str(tmp_path)])
    assert finished.code != 0
    assert "use DDP or FSDP2" in finished.output
