"""Trainers that take a config or an adapted model, with what they write on it and read from it: TRL's, transformers'
and those of sentence-transformers. Both methods in each, and LoRA as control. `table()` is the one in docs/peft.md.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from adapters import METHODS, make_config, shake
from datasets import Dataset
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_chat import TEMPLATE, make_language_rows, pairs, save_language_model
from tiny_models import build
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from peft_surgical import BestAdapterCallback, StratifiedConfig, SurgicalConfig


NAMES = [*METHODS, "LORA"]
ROOT = Path(__file__).parents[2]
LN_2 = torch.tensor(2.0).log().item()


# ---- bases and data


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Path:
    """A folder of tiny models with tokenizers, and of a tokenizer whose chat template brings two more tokens."""
    folder = tmp_path_factory.mktemp("bases")
    tokenizer = AutoTokenizer.from_pretrained(save_language_model(folder / "plain"))
    save_language_model(folder / "tied", tie_word_embeddings=True)
    save_language_model(folder / "wide", hidden_size=64, intermediate_size=128)
    for name, options in (("t5", {}), ("bert", {"bare": True})):
        build(name, **options).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    tokenizer.add_tokens(["<|user|>", "<|end|>"], special_tokens=True)
    tokenizer.eos_token = "<|end|>"
    tokenizer.chat_template = TEMPLATE.replace("<user>", "<|user|>")
    tokenizer.save_pretrained(folder / "source")
    return folder


def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": [q for q, _ in pairs(4, 1)], "privileged_context": ["w1"] * 4})


def preferences() -> Dataset:
    both = pairs(8, 1)
    told = {"chosen": [f" {a}" for _, a in both], "rejected": [" w50 w51"] * 8, "reference": [" w52"] * 8}
    return Dataset.from_dict({"prompt": [q for q, _ in both], **told})


def compared() -> Dataset:
    both = pairs(8, 1)
    return Dataset.from_dict({"chosen": [f"{q} {a}" for q, a in both], "rejected": [f"{q} w50" for q, _ in both]})


def judged() -> Dataset:
    both = pairs(8, 1)
    return Dataset.from_dict(
        {"prompt": [q for q, _ in both], "completion": [f" {a}" for _, a in both], "label": [True, False] * 4}
    )


def chats() -> Dataset:
    return make_language_rows(8, 1)


def numbers() -> Dataset:
    rows = [[*range(i + 3, i + 9)] for i in range(8)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def alike() -> Dataset:
    return Dataset.from_dict({"anchor": [q for q, _ in pairs(8, 1)], "positive": [a for _, a in pairs(8, 1)]})


def distinct_words(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(set(str(completion)))) for completion in completions]


# ---- trainers


def load(folder: Path, dtype: torch.dtype = torch.float32, cls: Any = AutoModelForCausalLM, **options: Any) -> Any:
    return cls.from_pretrained(folder, dtype=dtype, **options)


def half(folder: Path, **options: Any) -> Any:
    return load(folder, torch.bfloat16, **options)


def load_reward(folder: Path, **options: Any) -> Any:
    return load(folder, cls=AutoModelForSequenceClassification, num_labels=1, **options)


def load_seq2seq(folder: Path, **options: Any) -> Any:
    return load(folder.with_name("t5"), cls=transformers.AutoModelForSeq2SeqLM, **options)


def load_bare(folder: Path, **options: Any) -> Any:
    return load(folder.with_name("bert"), cls=transformers.AutoModel, **options)


def load_4bit(folder: Path, **options: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    quantised = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = load(folder, quantization_config=quantised, **options)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # bitsandbytes 0.50 loses the order of scales when it saves
    return model


def teacher(folder: Path) -> dict[str, Any]:
    return {"teacher_model": shake_all(load(folder))}


def shake_all(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@dataclass(frozen=True)
class Kind:
    """A trainer: where it is, what it trains on, and what it is given beside a model."""

    module: str
    rows: Callable[[], Dataset]
    args: Mapping[str, Any] = field(default_factory=dict)
    given: Callable[[Path], Mapping[str, Any]] = lambda folder: {}
    load: Callable[..., Any] = load
    task: str | None = "CAUSAL_LM"
    version: str | None = None  # at least

    def import_or_skip(self) -> Any:
        return pytest.importorskip(self.module, minversion=self.version)


SAYS = {"max_completion_length": 4, "num_generations": 2}
TOP = {"distillation_topk": 8}
REWARDED: Any = {"given": lambda folder: {"reward_funcs": distinct_words}}
KINDS = {
    "SFTTrainer": Kind("trl", chats),
    "DPOTrainer": Kind("trl", preferences),
    "KTOTrainer": Kind("trl", judged),
    "RewardTrainer": Kind("trl", compared, load=load_reward, task="SEQ_CLS"),
    "GRPOTrainer": Kind("trl", prompts, {**SAYS, "beta": 0.1}, **REWARDED),
    "RLOOTrainer": Kind("trl", prompts, {**SAYS, "beta": 0.1}, **REWARDED),
    "DistillationTrainer": Kind("trl", prompts, {"max_completion_length": 4}, teacher),
    "ORPOTrainer": Kind("trl.experimental.orpo", preferences, {"max_length": 32}),
    "CPOTrainer": Kind("trl.experimental.cpo", preferences, {"max_length": 32}),
    "TPOTrainer": Kind("trl.experimental.tpo", preferences),
    "OnlineDPOTrainer": Kind(
        "trl.experimental.online_dpo", prompts, {"max_new_tokens": 4, "max_length": 32}, **REWARDED
    ),
    "GKDTrainer": Kind("trl.experimental.gkd", chats, {"max_new_tokens": 4, "max_length": 32}, teacher),
    "SDFTTrainer": Kind("trl.experimental.sdft", prompts, {**SAYS, "teacher_model_kind": "base", **TOP}),
    "SDPOTrainer": Kind("trl.experimental.sdpo", prompts, {**SAYS, "teacher_model_kind": "base", **TOP}, **REWARDED),
    "Trainer": Kind("transformers", numbers),
    "Seq2SeqTrainer": Kind("transformers", numbers, load=load_seq2seq, task="SEQ_2_SEQ_LM"),
    "SentenceTransformerTrainer": Kind("sentence_transformers", alike, load=load_bare, task=None, version="6.2"),
}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    trainer: str
    option: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)  # of the trainer
    config: Mapping[str, Any] = field(default_factory=dict)  # of the method
    given: Mapping[str, Any] = field(default_factory=dict)  # to the trainer's constructor
    base: str = "plain"
    load: Callable[..., Any] | None = None
    trained: frozenset[str] = frozenset()  # beside what the method chooses in the layers
    written: Mapping[str, Any] = field(default_factory=dict)  # on the config
    start: str = "a config"  # or "an adapter", "both", "a file": what the trainer gets
    prepare: Callable[[Any], None] = lambda model: None  # once the trainer is there
    check: Callable[[Run], None] = lambda run: None
    refused: Mapping[str, str] = field(default_factory=dict)  # the error, by method
    quantised: bool = False

    @property
    def kind(self) -> Kind:
        return replace(KINDS[self.trainer], **({"load": self.load} if self.load else {}))


@contextmanager
def use_adapter(model: PeftModel, name: str | None) -> Iterator[None]:
    """With an adapter, or with none, as TRL's trainers get the reference."""
    if name is None:
        with model.disable_adapter():
            yield
    else:
        model.set_adapter(name)
        yield
        model.set_adapter("default")


def by_all(error: str) -> dict[str, str]:
    return dict.fromkeys(NAMES, error)


def config_of(method: str, case: Case) -> PeftConfig:
    """Layers 1 and 3: all weights; norms or biases in 1 and LoRA in 3; LoRA."""
    options = {"task_type": case.kind.task, **copy.deepcopy(dict(case.config))}
    family = {"Seq2SeqTrainer": "t5", "SentenceTransformerTrainer": "bert"}.get(case.trainer, "llama")
    if method == "SURGICAL" and case.quantised:
        options["dequantize"] = True
    if "target_modules" in options:
        cls = {"SURGICAL": SurgicalConfig, "STRATIFIED": StratifiedConfig, "LORA": LoraConfig}[method]
        return cls(**options)
    if method != "LORA":
        return make_config(method, family, [1, 3], **options)
    names = {"llama": "[qv]_proj", "t5": "[qv]", "bert": "(query|value)"}[family]
    stack = {"t5": "decoder.block"}.get(family, "(layers|layer)")
    return LoraConfig(r=2, target_modules=rf".*\b{stack}\.[13]\..*\.{names}", **options)


def meant(method: str, base: Any) -> set[str]:
    """The names of what `config_of` trains, told from the names in the base alone."""
    names = [name for name, _ in base.named_parameters() if not name.startswith(("encoder.block", "lm_head"))]
    stack = next(part for part in ("layers.", "block.", "layer.") if any(part in name for name in names))
    first, last = ([name for name in names if f"{stack}{layer}." in name] for layer in (1, 3))
    if method == "SURGICAL":
        return {*first, *last}
    lora = [name for name in last if name.split(".")[-2] in ("q_proj", "v_proj", "q", "v", "query", "value")]
    if method == "LORA":
        lora += [name.replace(f"{stack}3.", f"{stack}1.") for name in lora]
    lora = {name.replace("weight", f"lora_{x}.weight") for name in lora if name.endswith("weight") for x in "AB"}
    if method == "LORA":
        return lora
    biases = {
        name for name in [*first, *last] if name.endswith("bias") and (name in first or ".attention." not in name)
    }
    return {*lora, *(biases or [name for name in first if "norm" in name])}


def plain_name(name: str) -> str:
    """A trained tensor's name without what the methods and PEFT put into it."""
    parts = ("base_model.model.", ".surgical_params", ".lora_tuned", ".modules_to_save", ".default", "own_tensors.")
    for part in parts:
        name = name.replace(part, "")
    return name


def make_trainer(case: Case, model: Any, folder: Path, output: Path, config: Any = None, **args: Any) -> Any:
    kind = case.kind
    module, of_trl = kind.import_or_skip(), kind.module.startswith("trl")
    options: dict[str, Any] = {
        "output_dir": str(output), "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
        "bf16": False, **kind.args, **case.args, **args,
    }  # fmt: skip
    if "chat_template_path" in options:
        options["chat_template_path"] = str(folder.with_name("source"))
    given = {**kind.given(folder), "train_dataset": kind.rows()}
    if "ref_model" in case.given:
        given["ref_model"] = load(folder)
    if "eval_strategy" in args:
        given["eval_dataset"] = given["train_dataset"]
    if case.trainer == "SentenceTransformerTrainer":
        whole = module.SentenceTransformer(str(folder.with_name("bert")), device="cpu")
        whole[0].model, model = model, whole
        losses = importlib.import_module("sentence_transformers.losses")
        given["loss"] = losses.MultipleNegativesRankingLoss(whole)
    if of_trl:
        given |= {"processing_class": AutoTokenizer.from_pretrained(folder), "peft_config": config}
    name = case.trainer.removesuffix("Trainer") + ("Config" if of_trl else "TrainingArguments")
    trainer = getattr(module, case.trainer)(model=model, args=getattr(module, name)(**options), **given)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def peft_model_of(trainer: Any) -> PeftModel:
    return trainer.model if isinstance(trainer.model, PeftModel) else trainer.model[0].model


@torch.no_grad()
def outputs(model: Any) -> torch.Tensor:
    """What a model says to all tokens that it knows."""
    ids = torch.arange(model.config.vocab_size // 32 * 32).reshape(-1, 32)
    out = model.eval()(input_ids=ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


# ---- what is checked of single cases


@dataclass
class Run:
    """A cell of the table after training."""

    case: Case
    method: str
    trainer: Any
    model: PeftModel
    reference: Any  # the base, or the adapter at its start
    folder: Path

    def first(self, name: str) -> float:
        return float(self.trainer.state.log_history[0][name])


def log_probs_by_hand(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The sum of log p over the tokens of each completion, from the model's plain logits in float64."""
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()
    picked = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    return (picked * batch["completion_mask"][:, 1:]).sum(1).float()


def starts_at_ln_2(run: Run) -> None:
    assert run.first("loss") == LN_2
    batch = next(iter(run.trainer.get_train_dataloader()))
    batch = {name: batch[name] for name in ("input_ids", "attention_mask", "completion_mask")}
    expected = log_probs_by_hand(run.reference, batch)
    torch.testing.assert_close(torch.cat(run.trainer.compute_ref_log_probs(run.trainer.model, batch)), expected)
    if run.trainer.precompute_ref_logps:
        rows = run.trainer.train_dataset
        assert sorted(rows["ref_chosen_logps"][:]) == pytest.approx(
            sorted(
                float(v)
                for i in range(8)
                for v in log_probs_by_hand(run.reference, run.trainer.data_collator([rows[i]]))[:1]
            ),
            rel=1e-5,
        )


def starts_at_half(run: Run) -> None:
    assert run.first("loss") == 0.5  # sigmoid(0)


def starts_at_no_divergence(run: Run) -> None:
    assert abs(run.first("kl")) < 1e-6


def trains_in_float32(run: Run) -> None:
    assert run.model.get_base_model().dtype == torch.bfloat16
    assert {p.dtype for p in run.model.parameters() if p.requires_grad} == {torch.float32}


def trains_rows(tokens: list[int]) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        rows = run.model.get_input_embeddings().weight.detach()
        before = run.model.get_input_embeddings().token_adapter.base_layer.weight
        assert [i for i in range(len(rows)) if not torch.equal(rows[i], before[i])] == tokens

    return check


def copy_rows_to_the_reference(model: PeftModel) -> None:
    rows = model.get_input_embeddings().token_adapter.trainable_tokens_delta
    rows["ref"].data.copy_(rows["default"])


def undo_rounding(model: PeftModel) -> None:
    for p in model.parameters():
        p.data = p.data.float() if p.requires_grad else p.data


ADDED = [*range(66, 128)]  # the template's two tokens, of which one ends all, and those that fill the embeddings
OF_TEMPLATE = {"trainable_token_indices": {"embed_tokens": ADDED}}
ROWS = "model.embed_tokens.token_adapter.trainable_tokens_delta"
HEAD = {"trained": frozenset({"lm_head.weight"}), "config": {"modules_to_save": ["lm_head"]}}
SCORE = {"trained": frozenset({"score.weight"}), "written": {"modules_to_save": ["classifier", "score"]}}
OWN_REFERENCE = "a model with an adapter, which is the reference"
QUANTISED: Any = {"base": "wide", "load": load_4bit, "quantised": True}
NO_BIAS = "no attribute 'bias'"
NO_SYNC = by_all("sync_ref_model=True")
CASES = [
    Case("SFTTrainer"),
    Case("SFTTrainer", "`packing=True`", {"packing": True, "max_length": 32}),
    Case("SFTTrainer", "`assistant_only_loss=True`", {"assistant_only_loss": True}),
    Case("SFTTrainer", '`loss_type="dft"`', {"loss_type": "dft"}),
    Case("SFTTrainer", "`gradient_checkpointing=False`", {"gradient_checkpointing": False}),
    Case("SFTTrainer", "`use_reentrant=True`", {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    Case("SFTTrainer", "`bf16=True` on a base in bfloat16", {"bf16": True}, load=half, check=trains_in_float32),
    Case("SFTTrainer", "`task_type=None`", config={"task_type": None}),
    Case("SFTTrainer", '`modules_to_save=["lm_head"]`', **HEAD),
    Case("SFTTrainer", '`modules_to_save=["lm_head"]`, shared with the embeddings', base="tied", **HEAD),
    Case(
        "SFTTrainer", "`trainable_token_indices`", {"per_device_train_batch_size": 4},
        {"trainable_token_indices": [10, 11]},
        trained=frozenset({ROWS}), check=trains_rows([10, 11]),
    ),
    Case(
        "SFTTrainer", "`trainable_token_indices`, shared with the head", base="tied",
        config={"trainable_token_indices": [10, 11]}, refused=by_all(NO_BIAS),
    ),
    Case(
        "SFTTrainer", "`chat_template_path` with new tokens", {"chat_template_path": ""}, check=trains_rows([66]),
        written={**OF_TEMPLATE, "modules_to_save": ["lm_head"]}, trained=frozenset({ROWS, "lm_head.weight"}),
    ),
    Case(
        "SFTTrainer", "`chat_template_path` with new tokens, shared with the head", {"chat_template_path": ""},
        base="tied", refused={**dict.fromkeys(METHODS, "which is the same tensor"), "LORA": NO_BIAS},
    ),
    Case(
        "SFTTrainer", '`"lm_head"` in `target_modules`', config={"target_modules": ["q_proj", "lm_head"]},
        refused=by_all("Applying a PEFT adapter to `lm_head`"),
    ),
    Case("SFTTrainer", "a model with an adapter", start="an adapter"),
    Case("SFTTrainer", "a model with an adapter, and a config", start="both", refused=by_all("passed a `PeftModel`")),
    Case("SFTTrainer", "a config that was read, then `inference_mode = False`", start="a file"),
    Case("SFTTrainer", "a base in 4 bits", **QUANTISED),
    Case("SFTTrainer", "a base in 4 bits, what is trained in float32 again", prepare=undo_rounding, **QUANTISED),
    Case("DPOTrainer", check=starts_at_ln_2),
    Case("DPOTrainer", "`precompute_ref_log_probs=True`", {"precompute_ref_log_probs": True}, check=starts_at_ln_2),
    Case("DPOTrainer", "`ref_model=...`", given={"ref_model": True}),
    Case("DPOTrainer", OWN_REFERENCE, start="an adapter", check=starts_at_ln_2),
    Case(
        "DPOTrainer", f"{OWN_REFERENCE}, with `trainable_token_indices` and their rows copied by hand",
        config={"trainable_token_indices": [*range(6, 40)]}, trained=frozenset({ROWS}), start="an adapter",
        prepare=copy_rows_to_the_reference, check=starts_at_ln_2,
    ),
    Case("DPOTrainer", '`modules_to_save=["lm_head"]`', check=starts_at_ln_2, **HEAD),
    Case("DPOTrainer", "`sync_ref_model=True`", {"sync_ref_model": True}, refused=NO_SYNC),
    Case("KTOTrainer", check=starts_at_half),
    Case("KTOTrainer", "`precompute_ref_log_probs=True`", {"precompute_ref_log_probs": True}, check=starts_at_half),
    Case("KTOTrainer", OWN_REFERENCE, start="an adapter", check=starts_at_half),
    Case("RewardTrainer", **SCORE),
    Case(
        "RewardTrainer", '`task_type=None`, `modules_to_save=["score"]`', trained=SCORE["trained"],
        config={"task_type": None, "modules_to_save": ["score"]},
    ),
    Case(
        "RewardTrainer", "`chat_template_path` with new tokens", {"chat_template_path": ""},
        written={**OF_TEMPLATE, "modules_to_save": ["lm_head", "classifier", "score"]},
        trained=frozenset({ROWS, "score.weight"}),
    ),
    Case("GRPOTrainer", "`beta=0.1`", check=starts_at_no_divergence),
    Case("GRPOTrainer", "`num_iterations=2`", {"num_iterations": 2}),
    Case("GRPOTrainer", OWN_REFERENCE, start="an adapter", check=starts_at_no_divergence),
    Case("GRPOTrainer", "`sync_ref_model=True`", {"sync_ref_model": True}, refused=NO_SYNC),
    Case("RLOOTrainer", "`beta=0.1`"),
    Case("RLOOTrainer", OWN_REFERENCE, start="an adapter"),
    Case("DistillationTrainer"),
    *(Case(name) for name in KINDS if KINDS[name].module.startswith("trl.experimental")),
    Case("SDPOTrainer", '`teacher_model_kind="live"`', {"teacher_model_kind": "live"}),
    Case(
        "SDPOTrainer", '`teacher_model_kind="ema"`', {"teacher_model_kind": "ema"},
        refused=dict.fromkeys(METHODS, "non-pure-LoRA PEFT model is not supported"),
    ),
    Case("Trainer"),
    Case("Seq2SeqTrainer"),
    Case("SentenceTransformerTrainer", "`get_peft_model` on its transformer"),
]  # fmt: skip
RESUMED = ["SFTTrainer", "DPOTrainer", "SentenceTransformerTrainer"]
BEST = [
    *(Case(trainer, "`eval_strategy`, `load_best_model_at_end=True`") for trainer in RESUMED[:2]),
    Case(RESUMED[2], "`load_best_model_at_end=True` with `BestAdapterCallback`"),
    *(Case(trainer, "`resume_from_checkpoint`") for trainer in RESUMED[:2]),
    Case(RESUMED[2], "`resume_from_checkpoint`", refused=by_all("in loading state_dict")),
]


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.trainer}-{case.option}".replace("`", ""))
def test_a_trainer_trains_what_is_meant_and_saves_it(case, method, bases, tmp_path):
    case.kind.import_or_skip()
    folder = bases / case.base

    def fresh() -> Any:
        model = case.kind.load(folder)
        if "chat_template_path" in case.args:
            import trl

            tokenizer = AutoTokenizer.from_pretrained(folder)
            model, _, _ = trl.clone_chat_template(model, tokenizer, str(bases / "source"))
        return model

    config, model = config_of(method, case), case.kind.load(folder)
    base = reference = copy.deepcopy(model)  # a head is drawn anew each time
    if case.start != "a config":
        adapted = shake(get_peft_model(case.kind.load(folder), copy.deepcopy(config)), "default")
        adapted.save_pretrained(tmp_path / "start")
    if case.start == "a file":
        config = PeftConfig.from_pretrained(tmp_path / "start")
        config.inference_mode = False
    if case.start in ("an adapter", "both"):
        model = PeftModel.from_pretrained(model, tmp_path / "start", is_trainable=True)
        reference = PeftModel.from_pretrained(case.kind.load(folder), tmp_path / "start")
    before = copy.deepcopy(config.to_dict())
    if not case.kind.module.startswith("trl"):
        model = get_peft_model(model, config)
    given = None if case.start == "an adapter" else config

    if method in case.refused:
        with pytest.raises((ValueError, NotImplementedError, AttributeError), match=case.refused[method]):
            make_trainer(case, model, folder, tmp_path, given).train()
        return
    trainer = make_trainer(case, model, folder, tmp_path, given)
    model = peft_model_of(trainer)
    case.prepare(model)
    changed = {name: value for name, value in config.to_dict().items() if value != before[name]}
    changed.pop("base_model_name_or_path", None)  # which PEFT writes, also for LoRA
    assert changed == case.written
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {plain_name(name) for name in trained} == meant(method, base) | case.trained

    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    is_rounded = case.quantised and case.prepare is not undo_rounding  # all that is trained, by TRL
    if is_rounded and method != "LORA":
        with pytest.warns(UserWarning, match="bfloat16, where small steps are lost"):
            trainer.train()
    else:
        trainer.train()
    moved = {name for name, p in model.named_parameters() if name in start and not torch.equal(p, start[name])}
    assert moved == trained
    case.check(Run(case, method, trainer, model, reference, tmp_path))

    trainer.save_model(tmp_path / "saved")
    trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    after, own = outputs(model), "ref" in model.peft_config
    if "chat_template_path" not in case.args:  # its rows are drawn anew each time
        with use_adapter(model, "ref" if own else None):
            assert torch.equal(outputs(model), outputs(reference if own else base))
    assert not torch.equal(after, outputs(reference))
    loaded = outputs(PeftModel.from_pretrained(fresh(), tmp_path / "saved"))
    if is_rounded:  # PEFT loads it in float32
        torch.testing.assert_close(loaded, after, rtol=0, atol=2e-3)
    else:
        assert torch.equal(loaded, after)
    if case.quantised:
        return
    merged = outputs(model.merge_and_unload())
    if method == "SURGICAL":
        assert torch.equal(merged, after)
    else:
        tolerance = 1e-4 if merged.dtype == torch.float32 else 0.05
        torch.testing.assert_close(merged, after, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("trainer", RESUMED)
def test_a_run_goes_on_from_a_checkpoint_to_the_same_weights_and_ends_with_the_best(trainer, method, bases, tmp_path):
    case = Case(trainer, args={"max_steps": 4, "save_steps": 2, "eval_steps": 2})
    every = {"save_strategy": "steps", "eval_strategy": "steps"}
    refused = next(row.refused for row in BEST[3:] if row.trainer == trainer)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    folder = bases / "plain"

    def run(output: Path, **args: Any) -> Any:
        torch.manual_seed(0)  # LoRA starts at random
        model, config = case.kind.load(folder), config_of(method, case)
        if not case.kind.module.startswith("trl"):
            model = get_peft_model(model, config)
        return make_trainer(case, model, folder, output, config, **every, **args)

    def weights(output: Path, step: int) -> dict[str, torch.Tensor]:
        return load_file(output / f"checkpoint-{step}" / "adapter_model.safetensors")

    whole = run(tmp_path / "whole", **best)
    whole.add_callback(BestAdapterCallback())
    whole.train()
    losses = [row["eval_loss"] for row in whole.state.log_history if "eval_loss" in row]
    kept = tmp_path / "whole" / f"checkpoint-{2 if losses[0] > losses[1] else 4}"
    assert whole.state.best_model_checkpoint == str(kept)
    kept_model = PeftModel.from_pretrained(case.kind.load(folder), kept)
    assert torch.equal(outputs(peft_model_of(whole)), outputs(kept_model))
    resumed = run(tmp_path / "resumed")
    if refused:
        with pytest.raises(RuntimeError, match=refused[method]):
            resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
        return
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    one, other = weights(tmp_path / "whole", 4), weights(tmp_path / "resumed", 4)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not any(torch.equal(one[name], value) for name, value in weights(tmp_path / "whole", 2).items())


@pytest.mark.parametrize("method", METHODS)
def test_a_config_for_inference_is_no_silent_training_of_nothing(method, bases, tmp_path):
    """LoRA's is."""
    pytest.importorskip("trl")
    case = Case("SFTTrainer", config={"inference_mode": True})
    trainer = make_trainer(case, load(bases / "plain"), bases / "plain", tmp_path, config_of(method, case))
    with pytest.warns(UserWarning, match="inference_mode"), pytest.raises(RuntimeError, match="does not require grad"):
        trainer.train()


@pytest.mark.parametrize("method", NAMES)
def test_what_trl_sends_to_vllm_is_the_merged_model(method, bases):
    """vLLM is not needed to see which names and values it would get."""
    generation = pytest.importorskip("trl.generation.vllm_generation").VLLMGeneration
    case = Case("SFTTrainer", config={"modules_to_save": ["lm_head"]})
    model = shake(get_peft_model(load(bases / "plain"), config_of(method, case)), "default")
    sender = generation.__new__(generation)
    sender.model = model
    sender._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda parameters: nullcontext())
    before = outputs(model)
    sent = {name: value.clone() for name, value in sender._iter_named_params()}
    if method != "LORA":  # which takes away what it has added
        assert torch.equal(outputs(model), before)
    merged = dict(model.merge_and_unload().named_parameters())
    assert sent.keys() == merged.keys()
    for name, value in merged.items():
        torch.testing.assert_close(sent[name], value, rtol=0, atol=1e-6 if method == "LORA" else 0)


def table() -> str:
    lines = ["| trainer | option | surgical | stratified | LoRA |", "|---|---|---|---|---|"]
    for case in sorted([*CASES, *BEST], key=lambda case: [*KINDS].index(case.trainer)):
        cells = ["no" if method in case.refused else "yes" for method in NAMES]
        lines.append(" | ".join([f"| `{case.trainer}`", case.option or "as it is", *cells]) + " |")
    return "\n".join(lines)


def test_the_table_in_the_docs_is_this_one():
    assert table() in (ROOT / "docs" / "peft.md").read_text(), f"docs/peft.md must have\n\n{table()}"
