"""`--layers auto` against choices that are trained by hand, one by one."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from forks import run_forked
from safetensors.torch import load_file
from tiny_chat import save_language_data, save_language_model
from tiny_task import save_base, save_data
from transformers import AutoModelForSequenceClassification, TrainerCallback
from typer.testing import CliRunner

from peft_surgical import choose_layers
from peft_surgical.cli import app
from peft_surgical.methods.trainer import CHOICES
from peft_surgical.training import TrainingJob, TrainingRun, evaluate, plan, train
from peft_surgical.training.common import Diverged, JointCheckpoints


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, dict[str, str]]:
    base = str(save_base(tmp_path_factory.mktemp("base"), num_hidden_layers=6))
    labels, amounts = tmp_path_factory.mktemp("labels"), tmp_path_factory.mktemp("amounts")
    chats, language = tmp_path_factory.mktemp("chats"), tmp_path_factory.mktemp("language")
    return {
        "labels": {"model": base, "data": str(save_data(labels))},
        "amounts": {"model": base, "data": str(save_data(amounts, pair=True, regression=True))},
        "chats": {
            "model": str(save_language_model(language, num_hidden_layers=6)),
            "data": str(save_language_data(chats, train=40)),
        },
    }


@pytest.fixture
def job(places, tmp_path):
    def make(kind: str = "labels", **options) -> TrainingJob:
        usual = {"output": str(tmp_path / "out"), "epochs": 2, "learning_rate": 1e-2, "layers": "auto"}
        return TrainingJob(**{**places[kind], **usual, **options})

    return make


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("labels", {"metric": "loss"}),
        ("labels", {"metric": "loss", "max_steps": 6}),  # which ends within an epoch of four
        ("labels", {"metric": "loss", "epochs": 9, "early_stopping": 1, "learning_rate": 0.3}),
        ("amounts", {}),
        ("chats", {}),
    ],
    ids=["labels", "steps", "stopping", "amounts", "chats"],
)
def test_the_best_of_the_choices_is_kept_as_it_is_alone(job, tmp_path, kind, options):
    if kind == "chats":
        pytest.importorskip("trl")
    alone = {}
    for choice in CHOICES:
        alone[choice] = train(job(kind, layers=choice, output=str(tmp_path / choice), **options))
    lower = options.get("metric") == "loss" or kind == "chats"
    best = sorted(CHOICES, key=lambda choice: alone[choice]["selection"]["best"], reverse=not lower)[0]
    results = train(asked := job(kind, **options))
    tried = results["tried"]
    assert len({one["selection"]["best"] for one in alone.values()}) == len(CHOICES)  # or there is nothing to choose
    assert tried["kept"] == best
    assert same(weights(asked.output), weights(tmp_path / best))
    for key in ("evaluation", "selection", "layers", "training", "history", "parameters", "base", "answers"):
        assert results.get(key) == alone[best].get(key), key
    for choice, one in alone.items():
        found = tried["choices"][choice]
        assert found["value"] == one["selection"]["best"]
        assert found["layers"] == [*one["layers"].values()][0]
        assert (found["steps"], found["parameters"]) == (one["training"]["steps"], one["parameters"]["trained"])
        assert found["history"] == [[row["step"], row[results["metric"]]] for row in one["history"]]
    if "early_stopping" in options:
        assert min(found["steps"] for found in tried["choices"].values()) < 9 * 4
    if kind != "chats":
        measured = evaluate(asked.output).metrics
        assert measured == {name: results["evaluation"][name] for name in measured}
    assert json.loads(Path(asked.output, "metrics.json").read_text()) == json.loads(json.dumps(results))
    assert not [*Path(asked.output).rglob("checkpoint-*")]
    card = Path(asked.output, "README.md").read_text()
    assert re.search(rf"{best} .*kept\n", card.split("## Layers tried")[1])


def test_of_equal_choices_the_default_is_kept(job):
    """Nothing is learnt at this rate."""
    tried = train(job(learning_rate=1e-12, max_steps=1))["tried"]
    assert len({one["value"] for one in tried["choices"].values()}) == 1
    assert tried["kept"] == CHOICES[0]


def test_the_evaluation_rows_choose_no_layers(job, tmp_path, places):
    flipped = tmp_path / "flipped"
    flipped.mkdir()
    data = Path(places["labels"]["data"])
    Dataset.from_parquet(str(data / "train.parquet")).to_parquet(str(flipped / "train.parquet"))
    rows = Dataset.from_parquet(str(data / "validation.parquet"))
    rows = rows.map(lambda row: {"label": 1 - row["label"]}, features=rows.features)
    rows.to_parquet(str(flipped / "validation.parquet"))
    one = train(job(output=str(tmp_path / "one"), metric="loss"))
    other = train(job(output=str(tmp_path / "other"), metric="loss", data=str(flipped)))
    assert same(weights(tmp_path / "one"), weights(tmp_path / "other"))
    assert other["evaluation"]["accuracy"] == pytest.approx(1 - one["evaluation"]["accuracy"])
    values = [[found["history"] for found in results["tried"]["choices"].values()] for results in (one, other)]
    assert values[0] == values[1]


class Steps(TrainerCallback):
    """Counts the trainings and their steps; may kill the process at a step of one of them."""

    def __init__(self, training: int = 0, step: int = 0):
        self.steps, self.place = [], (training, step)

    def on_train_begin(self, *args, **kwargs):
        self.steps.append([])

    def on_step_end(self, args, state, control, **kwargs):
        self.steps[-1].append(state.global_step)
        if (len(self.steps), state.global_step) == self.place:
            os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(job: TrainingJob) -> None:
    TrainingRun(job, callbacks=[Steps(2, 6)]).fit()


def test_a_killed_run_goes_on_and_trains_no_finished_choice_again(job, tmp_path):
    options = {"metric": "loss", "epochs": 3}
    whole = train(job(output=str(tmp_path / "whole"), **options))
    asked = job(**options)
    assert run_forked(run_until_killed, asked).code == -signal.SIGKILL
    assert not Path(asked.output, "metrics.json").exists()
    steps = Steps()
    run = TrainingRun(asked, resume=True, callbacks=[steps])
    run.fit()
    resumed = run.finish()
    assert steps.steps == [[*range(5, 13)], [*range(1, 13)]]
    assert same(weights(asked.output), weights(tmp_path / "whole"))
    for key in ("evaluation", "selection", "layers", "history"):
        assert resumed[key] == whole[key], key
    for choice, found in resumed["tried"]["choices"].items():
        expected = whole["tried"]["choices"][choice]
        assert {**found, "seconds": 0} == {**expected, "seconds": 0}


def test_with_its_checkpoints_kept_a_run_trains_each_choice_longer(job, tmp_path):
    asked = job(keep_checkpoints=True, metric="loss")
    train(asked)
    longer, steps = dataclasses.replace(asked, epochs=3), Steps()
    run = TrainingRun(longer, resume=True, callbacks=[steps])
    run.fit()
    results = run.finish()
    assert steps.steps == [[*range(9, 13)]] * 3
    assert {found["steps"] for found in results["tried"]["choices"].values()} == {12}
    assert results["training"]["steps"] == 12
    train(asked := job(output=str(tmp_path / "gone")))
    with pytest.raises(ValueError, match="without the checkpoints"):
        train(dataclasses.replace(asked, epochs=3), resume=True)


def test_choices_of_the_same_layers_are_trained_once(job, tmp_path):
    base = save_base(tmp_path / "shallow", num_hidden_layers=2)
    tried = train(job(model=str(base), max_steps=1))["tried"]
    layers = [found["layers"] for found in tried["choices"].values()]
    assert layers == [[1], [0]]


def test_a_choice_that_diverges_is_not_kept(job, monkeypatch):
    fit = TrainingRun.fit

    def diverge(self, *given):
        fit(self, *given)
        if self.job.layers == CHOICES[0]:
            raise Diverged("outputs")

    monkeypatch.setattr(TrainingRun, "fit", diverge)
    tried = train(job())["tried"]
    assert tried["choices"][CHOICES[0]]["value"] is None
    assert tried["kept"] in CHOICES[1:]


def test_if_all_diverge_a_smaller_rate_is_advised(job):
    with pytest.raises(ValueError, match="diverged with every choice of layers. Lower --learning-rate"):
        train(job(learning_rate=1e30))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select_on": "none"}, "--layers auto keeps what is best on the rows that --select-on none does not keep"),
        ({"select_on": "validation"}, "--layers auto would choose on the rows of --select-on validation, which are"),
        ({"top_k": 2}, "--layers auto and --top-k both choose the layers"),
        ({"method": "lora"}, "--layers has no meaning with --method lora"),
    ],
)
def test_what_goes_ill_with_auto_is_refused_before_the_model_is_loaded(job, tmp_path, monkeypatch, options, message):
    loader = AutoModelForSequenceClassification
    monkeypatch.setattr(loader, "from_pretrained", lambda *a, **k: pytest.fail("loaded a model"))
    with pytest.raises(ValueError, match=message):
        TrainingRun(job(**options))
    assert not (tmp_path / "out").exists()


def test_two_stacks_need_the_name_of_one(job, tmp_path):
    base = save_base(tmp_path / "bart", "bart")
    with pytest.raises(ValueError, match="encoder.*decoder"):
        TrainingRun(job(model=str(base)))
    assert train(job(model=str(base), stack="decoder", max_steps=1))["layers"].keys() == {"decoder"}


def test_a_plan_tells_what_all_choices_cost(job):
    asked = job(select_on="held-out")
    each = {choice: plan(dataclasses.replace(asked, layers=choice)) for choice in CHOICES}
    found = plan(asked)
    assert {name: one.memory for name, one in found.choices.items()} == {n: one.memory for n, one in each.items()}
    assert found.memory.total == max(one.memory.total for one in each.values())
    assert found.seconds == pytest.approx(sum(one.seconds for one in found.choices.values()))


# on the command line


def invoke(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def interrupt(arguments: list[str]) -> None:
    """Interrupt the second choice in its second epoch."""
    begin, seen = JointCheckpoints.training_step, []

    def stop(self, *given, **more):
        seen.append(self.state.global_step)
        if seen.count(5) == 2:
            raise KeyboardInterrupt
        return begin(self, *given, **more)

    JointCheckpoints.training_step = stop
    print((result := CliRunner().invoke(app, arguments)).output, "code", result.exit_code)


def test_the_command_shows_tables_goes_on_after_an_interrupt_and_draws(places, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out, picture = tmp_path / "out", tmp_path / "tried.png"
    given = ["train", *(f"--{name}={value}" for name, value in places["labels"].items()), "--output", str(out)]
    given += ["--layers", "auto", "--metric", "loss", "--epochs", "2", "--lr", "0.01"]
    words = run_forked(interrupt, given).output
    assert "code 130" in words
    assert re.search(r"alternate:40% +1, 3 +8\n", words)  # before anything is trained
    assert re.search(r"alternate:40% +1, 3 +8 +about \d+\n", words)
    assert "To go on from alternate:40%, step 4, epoch 1 of 2:\n" in words
    command = re.search(r"peft-surgical (train --output .* --resume)\n", words).group(1)
    words = invoke(*shlex.split(command), "--plot", picture)
    assert words.count("Going on from step 4, epoch 1 of 2.") == 1
    assert re.search(r"Now alternate:40%(.|\n)*Now middle:40%", words)
    assert "Now spread" not in words
    assert len(re.findall(r"kept$", words.rsplit("Choices of layers", 1)[1], re.M)) == 1
    assert picture.read_bytes()[:4] == b"\x89PNG"
    picture.unlink()
    assert "is finished" in invoke(*shlex.split(command), "--plot", picture)
    assert picture.exists()
    assert "accuracy" in invoke("evaluate", out)
    words = invoke("plan", *given[1:-2], "--epochs", 3)
    assert re.search(r"middle:40% +encoder 2, 3: .* an epoch", words)
    assert re.search(r"In all .*: 3 epochs of each choice", words)


def test_a_picture_of_nothing_tried_is_refused(places, tmp_path):
    given = ["train", *(f"--{name}={value}" for name, value in places["labels"].items()), "--output", tmp_path / "out"]
    assert "--plot draws the choices" in invoke(*given, "--plot", tmp_path / "tried.png", code=2)


def test_the_rule_and_the_choices_are_those_of_choose_layers():
    assert choose_layers.__defaults__[0] is CHOICES
