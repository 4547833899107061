"""Every method of PEFT that a bank takes, beside tasks of this package and of LoRA on the same modules."""

from __future__ import annotations

import peft
import pytest
import torch
from peft import BOFTConfig, LoraConfig, RandLoraConfig, TrainableTokensConfig, VeraConfig, get_peft_model
from test_bank import X, ask, base, fill, save_task
from tiny_models import build

from peft_surgical import SurgicalConfig
from peft_surgical.bank import DeltaBank


METHODS = {
    "Beft": {},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "Deft": {"r": 4},
    "FourierFT": {"n_frequency": 8},
    "Glora": {"r": 4},
    "Gralora": {"r": 4, "gralora_k": 2},
    "Hira": {"r": 4},
    "HRA": {"r": 4},
    "IA3": {"feedforward_modules": []},
    "Lily": {"r": 4},
    "LNTuning": {"target_modules": ["LayerNorm"]},
    "LoHa": {"r": 4},
    "LoKr": {"r": 4},
    "Miss": {"r": 4},
    "OFT": {"oft_block_size": 4},
    "OSF": {},
    "Peanut": {"r": 4},
    "Psoft": {"r": 4},
    "Road": {"group_size": 4},
    "WaveFT": {"n_frequency": 8},
}
OTHERS = {
    "surgical": lambda: SurgicalConfig(task_type="SEQ_CLS", layers=[2, 3]),
    "lora": lambda: LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], r=2, init_lora_weights=False),
}


def save(folder, name):
    config_cls = getattr(peft, f"{name}Config", None)
    if config_cls is None:
        pytest.skip("this PEFT does not have it")
    return save_task(
        folder, name, config_cls(**{"task_type": "SEQ_CLS", "target_modules": ["query"], **METHODS[name]})
    )


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    folder = tmp_path_factory.mktemp("others")
    return folder, {name: save_task(folder, name, config()) for name, config in OTHERS.items()}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", METHODS)
def test_tasks_of_two_methods_do_not_disturb_each_other(name, other, others, tmp_path):
    answers = {name: save(tmp_path, name), other: others[1][other], None: base()(**X).logits.detach()}
    (tmp_path / other).symlink_to(others[0] / other)
    for order in ([name, other], [other, name]):
        bank = fill(DeltaBank(base()), tmp_path, order)
        for asked in [*order, *order, None]:
            torch.testing.assert_close(ask(bank, asked), answers[asked], atol=1e-5, rtol=0, msg=f"{order} {asked}")


@pytest.mark.parametrize("name", ["IA3", "HRA", "LNTuning"])
def test_rows_of_a_batch_pass_through_the_wrappers_of_methods_without_rows(name, others, tmp_path):
    save(tmp_path, name)
    folder, answers = others
    alone = base()(**X).logits.detach()
    for first in (name, "surgical"):
        bank = DeltaBank(base())
        for task in [name, *OTHERS]:
            bank.add(task, (tmp_path if task == name else folder) / task)
        for task in (first, name, *OTHERS):
            ask(bank, task)
        with bank.batch(["surgical", "lora", "__base__", "lora"]) as model, torch.no_grad():
            logits = model(**X).logits
        for row, wanted in enumerate([answers["surgical"], answers["lora"], alone, answers["lora"]]):
            torch.testing.assert_close(logits[row], wanted[row], atol=1e-5, rtol=0)
        with pytest.raises(TypeError, match="of LORA, SURGICAL, STRATIFIED, but not of .*. Run a batch per adapter"):
            bank.batch(["surgical", name, "lora", "lora"]).__enter__()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("config_cls", [VeraConfig, RandLoraConfig])
def test_tasks_that_share_a_projection_need_the_same_key(config_cls, compiled, tmp_path):
    def save_keyed(name, key):
        options = {"target_modules": ["query", "value"], "r": 4, "save_projection": False, "init_weights": False}
        torch.manual_seed(0)
        return save_task(tmp_path, name, config_cls(task_type="SEQ_CLS", projection_prng_key=key, **options), seed=key)

    answers = {"first": save_keyed("first", 0), "same": save_keyed("same", 0)}
    save_keyed("other", 1)
    bank = fill(DeltaBank(base(), compiled=compiled), tmp_path, answers)
    match = "Its random .* projection_prng_key=1.*(first|same)' has projection_prng_key=0.* of its own"
    with pytest.raises(ValueError, match=match):
        bank.add("other", tmp_path / "other")
    for name in [*answers, *answers]:
        torch.testing.assert_close(ask(bank, name), answers[name], atol=1e-5, rtol=0)
    bank.remove("first")
    with pytest.raises(ValueError, match=match):
        bank.add("other", tmp_path / "other")


def test_a_projection_that_is_saved_is_refused(tmp_path):
    save_task(tmp_path, "task", VeraConfig(task_type="SEQ_CLS", target_modules=["query"], r=4))
    with pytest.raises(ValueError, match="Task 'task': A DeltaBank does not take save_projection.*=False.*PeftModel"):
        DeltaBank(base()).add("task", tmp_path / "task")


@pytest.mark.parametrize("config_cls", [VeraConfig, RandLoraConfig])
def test_tasks_that_share_a_projection_need_one_of_the_same_sizes(config_cls, tmp_path):
    """Another projection of the same key would be computed with, or none that fits."""
    choices = {"small": (["query"], 4), "large": (["query", "intermediate.dense"], 4), "rank": (["query"], 8)}
    answers = {}
    for name, (modules, r) in choices.items():
        config = config_cls(task_type="SEQ_CLS", target_modules=modules, r=r, save_projection=False)
        answers[name] = save_task(tmp_path, name, config)
    for order in (["large", "small"], ["small", "large"], ["small", "rank"], ["rank", "small"]):
        bank = fill(DeltaBank(base()), tmp_path, order[:1])
        ask(bank, order[0])
        with pytest.raises(ValueError, match=f"Task {order[1]!r}: Its random projection has (r|shape)=.* of its own"):
            bank.add(order[1], tmp_path / order[1])
        torch.testing.assert_close(ask(bank, order[0]), answers[order[0]], atol=1e-5, rtol=0)


def test_the_projection_of_a_removed_task_that_left_nothing_in_the_model_binds_no_other(tmp_path):
    for name, key in (("first", 0), ("other", 1)):
        options = {"target_modules": ["query"], "r": 4, "save_projection": False, "projection_prng_key": key}
        answer = save_task(tmp_path, name, VeraConfig(task_type="SEQ_CLS", **options))
    bank = fill(DeltaBank(base()), tmp_path, ["first"])
    bank.remove("first")
    bank.add("other", tmp_path / "other")
    torch.testing.assert_close(ask(bank, "other"), answer, atol=1e-5, rtol=0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("config_cls", [VeraConfig, RandLoraConfig])
@pytest.mark.parametrize("first", ["surgical", "lora", "part"])
def test_a_shared_projection_is_the_same_whatever_wraps_its_modules_first(first, config_cls, compiled, tmp_path):
    configs = {
        "surgical": SurgicalConfig(task_type="SEQ_CLS", layers=[0, 1, 2, 3]),
        "lora": OTHERS["lora"](),
        "part": SurgicalConfig(task_type="SEQ_CLS", layers=[0, 1, 2, 3], target_modules=["intermediate.dense"]),
    }
    answers = {first: save_task(tmp_path, first, configs[first]), None: base()(**X).logits.detach()}
    for name in ("one", "two"):
        options = {"target_modules": ["query", "intermediate.dense"], "r": 4, "save_projection": False}
        answers[name] = save_task(tmp_path, name, config_cls(task_type="SEQ_CLS", **options), seed=len(answers))
    for order in ([first, "one", "two"], ["one", first, "two"]):
        bank = fill(DeltaBank(base(), compiled=compiled), tmp_path, order)
        for name in [*order, *order, None]:
            torch.testing.assert_close(ask(bank, name), answers[name], atol=1e-5, rtol=0, msg=f"{order} {name}")


@pytest.mark.parametrize(
    "config",
    [
        lambda: LoraConfig(task_type="SEQ_CLS", target_modules=["query"], lora_dropout=0.5, init_lora_weights=False),
        lambda: RandLoraConfig(
            task_type="SEQ_CLS", target_modules=["query"], r=4, randlora_dropout=0.5, save_projection=False
        ),
        lambda: BOFTConfig(task_type="SEQ_CLS", target_modules=["query"], boft_block_size=4, boft_dropout=0.5),
    ],
    ids=["LORA", "RANDLORA", "BOFT"],
)
def test_nothing_is_dropped_in_a_second_task_of_a_method(config, tmp_path):
    answers = {name: save_task(tmp_path, name, config(), seed=i) for i, name in enumerate("abc")}
    bank = fill(DeltaBank(base()), tmp_path, answers)
    for name in [*answers, *answers]:
        torch.testing.assert_close(ask(bank, name), answers[name], atol=1e-6, rtol=0)
    assert not any(module.training for module in bank.model.modules())


def test_trained_tokens_that_a_head_shares_are_refused(tmp_path):
    config = TrainableTokensConfig(task_type="CAUSAL_LM", target_modules=["embed_tokens"], token_indices=[3, 4])
    get_peft_model(build("llama", tie_word_embeddings=True), config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="takes no TRAINABLE_TOKENS that a head shares. Load it with PeftModel"):
        DeltaBank(build("llama", tie_word_embeddings=True)).add("task", tmp_path)


def test_trained_tokens_and_tasks_that_tune_the_embeddings_need_banks_of_their_own(tmp_path):
    """PEFT's wrapper of the tokens computes past whatever is inside it."""
    tokens = {"one": [1, 2], "two": [2, 3, 4]}
    for name, indices in tokens.items():
        config = TrainableTokensConfig(task_type="SEQ_CLS", target_modules=["word_embeddings"], token_indices=indices)
        tokens[name] = save_task(tmp_path, name, config, seed=len(indices))
    save_task(tmp_path, "tuned", SurgicalConfig(task_type="SEQ_CLS", layers=[3], extra_modules=["bert.embeddings"]))
    save_task(tmp_path, "lora", LoraConfig(task_type="SEQ_CLS", target_modules=["word_embeddings"]))
    tokens["last"] = save_task(tmp_path, "last", OTHERS["surgical"]())
    bank = fill(DeltaBank(base()), tmp_path, tokens)
    for name in [*tokens, *tokens]:
        assert torch.equal(ask(bank, name), tokens[name])
    for name in ("tuned", "lora"):
        with pytest.raises(ValueError, match=f"Task {name!r}: .*word_embeddings' whole"):
            bank.add(name, tmp_path / name)
        other = fill(DeltaBank(base()), tmp_path, [name])
        with pytest.raises(ValueError, match="Task 'one': .*word_embeddings' whole"):
            other.add("one", tmp_path / "one")


def test_a_shared_projection_stays_when_the_task_that_brought_it_leaves(tmp_path):
    options = {"target_modules": ["query"], "r": 4, "save_projection": False}
    answers = {n: save_task(tmp_path, n, VeraConfig(task_type="SEQ_CLS", **options), seed=ord(n)) for n in "ab"}
    alone = fill(DeltaBank(base()), tmp_path, ["a"])
    alone.activate("a")
    bank = fill(DeltaBank(base(), device_budget=alone.stats().device_bytes), tmp_path, "ab")
    for name in "abab":
        torch.testing.assert_close(ask(bank, name), answers[name], atol=1e-5, rtol=0)
    assert bank.stats().device_evictions == 3
