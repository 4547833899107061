"""The benchmarks of encodings, switching and serving: they run, and the guides show what they found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import test_benchmarks

from benchmarks.evidence import guides


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("deltas.md", "serving.md")]
SHOWN = [(page, *block) for page in PAGES for block in guides.blocks(page)]
place = test_benchmarks.place


def call(name: str, monkeypatch, *options: object) -> dict:
    """Run a benchmark; gives its results."""
    module = pytest.importorskip(name)
    output = Path(options[-1])
    monkeypatch.setattr(sys, "argv", [name, *map(str, options[:-1]), "--output", str(output)])
    module.main()
    (file,) = output.glob(f"{name}-*.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize(("page", "results", "shown"), SHOWN, ids=lambda value: getattr(value, "name", None))
def test_the_guides_show_the_tables_of_the_results(page, results, shown):
    pytest.importorskip(results.partition("-")[0])
    assert shown == guides.table_of(results)


def test_the_guides_show_results():
    assert {results.partition("-")[0] for _, results, _ in SHOWN} == {"delta_size", "swap_cost", "serve_load"}


@pytest.mark.slow
def test_every_encoding_is_measured(place, tmp_path, monkeypatch):
    paths = (place / "tiny", place / "data", "--cache", tmp_path)
    short = ("--tasks", "cola", "--seeds", 0, "--epochs", 1, "--rounds", 1, "--processes", 0)
    record = call("delta_size", monkeypatch, *paths, *short, tmp_path / "results")
    rows = {row["form"]: row for row in record["rows"]}
    assert len(rows) == len(record["times"]) == 9
    sizes = [rows[f"surgical, {name}"]["bytes"] for name in ("values", "lossless", "bf16", "int8", "int4", "sign")]
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
    record = call("serve_load", monkeypatch, "--size", "tiny", "--tasks", 3, "--requests", 30, tmp_path)
    assert [row["wrong"] for row in record["services"]] == [0] * 4
    assert all(row["requests"] == 30 and row["switches"] > 0 for row in record["services"])
