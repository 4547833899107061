from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import typer
from datasets import Dataset
from distributed.launch import free_port
from forks import run_forked
from safetensors.torch import load_file
from tiny_task import LABELS, make_rows, save_base, save_data
from typer.testing import CliRunner

import peft_surgical.distributed
import peft_surgical.training.progress as progress
from peft_surgical import LayerRanking, RotateLayers
from peft_surgical.cli import app
from peft_surgical.cli.common import as_command
from peft_surgical.cli.job import read_config, read_layers
from peft_surgical.files.encodings import ENCODINGS
from peft_surgical.ranking.scores import AGGREGATIONS, SCORES
from peft_surgical.training import TrainingJob, TrainingRun
from peft_surgical.training.common import JointCheckpoints


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return str(save_base(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return str(save_data(tmp_path_factory.mktemp("data")))


@pytest.fixture
def run(monkeypatch):
    """Run a command; on success its words, on failure the exit code and the words."""
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == code, result.output + repr(result.exception)
        return result.output

    return call


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def flat(text: str) -> str:
    return " ".join(text.split())


def test_help_names_the_commands_and_their_defaults(run):
    words = run("--help")
    for command in ("rank", "train", "evaluate", "demo"):
        assert command in words
    words = flat(run("train", "--help").replace("│", " "))
    assert "The layers lie at equal distances, unless --layers names others" in words
    rates = "surgical 0.0001 (decoders 5e-05), last 0.0001 (decoders 5e-05), "
    rates += "full 5e-05 (decoders 1e-05), head 0.0003, spafit 0.0002, "
    rates += "columns 0.0003, lora 0.0003"
    assert f"Default by method: {rates}" in words
    for option, default in (
        ("--epochs", "10"),
        ("--batch-size", "16"),
        ("--weight-decay", "0.01"),
        ("--samples", "100"),
    ):
        assert f"[default: {default}]" in words.split(option, 1)[1][:200], option


# where the package and the console script's module lie, in a checkout and installed
ROOT = Path(peft_surgical.__file__).parents[1]
WITH_ROOT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
LIGHT = """
import sys
from peft_surgical_command import main
sys.argv = ["peft-surgical", *sys.argv[1:]]
try:
    main()
finally:
    heavy = {"torch", "transformers", "peft", "datasets", "accelerate", "numpy", "safetensors"} & set(sys.modules)
    print("loaded", *sorted(heavy))
"""


@pytest.mark.parametrize(
    ("arguments", "typed", "shown"),
    [
        (["--help"], None, "Fine-tune a few layers of a transformer"),
        (["train", "--help"], None, "--gradient-checkpointing"),
        (["rank", "--help"], None, "Rank a model's layers"),
        ([], "peft-surgical ", "evaluate"),
        ([], "peft-surgical train --gra", "--gradient-accumulation"),
        ([], "peft-surgical train --method s", "spafit"),
    ],
)
def test_help_and_completions_load_nothing_heavy(arguments, typed, shown):
    environment = {**WITH_ROOT, "COLUMNS": "120"}
    if typed is not None:
        environment |= {"_PEFT_SURGICAL_COMPLETE": "complete_bash", "COMP_WORDS": typed}
        environment |= {"COMP_CWORD": str(len(typed.split(" ")) - 1)}
    command = [sys.executable, "-c", LIGHT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert shown in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded"


@pytest.mark.slow
def test_the_console_script_loads_the_library_when_a_command_runs(base, data, tmp_path):
    """PEFT knows the methods then, and the package is whole."""
    command = [sys.executable, "-c", LIGHT, "train", "--model", base, "--data", data]
    command += ["--output", str(tmp_path / "out"), "--method", "last", "--max-steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=WITH_ROOT, check=True)
    assert "peft" in done.stdout.splitlines()[-1]
    assert (tmp_path / "out" / "adapter_config.json").exists()


@pytest.mark.parametrize("command", ["train", "plan"])
def test_every_field_of_a_job_is_an_option_with_a_help_text(command):
    options = {parameter.name: parameter for parameter in typer.main.get_command(app).commands[command].params}
    for field in dataclasses.fields(TrainingJob):
        assert options[field.name].help.endswith("(required)") == (field.default is dataclasses.MISSING)


def test_help_begins_with_the_ten_basic_options(run):
    basic = run("train", "--help").split("╭─ Options")[1].split("╰─")[0]
    names = [
        "model",
        "data",
        "output",
        "method",
        "top-k",
        "layers",
        "max-length",
        "epochs",
        "batch-size",
        "lr",
        "help",
    ]
    assert re.findall(r"│ +(?:-\w,)?--([a-z-]+)", basic.replace("--learning-rate,--lr", "--lr")) == names


def test_the_version_is_told(run):
    assert run("--version").strip() == peft_surgical.__version__


def test_help_texts_list_the_values_that_there_are(run):
    def listed(words: str, before: str, after: str) -> set[str]:
        part = words.split(before, 1)[1].split(after, 1)[0]
        return set(re.sub(r"\(.*?\)|\bor\b", "", part).replace(",", " ").split())

    words = flat(run("rank", "--help").replace("│", " "))
    assert listed(words, "becomes one number: ", ".") == set(AGGREGATIONS)
    assert listed(words, "What the layers are ranked by: ", ", or another") <= set(SCORES)
    words = flat(run("convert", "--help").replace("│", " "))
    assert listed(words, "How tensors are written: ", ".") == {"values", "auto", *ENCODINGS}


def say_whether_the_process_group_ends(arguments: list[str]) -> None:
    start, started = dist.init_process_group, []

    def init_process_group(*args, **kwargs):
        start(*args, **kwargs)
        started.append(dist.is_initialized())

    dist.init_process_group = init_process_group
    result = CliRunner().invoke(app, arguments)
    print(result.exit_code, started, dist.is_initialized())


@pytest.mark.parametrize(("column", "code"), [("text", 0), ("nope", 2)])
def test_the_process_group_of_a_command_ends_with_it(base, data, tmp_path, column, code):
    """One that is left open lets threads run while Python ends, which now and then crash the process."""
    settings = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    settings |= {"MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true"}
    command = ["train", "--model", base, "--data", data, "--method", "head", "--text-column", column]
    command += ["--max-steps", "1", "--output", str(tmp_path / "out")]
    done = run_forked(say_whether_the_process_group_ends, command, env=settings)
    assert done.output.splitlines()[-1] == f"{code} [True] False"


@pytest.mark.parametrize(
    ("backend", "fails", "expected"),
    [
        ("nccl", False, ["wait", "end"]),
        ("gloo", False, ["wait", "end"]),
        ("gloo", True, ["end"]),
        ("cuda:nccl,cpu:gloo", True, []),
    ],
)
def test_a_process_that_fails_alone_waits_for_no_other(monkeypatch, backend, fails, expected):
    done: list[str] = []
    process = SimpleNamespace(backend=backend, is_main_process=True)
    process.wait_for_everyone = lambda: done.append("wait")
    process.destroy_process_group = lambda: done.append("end")
    monkeypatch.setattr(peft_surgical.distributed, "this_process", lambda: process)

    def work(console):
        if fails:
            raise ValueError("a mistake")

    one_command = typer.Typer()
    one_command.command()(as_command(work))
    assert CliRunner().invoke(one_command).exit_code == (2 if fails else 0)
    assert done == expected


def test_rank_shows_saves_and_plots(run, base, data, tmp_path):
    words = run("rank", "--model", base, "--data", data, "--samples", 12, "--output", tmp_path / "r.json",
                "--plot", tmp_path / "r.png", "--head-seeds", 2)  # fmt: skip
    ranking = LayerRanking.load(tmp_path / "r.json")
    assert str(ranking) in words
    assert ranking.record["num_samples"] == 12
    assert ranking.record["head_seeds"] == 2
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_rank_train_and_evaluate_go_together(run, base, data, out, tmp_path):
    run("rank", "--model", base, "--data", data, "--samples", 12, "--output", tmp_path / "r.json", "-q")
    words = run("train", "--model", base, "--data", data, "--ranking", tmp_path / "r.json", "--top-k", 2,
                "--epochs", 1, "--lr", 0.01, "--output", out)  # fmt: skip
    best = LayerRanking.load(tmp_path / "r.json").top(2)
    assert f"encoder {', '.join(map(str, sorted(best)))}" in words
    assert "54 rows of the train split" in words
    assert "6 rows: 10% of the training rows, held out" in words
    results = json.loads((out / "metrics.json").read_text())
    words = run("evaluate", out, "--output", tmp_path / "m.json", "--predictions", tmp_path / "p.csv")
    assert f"{results['evaluation']['accuracy']:.4f}" in words
    assert json.loads((tmp_path / "m.json").read_text())["f1"] == results["evaluation"]["f1"]
    assert len(Dataset.from_csv(str(tmp_path / "p.csv"))) == 30


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_predictions_are_written_in_the_format_named(run, base, data, out, tmp_path, ending):
    run("train", "--model", base, "--data", data, "--method", "head", "--max-steps", 1, "--output", out, "-q")
    file = tmp_path / f"p.{ending}"
    run("evaluate", out, "--predictions", file)
    read = {"csv": Dataset.from_csv, "jsonl": Dataset.from_json, "parquet": Dataset.from_parquet}[ending]
    assert read(str(file)).column_names == ["text", "label", "prediction"]


def test_every_option_of_a_job_reaches_the_job(run, base, data, out):
    given = {
        "method": "surgical", "top_k": 2, "stack": "encoder", "epochs": 1.0, "max_steps": 1, "batch_size": 4,
        "gradient_accumulation": 2, "learning_rate": 0.003, "weight_decay": 0.2, "warmup": 0.3, "max_grad_norm": 2.0,
        "max_length": 12, "max_train_samples": 20, "seed": 5, "eval_split": "validation", "select_on": "held-out",
        "held_out": 0.25, "metric": "matthews", "label_column": "label", "task": "classification",
        "score": "fisher", "fisher_labels": "exact", "aggregation": "trace", "head_seeds": 2, "dtype": "float32",
        "encoding": "latin-1",
    }  # fmt: skip
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    run("train", "--model", base, "--data", data, "--output", out, "--text-column", "text", "--keep-checkpoints",
        "--gradient-checkpointing", *options)  # fmt: skip
    expected = {**given, "text_columns": ("text",)}
    job = TrainingJob.load(out)
    assert {name: getattr(job, name) for name in expected} == expected
    assert job.keep_checkpoints
    assert job.gradient_checkpointing
    assert (out / "checkpoints").exists()


def test_layers_are_trained_in_turns(run, base, data, out):
    options = ["--rotate-every", 2, "--rotate-layers", 1, "--max-steps", 3, "--select-on", "none"]
    run("train", "--model", base, "--data", data, "--output", out, *options)
    saved = load_file(out / "adapter_model.safetensors")
    start = load_file(f"{base}/model.safetensors")
    moved = {layer: False for layer in "0123"}
    for name, value in saved.items():
        if layer := re.search(r"\.layer\.(\d)", name):
            in_base = name.replace(".surgical_params", "").removeprefix("base_model.model.bert.")
            moved[layer[1]] |= not torch.equal(value, start[in_base])
    of_two_turns = [str(RotateLayers(1, 2).layers_of(turn, 4)[0]) for turn in (0, 1)]
    assert moved == {layer: layer in of_two_turns for layer in "0123"}


def test_quiet_says_nothing(run, base, data, out):
    words = run("train", "--model", base, "--data", data, "--output", out, "--top-k", 1, "--score", "fisher",
                "--samples", 8, "--max-steps", 1, "--quiet")  # fmt: skip
    assert words == ""


def test_nothing_of_other_libraries_is_shown(run, base, data, out):
    words = run("train", "--model", base, "--data", data, "--output", out, "--method", "head", "--max-steps", 1)
    for chatter in ("Loading weights", "LOAD REPORT", "examples/s", "Warning", "{'loss'"):
        assert chatter not in words


def test_warnings_of_the_package_are_shown(run, base, out, tmp_path):
    rows = make_rows(40, 1)
    rows = rows.map(lambda row, i: {"text": "" if i == 3 else row["text"]}, with_indices=True)
    rows.to_parquet(str(tmp_path / "train.parquet"))
    words = run("train", "--model", base, "--data", tmp_path / "train.parquet", "--output", out, "--method", "head",
                "--max-steps", 1)  # fmt: skip
    assert "1 of 40 rows of 'train' have an empty text" in flat(words)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nowhere.csv"], "no such file or folder"),
        (["--model", "./nowhere"], "--model ./nowhere: there is no such folder; allowed are a folder"),
        (
            ["--model", "nowhere"],
            "--model nowhere: no tokenizer could be loaded from the hub, and there is no such folder",
        ),
        (["--method", "magic"], "allowed are surgical, last, full, head, spafit, columns, lora"),
        (["--layers", "9"], "layers 0 to 3"),
        (["--top-k", "9"], "encoder has 4 layers; allowed are 1 to 4"),
        (["--score", "magic"], "magic"),
        (["--text-column", "nope"], "no such column; the columns are ['text', 'label']"),
        (["--rotate-layers", "3"], "Add --rotate-every"),
        (["--rotate-every", "2", "--method", "lora"], "it goes with surgical"),
        (["--method", "head", "--top-k", "1"], "--top-k has no meaning with --method head"),
    ],
)
def test_mistakes_are_told_in_words(run, base, data, out, options, message):
    defaults = {"--model": base, "--data": data, "--output": out, "--max-steps": 1}
    given = [part for name, value in defaults.items() if name not in options for part in (name, value)]
    words = flat(run("train", *given, *options, code=2))
    assert message in words
    assert words.startswith("Error:") or "Error:" in words
    assert "Traceback" not in words


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["train"], "--model, --data, --output"),
        (["train", "m"], "--data, --output"),
        (["plan"], "--model, --data"),
        (["rank", "--data", "d"], "--model"),
        (["train", "--model", "m", "--resume"], "--data, --output"),
    ],
)
def test_all_options_that_are_missing_are_told_at_once(run, arguments, missing):
    assert f"Missing: {missing}. What they are" in flat(run(*arguments, code=2))


def test_predictions_to_an_unknown_format_are_refused_before_anything_is_computed(run, tmp_path):
    words = run("evaluate", tmp_path / "nowhere", "--predictions", "p.xlsx", code=2)
    assert "allowed are files ending in .csv, .jsonl, .parquet" in flat(words)


@pytest.mark.parametrize(
    "command",
    [
        ["rank", "--model", "m", "--data", "d", "--output", "no/r.json"],
        ["rank", "--model", "m", "--data", "d", "--output", "r.csv"],
        ["rank", "--model", "m", "--data", "d", "--plot", "r.jpeg"],
        ["train", "--model", "m", "--data", "d", "--output", "file/out"],
        ["evaluate", "run", "--output", "no/m.json"],
        ["evaluate", "run", "--predictions", "no/p.csv"],
        ["diff", "a", "b", "--output", "file/out"],
        ["diff", "a", "b", "--output", "out", "--plot", "no/p.png"],
        ["merge", "a", "b", "--output", "file/out"],
        ["convert", "a", "--encoding", "bf16", "--output", "file/out"],
        ["export-lora", "a", "--output", "file/out"],
        ["demo", "--output", "file/out"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_written_is_told_before_anything_is_read(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    words = flat(run(*command, code=2))
    assert "is not a folder" in words or "allowed are files ending in" in words
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_class_counts_and_the_majority_are_shown_before_training_and_beside_the_result(run, base, out, tmp_path):
    rows = make_rows(60, 1)
    uneven = rows.select([i for i, label in enumerate(rows["label"][:]) if label or i % 4 == 0])
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        uneven.to_parquet(str(tmp_path / "data" / f"{split}.parquet"))
    words = flat(run("train", "--model", base, "--data", tmp_path / "data", "--output", out, "--method", "head",
                     "--select-on", "none", "--max-steps", 1))  # fmt: skip
    before, after = words.split("Chosen")[0].rsplit("rows:", 1)
    assert "label: good 30, bad 15" in before
    assert "Always answering 'good', the class of 67% of these rows, gives accuracy 0.6667" in before
    assert "(always 'good': 0.6667)" in after
    assert "(always 'good': 0.6667)" in flat(run("evaluate", out))
    assert (
        "Always answering 'good', the class of 67% of these rows, gives accuracy 0.6667"
        in (out / "README.md").read_text()
    )


def test_resume_needs_the_folder_alone_and_takes_the_options_of_the_run_that_stopped(run, base, data, out):
    TrainingRun(TrainingJob(model=base, data=data, output=str(out), method="last", epochs=3, learning_rate=0.01))
    words = run("train", "--output", out, "--resume", "--batch-size", 4, code=2)
    assert "batch_size was 16 when the run" in flat(words)
    run("train", "--output", out, "--resume")
    job = TrainingJob.load(out)
    assert (job.method, job.epochs) == ("last", 3)
    results = (out / "metrics.json").read_text()
    words = flat(run("train", "--output", out, "--resume"))
    assert f"The run in {out} is finished" in words
    assert f"accuracy {json.loads(results)['evaluation']['accuracy']:.4f}" in words
    assert (out / "metrics.json").read_text() == results


def interrupt(arguments: list[str], step: int) -> None:
    begin = JointCheckpoints.training_step

    def stop(self, *given, **more):
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return begin(self, *given, **more)

    JointCheckpoints.training_step = stop
    result = CliRunner().invoke(app, arguments)
    print(result.output, "code", result.exit_code)


@pytest.mark.parametrize(
    ("step", "place"),
    [(2, "the start, for there is no checkpoint"), (6, "step 4, epoch 1 of 2")],
    ids=["early", "late"],
)
def test_an_interrupt_tells_how_to_go_on(run, base, data, tmp_path, step, place):
    out = tmp_path / "with space"
    given = ["train", "--model", base, "--data", data, "--output", str(out), "--method", "head", "--epochs", "2"]
    done = run_forked(interrupt, given, step, env={"COLUMNS": "120"})
    command = re.search(r"peft-surgical (train --output .* --resume)\n", done.output).group(1)
    assert done.output.splitlines()[-1].endswith("code 130")
    assert f"To go on from {place}" in done.output
    words = run(*shlex.split(command))
    assert ("Going on from step 4, epoch 1 of 2." in words) == (step == 6)
    assert (out / "metrics.json").exists()


def test_a_run_writes_what_can_be_run_again(run, base, data, tmp_path):
    given = ["--method", "surgical", "--layers", "0-1,3", "--lr", "5e-5", "--max-steps", 2, "--text-column", "text"]
    run("train", base, "--data", data, "--output", tmp_path / "one", *given, "--select-on", "none", "-q")
    again = ["--config", tmp_path / "one" / "run.yaml", "--output", tmp_path / "two", "-q"]
    run("train", *again)
    one, two = (TrainingJob.load(tmp_path / name) for name in ("one", "two"))
    assert dataclasses.replace(two, output=one.output) == one
    weights = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
    run("train", *again[:2], "--output", tmp_path / "three", "--max-steps", 1, "-q")
    assert TrainingJob.load(tmp_path / "three").max_steps == 1


def test_a_config_has_options_by_name(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: m\ntop-k: 2\nlearning_rate: 5e-5\nepochs: 3\nbf16: true\nn1: 0.2\ntext-columns: a\n")
    fields = read_config(file)
    numbers = {"top_k": 2, "learning_rate": 5e-5, "epochs": 3.0, "n1": 0.2}
    assert fields == {"model": "m", **numbers, "bf16": True, "text_columns": ("a",)}
    assert isinstance(fields["epochs"], float)
    file.write_text("lr: 5e-5\ntext_column: [a, b]\ntarget-module: query\n--max-steps: 3\n")  # as the flags are called
    assert read_config(file) == {
        "learning_rate": 5e-5, "text_columns": ("a", "b"), "target_modules": ("query",), "max_steps": 3
    }  # fmt: skip
    for written, read in (("[0, 3-4]", (0, "3-4")), ("last:25%", "last:25%"), ("3,-1", (3, -1)), ("5", (5,))):
        file.write_text(f"layers: {written}")
        assert read_config(file) == {"layers": read}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", "'epoch' is no option of a job; see epochs"),
        ("text_colum: a", "see text_column"),
        ("lr: 1\nlearning_rate: 2", "'learning_rate' is there twice"),
        ("epochs: many", "epochs: many: allowed is a number"),
        ("epochs: true", "epochs: True: allowed is a number"),
        ("bf16: 1", "bf16: 1: allowed is true or false"),
        ("top_k: 2.5", "top_k: 2.5: allowed is a whole number"),
        ("model: [a]", "model: ['a']: allowed is a text"),
        ("- model", "holds no options by name"),
        ("a: [", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_mistake_in_a_config_is_told(run, out, tmp_path, text, message):
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
    words = flat(run("train", "--config", tmp_path / "c.yaml", "--output", out, code=2))
    assert f"--config {tmp_path / 'c.yaml'}" in words
    assert message in words
    assert not out.exists()


def test_two_models_are_refused(run):
    assert "a and --model b are two models" in run("train", "a", "--model", "b", code=2)


def test_few_rows_that_choose_are_told_and_lines_come_every_so_many_steps(run, base, data, out):
    words = run("train", base, "--data", data, "--output", out, "--method", "head", "--epochs", 2, "--log-every", 3)
    assert "The best epoch is chosen on 6 rows only" in words
    shown = re.findall(r"step (\d+) of 8: loss ([\d.]+), learning rate \S+, \S+ steps a second, \d+:\d+ left", words)
    assert [step for step, _ in shown] == ["3", "6"]
    results = json.loads((out / "metrics.json").read_text())
    lines = re.findall(r"epoch (\d): training loss ([\d.]+), accuracy", words)
    assert lines == [(f"{i}", f"{row['train_loss']:.4f}") for i, row in enumerate(results["history"], 1)]
    assert "Memory" in words.split("epoch 1")[0]


def test_under_a_pipe_a_line_tells_each_half_minute_how_it_goes(run, base, data, out, monkeypatch):
    """The loss is the mean over the steps since the line before."""
    seconds = iter(range(0, 10_000, 15))
    losses, step = [], JointCheckpoints.training_step

    def noted(self, *given, **more):
        loss = step(self, *given, **more)
        losses.append(float(loss))
        return loss

    monkeypatch.setattr(JointCheckpoints, "training_step", noted)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    words = run("train", base, "--data", data, "--output", out, "--method", "head", "--epochs", 2)
    shown = re.findall(r"step (\d+) of 8: loss ([\d.]+), learning rate .*?, 0.0667 steps a second, (\S+) left", words)
    means = [f"{sum(losses[i : i + 2]) / 2:.4f}" for i in (0, 2, 4, 6)]
    assert shown == [*zip("2468", means, ["01:30", "01:00", "00:30", "00:00"], strict=True)]


def test_columns_can_be_named_in_evaluate_and_predict(run, base, data, out, tmp_path):
    run("train", base, "--data", data, "--output", out, "--method", "head", "--max-steps", 1, "-q")
    rows = make_rows(10, 3)
    other = {
        "id": [*range(10)],
        "said": rows["text"][:],
        "by": ["w1"] * 10,
        "mood": [LABELS[i] for i in rows["label"]],
    }
    Dataset.from_dict(other).to_csv(str(tmp_path / "other.csv"))
    Dataset.from_dict({"text": other["said"], "label": other["mood"]}).to_csv(str(tmp_path / "same.csv"))
    run("evaluate", out, "--data", tmp_path / "same.csv", "--output", tmp_path / "same.json")
    named = ["--data", tmp_path / "other.csv", "--text-column", "said"]
    run("evaluate", out, *named, "--label-column", "mood", "--output", tmp_path / "other.json")
    assert (tmp_path / "other.json").read_text() == (tmp_path / "same.json").read_text()
    assert "--text-column nope: there is no such column" in run(
        "evaluate", out, "--data", tmp_path / "other.csv", "--text-column", "nope", "--label-column", "mood", code=2
    )
    words = run("predict", out, *named, "--output", tmp_path / "p.jsonl")
    said = Dataset.from_json(str(tmp_path / "p.jsonl"))
    assert said.column_names == ["text", "prediction", "probability of bad", "probability of good"]
    assert said["text"][:] == rows["text"][:]
    assert (words.count("prediction"), "Saved 10 rows" in words) == (3, True)


def test_resume_without_anything_to_resume_starts(run, base, data, out):
    run("train", "--model", base, "--data", data, "--output", out, "--method", "head", "--max-steps", 1, "--resume")
    assert (out / "metrics.json").exists()


@pytest.mark.parametrize(
    ("text", "layers"),
    [("3,5,-1", (3, 5, -1)), ("2", (2,)), ("last:25%", "last:25%"), ("0-2, 5", ("0-2", 5))],
)
def test_layers_are_read_as_written(text, layers):
    assert read_layers(text) == layers
