"""The benchmarks of encodings, switching and serving: they run, and the guides show what they found."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path

import pytest
import test_evidence
from distributed.launch import torchrun
from forks import run_forked

from benchmarks.common import guides
from benchmarks.distributed import multi_gpu


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("deltas.md", "distributed.md", "serving.md", "vllm.md")]
SHOWN = [(page, *block) for page in PAGES for block in guides.blocks(page)]
place = test_evidence.place


def call(name: str, monkeypatch, *options: object) -> dict:
    """Run a benchmark by the name of its results; gives these."""
    module = importlib.import_module(f"benchmarks.{name.replace('_', '.', 1)}")
    output = Path(options[-1])
    monkeypatch.setattr(sys, "argv", [name, *map(str, options[:-1]), "--output", str(output)])
    try:
        module.main()
    finally:
        logging.disable(logging.NOTSET)  # a benchmark is a process of its own, tests are not
    (file,) = output.glob(f"{name}-*.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize(("page", "results", "shown"), SHOWN, ids=lambda value: getattr(value, "name", None))
def test_the_guides_show_the_tables_of_the_results(page, results, shown):
    assert shown == guides.table_of(results)


def test_the_guides_show_results():
    shown = {results.partition("-")[0] for _, results, _ in SHOWN}
    swaps = {f"swap_{file}" for file in ("cost", "fleet", "replicas", "serve_load", "vllm_server")}
    assert shown == {"delta_size", "delta_fine_tunes", "distributed_multi_gpu", *swaps}


@pytest.mark.slow
def test_every_encoding_is_measured(place, tmp_path, monkeypatch):
    paths = (place / "tiny", place / "data", "--cache", tmp_path)
    short = ("--tasks", "cola", "--seeds", 0, "--epochs", 1, "--rounds", 1, "--processes", 0)
    record = call("delta_size", monkeypatch, *paths, *short, tmp_path / "results")
    rows = {row["form"]: row for row in record["rows"]}
    assert len(rows) == len(record["times"]) == 9
    for smaller in (("values", "lossless"), ("values", "bf16"), ("int8", "int4", "sign")):
        sizes = [rows[f"surgical, {name}"]["bytes"] for name in smaller]
        assert sizes == sorted(sizes, reverse=True)
    assert rows["surgical, lossless"]["points"] == rows["surgical, values"]["points"]


@pytest.mark.slow
def test_every_way_of_switching_is_measured_and_right(tmp_path, monkeypatch):
    record = call("swap_cost", monkeypatch, "--size", "tiny", "--seconds", 0.01, tmp_path)
    assert len(record["ways"]) >= 11
    assert record["compiling"] == {"switches": 100, "compilations": 1}
    assert record["registering"]["bytes_of_weights_read"] == 0


@pytest.mark.slow
def test_no_service_gives_a_wrong_answer_under_load(tmp_path, monkeypatch):
    record = call("swap_serve_load", monkeypatch, "--size", "tiny", "--tasks", 3, "--requests", 30, tmp_path)
    assert [row["wrong"] for row in record["services"]] == [0] * 4
    assert all(row["requests"] == 30 and row["switches"] > 0 for row in record["services"])


class Forked:
    """Stands for `subprocess.Popen`: forks in place of the interpreters that `torchrun` would start."""

    def __init__(self, command: list[str], env: None):
        assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
        self.done = run_forked(torchrun, command[3:], env={"OMP_NUM_THREADS": "1"})

    def wait(self, timeout: float) -> int:
        print(self.done.output)
        return self.done.code


@pytest.mark.slow
def test_several_processes_are_started_and_their_results_gathered(tmp_path, monkeypatch):
    model = ("--models", "bert-tiny", "--methods", "surgical 5", "--length", 8, "--batch", 2)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(multi_gpu.subprocess, "Popen", Forked)
    record = call(
        "distributed_multi_gpu", monkeypatch, "--gpus", 1, 2, "--engines", "ddp", "--steps", 1, *model, tmp_path
    )
    assert [row["gpus"] for row in record] == [1, 2]
    assert all(row["difference_to_first"] < 1e-6 for row in record)


def test_plans_are_made_of_every_method(tmp_path, monkeypatch):
    rows = {row["method"]: row["planned"] for row in call("step_plan", monkeypatch, "tiny", tmp_path)["rows"]}
    assert [*rows] == ["full", "surgical", "spafit", "lora"]
    assert all(row["weights"] + row["copies"] < row["peak"] == row["total"] for row in rows.values())
    assert rows["lora"]["gradients"] < rows["surgical"]["gradients"] < rows["full"]["gradients"]
