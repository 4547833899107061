"""SPAFIT from the command line."""

from __future__ import annotations

import json

import pytest
from peft import PeftConfig
from tiny_task import make_rows, save_base
from typer.testing import CliRunner

from peft_surgical.cli import app
from peft_surgical.ranking.rank import LayerRanking
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.methods import describe_strata_by_rank, spafit_counts


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spafit")
    save_base(folder / "base")
    (folder / "data").mkdir()
    make_rows(40, 0).to_parquet(str(folder / "data" / "train.parquet"))
    make_rows(20, 1).to_parquet(str(folder / "data" / "validation.parquet"))
    return folder


@pytest.fixture
def run(places, tmp_path):
    def call(command, *options, code=0, base="base"):
        given = [command, "--model", places / base, "--data", places / "data", *options]
        if command == "train":
            given += ["--output", tmp_path / "out", "--max-steps", 2]
        result = CliRunner().invoke(app, [str(part) for part in given])
        assert result.exit_code == code, result.output
        return " ".join(result.output.split())

    return call


def strata(folder):
    return [(s["layers"], s["tune"]) for s in PeftConfig.from_pretrained(folder).strata]


@pytest.mark.parametrize(
    "options",
    [
        ("--preset", "SPAFIT-0-1-II"),
        ("--n1", "0", "--n2", "1"),
        ("--n1", "0.25", "--n2", "0.5"),
        (),
    ],
)
def test_groups_are_chosen_by_preset_by_layer_or_by_fraction(run, tmp_path, options):
    run("train", "--method", "spafit", *options)
    config = PeftConfig.from_pretrained(tmp_path / "out")
    assert strata(tmp_path / "out") == [([0], "frozen"), ([1], "bitfit"), ([2, 3], "lora")]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (64, 128, 0.0)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["layers"] == {"encoder": [1, 2, 3]}


def test_options_of_lora_reach_the_adapter(run, tmp_path):
    run("train", "--method", "spafit", "--lora-r", "3", "--lora-alpha", "5", "--lora-dropout", "0.3",
        "--target-module", "query")  # fmt: skip
    config = PeftConfig.from_pretrained(tmp_path / "out")
    assert (config.r, config.lora_alpha, config.lora_dropout) == (3, 5, 0.3)
    assert config.strata[2]["target_modules"] == ["query"]


def test_models_without_bias_terms_train_with_norms(run, places, tmp_path):
    save_base(places / "modernbert", "modernbert")
    words = run("train", "--method", "spafit", base="modernbert", code=2)
    assert "has no bias terms to tune" in words
    assert not (tmp_path / "out").exists()
    run("train", "--method", "spafit", "--group-2", "norm", base="modernbert")
    assert strata(tmp_path / "out") == [([0], "frozen"), ([1], "norm"), ([2, 3], "lora")]


def test_rank_prints_the_strata_that_train_makes_of_the_ranking(run, tmp_path):
    words = run("rank", "--samples", 8, "--output", tmp_path / "ranking.json")
    order = LayerRanking.load(tmp_path / "ranking.json").order
    rest = ", ".join(map(str, sorted(order[2:])))
    said = f"Strata by rank: LoRA on layer {order[0]}, bias terms of layer {order[1]}, layers {rest} frozen."
    assert said in words
    assert "StratifiedConfig.by_ranking(ranking, lora=1, bitfit=1)" in words
    words = run("train", "--method", "spafit", "--ranking", tmp_path / "ranking.json")
    assert said in words
    found = dict((tune, layers) for layers, tune in strata(tmp_path / "out"))
    assert found == {"lora": order[:1], "bitfit": order[1:2], "frozen": sorted(order[2:])}


def test_counts_by_rank_are_5_and_4_of_12():
    ranking = LayerRanking(stack="encoder", scores=[float(i) for i in range(12)])
    assert spafit_counts(12) == {"lora": 5, "bitfit": 4}
    assert spafit_counts(3, "norm") == {"lora": 1, "norm": 1}
    words = describe_strata_by_rank(ranking, "norm")
    assert "LoRA on layers 7, 8, 9, 10, 11, norms of layers 3, 4, 5, 6, layers 0, 1, 2 frozen" in words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--preset", "SPAFIT-4"), "SPAFIT-N1-N2-I or -II"),
        (("--preset", "SPAFIT-0-1-I", "--n1", "0"), "--preset SPAFIT-0-1-I and --n1 0 choose the groups"),
        (("--n1", "0"), "must be given together"),
        (("--n1", "x", "--n2", "2"), "--n1 x: allowed are a layer's index and a fraction"),
        (("--n1", "2", "--n2", "1"), "n1=2 must be below n2=1"),
        (("--preset", "SPAFIT-4-9-II"), "leave a group without layers in encoder"),
        (("--target-module", "nope"), "none of target_modules"),
        (("--group-2", "full"), "allowed are 'bitfit' and 'norm'"),
    ],
)
def test_mistakes_are_told_in_words_before_anything_is_written(run, tmp_path, options, message):
    assert message in run("train", "--method", "spafit", *options, code=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["preset", "n1", "group_2", "target_modules"])
def test_options_of_spafit_mean_nothing_elsewhere(name):
    value = {"preset": "SPAFIT-0-1-I", "n1": 1, "group_2": "norm", "target_modules": ("query",)}[name]
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} has no meaning with --method lora"):
        TrainingJob(model="m", data="d", output="o", method="lora", **{name: value})


def test_a_job_of_spafit_is_read_as_it_was_saved(tmp_path):
    job = TrainingJob(model="m", data="d", output="o", method="spafit", n1=0.2, n2=0.5, target_modules=("query",))
    job.save(tmp_path)
    assert TrainingJob.load(tmp_path) == job
