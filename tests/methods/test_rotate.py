"""`RotateLayers` equals a plain loop that freezes all but a few layers and makes a new AdamW for each turn."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from adapters import METHODS, make_config
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file
from tiny_chat import save_language_model
from tiny_models import batch, build
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from peft_surgical import RotateLayers, SurgicalConfig, resolve_layers
from peft_surgical.copies import host
from peft_surgical.copies.module import TunedModule


STEPS, EVERY, DEPTH = 7, 2, 4
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def loss_of(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits.float(), labels)


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)


def trainer_of(model, folder, callbacks, **options) -> Trainer:
    rows = [batch("bert", n=1, length=6, seed=i) for i in range(64)]
    arguments = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "save_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "optim": "adamw_torch",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **options,
    }
    data = [{name: value[0] for name, value in row.items()} for row in rows]
    args = TrainingArguments(**arguments)
    return InOrder(
        model, args, train_dataset=data, eval_dataset=data[:6], callbacks=callbacks, compute_loss_func=loss_of
    )


def make(method: str = "SURGICAL", **options) -> PeftModel:
    torch.manual_seed(0)
    return get_peft_model(build("bert", **WITHOUT_DROPOUT), make_config(method, "bert", range(DEPTH), **options))


def train_plainly(model, callback: RotateLayers, *, accumulation: int = 1, bf16: bool = False, fused: bool = False):
    """The oracle: layers are frozen by hand, and each turn has an AdamW of its own."""

    def optimizer_of(modules):
        named = [(name, p) for module in modules for name, p in module.named_parameters()]
        exempt = [p for name, p in named if "bias" in name or "LayerNorm" in name]
        decayed = [p for _, p in named if all(p is not other for other in exempt)]
        groups = [{"params": decayed}, {"params": exempt, "weight_decay": 0}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=fused)

    layers = [layer.module for layer in resolve_layers(model, "all")]
    of_head = optimizer_of([model.classifier])
    model.train()
    row = 0
    for step in range(STEPS):
        if step % EVERY == 0:
            turn = [layers[i] for i in callback.layers_of(step // EVERY, DEPTH)]
            model.requires_grad_(False)
            for module in [*turn, model.classifier]:
                module.requires_grad_(True)
            of_turn = optimizer_of(turn)
        for _ in range(accumulation):
            rows = [batch("bert", n=1, length=6, seed=i) for i in (row, row + 1)]
            row += 2
            inputs = {name: torch.cat([r[name] for r in rows]) for name in rows[0]}
            with torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else nullcontext():
                loss_of(model(**inputs), inputs["labels"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in (of_head, of_turn):
            optimizer.step()
        model.zero_grad()
    return model


CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
CASES = {
    "random": ({}, {}, {}),
    "shuffled, accumulating": ({"order": "shuffled"}, {"accumulation": 2}, {"gradient_accumulation_steps": 2}),
    "ascending, fused": ({"order": "ascending", "layers": 1}, {"fused": True}, {"optim": "adamw_torch_fused"}),
    "descending in bf16": ({"order": "descending"}, {"bf16": True}, {"bf16": True}),
    "re-entrant checkpointing": ({"seed": 3}, {}, CHECKPOINTING),
    "checkpointing": (
        {},
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("error::UserWarning:peft_surgical")
def test_turns_are_those_of_plain_pytorch(case, tmp_path):
    options, plainly, of_trainer = CASES[case]
    callback = RotateLayers(every=EVERY, **options)
    base = build("bert", **WITHOUT_DROPOUT)
    model = get_peft_model(copy.deepcopy(base), make_config("SURGICAL", "bert", range(DEPTH)))
    trainer = trainer_of(model, tmp_path, [callback], **of_trainer)
    trainer.train()
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # without autocast
    assert all(p.requires_grad for name, p in model.named_parameters() if ".default." in name)
    with model.disable_adapter():
        inputs = batch("bert", labels=False)
        assert torch.equal(model.eval()(**inputs).logits, base.eval()(**inputs).logits)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").merge_and_unload().state_dict()
    expected = train_plainly(copy.deepcopy(base), callback, **plainly).state_dict()
    moved = {name for name, value in base.state_dict().items() if not torch.equal(value, expected[name])}
    assert {name.split(".layer.")[1][0] for name in moved if ".layer." in name} >= {"0", "3"}
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name


class Watch(TrainerCallback):
    """Notes at each step what moved, and what has a state in the optimizer."""

    def __init__(self, callback: RotateLayers):
        self.callback = callback

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        assert {n for n, p in model.named_parameters() if p.grad is not None} == self.expected(
            model, state.global_step
        )

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        expected = self.expected(model, state.global_step - 1)
        assert {n for n, p in model.named_parameters() if not torch.equal(p, self.before[n])} == expected
        assert {n for n, p in model.named_parameters() if optimizer.state.get(p)} == expected
        steps = {
            float(optimizer.state[p]["step"]) for n, p in model.named_parameters() if n in expected and ".layer." in n
        }
        assert steps == {(state.global_step - 1) % EVERY + 1}

    def expected(self, model, step: int) -> set[str]:
        turn = self.callback.layers_of(step // EVERY, DEPTH)
        own = {n for n, _ in model.named_parameters() if ".default." in n}
        return {n for n in own if ".layer." not in n or int(n.split(".layer.")[1].split(".")[0]) in turn}


@pytest.mark.parametrize("method", METHODS)
def test_only_the_layers_of_the_turn_have_gradients_and_a_state_and_move(method, tmp_path):
    callback = RotateLayers(2, EVERY)
    model = make(method)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)  # or lora_A would not move at first
    trainer_of(model, tmp_path, [callback, Watch(callback)]).train()


@pytest.mark.parametrize("step", [3, 6])
def test_a_training_goes_on_from_the_middle_of_a_turn(step, tmp_path):
    whole = make()
    trainer_of(whole, tmp_path, [RotateLayers(2, EVERY)]).train()
    again = make()
    trainer = trainer_of(again, tmp_path, [RotateLayers(2, EVERY)])
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    with pytest.raises(ValueError, match="Resume with the options"):
        trainer_of(make(), tmp_path, [RotateLayers(1, 5)]).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


class Interrupt(TrainerCallback):
    def __init__(self, step: int = 1):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_after_an_interruption_all_layers_are_trained_again(tmp_path):
    model = make()
    with pytest.raises(KeyboardInterrupt):
        trainer_of(model, tmp_path, [RotateLayers(2, EVERY), Interrupt()]).train()
    trainer_of(model, tmp_path, [RotateLayers(2, EVERY)]).train()
    assert all(p.requires_grad for name, p in model.named_parameters() if ".default." in name)


class Switch(TrainerCallback):
    """As trainers that ask a reference adapter do."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.set_adapter("reference")
        model.set_adapter("default")
        with model.disable_adapter():
            pass


def test_a_switch_inside_a_turn_wakes_no_layer(tmp_path):
    callback = RotateLayers(2, EVERY)
    model = make()
    model.add_adapter("reference", make_config("SURGICAL", "bert", [1]))
    trainer_of(model, tmp_path, [callback, Switch(), Watch(callback)]).train()


@pytest.fixture
def accelerator(monkeypatch):
    """Makes the CPU pass for an accelerator with memory of its own."""
    monkeypatch.setattr(host, "_HOSTS", ())


@pytest.mark.parametrize("at_rest", ["host", "device", "rounded"])
@pytest.mark.usefixtures("accelerator")
def test_an_evaluation_between_steps_sees_what_was_trained(at_rest, tmp_path):
    """A fused AdamW leaves no trace in a tensor's version, and casts of what rests are kept for inference."""

    class Evaluate(TrainerCallback):
        @torch.no_grad()
        def on_step_end(self, args, state, control, model=None, **kwargs):
            found = model.eval()(**inputs).logits
            merged = copy.deepcopy(model).merge_and_unload().eval()
            assert torch.equal(found, merged(**inputs).logits), state.global_step
            model.train()

    inputs = batch("bert", labels=False)
    base = build("bert", **WITHOUT_DROPOUT).bfloat16()
    model = get_peft_model(base, make_config("SURGICAL", "bert", range(DEPTH)))
    callbacks = [RotateLayers(2, 1, "ascending", at_rest=at_rest), Evaluate()]
    trainer_of(model, tmp_path, callbacks, optim="adamw_torch_fused", save_strategy="no").train()


def on_bf16(method: str = "SURGICAL") -> PeftModel:
    torch.manual_seed(0)
    base = build("bert", **WITHOUT_DROPOUT).bfloat16()
    return get_peft_model(base, make_config(method, "bert", range(DEPTH)))


class Dtypes(TrainerCallback):
    """Checks the dtypes of what rests, and of the others."""

    def __init__(self, callback: RotateLayers):
        self.callback = callback

    def on_step_end(self, args, state, control, model=None, **kwargs):
        turn = self.callback.layers_of((state.global_step - 1) // EVERY, DEPTH)
        for i, layer in enumerate(resolve_layers(model, "all")):
            own = [(name, p) for name, p in layer.module.named_parameters() if ".default." in name]
            dtypes = {p.dtype for name, p in own if ".lora_" not in name}
            assert own
            assert dtypes <= {torch.float32 if i in turn else torch.bfloat16}


def is_equal(found, expected) -> bool:
    assert found.keys() == expected.keys()
    return all(value.dtype == found[n].dtype and torch.equal(found[n], value) for n, value in expected.items())


def test_layers_may_be_rounded_when_they_rest(tmp_path):
    callback = RotateLayers(2, EVERY, at_rest="rounded")
    whole = on_bf16()
    trainer_of(whole, tmp_path, [callback, Dtypes(callback)]).train()
    whole.save_pretrained(tmp_path / "adapter")
    assert {t.dtype for t in load_file(tmp_path / "adapter/adapter_model.safetensors").values()} == {torch.bfloat16}
    for step in (3, 6):
        again = on_bf16()
        trainer = trainer_of(again, tmp_path, [RotateLayers(2, EVERY, at_rest="rounded")])
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert is_equal(again.state_dict(), whole.state_dict())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("accelerator")
def test_rest_in_host_memory_changes_nothing(method, tmp_path):
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3}
    plain = on_bf16(method)
    trainer = trainer_of(plain, tmp_path / "plain", [RotateLayers(2, EVERY, at_rest="device")], **options)
    trainer.train()
    found, callback = on_bf16(method), RotateLayers(2, EVERY)
    trainer_of(found, tmp_path / "found", [callback, Dtypes(callback)], **options).train()
    assert is_equal(found.state_dict(), plain.state_dict())
    for step in (3, 6):
        files = [tmp_path / run / f"checkpoint-{step}/adapter_model.safetensors" for run in ("found", "plain")]
        assert is_equal(*map(load_file, files))
        again = on_bf16(method)
        trainer = trainer_of(again, tmp_path / "again", [RotateLayers(2, EVERY)], **options)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"found/checkpoint-{step}"))
        assert is_equal(again.state_dict(), plain.state_dict())


def combined(model):
    model.add_weighted_adapter(["default", "other"], [0.5, 0.7], "sum")


def merged_with_another(model):
    model.base_model.merge_adapter(["default", "other"])


def sum_of_both(model):
    for module in model.modules():
        if isinstance(module, TunedModule):
            module.set_adapter(["default", "other"])
    return {"logits": model(**batch("bert", labels=False)).logits}


def loaded(model):
    model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})


USES = {
    "a copy": lambda model: copy.deepcopy(model).state_dict(),
    "combined": combined,
    "loaded": loaded,
    "merged with another": merged_with_another,
    "moved": lambda model: model.to("cpu").state_dict(),
    "state dict": lambda model: model.state_dict(),
    "sum of both": sum_of_both,
    "swapped": lambda model: hotswap_adapter(model, model.folder, "default"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.usefixtures("accelerator")
def test_what_else_is_done_inside_a_turn_finds_all_digits(use, tmp_path):
    class Use(TrainerCallback):
        @torch.no_grad()
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 4:
                copied = copy.deepcopy(model)
                copied.folder = str(tmp_path / "other")
                outcomes.append(USES[use](copied) or copied.state_dict())

    outcomes: list[dict] = []
    for at_rest in ("host", "device"):
        model = on_bf16()
        torch.manual_seed(1)
        model.add_adapter("other", make_config("SURGICAL", "bert", [1, 2], init_weights=False))
        model.save_pretrained(tmp_path, selected_adapters=["other"])
        trainer_of(model, tmp_path, [RotateLayers(2, EVERY, at_rest=at_rest), Use()], save_strategy="no").train()
    assert is_equal(*outcomes)


@pytest.mark.usefixtures("accelerator")
def test_an_interruption_leaves_all_digits(tmp_path):
    models = []
    for at_rest in ("host", "device"):
        model = on_bf16()
        callbacks = [RotateLayers(2, EVERY, at_rest=at_rest), Interrupt(4)]
        with pytest.raises(KeyboardInterrupt):
            trainer_of(model, tmp_path, callbacks).train()
        models.append(model)
        model.save_pretrained(tmp_path / at_rest)
    assert is_equal(*(load_file(tmp_path / a / "adapter_model.safetensors") for a in ("host", "device")))
    for model in models:
        trainer_of(model, tmp_path, [RotateLayers(2, EVERY)]).train()
    assert is_equal(*(model.state_dict() for model in models))


def test_trl_trains_in_turns(tmp_path):
    trl = pytest.importorskip("trl")
    folder = save_language_model(tmp_path / "model")
    trainer = trl.SFTTrainer(
        str(folder),
        args=trl.SFTConfig(
            str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=2,
            use_cpu=True,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"text": ["w1 w2 w3 w4", "w5 w6 w7"] * 8}),
        peft_config=SurgicalConfig(task_type="CAUSAL_LM", layers="all"),
        callbacks=[RotateLayers(1, every=2, order="ascending")],
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if ".default." in name and (".layers.0." in name or ".layers.1." in name)}


@pytest.mark.parametrize("order", ["random", "shuffled", "ascending", "descending"])
def test_every_layer_gets_its_turn(order):
    callback = RotateLayers(3, 1, order, seed=5)
    turns = [callback.layers_of(i, 8) for i in range(60)]
    assert {layer for turn in turns for layer in turn} == set(range(8))
    assert turns == [RotateLayers(3, 1, order, seed=5).layers_of(i, 8) for i in range(60)]
    if order == "random":
        assert all(len(turn) == 3 for turn in turns)
        assert turns != [RotateLayers(3, 1, order, seed=6).layers_of(i, 8) for i in range(60)]
    else:  # each pass has every layer once
        assert all(sorted(sum(turns[i : i + 3], [])) == list(range(8)) for i in range(0, 60, 3))
    if order == "shuffled":
        assert turns[:3] != turns[3:6] or turns[3:6] != turns[6:9]
    if order == "descending":
        assert turns[:3] == [[6, 7], [3, 4, 5], [0, 1, 2]]


def test_what_cannot_be_is_refused(tmp_path):
    for options in ({"layers": 0}, {"every": 1.5}, {"order": "up"}, {"at_rest": "cpu"}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}="):
            RotateLayers(**options)
    with pytest.raises(ValueError, match="has none of this package"):
        trainer_of(build("bert"), tmp_path, [RotateLayers()])
    with pytest.raises(ValueError, match="has none of this package"):
        trainer_of(get_peft_model(build("bert"), LoraConfig(target_modules=["query"])), tmp_path, [RotateLayers()])
    few = get_peft_model(build("bert"), SurgicalConfig(task_type="SEQ_CLS", layers=[1]))
    with pytest.raises(ValueError, match="the adapter trains 1 layers"):
        trainer_of(few, tmp_path, [RotateLayers(2)]).train()
    model = make()
    trainer = trainer_of(model, tmp_path, [RotateLayers()])
    trainer.optimizer = torch.optim.AdamW(model.classifier.parameters())
    with pytest.raises(ValueError, match="an optimizer that was made while all layers"):
        trainer.train()
