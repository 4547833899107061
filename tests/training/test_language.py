"""Language models on TRL: the losses against plain PyTorch and TRL's own script, and the whole way."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from distributed.launch import launch_well, skip_if_missing
from forks import run_forked
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from tiny_chat import TEMPLATE, make_language_rows, save_language_data, save_language_model
from tiny_task import save_base, save_data
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from typer.testing import CliRunner

import peft_surgical.training.prepare as prepare_module
from peft_surgical import LayerRanking, SurgicalConfig, merge_checkpoint, rank_layers
from peft_surgical.cli import app
from peft_surgical.training import TrainingJob, TrainingRun, evaluate, predict, train


pytest.importorskip("trl")
RANKED = {"method": "surgical", "score": "fisher"}
FORMS = ["messages", "chat prompt", "prompt", "instruction", "text"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_language_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    return {form: save_language_data(tmp_path_factory.mktemp("data"), form) for form in FORMS}


@pytest.fixture
def job(base, data, tmp_path):
    def make(form: str = "messages", **options) -> TrainingJob:
        places = {"model": str(base), "data": str(data[form]), "output": str(tmp_path / "out")}
        usual = {"epochs": 2, "learning_rate": 1e-2, "method": "last", "batch_size": 8}
        return TrainingJob(**{**places, **usual, **options})

    return make


@pytest.fixture
def run(monkeypatch):
    """Run a command, and have its words."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> str:
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == 0, result.output + repr(result.exception)
        return " ".join(result.output.split())

    return call


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(next(Path(folder).glob("*.safetensors")))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def encode_by_hand(tokenizer, row: dict, *, answers_only: bool) -> tuple[list[int], list[int]]:
    """Ids and labels of a row, from the template and the formats as their authors describe them."""
    eos = tokenizer.eos_token_id
    if "messages" in row or isinstance(row.get("prompt"), list):
        chat = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
        asked = tokenizer(f"<user> {chat[0]['content']} <assistant>")["input_ids"]
        told = [*tokenizer(chat[1]["content"])["input_ids"], eos]
    elif "prompt" in row:
        asked, told = tokenizer(row["prompt"])["input_ids"], [*tokenizer(row["completion"])["input_ids"], eos]
    elif "instruction" in row:
        asked = tokenizer(f"<user> {row['instruction']} {row['input']} <assistant>")["input_ids"]
        told = [*tokenizer(row["output"])["input_ids"], eos]
    else:
        asked, told = [], [*tokenizer(row["text"])["input_ids"], eos]
    return asked + told, [-100] * len(asked) + told if answers_only else asked + told


@torch.no_grad()
def losses_by_hand(model, tokenizer, rows: Dataset, *, answers_only: bool) -> list[tuple[float, int]]:
    """The sum of -log p of each row, and the tokens in it: one row at a time, in float64."""
    model = model.double().eval()
    found = []
    for row in rows:
        ids, labels = encode_by_hand(tokenizer, row, answers_only=answers_only)
        log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        picked = [-float(log_p[i, label]) for i, label in enumerate(labels[1:]) if label != -100]
        found.append((sum(picked), len(picked)))
    return found


@pytest.mark.parametrize("form", FORMS)
def test_each_format_is_trained_on_and_its_loss_is_that_of_plain_pytorch(job, data, form):
    """The loss counts each token once, whatever the batches; answers alone where they stand by themselves."""
    asked = job(form, assistant_only_loss=form == "messages", max_steps=2)
    results = train(asked)
    assert results["task"]["kind"] == "causal-lm"
    rows = Dataset.from_parquet(str(data[form] / "validation.parquet"))
    tokenizer = AutoTokenizer.from_pretrained(asked.output)
    base = AutoModelForCausalLM.from_pretrained(asked.model)
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(asked.model), asked.output)
    for model, measured in ((base, results["base"]), (tuned, results["evaluation"])):
        expected = losses_by_hand(model, tokenizer, rows, answers_only=form != "text")
        loss = sum(a for a, _ in expected) / sum(b for _, b in expected)
        assert measured["loss"] == pytest.approx(loss, rel=1e-5)
        assert measured["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    again = evaluate(asked.output)
    assert again.metrics == {name: results["evaluation"][name] for name in ("loss", "perplexity")}
    assert again.outputs[:, 1].tolist() == [count for _, count in expected]
    assert again.outputs[:, 0] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert again.table()["tokens"][:] == [count for _, count in expected]


def test_without_assistant_only_loss_the_whole_chat_counts(job, data):
    asked = job(max_steps=1)
    train(asked)
    rows = Dataset.from_parquet(str(data["messages"] / "validation.parquet"))
    tokenizer = AutoTokenizer.from_pretrained(asked.output)
    counted = evaluate(asked.output).outputs[:, 1].tolist()
    assert counted == [len(encode_by_hand(tokenizer, row, answers_only=False)[0]) - 1 for row in rows]


@pytest.mark.parametrize("method", ["surgical", "lora"])
def test_the_losses_and_weights_are_those_of_trls_own_script_bit_for_bit(job, data, tmp_path, method):
    from trl import SFTConfig, SFTTrainer

    options = {"layers": (1, -1)} if method == "surgical" else {"lora_r": 4, "lora_dropout": 0.2}
    asked = job(method=method, select_on="none", assistant_only_loss=True, warmup=0.0, epochs=3, seed=3, **options)
    results = train(asked)
    if method == "surgical":
        config = SurgicalConfig(task_type="CAUSAL_LM", layers=[1, -1])
    else:
        config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, lora_dropout=0.2)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32),
        args=SFTConfig(
            output_dir=str(tmp_path / "trl"),
            assistant_only_loss=True,
            num_train_epochs=3,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            weight_decay=0.01,
            logging_strategy="epoch",
            save_strategy="no",
            gradient_checkpointing=False,
            bf16=False,
            seed=3,
            data_seed=3,
            use_cpu=True,
            report_to=[],
        ),
        train_dataset=Dataset.from_parquet(str(data["messages"] / "train.parquet")),
        processing_class=AutoTokenizer.from_pretrained(asked.model),
        peft_config=config,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "theirs"))
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [row["train_loss"] for row in results["history"]] == theirs
    assert same(weights(asked.output), weights(tmp_path / "theirs"))


def test_packed_rows_are_trained_on_as_if_each_were_alone(job, data):
    """One step over all rows: the loss before it is the mean over all tokens that are learnt."""
    asked = job(packing=True, assistant_only_loss=True, select_on="none", max_steps=1, batch_size=40, max_length=64)
    results = train(asked)
    rows = Dataset.from_parquet(str(data["messages"] / "train.parquet"))
    model = AutoModelForCausalLM.from_pretrained(asked.model)
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    expected = losses_by_hand(model, tokenizer, rows, answers_only=True)
    loss = sum(a for a, _ in expected) / sum(b for _, b in expected)
    assert results["history"][0]["train_loss"] == pytest.approx(loss, rel=1e-4)
    assert evaluate(asked.output).metrics["loss"] == results["evaluation"]["loss"]


def test_gradient_checkpointing_changes_no_loss_and_bfloat16_trains(job, tmp_path):
    plain = train(job(output=str(tmp_path / "plain")))
    checked = train(job(output=str(tmp_path / "checked"), gradient_checkpointing=True))
    assert checked["history"][0]["train_loss"] == plain["history"][0]["train_loss"]
    half = train(job(output=str(tmp_path / "half"), bf16=True, dtype="bfloat16"))
    assert half["history"][0]["train_loss"] == pytest.approx(plain["history"][0]["train_loss"], rel=0.02)
    assert evaluate(tmp_path / "half").metrics["loss"] == pytest.approx(half["evaluation"]["loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"method": "surgical", "top_k": 2, "score": "fisher", "samples": 20}, None),
        ({"method": "surgical", "layers": (1, -1)}, [1, 3]),
        ({"method": "surgical", "top_k": 1}, [2]),
        ({"method": "last", "top_k": 3}, [1, 2, 3]),
        ({"method": "lora"}, [0, 1, 2, 3]),
        ({"method": "spafit", "group_2": "norm", "lora_r": 2}, [1, 2, 3]),
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
    assert results["layers"] == {"layers": layers}
    assert json.loads(Path(asked.output, "metrics.json").read_text()) == json.loads(json.dumps(results))
    assert evaluate(asked.output).metrics["loss"] == pytest.approx(results["evaluation"]["loss"], rel=1e-6)
    assert results["evaluation"]["loss"] != results.get("base", {}).get("loss")
    assert ("base" in results) == (options["method"] != "full")
    if options["method"] not in ("full", "columns"):  # columns are saved packed
        saved = sum(tensor.numel() for tensor in weights(asked.output).values())
        assert saved == results["parameters"]["trained"]


def test_the_layers_are_ranked_on_the_tokens_that_are_learnt(job, data):
    asked = job(**RANKED, top_k=1, samples=1000, assistant_only_loss=True, select_on="none", max_steps=1)
    train(asked)
    ours = LayerRanking.load(f"{asked.output}/ranking.json")
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    rows = [
        dict(zip(("input_ids", "labels"), encode_by_hand(tokenizer, row, answers_only=True), strict=True))
        for row in Dataset.from_parquet(str(data["messages"] / "train.parquet"))
    ]
    model = AutoModelForCausalLM.from_pretrained(asked.model)
    theirs = rank_layers(model, rows, num_samples=1000, batch_size=1, progress=False)
    assert ours.scores == pytest.approx(theirs.scores, rel=1e-4)


def test_training_learns_and_says_what_was_learnt(job, tmp_path):
    many = save_language_data(tmp_path / "many", train=400)
    asked = job(data=str(many), method="full", epochs=12, learning_rate=1e-2, assistant_only_loss=True, batch_size=16)
    results = train(asked)
    assert results["evaluation"]["perplexity"] < 3
    assert results["selection"]["best_step"] == min(results["history"], key=lambda row: row["perplexity"])["step"]
    said = [row["answer"] for row in predict(asked.output, ["w3 w5", "w1 w2"], max_new_tokens=8)]
    assert all(re.fullmatch(r"(w1\d ?)+", text) for text in said)
    assert [row["prompt"] for row in results["answers"]] == [
        row["messages"][0]["content"] for row in make_language_rows(12, 2).select(range(3))
    ]


def test_an_encoder_is_no_language_model(job, tmp_path):
    folder = save_language_model(tmp_path / "encoder", "roberta")
    with pytest.raises(ValueError, match="RobertaForCausalLM reads a text from both sides.*--label-column"):
        train(job(model=str(folder)))


def test_a_prompt_that_fills_the_model_has_no_answer(job, tmp_path):
    folder = save_language_model(tmp_path / "short", "gpt2", n_positions=16)
    asked = job("text", model=str(folder), max_length=16)
    train(asked)
    with pytest.raises(ValueError, match="The prompt has 20 tokens, and with an answer the model reads at most 16"):
        list(predict(asked.output, ["w1 " * 20]))
    assert len(list(predict(asked.output, ["w1 " * 10]))) == 1
    # none is answered, for the answers to those before it would be lost
    with pytest.raises(ValueError, match="Prompt 2 of 3: The prompt has 20 tokens, .*16. Shorten it, or leave it out"):
        next(predict(asked.output, ["w1", "w1 " * 20, "w2"]))


# the whole way, and what is said on it


def test_train_evaluate_predict_and_load_with_peft(base, data, tmp_path, run):
    out = tmp_path / "out"
    words = run(
        "train", "--model", base, "--data", data["messages"], "--output", out, "--layers", "1,3", "--epochs", "2",
        "--assistant-only-loss", "--lr", "1e-2", "--batch-size", "8",
    )  # fmt: skip
    assert "Learns what the assistant says" in words
    assert "Train on 36 rows of the train split" in words
    results = json.loads((out / "metrics.json").read_text())
    value, before = results["evaluation"]["perplexity"], results["base"]["perplexity"]
    assert f"perplexity {value:.4f} (base model: {before:.4f})" in words
    assert f"peft-surgical predict {out}" in words.replace("\n", "")
    measured = run("evaluate", out, "--predictions", tmp_path / "rows.csv")
    assert f"perplexity {value:.4f}" in measured
    assert len(Dataset.from_csv(str(tmp_path / "rows.csv"))) == 12
    said = run("predict", out, "--prompt", "w1 w2", "--max-new-tokens", "4", "--output", tmp_path / "said.jsonl")
    (row,) = Dataset.from_json(str(tmp_path / "said.jsonl"))
    assert row["prompt"] == "w1 w2"
    assert row["answer"] in said

    tokenizer = AutoTokenizer.from_pretrained(out)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out).eval()
    ids = torch.tensor([tokenizer("<user> w1 w2 <assistant>")["input_ids"]])
    for _ in range(4):  # the likeliest token each time
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    told = ids[0, 4:].tolist()
    told = told[: told.index(2)] if 2 in told else told
    assert row["answer"] == tokenizer.decode(told, skip_special_tokens=True)


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(job: TrainingJob) -> None:
    run = TrainingRun(job, callbacks=[Kill()])
    run.rank()
    run.fit()


def test_a_run_that_was_killed_goes_on_to_the_same_weights(job, tmp_path):
    options = {"method": "lora", "epochs": 3}
    whole = train(job(output=str(tmp_path / "whole"), **options))
    asked = job(output=str(tmp_path / "killed"), **options)
    assert run_forked(run_until_killed, asked).code == -signal.SIGKILL
    resumed = train(asked, resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    assert resumed["evaluation"] == whole["evaluation"]


@pytest.mark.parametrize(("method", "form"), [("last", "messages"), ("full", "text")])
def test_the_code_on_the_card_runs(job, tmp_path, monkeypatch, method, form, capsys):
    train(job(form, method=method, max_steps=1))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "pipeline_tag: text-generation" in card
    assert "## Answers" in card
    monkeypatch.chdir(tmp_path / "out")
    scope: dict = {}
    code = re.search(r"```python\n(.*?)```", card, re.S).group(1)
    exec(code.replace("A question", "w1 w2").replace("Once upon a time", "w1 w2"), scope)
    (row,) = predict(tmp_path / "out", ["w1 w2"], max_new_tokens=64)
    assert capsys.readouterr().out.strip() == row["answer"].strip()


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_processes_train_as_one_and_count_no_row_twice(base, tmp_path, engine):
    rows = save_language_data(tmp_path / "odd", train=44, validation=11)  # 40 to train on, in whole batches
    skip_if_missing(engine)

    def options(output: str, batch_size: int) -> dict:
        return {
            "model": str(base), "data": str(rows), "output": str(tmp_path / output), "method": "last",
            "batch_size": batch_size, "epochs": 2, "learning_rate": 1e-2, "assistant_only_loss": True,
        }  # fmt: skip

    one = train(TrainingJob(**options("one", 8)))
    given = {name.replace("_", "-"): value for name, value in options("two", 4).items() if value is not True}
    arguments = [f"--{name}={value}" for name, value in given.items()]
    launch_well(engine, ["-m", "peft_surgical.cli", "train", *arguments, "--assistant-only-loss"])
    two = json.loads((tmp_path / "two" / "metrics.json").read_text())
    for row, other in zip(one["history"], two["history"], strict=True):
        assert other["train_loss"] == pytest.approx(row["train_loss"], rel=1e-4)
    for part in ("base", "evaluation"):
        assert two[part]["loss"] == pytest.approx(one[part]["loss"], rel=1e-4)
    assert ("answers" in two) == (engine == "ddp")  # not of weights in parts
    assert evaluate(tmp_path / "two").metrics["loss"] == pytest.approx(two["evaluation"]["loss"], rel=1e-5)


# prompts


def test_prompts_are_put_as_the_rows_were(job, data, tmp_path):
    """A chat's last answer is asked for anew; an instruction takes its input along; a text goes on."""
    for form in FORMS:
        out = str(tmp_path / form)
        train(job(form, output=out, max_steps=1))
        rows = Dataset.from_parquet(str(data[form] / "validation.parquet"))
        tokenizer = AutoTokenizer.from_pretrained(out)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(job().model), out).eval()
        said = list(predict(out, data=str(data[form] / "validation.parquet"), max_new_tokens=3))
        assert len(said) == 12
        for row, found in zip(rows, said, strict=True):
            ids, labels = encode_by_hand(tokenizer, row, answers_only=True)
            asked = ids[: labels.count(-100)] if form != "text" else ids[:-1]
            told = model.generate(torch.tensor([asked]), max_new_tokens=3, do_sample=False, eos_token_id=2)[0]
            assert found["answer"] == tokenizer.decode(told[len(asked) :], skip_special_tokens=True)


def test_instructions_are_plain_text_for_a_tokenizer_without_a_chat_template(job, tmp_path):
    plain = save_language_model(tmp_path / "plain", template=None)
    asked = job("instruction", model=str(plain), max_steps=1)
    train(asked)
    tokenizer = AutoTokenizer.from_pretrained(asked.output)
    rows = make_language_rows(12, 2, "instruction")
    counted = evaluate(asked.output).outputs[:, 1].tolist()
    assert counted == [len(tokenizer(row["output"])["input_ids"]) + 1 for row in rows]
    assert len(list(predict(asked.output, ["w1 w2"], max_new_tokens=3))) == 1


def test_a_chat_template_can_be_given_and_goes_along(job, tmp_path, run):
    plain = save_language_model(tmp_path / "plain", template=None)
    with pytest.raises(ValueError, match="has no chat template, and the rows are chats. .*--chat-template FILE"):
        train(job(model=str(plain)))
    assert not (tmp_path / "out").exists()
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    asked = job(model=str(plain), chat_template=str(tmp_path / "chat.jinja"), max_steps=1, output=str(tmp_path / "a"))
    ours = train(asked)
    theirs = train(job(max_steps=1, output=str(tmp_path / "b")))
    assert ours["evaluation"] == theirs["evaluation"]
    assert AutoTokenizer.from_pretrained(asked.output).chat_template == TEMPLATE
    merge_checkpoint(plain, asked.output, tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == TEMPLATE
    given = ("--model", plain, "--data", asked.data, "--chat-template", tmp_path / "chat.jinja")
    assert "layers of layers" in run("rank", *given, "--assistant-only-loss", "--samples", 4)


def test_a_temperature_draws_by_the_seed(job):
    asked = job(max_steps=1)
    train(asked)

    def said(seed: int) -> list[str]:
        rows = predict(asked.output, ["w1", "w2"], temperature=5.0, seed=seed, max_new_tokens=10)
        return [row["answer"] for row in rows]

    assert said(0) == said(0)
    assert said(0) != said(1)


# what has no meaning, and what is lost


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        ("messages", {"method": "head"}, "--method head: a language model has no head of a task"),
        ("messages", {"label_column": "x", "task": "causal-lm"}, "--label-column has no meaning for causal-lm"),
        (
            "messages",
            {"method": "surgical", "score": "fisher", "head_seeds": 2},
            "--head-seeds has no meaning for causal-lm",
        ),
        ("messages", {"metric": "accuracy"}, "--metric accuracy: for causal-lm allowed are perplexity, loss"),
        ("text", {"assistant_only_loss": True}, "--assistant-only-loss needs chats"),
        ("messages", {"chat_template": "nowhere.jinja"}, "--chat-template nowhere.jinja: there is no such file"),
    ],
)
def test_what_makes_no_sense_is_told_before_the_model_is_loaded(job, tmp_path, monkeypatch, form, options, message):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("loaded a model"))
    with pytest.raises(ValueError, match=message):
        TrainingRun(job(form, **options))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["packing", "assistant_only_loss", "load_in_4bit", "dequantize"])
def test_options_of_language_models_are_refused_for_labelled_text(tmp_path, option):
    folder, rows = save_base(tmp_path / "base"), save_data(tmp_path / "data")
    job = TrainingJob(model=str(folder), data=str(rows), output=str(tmp_path / "out"), method="last", **{option: True})
    with pytest.raises(ValueError, match="has no meaning for classification, .*; it goes with causal-lm"):
        TrainingRun(job)


def test_all_weights_of_a_base_in_four_bits_are_refused():
    with pytest.raises(ValueError, match="--method full .* --load-in-4bit freezes"):
        TrainingJob(model="m", data="d", output="o", method="full", load_in_4bit=True)


def test_trl_is_asked_for_when_it_is_not_there(job, monkeypatch):
    monkeypatch.setattr(prepare_module, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match='pip install "trl>='):
        TrainingRun(job())


def test_rows_that_are_cut_or_hold_nothing_to_learn_are_told(job, caplog):
    asked = job(assistant_only_loss=True, max_length=6, select_on="none", max_steps=1)
    run = TrainingRun(asked)
    run.fit()
    lengths = [encode_by_hand(run.prepared.tokenizer, row, answers_only=True)[1] for row in run.prepared.parts.train]
    lost = sum(all(label == -100 for label in labels[:6]) for labels in lengths)
    assert lost > 0
    assert f"{lost} of 40 rows have nothing to learn within 6 tokens: left out." in caplog.text
    assert len(run.trainer.train_dataset) == 40 - lost
    assert "rows fill --max-length 6; what is longer is cut." in caplog.text


# 4 bits


def test_a_base_in_four_bits_trains_copies_of_its_layers_in_full_precision(job, tmp_path):
    pytest.importorskip("bitsandbytes")
    big = save_language_model(tmp_path / "big", hidden_size=64, intermediate_size=128, num_attention_heads=2)
    options = {"model": str(big), "load_in_4bit": True, "method": "last", "top_k": 1, "max_steps": 2}
    with pytest.raises(ValueError, match="dequantize=True"):
        train(job(**options))
    asked = job(**options, dequantize=True, output=str(tmp_path / "four"))
    results = train(asked)
    assert {tensor.dtype for tensor in weights(asked.output).values()} == {torch.float32}
    assert results["evaluation"]["loss"] < results["base"]["loss"]
    assert evaluate(asked.output).metrics["loss"] == pytest.approx(results["evaluation"]["loss"], rel=1e-5)
    rounded = job(
        **options, dequantize=True, stochastic_rounding=True, dtype="bfloat16", output=str(tmp_path / "half")
    )
    assert train(rounded)["evaluation"]["loss"] < results["base"]["loss"]
    assert {tensor.dtype for tensor in weights(rounded.output).values()} == {torch.bfloat16}
    lora = train(job(**{**options, "method": "lora", "top_k": None}, output=str(tmp_path / "lora")))
    assert lora["evaluation"]["loss"] != lora["base"]["loss"]
