"""The command line and the example scripts under `accelerate launch` with the shipped configurations; and when a
process dies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_task import LABELS, save_base, save_data

from distributed.launch import HERE, ROOT, launch, launch_well, once, skip_if_missing
from peft_surgical import LayerRanking
from peft_surgical.training import TrainingJob, evaluate
from peft_surgical.training.checkpoints import newest_checkpoint
from peft_surgical.training.common import load_classifier, load_tokenizer, load_trained
from peft_surgical.training.prepare import prepare, rank


slow = pytest.mark.slow

OPTIONS = {
    # without a choice among checkpoints, so that the last steps count
    "surgical": ["--top-k", "1", "--score", "fisher", "--samples", "20", "--select-on", "none"],
    "spafit": ["--n1", "0", "--n2", "1", "--lora-r", "2"],
    "head": [],
}


engines = pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp1", "zero2", "zero3"])


@pytest.fixture(scope="session")
def places(tmp_path_factory) -> tuple[str, str]:
    """A tiny base model and a task, which workers of pytest-xdist share as they share the runs on them."""

    def save(folder: Path) -> str:
        save_base(folder / "base")
        save_data(folder / "data")
        return ""

    folder, _ = once(tmp_path_factory.getbasetemp(), "places", save)
    return str(folder / "base"), str(folder / "data")


@pytest.fixture
def train(places) -> Callable[..., list[str]]:
    """The arguments of `peft-surgical train`."""

    def arguments(output: Path, method: str, *more: str) -> list[str]:
        base, data = places
        common = ["--model", base, "--data", data, "--output", str(output), "--method", method, "--lr", "0.01"]
        return ["train", *common, "--epochs", "3", "--batch-size", "4", *OPTIONS[method], *more]

    return arguments


@pytest.fixture
def finished(train, tmp_path_factory) -> Callable[..., tuple[Path, str]]:
    """A run of `peft-surgical train` in two processes: its folder and what it printed."""

    def run(engine: str, method: str) -> tuple[Path, str]:
        def start(folder: Path) -> str:
            is_first = (engine, method) == ("ddp", "surgical")
            return launch_well(engine, ["-m", "peft_surgical.cli", *train(folder / "out", method)], fresh=is_first)

        folder, output = once(tmp_path_factory.getbasetemp(), f"{method}-{engine}", start)
        return folder / "out", output

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("engine", "method"),
    [
        ("ddp", "surgical"),
        *(
            pytest.param(*case, marks=slow)
            for case in (
                ("fsdp2", "spafit"),
                ("fsdp2", "head"),
                ("fsdp1", "surgical"),
                ("fsdp1", "head"),
                ("zero2", "surgical"),
                ("zero3", "surgical"),
                ("zero3", "spafit"),
                ("zero3", "head"),
            )
        ),
    ],
)
def test_the_command_line_ranks_tunes_measures_and_saves_once(engine, method, places, finished):
    skip_if_missing(engine)
    folder, output = finished(engine, method)
    assert output.count("Saved in") == 1  # the first process speaks for all
    assert "find_unused_parameters" not in output  # DDP would say that there is none
    results = json.loads((folder / "metrics.json").read_text())
    # 54 rows, or 60 where none are held out, by 2 processes by 4, three times
    assert results["training"]["steps"] == (24 if method == "surgical" else 21)
    measured = evaluate(folder, model=places[0]).metrics
    assert {name: results["evaluation"][name] for name in measured} == measured
    assert sum(tensor.numel() for tensor in weights(folder).values()) == results["parameters"]["trained"]
    if method == "surgical":
        job = TrainingJob.load(folder)
        alone = rank(prepare(job), job, progress=False)
        together = LayerRanking.load(folder / "ranking.json")
        assert together.scores == pytest.approx(alone.scores, rel=1e-4)
        assert results["layers"] == {"encoder": alone.order[:1]}


@pytest.mark.parametrize("engine", ["ddp", *(pytest.param(engine, marks=slow) for engine in ("fsdp2", "zero3"))])
def test_all_processes_keep_the_same_choice_of_layers(engine, train, places, tmp_path):
    skip_if_missing(engine)
    base = str(save_base(tmp_path / "base", num_hidden_layers=6))  # in which three choices are three
    given = train(tmp_path / "run", "surgical", "--layers", "auto", "--metric", "loss")
    for option in OPTIONS["surgical"]:
        given.remove(option)
    given[given.index(places[0])] = base
    output = launch_well(engine, ["-m", "peft_surgical.cli", *given])
    assert output.count("Saved in") == 1
    results = json.loads((tmp_path / "run" / "metrics.json").read_text())
    values = {choice: found["value"] for choice, found in results["tried"]["choices"].items()}
    assert results["tried"]["kept"] == min(values, key=values.__getitem__)
    assert len({*values.values()}) == 3
    assert {found["steps"] for found in results["tried"]["choices"].values()} == {21}
    measured = evaluate(tmp_path / "run", model=base).metrics
    assert {name: results["evaluation"][name] for name in measured} == measured


@slow
def test_a_ranking_by_itself_is_shown_and_written_once(places, tmp_path):
    base, data = places
    options = ["--model", base, "--data", data, "--samples", "20"]
    output = launch_well("ddp", ["-m", "peft_surgical.cli", "rank", *options, "--output", str(tmp_path / "r.json")])
    assert output.count("Saved") == 1
    job = TrainingJob(model=base, data=data, output="", score="fisher", samples=20, select_on="none")
    alone = rank(prepare(job), job, progress=False)
    assert LayerRanking.load(tmp_path / "r.json").scores == pytest.approx(alone.scores, rel=1e-4)


@slow
@pytest.mark.parametrize(
    ("engine", "method"),
    [
        ("ddp", "stratified"),
        ("fsdp2", "surgical"),
        ("fsdp1", "stratified"),
        ("zero2", "stratified"),
        ("zero3", "surgical"),
    ],
)
def test_the_example_script_runs_as_it_stands(engine, method, places, tmp_path):
    skip_if_missing(engine)
    base, data = places
    script = [str(ROOT / "docs/examples/train.py"), "--model", base, "--data", data, "--output", str(tmp_path)]
    script += ["--method", method, "--top-k", "1", "--epochs", "2", "--batch-size", "4", "--lr", "0.01"]
    output = launch_well(engine, script, fresh=engine == "ddp")
    assert output.count("'eval_loss'") == 2  # the first process speaks for all
    tokenizer = load_tokenizer(base)
    model = load_trained(str(tmp_path / "adapter"), base, LABELS, tokenizer)
    saved = weights(tmp_path / "adapter")
    assert any(".layer." in name for name in saved)
    last = newest_checkpoint(tmp_path)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights(last).items())
    assert torch.isfinite(model(**tokenizer("w1 w2", return_tensors="pt")).logits).all()


# a process that dies


moments = pytest.mark.parametrize("when", ["training", "saving"])


@pytest.fixture
def died(train, tmp_path_factory) -> Callable[..., tuple[Path, str]]:
    """A run of `peft-surgical train` whose second process was killed: its folder and what it printed."""

    def run(engine: str, when: str) -> tuple[Path, str]:
        def start(folder: Path) -> str:
            arguments = train(folder / "out", "surgical", "--keep-checkpoints")
            ended = launch(engine, [str(HERE / "dying.py"), when, *arguments])
            assert ended.code != 0
            return ended.output

        folder, output = once(tmp_path_factory.getbasetemp(), f"died-{when}-{engine}", start)
        return folder / "out", output

    return run


@slow
@moments
@engines
def test_a_killed_process_ends_the_launch_and_leaves_the_last_checkpoint(engine, when, places, died):
    skip_if_missing(engine)
    folder, output = died(engine, when)
    assert "process 1 kills itself" in output  # and that no process is left, `launch` has seen
    assert not (folder / "metrics.json").exists()
    if when == "saving":
        assert (folder / "checkpoints/checkpoint-16/adapter_model.safetensors").exists()
    checkpoint = newest_checkpoint(folder / "checkpoints")
    assert checkpoint.name == "checkpoint-8"
    base, _ = load_classifier(places[0], LABELS, load_tokenizer(places[0]))
    PeftModel.from_pretrained(base, checkpoint)
    for name, expected in weights(died("ddp", "training")[0] / "checkpoints/checkpoint-8").items():
        if not name.endswith("key.surgical_params.bias"):  # its gradient is zero but for rounding
            torch.testing.assert_close(weights(checkpoint)[name], expected, rtol=0, atol=1e-5)


@slow
@moments
def test_a_run_goes_on_from_where_a_process_was_killed(when, train, died, finished, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(died("ddp", when)[0], folder)
    half = weights(folder / "checkpoints/checkpoint-8")
    launch_well("ddp", ["-m", "peft_surgical.cli", *train(folder, "surgical", "--resume")])
    expected = weights(finished("ddp", "surgical")[0])
    assert not any(torch.equal(tensor, expected[name]) for name, tensor in half.items())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(folder).items())
