from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from forks import run_forked
from peft import PeftModel
from safetensors.torch import load_file
from sklearn.dummy import DummyClassifier
from sklearn.metrics import accuracy_score, f1_score
from tiny_task import LABELS, make_rows, save_base, save_data
from transformers import AutoModelForSequenceClassification, TrainerCallback

import peft_surgical.training.prepare as prepare_module
from peft_surgical import LayerRanking
from peft_surgical.training import METHODS, TrainingJob, TrainingRun, evaluate, train
from peft_surgical.training.checkpoints import newest_checkpoint
from peft_surgical.training.common import load_classifier, load_tokenizer, load_trained
from peft_surgical.training.evaluation import majority


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return save_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def job(base, data, tmp_path):
    def make(**options) -> TrainingJob:
        places = {"model": str(base), "data": str(data), "output": str(tmp_path / "out")}
        return TrainingJob(**{**places, "epochs": 2, "learning_rate": 1e-2, "method": "last", **options})

    return make


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(next(Path(folder).glob("*.safetensors")))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


RANKED = {"method": "surgical", "score": "fisher", "samples": 20}


# what each method trains, saves and loads


@pytest.mark.parametrize(
    ("method", "decoder", "given", "rate"),
    [
        ("full", False, None, 5e-5),
        ("surgical", False, None, 1e-4),
        ("surgical", True, None, 5e-5),
        ("last", True, None, 5e-5),
        ("full", True, None, 1e-5),
        ("full", True, 3e-5, 3e-5),
        ("lora", True, None, 3e-4),
    ],
)
def test_the_learning_rate_is_the_one_given_or_that_of_the_evidence(method, decoder, given, rate):
    job = TrainingJob(model="m", data="d", output="o", method=method, learning_rate=given)
    assert job.learning_rate_for(decoder) == rate


@pytest.mark.parametrize(
    ("family", "rate"), [("bert", 1e-4), ("t5", 1e-4), ("bart", 1e-4), ("gpt2", 5e-5), ("llama", 5e-5)]
)
def test_a_decoder_has_its_own_rate_also_for_labels(job, tmp_path, family, rate):
    stack = "encoder" if family in ("t5", "bart") else None
    asked = job(model=str(save_base(tmp_path / family, family)), stack=stack, learning_rate=None)
    assert TrainingRun(asked).learning_rate == rate


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({**RANKED, "top_k": 2}, None),
        ({"method": "surgical", "layers": (1, -1)}, [1, 3]),
        ({"method": "surgical", "layers": "middle:2"}, [1, 2]),
        ({"method": "surgical"}, [1, 3]),
        ({"method": "surgical", "top_k": 1}, [2]),
        ({"method": "surgical", "top_k": 2}, [1, 3]),
        ({"method": "surgical", "layers": "all", "target_modules": ("attention",)}, [0, 1, 2, 3]),
        ({"method": "last"}, [3]),
        ({"method": "last", "top_k": 3}, [1, 2, 3]),
        ({"method": "head"}, []),
        ({"method": "lora"}, [0, 1, 2, 3]),
        ({"method": "spafit"}, [1, 2, 3]),
        ({"method": "spafit", "n1": 1, "n2": 2, "lora_r": 2}, [2, 3]),
        ({"method": "spafit", "preset": "SPAFIT-0-1-I", "lora_r": 2}, [1, 2, 3]),
        ({"method": "columns", "columns": 4}, [0, 1, 2, 3]),
        ({"method": "full"}, [0, 1, 2, 3]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_method_trains_its_layers_and_saves_what_evaluate_measures_again(job, options, layers):
    asked = job(**options)
    results = train(asked)
    if layers is None:
        layers = sorted(LayerRanking.load(f"{asked.output}/ranking.json").top(2))
    assert results["layers"] == ({"encoder": layers} if layers else {})
    assert json.loads(Path(asked.output, "metrics.json").read_text()) == json.loads(json.dumps(results))
    again = evaluate(asked.output)
    measured = {k: v for k, v in results["evaluation"].items() if k not in ("rows", "samples", "loss")}
    assert again.metrics == measured
    assert len(again.predictions) == 30
    assert not Path(asked.output, "checkpoints").exists()
    saved = {name: tensor.numel() for name, tensor in weights(asked.output).items()}
    if options["method"] == "columns":  # which are saved packed
        assert sum(":columns" in name for name in saved) == 2 * 4 * 6
    else:
        assert sum(saved.values()) == results["parameters"]["trained"]


def test_every_method_has_a_line_in_the_table_that_says_what_it_does():
    for method in METHODS.values():
        assert method.about
        assert method.learning_rate > 0
        assert method.options <= {field.name for field in dataclasses.fields(TrainingJob)}


def test_what_a_job_trains_is_told_with_the_modules_that_it_is_narrowed_to():
    def about(**options):
        return TrainingJob(model="m", data="d", output="o", **options).about

    assert about(method="surgical") == "all weights of some layers"
    narrowed = about(method="last", target_modules=("query", "value"))
    assert narrowed == "all weights of query and value in the last layers"
    assert about(method="spafit", target_modules=("query",)) == METHODS["spafit"].about


def test_the_tokenizer_is_saved_with_a_whole_model_only(job, tmp_path):
    train(job(method="full", max_steps=1))
    assert (tmp_path / "out" / "tokenizer.json").exists()
    train(job(method="head", max_steps=1, output=str(tmp_path / "head")))
    assert not (tmp_path / "head" / "tokenizer.json").exists()


def test_new_weights_outside_the_head_names_of_peft_are_trained_and_saved(job, tmp_path, base):
    """DistilBERT's `pre_classifier` is as new as its `classifier`; left out, it is random again after loading."""
    folder = save_base(tmp_path / "distilbert", "distilbert")
    for method in ("head", "lora", "last"):
        asked = job(model=str(folder), method=method, output=str(tmp_path / method), max_steps=2)
        train(asked)
        assert any("pre_classifier" in name for name in weights(asked.output))
        tokenizer = load_tokenizer(str(folder))
        batch = tokenizer(["w1 w2 w3", "w4"], padding=True, return_tensors="pt")
        batch.pop("token_type_ids", None)
        logits = []
        for seed in (1, 2):
            fresh, _ = load_classifier(str(folder), LABELS, tokenizer, seed=seed)
            logits.append(PeftModel.from_pretrained(fresh, asked.output).eval()(**batch).logits)
        assert torch.equal(*logits)


@pytest.mark.parametrize("family", ["xlnet", "roberta", "gpt2", "deberta-v2", "modernbert"])
def test_other_families_train_and_load(job, tmp_path, family):
    folder = save_base(tmp_path / family, family)
    asked = job(model=str(folder), max_steps=2)
    results = train(asked)
    assert evaluate(asked.output).metrics["accuracy"] == results["evaluation"]["accuracy"]


def test_a_model_with_two_stacks_needs_the_name_of_one(job, tmp_path):
    folder = save_base(tmp_path / "bart", "bart")
    with pytest.raises(ValueError, match="encoder.*decoder"):
        train(job(model=str(folder), method="last", top_k=1, max_steps=1))
    results = train(
        job(model=str(folder), method="surgical", top_k=1, stack="decoder", score="fisher", samples=8, max_steps=1),
        overwrite=True,
    )
    assert list(results["layers"]) == ["decoder"]


def test_a_pair_and_an_amount_are_trained_on(job, tmp_path):
    folder = save_data(tmp_path / "amounts", pair=True, regression=True)
    results = train(job(data=str(folder)))
    assert results["task"] == {
        "kind": "regression",
        "text_columns": ("sentence1", "sentence2"),
        "label_column": "label",
        "labels": (),
    }
    assert set(results["evaluation"]) == {"rows", "samples", "loss", "pearson", "spearman"}
    assert results["metric"] == "pearson"
    assert evaluate(tmp_path / "out").metrics["pearson"] == pytest.approx(results["evaluation"]["pearson"])


def test_training_learns(job, tmp_path):
    many = save_data(tmp_path / "many", train=300)
    results = train(job(data=str(many), method="full", epochs=6, learning_rate=5e-3))
    assert results["evaluation"]["accuracy"] > 0.9
    assert results["history"][-1]["train_loss"] < results["history"][0]["train_loss"] / 2


# held-out rows


def test_layers_are_ranked_on_training_rows_alone(job, monkeypatch):
    seen: list[Dataset] = []

    def spy(model, data, **options):
        seen.append(data)
        return LayerRanking(stack="encoder", scores=[1.0, 2.0, 3.0, 4.0])

    monkeypatch.setattr(prepare_module, "rank_layers", spy)
    run = TrainingRun(job(method="surgical", score="fisher"))
    run.rank()
    tokens = {tuple(row) for row in seen[0]["input_ids"][:]}
    tokenizer = run.prepared.tokenizer
    for part, expected in (("train", True), ("selection", False), ("evaluation", False)):
        rows = tokenizer(getattr(run.prepared.parts, part)["text"][:])["input_ids"]
        assert {tuple(row) in tokens for row in rows} == {expected}, part


def test_the_evaluation_rows_choose_nothing(job, data, tmp_path):
    """Other labels on the evaluation rows change the final numbers and nothing else."""
    flipped = tmp_path / "flipped"
    flipped.mkdir()
    Dataset.from_parquet(str(data / "train.parquet")).to_parquet(str(flipped / "train.parquet"))
    rows = Dataset.from_parquet(str(data / "validation.parquet"))
    rows = rows.map(lambda row: {"label": 1 - row["label"]}, features=rows.features)
    rows.to_parquet(str(flipped / "validation.parquet"))
    options = {**RANKED, "top_k": 1, "epochs": 3}
    one = train(job(output=str(tmp_path / "one"), **options))
    other = train(job(output=str(tmp_path / "other"), data=str(flipped), **options))
    assert same(weights(tmp_path / "one"), weights(tmp_path / "other"))
    assert one["selection"] == other["selection"]
    assert other["evaluation"]["accuracy"] == pytest.approx(1 - one["evaluation"]["accuracy"])


def test_the_best_checkpoint_is_the_one_that_is_saved(job, tmp_path):
    results = train(job(epochs=4, metric="loss", keep_checkpoints=True))
    losses = {row["step"]: row["loss"] for row in results["history"]}
    best = min(losses, key=losses.__getitem__)
    assert len(losses) == 4
    assert results["selection"]["best_step"] == best
    assert results["selection"]["best"] == pytest.approx(losses[best])
    assert same(weights(tmp_path / "out"), weights(tmp_path / "out" / "checkpoints" / f"checkpoint-{best}"))


def test_without_selection_the_last_checkpoint_is_taken_and_all_rows_are_trained_on(job):
    results = train(job(select_on="none"))
    assert results["selection"] is None
    assert results["training"] == {"rows": "rows of the train split", "samples": 60, "steps": 8}


def test_a_metric_of_another_kind_of_task_is_refused_before_training(job, tmp_path):
    with pytest.raises(ValueError, match="--metric pearson: for classification allowed are accuracy, f1"):
        TrainingRun(job(metric="pearson"))
    assert not (tmp_path / "out").exists()


# runs that are repeated, resumed, refused


def test_the_same_job_gives_the_same_weights(job, tmp_path):
    for name in ("one", "other"):
        train(job(output=str(tmp_path / name), top_k=1, **RANKED))
    assert same(weights(tmp_path / "one"), weights(tmp_path / "other"))


class Watch(TrainerCallback):
    def __init__(self):
        self.steps: list[int] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


class Kill(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(job: TrainingJob, step: int = 6) -> None:
    run = TrainingRun(job, callbacks=[Kill(step)])
    run.rank()
    run.fit()


RANKED_TWO = {"method": "surgical", "top_k": 2, "score": "fisher", "samples": 20}
ROUNDED = {"stochastic_rounding": True, "dtype": "bfloat16"}


@pytest.mark.parametrize("options", [RANKED_TWO, {"method": "full"}, {**RANKED_TWO, **ROUNDED}, {**ROUNDED}])
def test_a_run_that_was_killed_goes_on_to_the_same_weights(job, tmp_path, options, monkeypatch):
    options = {"epochs": 3, **options}
    whole = train(job(output=str(tmp_path / "whole"), **options))
    asked = job(output=str(tmp_path / "killed"), **options)
    assert run_forked(run_until_killed, asked).code == -signal.SIGKILL
    assert not Path(asked.output, "metrics.json").exists()
    monkeypatch.setattr(prepare_module, "rank_layers", lambda *a, **k: pytest.fail("ranked again"))
    resumed = train(asked, resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    dtype = torch.bfloat16 if "dtype" in options else torch.float32
    assert {values.dtype for values in weights(tmp_path / "killed").values()} == {dtype}
    for key in ("evaluation", "selection", "layers", "history"):
        assert resumed[key] == whole[key], key


def test_only_what_is_in_bfloat16_is_rounded(job):
    with pytest.raises(ValueError, match="--stochastic-rounding is for values in bfloat16; .* in float32"):
        train(job(stochastic_rounding=True))


def test_early_stopping_counts_epochs_also_over_a_kill(job, tmp_path):
    """Nothing is learnt at this rate, so the first epoch stays the best."""
    options = {"epochs": 9, "early_stopping": 2, "learning_rate": 1e-12}
    whole = train(job(output=str(tmp_path / "whole"), **options))
    assert [row["epoch"] for row in whole["history"]] == [1, 2, 3]
    asked = job(output=str(tmp_path / "killed"), **options)
    assert run_forked(run_until_killed, asked, 10).code == -signal.SIGKILL  # in the third epoch
    resumed = train(asked, resume=True)
    assert resumed["history"] == whole["history"]
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


class KillAtEnd(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        if control.should_training_stop:
            os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed_at_its_end(job: TrainingJob) -> None:
    TrainingRun(job, callbacks=[KillAtEnd()]).fit()


@pytest.mark.parametrize("options", [{"epochs": 9, "early_stopping": 2, "learning_rate": 1e-12}, {"max_steps": 6}])
def test_a_run_that_was_killed_after_its_last_step_takes_no_more(job, tmp_path, options):
    """Trainer would begin another epoch, or take another step of this one."""
    whole = train(job(output=str(tmp_path / "whole"), **options))
    asked = job(**options)
    assert run_forked(run_until_killed_at_its_end, asked).code == -signal.SIGKILL
    watch = Watch()
    run = TrainingRun(asked, resume=True, callbacks=[watch])
    run.fit()
    resumed = run.finish()
    assert watch.steps == []
    for key in ("evaluation", "selection", "training", "history"):
        assert resumed[key] == whole[key], key
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "out"))


def test_the_loss_is_logged_every_so_many_steps_and_told_by_epoch(job, tmp_path):
    class Losses(TrainerCallback):
        def __init__(self):
            self.at: list[int] = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                self.at.append(state.global_step)

    usual, often = train(job(output=str(tmp_path / "usual"))), Losses()
    run = TrainingRun(job(log_every=3), callbacks=[often])
    run.fit()
    results = run.finish()
    assert often.at == [3, 4, 6, 8]
    assert [row["step"] for row in results["history"]] == [4, 8]
    for one, other in zip(results["history"], usual["history"], strict=True):
        assert one == {**other, "train_loss": pytest.approx(other["train_loss"], rel=1e-3)}
    assert same(weights(tmp_path / "usual"), weights(tmp_path / "out"))


def test_what_a_service_writes_beside_the_checkpoints_stays_when_these_go(job, tmp_path):
    class Service(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.folder = Path(args.output_dir) / "runs"
            self.folder.mkdir(parents=True)

    service = Service()
    run = TrainingRun(job(max_steps=1), callbacks=[service])
    run.fit()
    run.finish()
    assert [*(tmp_path / "out" / "checkpoints").iterdir()] == [service.folder]


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(job, tmp_path):
    asked = job()
    TrainingRun(asked)
    assert train(asked, resume=True)["training"]["steps"] == 8


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(tmp_path):
    for step, state in ((2, "{}"), (10, "{}"), (11, '{"cut o'), (12, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert newest_checkpoint(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "rng_state.pth", "training_args.bin", "adapter_model.safetensors", "trainer_state.json"]
)
def test_a_checkpoint_with_a_file_that_is_cut_off_is_told_and_passed_over(job, tmp_path, caplog, name):
    asked = job(epochs=4, keep_checkpoints=True, select_on="none")
    whole, first, wanted = train(asked), weights(asked.output), tmp_path / "out" / "checkpoints"
    (tmp_path / "out" / "metrics.json").unlink()  # as if it were killed at its end
    kept = sorted(int(path.name.rpartition("-")[2]) for path in wanted.iterdir())
    cut = wanted / f"checkpoint-{kept[-1]}" / name
    cut.write_bytes(cut.read_bytes()[:-100])
    assert newest_checkpoint(wanted) == wanted / f"checkpoint-{kept[-2]}"
    assert f"{cut} is missing or cut off: checkpoint-{kept[-1]} is skipped" in caplog.text
    assert train(asked, resume=True)["history"] == whole["history"]
    assert same(weights(asked.output), first)


def test_a_best_checkpoint_that_is_cut_off_ends_no_run(job, tmp_path, caplog):
    asked = job(
        epochs=2, keep_checkpoints=True, learning_rate=1e-12
    )  # the first epoch is the best, the second the last
    train(asked)
    best = tmp_path / "out" / "checkpoints" / "checkpoint-4" / "adapter_model.safetensors"
    best.write_bytes(best.read_bytes()[:-100])
    assert newest_checkpoint(best.parents[1]) is None
    assert f"No checkpoint in {best.parents[1]} is whole, so the run starts from the beginning" in caplog.text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: rows.select(range(50)), "60 rows then and 50 now"),
        (
            lambda rows: rows.map(lambda row, i: {"text": "w1"} if i == 7 else {}, with_indices=True),
            "as many rows, with",
        ),
        (
            lambda rows: rows.map(lambda row, i: {"label": 1 - row["label"]} if i == 7 else {}, with_indices=True),
            "labels",
        ),
    ],
)
def test_a_run_is_not_resumed_on_other_rows(job, tmp_path, change, told):
    asked = job(data=str(save_data(tmp_path / "data")))
    TrainingRun(asked)
    change(make_rows(60, 1)).to_parquet(str(tmp_path / "data" / "train.parquet"))
    with pytest.raises(
        ValueError, match=f"--resume: the training data are not those .* began with: .*{told}.*--overwrite"
    ):
        TrainingRun(asked, resume=True)
    make_rows(60, 1).to_parquet(str(tmp_path / "data" / "train.parquet"))  # back as they were
    TrainingRun(asked, resume=True)
    job_file = tmp_path / "out" / "job.json"
    job_file.write_text(json.dumps({k: v for k, v in json.loads(job_file.read_text()).items() if k != "rows"}))
    change(make_rows(60, 1)).to_parquet(str(tmp_path / "data" / "train.parquet"))
    TrainingRun(asked, resume=True)  # a run of an earlier version, of which nothing is known


@pytest.mark.parametrize("options", [{"epochs": 1}, {"batch_size": 8}, {"max_steps": 3}])
def test_a_resumed_run_keeps_its_options_and_may_only_become_longer(job, options):
    TrainingRun(job(max_steps=4))
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} was .* when the run .* and is {value} now"):
        train(job(**{"max_steps": 4, **options}), resume=True)


def test_a_finished_run_that_is_resumed_stays_as_it_is_or_trains_longer(job, tmp_path):
    asked = job(
        epochs=2, learning_rate=1e-12, keep_checkpoints=True
    )  # the first epoch is the best, the second the last
    once = train(asked)
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert json.loads(json.dumps(once)) == train(asked, resume=True)
    assert {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()} == before
    longer = dataclasses.replace(asked, epochs=3)
    seen = Watch()
    run = TrainingRun(longer, resume=True, callbacks=[seen])
    assert not (tmp_path / "out" / "metrics.json").exists()  # or a kill now would leave a run that looks finished
    run.fit()
    results = run.finish()
    assert seen.steps == [9, 10, 11, 12]
    assert [row["epoch"] for row in results["history"]] == [1.0, 2.0, 3.0]
    assert results["history"][:2] == once["history"]
    assert TrainingJob.load(asked.output).epochs == 3
    assert results == json.loads((tmp_path / "out" / "metrics.json").read_text()) | {"task": results["task"]}


def test_a_finished_run_without_checkpoints_cannot_become_longer(job):
    train(job(epochs=1))
    with pytest.raises(ValueError, match="without the checkpoints .* --keep-checkpoints keeps"):
        train(job(epochs=2), resume=True)


def test_a_folder_in_use_is_refused_and_left_alone(job, tmp_path):
    asked = job(max_steps=1)
    train(asked)
    before = weights(asked.output)
    with pytest.raises(ValueError, match="not empty. Use --resume to go on, --overwrite"):
        train(asked)
    with pytest.raises(ValueError, match="Drop one"):
        train(asked, resume=True, overwrite=True)
    assert same(weights(asked.output), before)
    train(asked, overwrite=True)


def test_a_folder_with_other_files_is_never_emptied(job, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="not written by `peft-surgical train`"):
        train(job(), overwrite=True)
    assert (tmp_path / "out" / "thesis.tex").exists()


def test_a_mistake_in_the_data_leaves_no_folder_behind(job, tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        train(job(data=str(tmp_path / "nowhere.csv")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "--method magic: allowed are surgical, last, full"),
        ({"metric": "bleu"}, "--metric bleu: allowed are"),
        ({"task": "tagging"}, "--task tagging: allowed are"),
        ({"dtype": "int8"}, "--dtype int8: allowed are"),
        ({"warmup": 1.5}, "--warmup 1.5: allowed are fractions from 0 to below 1"),
        ({"epochs": 0}, "--epochs 0: allowed are numbers above 0"),
        ({"method": "surgical", "layers": "last:2", "top_k": 2}, "--layers last:2 and --top-k both choose"),
        ({"method": "surgical", "layers": "last:2", "ranking": "r"}, "--layers last:2 and --ranking both choose"),
        ({"layers": "last:2", "score": "fisher"}, "--layers last:2 and --score both choose"),
        ({"ranking": "r", "score": "fisher"}, "--ranking r and --score fisher both rank the layers"),
        ({"samples": 20}, "--samples is for ranking layers. Add --score fisher, or drop it"),
        ({"method": "head", "top_k": 2}, "--top-k has no meaning with --method head; it goes with surgical, last"),
        ({"method": "full", "lora_r": 4}, "--lora-r has no meaning with --method full; it goes with spafit, lora"),
        ({"bf16": True, "fp16": True}, "--bf16 and --fp16"),
        ({"early_stopping": 1, "select_on": "none"}, "--early-stopping looks at the rows that --select-on none"),
        ({"early_stopping": 0}, "--early-stopping 0: allowed are numbers above 0"),
        ({"log_every": 0}, "--log-every 0: allowed are numbers above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        TrainingJob(model="m", data="d", output="o", **options)


def test_a_job_is_read_as_it_was_saved(tmp_path):
    job = TrainingJob(
        model="m", data="d", output="o", method="surgical", layers=(1, "3-4"), text_columns=("a", "b"), epochs=0.5
    )
    job.save(tmp_path)
    assert TrainingJob.load(tmp_path) == job
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ValueError, match=r"no job\.json"):
        TrainingJob.load(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="There is no folder .*nowhere"):
        TrainingJob.load(tmp_path / "nowhere")


def test_a_ranking_made_before_is_used(job, tmp_path, monkeypatch):
    file = tmp_path / "ranking.json"
    LayerRanking(stack="encoder", scores=[0.1, 0.9, 0.2, 0.8]).save(str(file))
    monkeypatch.setattr(prepare_module, "rank_layers", lambda *a, **k: pytest.fail("ranked again"))
    results = train(job(method="surgical", ranking=str(file), top_k=2, max_steps=1))
    assert results["layers"] == {"encoder": [1, 3]}


def test_a_run_in_bfloat16_is_none_for_the_next(job, tmp_path):
    train(job(max_steps=1))
    alone = evaluate(tmp_path / "out").outputs
    train(job(output=str(tmp_path / "half"), bf16=True, max_steps=1))
    assert (evaluate(tmp_path / "out").outputs == alone).all()


# evaluation elsewhere


def test_other_data_with_other_column_names_is_evaluated_by_class_name(job, tmp_path):
    train(job())
    rows = make_rows(20, 5)
    named = [LABELS[i] for i in rows["label"][:]]
    Dataset.from_dict({"sentence": rows["text"][:], "target": named}).to_csv(str(tmp_path / "test.csv"))
    rows.to_parquet(str(tmp_path / "same.parquet"))
    other = evaluate(tmp_path / "out", data=str(tmp_path / "test.csv"))
    assert other.metrics == evaluate(tmp_path / "out", data=str(tmp_path / "same.parquet")).metrics
    assert other.rows == "the test split"
    table = other.table()
    assert table.column_names == ["text", "label", "prediction"]
    right = sum(a == b for a, b in zip(table["label"][:], table["prediction"][:], strict=True))
    assert other.metrics["accuracy"] == right / 20


def test_evaluation_refuses_what_does_not_fit(job, tmp_path, data):
    run = TrainingRun(job())
    with pytest.raises(ValueError, match="no finished run"):
        evaluate(run.folder)
    with pytest.raises(ValueError, match="There is no folder"):
        evaluate(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="not written by"):
        evaluate(tmp_path)
    run.fit()
    run.finish()
    save_data(tmp_path / "pairs", pair=True)
    with pytest.raises(ValueError, match="was trained on the columns"):
        evaluate(run.folder, data=str(tmp_path / "pairs"))
    with pytest.raises(ValueError, match="labelled rows called 'test'"):
        evaluate(run.folder, split="test")
    make_rows(4, 1).rename_columns({"text": "said", "label": "stars"}).to_csv(tmp_path / "other.csv")
    told = (
        r"trained on the columns \['text', 'label'\], and the data has \['said', 'stars'\]. Name .* --text-column and"
    )
    with pytest.raises(ValueError, match=f"--data .*other.csv: the run was {told} --label-column"):
        evaluate(run.folder, data=str(tmp_path / "other.csv"))
    with pytest.raises(ValueError, match=r"trained on the columns \['label'\]"):
        evaluate(run.folder, data=str(tmp_path / "other.csv"), text_columns=["said"])


def test_a_base_that_moved_can_be_named(job, base, tmp_path):
    results = train(job())
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in base.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert evaluate(tmp_path / "out", model=str(moved)).metrics["f1"] == results["evaluation"]["f1"]


# the card


def test_the_card_tells_ranking_results_rows_and_the_exact_configuration(job, tmp_path):
    asked = job(top_k=2, **RANKED)
    results = train(asked)
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(LayerRanking.load(tmp_path / "out" / "ranking.json")) in card
    assert f"{results['evaluation']['accuracy']:.4f}" in card
    assert "Measured on 30 rows: the validation split." in card
    assert "measured on 6 rows: 10% of the training rows, held out." in card
    assert "too good" not in card
    config = json.loads(re.search(r"```json\n(.*?)```", card, re.S).group(1))
    saved = json.loads((tmp_path / "out" / "job.json").read_text())
    assert saved.pop("rows")["count"] == 60
    assert config == {**saved, "learning_rate": 1e-2}
    assert card.startswith("---\n")
    assert "base_model:" not in card  # a folder, which the hub refuses


def test_the_card_admits_a_choice_on_the_evaluation_rows(job, tmp_path):
    train(job(select_on="validation"))
    assert "so these numbers are too good" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("method", ["last", "lora", "full"])
def test_the_code_on_the_card_runs(job, tmp_path, monkeypatch, method, capsys):
    train(job(method=method))
    card = (tmp_path / "out" / "README.md").read_text()
    monkeypatch.chdir(tmp_path / "out")
    scope: dict = {}
    exec(re.search(r"```python\n(.*?)```", card, re.S).group(1), scope)
    assert capsys.readouterr().out.strip() in LABELS
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path / "out") if method == "full" else scope["base"].config._name_or_path)
    ours = load_trained("out", json.loads(Path("out/job.json").read_text())["model"], LABELS, tokenizer)
    assert torch.equal(scope["logits"], ours(**tokenizer("A text", return_tensors="pt")).logits)


def test_a_callback_sees_the_run(job):
    class Count(TrainerCallback):
        steps = 0

        def on_step_end(self, *args, **kwargs):
            self.steps += 1

    counter = Count()
    run = TrainingRun(job(select_on="none"), callbacks=[counter])
    run.fit()
    assert counter.steps == 8


def test_the_base_folder_is_never_written(job, base):
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    train(job(method="full", max_steps=1))
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before
    assert AutoModelForSequenceClassification.from_pretrained(base) is not None


# what is reached without a model


def test_the_majority_is_what_scikit_learns_dummy_reaches():
    targets, labels = [0, 2, 2, 1, 2], ["a", "b", "c"]
    found = majority(Dataset.from_dict({"labels": targets}), labels)
    said = DummyClassifier().fit([[0]] * 5, targets).predict([[0]] * 5)
    assert (found["label"], found["share"]) == ("c", 0.6)
    assert found["accuracy"] == accuracy_score(targets, said)
    assert found["f1"] == f1_score(targets, said, average="macro")
    assert majority(Dataset.from_dict({"labels": [0.5]}), ()) is None


# options are checked before anything is loaded or made


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "surgical", "score": "fischer"}, "score='fischer' is unknown; allowed are 'alternate'"),
        (
            {"method": "surgical", "score": "fisher", "fisher_labels": "drawn"},
            "--fisher-labels drawn: allowed are given, sampled, exact",
        ),
        ({"method": "surgical", "score": "fisher", "aggregation": "sum"}, "--aggregation sum: allowed are frobenius"),
        (
            {"method": "surgical", "ranking": "nowhere.json"},
            "--ranking nowhere.json names no saved ranking.*rank --output",
        ),
        ({"method": "surgical", "ranking": __file__}, "--ranking .*test_training.py names no saved ranking"),
        ({"method": "spafit", "group_2": "biases"}, "biases"),
        ({"method": "spafit", "preset": "SPAFIT-9"}, "SPAFIT-9"),
        ({"report_to": "tensorbord"}, "--report-to tensorbord: allowed are none, all, .*tensorboard, .*wandb"),
        ({"report_to": "wandb"}, r"--report-to wandb: .*installed: pip install .\.\[wandb\]. in a checkout"),
        ({"optim": "adam_w"}, "--optim adam_w: transformers has none of this name; allowed are .*sgd"),
        ({"optim": "adamw_bnb_8bit"}, "bitsandbytes, which is not installed|needs a GPU"),
        ({"encoding": "utf8-8"}, "--encoding: unknown encoding"),
        ({"fp16": True}, "--fp16 needs a GPU"),
        ({"metric": "pearson"}, "--metric pearson: for classification allowed are"),
        ({"select_on": "valid"}, "--select-on valid: allowed are held-out, none, validation"),
        ({"eval_split": "dev"}, "--eval-split dev: allowed are validation"),
        ({"text_columns": ("txt",)}, "--text-column txt"),
        ({"label_column": "lable"}, "--label-column lable"),
    ],
)
def test_a_typo_is_told_before_the_model_is_loaded_and_leaves_no_folder(job, tmp_path, monkeypatch, options, message):
    loader = AutoModelForSequenceClassification
    monkeypatch.setattr(loader, "from_pretrained", lambda *a, **k: pytest.fail("loaded a model"))
    with pytest.raises((ValueError, OSError, ImportError), match=message):
        TrainingRun(job(**options))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        *({name: value} for name in ("top_k", "max_train_samples", "lora_r", "lora_alpha") for value in (0, -1)),
        *({name: value} for name in ("epochs", "learning_rate") for value in (0.0, float("inf"), float("nan"))),
        *({name: -1} for name in ("weight_decay", "max_grad_norm", "seed", "head_seeds")),
        *({"max_steps": value} for value in (0, -2)),
        {"lora_dropout": 1.0},
    ],
)
def test_numbers_out_of_bounds_are_refused_by_the_job_itself(job, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} "):
        job(method="lora" if "lora" in name else "last", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "surgical", "layers": (9,)}, "layers 0 to 3"),
        ({"method": "surgical", "top_k": 9}, "--top-k 9: encoder has 4 layers"),
        (
            {"method": "surgical", "target_modules": ("self_attn",)},
            "target_modules={'self_attn'}.*Names in these layers",
        ),
        ({"method": "surgical", "stack": "decoder"}, "decoder"),
        ({"method": "last", "stack": "decoder"}, "decoder"),
        ({"method": "surgical", "ranking": "six.json", "top_k": 1}, "six.json ranks 6 layers; encoder has 4"),
        ({"method": "spafit", "ranking": "six.json"}, "six.json ranks 6 layers; encoder has 4"),
    ],
)
def test_what_does_not_fit_the_model_leaves_no_folder(job, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    LayerRanking(stack="encoder", scores=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).save("six.json")
    with pytest.raises(ValueError, match=message):
        TrainingRun(job(**options))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_told_at_once(job, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--output .*file is not a folder"):
        TrainingRun(job(output=str(tmp_path / "file" / "out")))
