"""Training, saving, loading and resuming in two processes, under each engine, against one process.

Each engine is launched once, see `distributed/worker.py`; the tests read what its processes found.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_config
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from distributed.cases import (
    CASES,
    CHECKPOINTED,
    METHODS,
    RESUMED,
    Case,
    batches,
    digest,
    logits,
    make_base,
    make_model,
    make_optimizer,
    samples,
    train,
)
from distributed.launch import ENGINES, HERE, launch_well, once, skip_if_missing
from peft_surgical import rank_layers
from peft_surgical.layers import find_stacks


SHARDING = ["fsdp2", "fsdp1", "zero3"]

engines = pytest.mark.parametrize("engine", [engine for engine in ENGINES if " " not in engine])
sharding = pytest.mark.parametrize("engine", SHARDING)
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
methods = pytest.mark.parametrize("case", METHODS, ids=lambda case: case.name)
own_methods = pytest.mark.parametrize("case", METHODS[:2], ids=lambda case: case.name)


@dataclass(frozen=True)
class Run:
    """What the processes of one launch found."""

    folder: Path
    facts: list[dict[str, Any]]  # of each process

    def tensors(self, case: Case) -> dict[str, Any]:
        return torch.load(self.folder / f"{case.name}.pt")

    def of_all(self, *path: str) -> list[Any]:
        """A fact as each process has it."""
        return [functools.reduce(lambda facts, key: facts[key], path, facts) for facts in self.facts]


@pytest.fixture
def run(engine, tmp_path_factory) -> Run:
    skip_if_missing(engine)
    folder, _ = once(
        tmp_path_factory.getbasetemp(),
        f"engine-{engine}",
        lambda folder: launch_well(engine, [str(HERE / "worker.py"), str(folder)]),
    )
    return Run(folder, json.loads((folder / "facts.json").read_text()))


@functools.cache
def trained_alone(case: Case) -> PeftModel:
    model = make_model(case)
    train(model, make_optimizer(model), batches(case.family))
    return model


def names_trained(model: PeftModel) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def check_as_alone(run: Run, case: Case) -> None:
    """The weights are those of one process with the joint batches, and all that is trained has moved."""
    found, start, alone = run.tensors(case)["weights"], make_model(case), trained_alone(case)
    expected = dict(alone.named_parameters())
    assert set(found) == set(expected)
    for name, parameter in start.named_parameters():
        torch.testing.assert_close(found[name], expected[name].detach(), rtol=0, atol=1e-6)
        if ".key." not in name or not name.endswith("bias"):  # softmax makes a key's bias one that changes nothing
            assert torch.equal(found[name], parameter.detach()) != parameter.requires_grad, name


# training


@engines
@cases
def test_two_processes_train_as_one_with_the_joint_batch(run, case):
    assert run.of_all("processes") == [2, 2]
    check_as_alone(run, case)


@engines
@cases
def test_processes_end_with_the_same_weights_to_the_last_bit(run, case):
    first, second = run.of_all(case.name, "digest")
    assert first == second


@engines
@cases
def test_the_base_keeps_its_weights_to_the_last_bit(run, case):
    model = dict(make_model(case).named_parameters())
    expected = digest(model[name] for name in sorted(model) if ".default." not in name)
    assert run.of_all(case.name, "frozen digest") == [expected, expected]


@cases
@pytest.mark.parametrize("engine", ["ddp"])
def test_every_trainable_parameter_gets_a_gradient(run, case):
    """DDP without `find_unused_parameters` would fail in the second step otherwise."""
    assert run.of_all(case.name, "without gradient") == [[], []]


@sharding
@cases
def test_each_process_holds_its_share_of_frozen_and_trained_tensors(run, case, engine):
    first, second = run.of_all(case.name, "held")
    model = make_model(case)
    whole = {name: p.numel() for name, p in model.named_parameters()}
    assert set(first) == set(second)
    left_out = set(whole) - set(first)  # the base's own of what has copies, in each process's host memory
    assert bool(left_out) == (engine == "fsdp2" and case.method in ("SURGICAL", "STRATIFIED") and not case.neighbour)
    assert sum(whole.pop(name) for name in left_out) <= sum(whole[name] for name in names_trained(model))
    assert sum(first.values()) + sum(second.values()) <= sum(whole.values()) * 1.01  # padded to even shares
    assert sum(second.values()) > 0.45 * sum(whole.values())


def check_units(found: list[str], case: Case) -> None:
    """The layers are units, and nothing inside them is."""
    (stack,) = find_stacks(make_base(case.family)).values()
    layers = [f"base_model.model.{layer.path}" for layer in stack.layers]
    assert [unit for unit in found if unit.startswith(tuple(layers))] == layers


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
@cases
def test_the_layers_stay_the_units_of_sharding(run, case):
    for units in run.of_all(case.name, "units"):
        check_units(units, case)


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
@methods
def test_the_layers_stay_the_units_under_trainer(run, case):
    for units in run.of_all(case.name, "units of Trainer"):
        check_units(units, case)


@pytest.mark.parametrize("engine", ["fsdp1"])
def test_adapters_that_peft_would_save_empty_are_refused(run):
    for found in run.of_all("LoRA of PEFT"):
        assert "LoraConfig of PEFT's own, which saves files without its tensors under FSDP1" in found["error"]
        assert found["saved"] in (0, None)  # if this fails, PEFT saves them now, and the error can go


# saving and loading


@engines
@cases
def test_the_saved_files_are_those_that_one_process_saves(run, case, tmp_path):
    model = make_model(case)
    model.load_state_dict(run.tensors(case)["weights"], strict=False)
    model.save_pretrained(tmp_path)
    for adapter in model.peft_config:
        subfolder = "" if adapter == "default" else adapter
        folders = run.folder / case.name / subfolder, tmp_path / subfolder
        found, expected = (load_file(folder / "adapter_model.safetensors") for folder in folders)
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert found[name].numpy().tobytes() == tensor.numpy().tobytes(), name
        configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in folders]
        for config in configs:
            config["target_modules"] = sorted(config["target_modules"] or [])  # PEFT writes a set
        assert configs[0] == configs[1]
    if case.encoding != "values":
        assert any(f":{case.encoding}" in name for name in found)


@engines
@cases
def test_the_saved_files_load_in_one_process_and_under_the_engine(run, case):
    tensors = run.tensors(case)
    assert not torch.allclose(tensors["logits"], logits(make_model(case), case.family), atol=1e-3)
    alone = logits(PeftModel.from_pretrained(make_base(case.family), run.folder / case.name), case.family)
    for found in (tensors["logits"], tensors["logits after loading"]):
        assert torch.equal(found, alone)
    assert torch.equal(tensors["logits of the base"], logits(make_base(case.family), case.family))


@sharding
@methods
def test_a_share_of_a_tensor_is_an_error_before_anything_is_written(run, case):
    first, second = run.of_all(case.name, "not gathered")
    assert "accelerator.get_state_dict(model)" in first
    assert second  # this one has nothing to write, whatever it is told
    for folder in run.folder.glob("raw-*"):
        assert not list(folder.rglob("adapter_*"))


@engines
def test_adapting_loading_and_ranking_come_before_prepare(run, engine):
    for errors in run.of_all("wrong order"):
        for action in ("load", "adapt", "rank"):
            if (engine, action) == ("ddp", "rank"):
                assert not errors[action]  # every process has the whole model
            else:
                assert "comes first, accelerator.prepare(model)" in errors[action]


@engines
@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_two_steps_of_trainer_and_two_more_are_four(run, case, engine):
    folders = [run.folder / f"{case.name}-{name}" for name in ("whole/end", "half/end", "half/checkpoint-2")]
    models = [PeftModel.from_pretrained(make_base(), folder, is_trainable=True) for folder in folders]
    whole, resumed, half = ({n: p for n, p in m.named_parameters() if p.requires_grad} for m in models)
    assert sum(not torch.equal(half[name], tensor) for name, tensor in whole.items()) > len(whole) / 2
    for name, tensor in whole.items():
        if engine == "ddp":
            assert torch.equal(resumed[name], tensor), name
        else:
            torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=1e-6)
    torch.testing.assert_close(logits(models[0]), logits(models[1]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", ["fsdp1"])
def test_on_the_cpu_pytorch_saves_adam_wrongly_for_fsdp1(run):
    """Also for a plain model. If this fails, going on with Adam can be tested as it is under the other engines."""
    saved = torch.load(run.folder / "plain/optimizer.bin")["state"]
    assert len(saved) == len(dict(make_base().named_parameters()))
    assert all(torch.equal(state["exp_avg"], state["exp_avg_sq"]) for state in saved.values())


def test_models_that_zero3_shards_at_birth_are_adapted_and_checked_by_their_whole_weights(tmp_path):
    skip_if_missing("zero3 from birth")
    make_base().save_pretrained(tmp_path / "base")
    for case in METHODS[:2]:
        make_model(case).save_pretrained(tmp_path / case.name)
    launch_well("zero3 from birth", [str(HERE / "born_sharded.py"), str(tmp_path)])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["held"] == 0
    assert "ranked by whole weights" in found["rank"]
    for case in METHODS[:2]:
        adapted = get_peft_model(make_base(), make_config(case.method, "bert", [1, 2]))
        copies = {name: p for name, p in adapted.named_parameters() if p.requires_grad and "lora_A" not in name}
        assert found[case.name]["copies"] == digest(copies[name] for name in sorted(copies))
        assert found[case.name]["base"] == adapted.peft_config["default"].base
        assert torch.equal(torch.load(tmp_path / f"{case.name}.pt"), logits(make_model(case)))


# kinds of fault that users report of training in several processes, by their ids


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@own_methods
def test_D3_frozen_and_trained_parameters_share_a_unit(run, case):
    frozen_too = {n.split(".attention")[0] for n, p in make_model(case).named_parameters() if not p.requires_grad}
    trained = {name.split(".attention")[0] for name in names_trained(make_model(case))}
    assert frozen_too & trained & {f"base_model.model.bert.encoder.layer.{i}" for i in (1, 2)}
    check_as_alone(run, case)


@pytest.mark.parametrize("engine", ["fsdp2"])
@own_methods
def test_D6_sharded_tensors_are_saved_whole_and_come_back(run, case):
    saved = load_file(run.folder / case.name / "adapter_model.safetensors")
    expected = {name: p.shape for name, p in make_model(case).named_parameters() if p.requires_grad}
    assert sorted(map(tuple, expected.values())) == sorted(tuple(tensor.shape) for tensor in saved.values())
    weights, model = run.tensors(case)["weights"], PeftModel.from_pretrained(make_base(), run.folder / case.name)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter.detach()), name


@pytest.mark.parametrize("engine", ["ddp"])
@pytest.mark.parametrize("case", CHECKPOINTED, ids=lambda case: case.name)
def test_D9_checkpointing_under_ddp_trains_as_one_process_without(run, case):
    first, second = run.of_all(case.name, "digest")
    assert first == second
    check_as_alone(run, case)
    plain = {c.method: c for c in METHODS}[case.method]
    for name, tensor in run.tensors(plain)["weights"].items():
        torch.testing.assert_close(run.tensors(case)["weights"][name], tensor, rtol=0, atol=1e-6)


@engines
@pytest.mark.parametrize("data", ["whole", "split"])
def test_D11_processes_rank_their_shares_as_one_ranks_all(run, data):
    """`split`: a loader that `accelerator.prepare` made gives each process samples of its own."""
    first, second = run.of_all("rankings", data)
    assert first == second
    alone = rank_layers(make_base(), samples(), progress=False).scores
    assert first == pytest.approx(alone, rel=1e-5)


@engines
def test_D11_processes_with_different_weights_are_refused(run):
    for error in run.of_all("other weights"):
        assert "different weights: 'bert.encoder.layer.2.output.dense.weight'" in error
