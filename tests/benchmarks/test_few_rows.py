"""Runs with few training rows: which rows they are, and that nothing mistakes them for runs with all."""

from __future__ import annotations

import pytest
import torch
from test_evidence import call, decoder, place  # noqa: F401 - fixtures among them

from benchmarks.evidence import cell_tables, few_rows, findings, jobs, methods, records, tasks, training


@pytest.fixture
def made_of(place) -> jobs.Place:  # noqa: F811
    return jobs.Place(str(place / "tiny"), place / "data", place / "results", place / "cache", "cpu")


def rows_of(data: tasks.Rows) -> list[list[int]]:
    return data.inputs["input_ids"].flatten(1).tolist()


def test_the_seed_draws_the_rows_and_those_held_out_stay(made_of):
    whole = made_of.read("cola")
    drawn = {seed: made_of.read("cola@12", seed) for seed in (0, 1)}
    for data in drawn.values():
        assert len(data.train) == 12
        assert all(row in rows_of(whole.train) for row in rows_of(data.train))
        assert rows_of(data.held_out) == rows_of(whole.held_out)
        assert rows_of(data.validation) == rows_of(whole.validation)
    assert rows_of(drawn[0].train) == rows_of(made_of.read("cola@12", 0).train)
    assert sorted(rows_of(drawn[0].train)) != sorted(rows_of(drawn[1].train))
    with pytest.raises(ValueError, match="37 training rows of cola .* 1 to 36"):
        made_of.read("cola@37")


def test_an_epoch_sees_few_rows_equally_often(made_of, monkeypatch):
    monkeypatch.setattr(few_rows, "EPOCH", 30)
    drawn = made_of.read("cola@12").train
    seen = few_rows.epoch(drawn, "cola@12")
    assert sorted(rows_of(seen)) == sorted(rows_of(drawn) * 3)
    assert few_rows.epoch(drawn, "cola") is drawn


@pytest.mark.parametrize("kind", ["tiny", "decoder"])
def test_one_cell_with_few_rows_is_one_command(place, decoder, tmp_path, kind, monkeypatch):  # noqa: F811
    monkeypatch.setattr(few_rows, "EPOCH", 24)
    monkeypatch.setattr(few_rows, "EPOCHS", 2)
    fitted, fit = [], training.fit

    def note(trainees, task, *rows, seed: int, **options):
        fitted.append((seed, *rows))
        fit(trainees, task, *rows, seed=seed, **options)

    monkeypatch.setattr(training, "fit", note)
    options = ["cells", "--methods", "fisher", "full", "--k", "1", "--rate", "1e-3", "--tasks", "copa"]
    options += ["--model", str(place / kind), "--results", str(tmp_path)]
    call(place, *options, "--rows", "12", "--seeds", "0", "1")
    assert {file.name for file in (tmp_path / "runs").iterdir()} == {"copa@12.jsonl"}
    of_few = records.read(tmp_path / "runs/copa@12.jsonl")
    ranked = {r["seed"]: r for r in records.read(tmp_path / "rankings.jsonl")}
    assert {(r["task"], r["rows"], r["batch"]) for r in of_few} == {("copa@12", 12, few_rows.BATCH)}
    wanted = {(s, t) for s in (0, 1) for t in ("full", methods.layers_name(ranked[s]["order"][:1]))}
    assert {(r["seed"], r["tuning"]) for r in of_few} == wanted
    assert {r["record"]["num_samples"] for r in ranked.values()} == {12}
    for seed, train, held_out in fitted:
        again = jobs.Place(str(place / kind), place / "data", tmp_path, place / "cache", "cpu").read("copa@12", seed)
        assert sorted(rows_of(train)) == sorted(rows_of(again.train) * 2)
        assert rows_of(held_out) == rows_of(again.held_out)
    before = (tmp_path / "runs/copa@12.jsonl").read_bytes()
    call(place, *options, "--rows", "12", "--seeds", "0", "1")
    assert (tmp_path / "runs/copa@12.jsonl").read_bytes() == before  # nothing is run twice


def test_tables_keep_few_rows_apart(tmp_path, monkeypatch):
    for rows, best in (("", 0.9), ("@200", 0.6), ("@50", 0.5)):
        for task in ("rte", "mrpc", "cola"):
            for rate in (2e-5, 5e-5, 1e-4):
                held_out = {"accuracy": best - abs(rate - 5e-5), "loss": 0.0}
                made = {"task": task + rows, "tuning": "full", "rate": rate, "seed": 0, "metric": "accuracy"}
                made |= {"held_out": held_out, "validation": {"accuracy": best}}
                records.append(tmp_path / f"runs/{task}{rows}.jsonl", made)
    ranking = {"task": "rte@200", "seed": 0, "score": "fisher", "order": [0], "scores": [1.0] * 99}
    records.append(tmp_path / "rankings.jsonl", ranking)
    results = findings.Results(tmp_path)
    assert {run["task"] for run in results.every_run} == {"rte", "mrpc", "cola"}
    assert results.depth == 12
    assert "| full |  | 5e-05 | 3 | 90.00 |" in cell_tables.cells_table(results)
    fewer, few = cell_tables.few_rows_table(results).split("200 training rows:")
    assert "| full |  | 5e-05 | 3 | 50.00 |" in fewer
    assert "| full |  | 5e-05 | 3 | 60.00 |" in few
    records.append(tmp_path / "runs/lm-news@9.jsonl", {"task": "lm-news@9"})
    assert cell_tables.few_rows_table(results).startswith("9 training rows:")  # without a row


def test_rates_are_chosen_with_as_few_rows(made_of):
    whole = made_of.read("copa@12")
    assert torch.equal(whole.train.labels, made_of.read("copa@12").train.labels)
    made = [cell_tables.cells.rate_tasks([name]) for name in ("copa@12", "copa")]
    assert made == [["rte@12", "mrpc@12", "cola@12"], ["rte", "mrpc", "cola"]]
