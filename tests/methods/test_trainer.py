"""transformers' Trainer works with both methods: resuming, the best model, evaluation, mixed precision."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from adapters import METHODS, TASKS, make_config, outputs
from peft import PeftModel, get_peft_model
from tiny_models import VOCABULARY, batch, build
from transformers import Trainer, TrainerCallback, TrainingArguments

from peft_surgical import SurgicalConfig
from peft_surgical.methods.trainer import BestAdapterCallback, choose_layers


methods = pytest.mark.parametrize("method", METHODS)


def samples(family: str, n: int = 16) -> list[dict[str, torch.Tensor]]:
    rows = [batch(family, n=1, length=6, seed=i) for i in range(n)]
    return [{key: value[0] for key, value in row.items()} for row in rows]


def make(method: str, family: str, name: str = "default", layers=(1, 2), **options) -> PeftModel:
    torch.manual_seed(0)
    model = get_peft_model(build(family, **options), make_config(method, family, layers), adapter_name=name)
    return model


def trainer_of(model: PeftModel, folder, family: str = "bert", callbacks=None, **options) -> Trainer:
    arguments = {
        "output_dir": str(folder),
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
        **options,
    }
    data = samples(family)
    return Trainer(
        model, TrainingArguments(**arguments), train_dataset=data, eval_dataset=data[:4], callbacks=callbacks or []
    )


def trained_tensors(model: PeftModel, name: str) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items() if f".{name}." in key}


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("name", ["default", "task_a"])
@methods
def test_two_steps_and_two_more_are_four(method, name, tmp_path):
    whole = make(method, "bert", name)
    names = [n for n, p in whole.named_parameters() if p.requires_grad]
    trainer_of(whole, tmp_path / "whole").train()
    half = make(method, "bert", name)
    trainer_of(half, tmp_path / "half", callbacks=[StopAt(2)]).train()
    again = make(method, "bert", name)
    trainer = trainer_of(again, tmp_path / "half")
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    assert [n for n, p in again.named_parameters() if p.requires_grad] == names  # in the optimizer's order
    for key, value in trained_tensors(whole, name).items():
        assert torch.equal(trained_tensors(again, name)[key], value), key
    assert not all(torch.equal(trained_tensors(half, name)[k], v) for k, v in trained_tensors(whole, name).items())


@pytest.mark.parametrize("name", ["default", "task_a"])
@methods
def test_the_best_model_is_loaded_at_the_end(method, name, tmp_path):
    model = make(method, "bert", name)
    losses = iter([0.5, 0.1, 0.7, 0.9])  # the second checkpoint is the best

    class Fake(Trainer):
        def evaluate(self, *args, **kwargs):
            metrics = {**super().evaluate(*args, **kwargs), "eval_score": next(losses)}
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    base = trainer_of(
        model,
        tmp_path,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=False,
        callbacks=[BestAdapterCallback()],
    )
    base.__class__ = Fake
    base.train()
    assert base.state.best_model_checkpoint.endswith("checkpoint-2")
    folder = tmp_path / "checkpoint-2" / ("" if name == "default" else name)
    best = PeftModel.from_pretrained(build("bert"), folder)
    assert torch.equal(outputs(model.eval(), "bert"), outputs(best.eval(), "bert"))
    last = PeftModel.from_pretrained(build("bert"), tmp_path / "checkpoint-4" / ("" if name == "default" else name))
    assert not torch.equal(outputs(model.eval(), "bert"), outputs(last.eval(), "bert"))


HEADS = [
    ("bert", "BertForSequenceClassification", "SEQ_CLS"),
    ("bert", "BertForTokenClassification", "TOKEN_CLS"),
    ("bert", "BertForQuestionAnswering", "QUESTION_ANS"),
    ("gpt2", "GPT2LMHeadModel", "CAUSAL_LM"),
    ("gpt2", "GPT2ForSequenceClassification", "SEQ_CLS"),
    ("t5", "T5ForConditionalGeneration", "SEQ_2_SEQ_LM"),
]


@pytest.mark.parametrize(("family", "head", "task"), HEADS)
@methods
def test_evaluation_has_a_loss_for_every_task(method, family, head, task, tmp_path):
    model = get_peft_model(build(family, head=head), make_config(method, family, [1, 2], task_type=task))
    generator = torch.Generator().manual_seed(0)
    data = []
    for _ in range(4):
        ids = torch.randint(3, VOCABULARY, (6,), generator=generator)
        sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if task == "QUESTION_ANS":
            sample |= {"start_positions": torch.tensor(1), "end_positions": torch.tensor(3)}
        elif task == "SEQ_CLS":
            sample["labels"] = torch.tensor(1)
        else:
            sample["labels"] = ids % 2 if task == "TOKEN_CLS" else ids
        data.append(sample)
    trainer = trainer_of(model, tmp_path, max_steps=1, save_strategy="no")
    trainer.train_dataset, trainer.eval_dataset = data, data
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@methods
def test_mixed_precision_moves_the_masters_in_float32(method, dtype):
    """One step as Trainer does it with fp16=True or bf16=True, which want an accelerator."""
    base = build("llama").to(getattr(torch, dtype))
    model = get_peft_model(base, make_config(method, "llama", [1, 2])).train()
    before = trained_tensors(model, "default")
    assert {value.dtype for value in before.values()} == {torch.float32}
    parameters = [p for p in model.parameters() if p.requires_grad]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype == "float16")
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    with torch.autocast("cpu", dtype=getattr(torch, dtype)):
        loss = model(**batch("llama")).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    after = trained_tensors(model, "default")
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(after[key], value) for key, value in before.items())


@methods
def test_bf16_of_the_trainer(method, tmp_path):
    model = make(method, "bert")
    before = trained_tensors(model, "default")
    trainer_of(model, tmp_path, bf16=True, save_strategy="no", max_steps=2).train()
    moved = [key for key, value in trained_tensors(model, "default").items() if not torch.equal(value, before[key])]
    assert len(moved) == len(before)


@pytest.mark.parametrize("reentrant", [True, False])
@methods
def test_gradient_checkpointing_of_the_trainer_changes_nothing(method, reentrant, tmp_path):
    models = [make(method, "llama"), make(method, "llama")]
    for i, model in enumerate(models):
        options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        trainer_of(
            model, tmp_path / str(i), "llama", save_strategy="no", max_steps=2, **(options if i else {})
        ).train()
    plain, checkpointed = (trained_tensors(model, "default") for model in models)
    for key, value in plain.items():
        torch.testing.assert_close(checkpointed[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", list(TASKS))
def test_the_trainer_trains_only_the_chosen_layers(family, tmp_path):
    model = make("SURGICAL", family)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_of(model, tmp_path, family, save_strategy="no", max_steps=2).train()
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
    assert isinstance(model.peft_config["default"], SurgicalConfig)


class Measured:
    """Stands for a trainer: training takes nothing, and each choice of layers has the metrics that it has."""

    def __init__(self, metrics: dict[str, float], **arguments: object):
        named = {"metric_for_best_model": None, "greater_is_better": None, **arguments}
        self.args, self.metrics, self.is_trained = SimpleNamespace(**named), metrics, False

    def train(self) -> None:
        self.is_trained = True

    def evaluate(self) -> dict[str, float]:
        assert self.is_trained
        return self.metrics


@pytest.mark.parametrize(
    ("metric", "arguments", "best"),
    [
        (None, {}, "b"),  # the smallest loss
        ("accuracy", {}, "a"),
        ("eval_error", {}, "b"),  # the larger the better: nobody says otherwise
        (None, {"metric_for_best_model": "error", "greater_is_better": False}, "a"),
        (None, {"metric_for_best_model": "accuracy", "greater_is_better": True}, "a"),
        ("error", {"metric_for_best_model": "eval_error", "greater_is_better": False}, "a"),
        ("accuracy", {"metric_for_best_model": "error", "greater_is_better": False}, "a"),  # of another metric
    ],
)
def test_the_best_choice_of_layers_is_kept(metric, arguments, best):
    measured = {
        "a": {"eval_loss": 0.5, "eval_accuracy": 0.9, "eval_error": 0.1},
        "b": {"eval_loss": 0.4, "eval_accuracy": 0.8, "eval_error": 0.2},
        "c": {"eval_loss": 0.4, "eval_accuracy": 0.8, "eval_error": 0.2},  # of equal ones the first
        "d": dict.fromkeys(("eval_loss", "eval_accuracy", "eval_error"), math.nan),
    }
    made = {}

    def make_trainer(layers: str) -> Measured:
        made[layers] = Measured(measured[layers], **arguments)
        return made[layers]

    tried = choose_layers(make_trainer, [*measured, "a"], metric=metric)
    assert tried.layers == best
    assert tried.trainer is made[best]
    assert {name: value for name, value in tried.values.items() if name != "d"} == {
        name: measured[name][tried.metric] for name in "abc"
    }
    assert [line.endswith("kept") for line in str(tried).splitlines()[1:]] == [name == best for name in "abcd"]


def test_no_choice_of_layers_is_kept_that_gave_no_number():
    with pytest.raises(ValueError, match="finite.*nan"):
        choose_layers(lambda layers: Measured({"eval_loss": math.nan}), ["a"])
    with pytest.raises(ValueError, match="no choices"):
        choose_layers(lambda layers: Measured({"eval_loss": 1.0}), [])
    with pytest.raises(KeyError, match="eval_f1.*eval_loss"):
        choose_layers(lambda layers: Measured({"eval_loss": 1.0}), ["a"], metric="f1")


def test_choices_of_layers_are_trained_as_each_alone(tmp_path):
    def make_trainer(layers: str) -> Trainer:
        torch.manual_seed(0)
        config = SurgicalConfig(task_type="SEQ_CLS", layers=layers)
        return trainer_of(get_peft_model(build("bert"), config), tmp_path / layers, save_strategy="no")

    choices = ["alternate:2", "middle:2", "last:2"]
    tried = choose_layers(make_trainer, choices)
    losses = {}
    for layers in choices:
        alone = make_trainer(layers)
        alone.train()
        losses[layers] = alone.evaluate()["eval_loss"]
        if layers == tried.layers:
            expected = trained_tensors(alone.model, "default")
    assert tried.values == losses
    assert losses[tried.layers] == min(losses.values())
    assert len(set(losses.values())) == 3
    found = trained_tensors(tried.trainer.model, "default")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
