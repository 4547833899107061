"""Language modelling in the evidence benchmarks, on a tiny random decoder and made-up prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_evidence import Recorded, call, decoder, make_tokenizer, place  # noqa: F401 - fixtures among them
from test_evidence import texts as made_up

from benchmarks.evidence import (
    cells,
    decoders,
    findings,
    jobs,
    methods,
    prompts,
    records,
    run,
    tasks,
    text_tables,
    texts,
    training,
)


SENTENCES = {"train": made_up(40, 1), "held_out": made_up(9, 2), "validation": made_up(20, 3)}
SENTENCES["validation"][4] = SENTENCES["train"][7]  # which is no document of both


@pytest.fixture(scope="module")
def folder(decoder):  # noqa: F811
    """The decoder with SST-2's prompts too."""
    parts = []
    for sentences in SENTENCES.values():
        frame = tasks.pd.DataFrame({"sentence": sentences, "label": 0, "idx": range(len(sentences))})
        parts.append(prompts.encode("sst2", frame, make_tokenizer()))
    torch.save(tasks.TaskData(*parts), decoder / "tasks/sst2-1.pt")
    return decoder


def test_documents_are_the_texts_before_the_question(folder):
    tokenizer = make_tokenizer()
    data = texts.read(folder, "lm-reviews")
    found = {part: getattr(data, part) for part in SENTENCES}
    ids = {
        part: [tuple(row[:n].tolist()) for row, n in zip(rows.inputs["input_ids"], rows.lengths, strict=True)]
        for part, rows in found.items()
    }
    expected = {
        part: [(0, *tokenizer(s, add_special_tokens=False)["input_ids"]) for s in sentences]
        for part, sentences in SENTENCES.items()
    }
    assert ids["train"] == expected["train"]
    assert {*ids["held_out"], *ids["validation"]} == {*expected["validation"]} - {expected["validation"][4]}
    assert (len(ids["held_out"]), len(ids["validation"])) == (9, 10)  # no document of two parts
    for part, rows in found.items():
        assert rows.labels.tolist() == [[len(document) - 1] for document in ids[part]]


def test_the_loss_of_documents_is_that_of_transformers(folder, monkeypatch):
    monkeypatch.setattr(texts, "AT_A_TIME", 4)
    rows = texts.read(folder, "lm-reviews").validation
    plain, model = decoders.plain_model(folder).eval(), texts.load(folder).eval()
    with torch.no_grad():
        logits = model(**rows.inputs).logits
        alone = [plain(**{k: v[None] for k, v in feature.items()}).loss for feature in texts.features(rows)]
    losses = torch.stack(alone) * rows.labels[:, 0]
    torch.testing.assert_close(logits[:, 0], losses)
    a_token = float(losses.sum() / rows.labels.sum())
    assert float(training.task_loss(logits, rows.labels)) == pytest.approx(a_token)
    torch.testing.assert_close(training.task_loss(logits, rows.labels, "none"), torch.stack(alone))
    assert tasks.score(texts.TASKS["lm-reviews"], logits, rows) == {"log_likelihood": pytest.approx(-a_token)}


@pytest.mark.parametrize("tuning", ["full", "layers-0.2", "lora-16"])
def test_a_step_on_documents_can_become_a_cuda_graph(folder, tuning):
    rows = texts.read(folder, "lm-news").train.take(torch.arange(4))
    trainee = training.Trainee(training.halve_frozen(methods.adapt(texts.load(folder), tuning)), 1e-3)
    inputs = training.cut(rows, torch.arange(4), 16)
    trainee.step(inputs, rows.labels)
    with Recorded() as recorded:
        trainee.step(inputs, rows.labels)
    assert recorded.waits == []


def test_language_modelling_goes_the_same_way_to_its_table(place, folder, tmp_path):  # noqa: F811
    options = ["--methods", "full", "cka", "last", "--k", "2", "--model", str(folder), "--results", str(tmp_path)]
    call(place, "cells", *options, "--rate", "1e-2", "--tasks", *texts.TASKS)
    for name in texts.TASKS:
        runs = {r["tuning"]: r for r in records.read(tmp_path / f"runs/{name}.jsonl")}
        assert "layers-2.3" in runs
        for r in runs.values():
            held_out = r["held_out"]
            assert held_out["log_likelihood"] == pytest.approx(-held_out["loss"], rel=1e-5)
            assert held_out["log_likelihood"] == max(e["log_likelihood"] for e in r["history"])
            tokens = int(texts.read(folder, name).validation.labels.sum())
            assert r["validation"]["log_likelihood"] == pytest.approx(-sum(r["documents"]) / tokens, abs=0.01)
            assert r["validation"]["log_likelihood"] != r["untuned"]["log_likelihood"]
            assert r["plain"][0] != r["plain"][1]
    assert {file.stem for file in (tmp_path / "runs").iterdir()} == set(texts.TASKS)
    assert findings.Results(tmp_path).tasks == []


def scripted(where: jobs.Place, job: jobs.Job) -> None:
    """What stands for training: the loss is least at 1e-4, and of `last` 0.1 nats more than of all weights."""
    for tuning, rate in zip(job.items, job.rates, strict=True):
        loss = 3 + abs(np.log(rate / 1e-4)) + 0.1 * (tuning != "full")
        tokens = np.array(where.sizes()[job.task]["documents"])
        made = {"task": job.task, "tuning": tuning, "rate": rate, "seed": job.seed, "metric": "log_likelihood"}
        made |= {"revision": texts.TASKS[job.task].revision}
        made |= {"held_out": {"log_likelihood": 0.5 - loss}, "validation": {"log_likelihood": -loss}}
        made |= {"untuned": {"log_likelihood": -5.0}, "documents": (loss * tokens).tolist(), "plain": [2.0, 2.25]}
        records.append(where.runs_file(job.task), made)


def test_the_rate_with_the_least_loss_is_chosen_on_documents(place, folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setitem(jobs.JOBS, "train", scripted)
    options = ["--methods", "full", "last", "--k", "1", "--model", str(folder), "--results", str(tmp_path)]
    options += ["--seeds", "0", "1", "--share", "last"]
    call(place, "cells", *options, "--tasks", "lm-news")
    assert not (tmp_path / "runs/rte.jsonl").exists()  # documents alone are tried
    later = [r for r in records.read(tmp_path / "runs/lm-news.jsonl") if r["seed"] == 1]
    assert {(r["tuning"], r["rate"]) for r in later} == {("full", 1e-4), ("layers-3", 1e-4)}
    call(place, "cells", *options, "--tasks", *texts.TASKS)
    monkeypatch.setattr(cells, "SHARED", ("last",))
    results = findings.Results(tmp_path)
    results.depth = 4
    monkeypatch.setattr(text_tables.CellValues, "names", lambda _: ["full", "last:1"])
    before, full, last = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text_tables.texts_table(results).splitlines()[2:]
    ]
    assert before[4:8] == ["5.000"] * 4
    assert full[:8] == ["full", "", "0.0001", "2", *["3.000"] * 4]
    assert last[:8] == ["last", "1", "0.0001", "2", *["3.100"] * 4]
    assert (full[8], last[8]) == ("+0.000 (+0.000 to +0.000)", "+0.100 (+0.100 to +0.100)")
    assert last[9:] == ["-", "2.600", "+0.250"]  # no run of equal distances


def test_the_interval_is_over_documents():
    generator = np.random.default_rng(1)
    tokens = {task: generator.integers(5, 15, 400) for task in texts.TASKS}
    losses = {task: n * generator.normal(0.3, 1.0, 400) for task, n in tokens.items()}
    mean, low, high = map(
        float, text_tables._interval(losses, tokens).replace("(", "").strip(")").replace("to ", "").split()
    )
    errors = [np.std((losses[t] - losses[t].sum() / n.sum() * n) / n.mean()) / 20 for t, n in tokens.items()]
    half = 1.96 * np.linalg.norm(errors) / 3
    assert mean == pytest.approx(np.mean([losses[t].sum() / n.sum() for t, n in tokens.items()]), abs=1e-3)
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.2 * half)
    assert text_tables._interval({"lm-news": losses["lm-news"]}, tokens) == "-"


def test_texts_are_for_decoders_and_among_themselves(place):  # noqa: F811
    with pytest.raises(SystemExit, match="are for decoders"):
        call(place, "cells", "--tasks", "lm-news")
    for wrong in (["cells", "--tasks", "lm-news", "rte"], ["train", "--tasks", "lm-news"], ["rank", "--rows", "9"]):
        with pytest.raises(SystemExit):
            run._arguments([*wrong, "--model", "m", "--data", "d"])
