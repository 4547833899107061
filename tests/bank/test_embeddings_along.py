"""Adapters beside which PEFT has saved embeddings, by all ways in, against what they answered when they were saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from adapters import save
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file
from tiny_models import VOCABULARY, build
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from peft_surgical import DeltaBank, StratifiedConfig, SurgicalConfig, merge_checkpoint
from peft_surgical.convert.inspect import inspect_adapter
from peft_surgical.convert.merge import merged_changes, tensors_of_base
from peft_surgical.files.checkpoint import Checkpoint
from peft_surgical.methods.config import open_adapter
from peft_surgical.methods.hotswap import prepare_model_for_hotswap


GROWN = VOCABULARY + 5
X = torch.tensor([[3, 5, VOCABULARY, VOCABULARY + 1, 7, GROWN - 1], [1, 2, 3, 4, 5, 6]])
EMBEDDINGS = {"model.embed_tokens", "lm_head"}
pytestmark = pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings", "ignore:Setting `save_embedding_layers"
)


def surgical(**options):
    return SurgicalConfig(task_type="CAUSAL_LM", **{"layers": [1], **options})


def lora(modules=("q_proj",), **options):
    return LoraConfig(task_type="CAUSAL_LM", target_modules=[*modules], r=2, init_lora_weights=False, **options)


CONFIGS = {
    "layer": surgical,
    "embeddings": lambda: surgical(extra_modules=["model.embed_tokens"]),
    "lossless": lambda: surgical(extra_modules=["model.embed_tokens"], encoding="lossless"),
    "modules_to_save": lambda: surgical(modules_to_save=["embed_tokens", "lm_head"]),
    "strata": lambda: StratifiedConfig(
        task_type="CAUSAL_LM", n1=0, n2=1, group_2="norm", r=2, init_lora_weights=False
    ),
    "lora": lora,
    "lora and modules_to_save": lambda: lora(modules_to_save=["embed_tokens"]),
}
TUNED = ("embeddings", "lossless")
ON_EMBEDDINGS = {
    "strata": lambda: StratifiedConfig(
        task_type="CAUSAL_LM", target_modules=["embed_tokens", "q_proj"], r=2, init_lora_weights=False
    ),
    "lora": lambda: lora(modules=("embed_tokens", "q_proj")),
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def bases(request, tmp_path_factory) -> Path:
    """A base whose vocabulary was grown twice: what was added has other values in each."""
    folder = tmp_path_factory.mktemp("bases")
    build("llama", tie_word_embeddings=request.param).save_pretrained(folder / "0")
    for seed in (1, 2):
        model = AutoModelForCausalLM.from_pretrained(folder / "0")
        torch.manual_seed(seed)
        model.resize_token_embeddings(GROWN, mean_resizing=False)
        model.save_pretrained(folder / str(seed))
    return folder


def load(bases: Path, number: int):
    return AutoModelForCausalLM.from_pretrained(bases / str(number)).eval()


@torch.no_grad()
def ask(model) -> torch.Tensor:
    return model(X).logits


def save_task(bases: Path, folder: Path, config, along: bool = True, seed: int = 0) -> torch.Tensor:
    """Save a task that was trained on the first of the two; gives what its model answers."""
    model = get_peft_model(load(bases, 1), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    answer = ask(model)
    model.save_pretrained(folder, save_embedding_layers=along)
    return answer


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("number", [1, 2], ids=["its own rows", "other rows"])
@pytest.mark.parametrize("how", ["whole", "tuned"])
def test_a_bank_serves_them_beside_others(bases, how, number, compiled, tmp_path):
    configs = {name: config for name, config in CONFIGS.items() if (name in TUNED) == (how == "tuned")}
    if how == "tuned" and number == 1:  # else they are refused
        configs |= {f"{name} on them": config for name, config in ON_EMBEDDINGS.items()}
    answers = {n: save_task(bases, tmp_path / n, config(), seed=i) for i, (n, config) in enumerate(configs.items())}
    if number == 1:
        answers["plain"] = save_task(bases, tmp_path / "plain", surgical(), along=False, seed=99)
    base = load(bases, number)
    answers[None] = ask(base)
    bank = DeltaBank(base, compiled=compiled)
    for name in filter(None, answers):
        bank.add(name, tmp_path / name)
    for name in [*answers, *reversed(answers)]:
        with bank.task(name) as model:
            assert torch.equal(ask(model), answers[name]), name
        if name is not None:
            loaded = PeftModel.from_pretrained(load(bases, number), tmp_path / name).eval()
            assert torch.equal(ask(loaded), answers[name]), name
    if how == "whole" and not compiled:
        rows = ["layer", "modules_to_save"]
        with bank.batch(rows) as model:
            found = ask(model)
        for row, name in enumerate(rows):
            torch.testing.assert_close(found[row], answers[name][row])


@pytest.mark.parametrize("whole", ["layer", "modules_to_save", "lora and modules_to_save"])
@pytest.mark.parametrize("tuned", [*TUNED, *(f"{name} on them" for name in ON_EMBEDDINGS)])
def test_a_module_is_whole_or_tuned_in_a_bank(bases, whole, tuned, tmp_path):
    configs = {**CONFIGS, **{f"{name} on them": config for name, config in ON_EMBEDDINGS.items()}}
    for name in (whole, tuned):
        save_task(bases, tmp_path / name, configs[name]())
    number = 1 if whole != "layer" else 2
    for one, other in ((whole, tuned), (tuned, whole)):
        if number == 2 and tuned not in TUNED:
            continue  # not of this base
        bank = DeltaBank(load(bases, number))
        bank.add(one, tmp_path / one)
        with pytest.raises(ValueError, match="'model.embed_tokens' whole, and the other tunes it.*banks of their own"):
            bank.add(other, tmp_path / other)
        assert list(bank) == [one]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_wrappers_of_a_removed_task_stay(bases, compiled, tmp_path):
    for name in ("modules_to_save", TUNED[0]):
        save_task(bases, tmp_path / name, CONFIGS[name]())
    bank = DeltaBank(load(bases, 1), compiled=compiled)
    bank.add("unused", tmp_path / "modules_to_save")
    bank.remove("unused")
    bank.add("used", tmp_path / TUNED[0])
    with bank.task("used"):
        pass
    bank.remove("used")
    with pytest.raises(ValueError, match=r"'used' \(removed, but its wrappers stay in the model\)"):
        bank.add("whole", tmp_path / "modules_to_save")
    bank.add("again", tmp_path / TUNED[0])


def test_embeddings_that_are_the_bases_take_no_memory_of_a_bank_and_tied_ones_are_there_once(bases, tmp_path):
    for name, along in (("with", True), ("without", False)):
        save_task(bases, tmp_path / name, surgical(), along)
    sizes = {}
    for number, name in ((1, "with"), (1, "without"), (2, "with")):
        bank = DeltaBank(load(bases, number))
        bank.add(name, tmp_path / name)
        bank.activate(name)
        sizes[number, name] = bank.stats().device_bytes
    assert sizes[1, "with"] == sizes[1, "without"]
    weights = load(bases, 1).get_input_embeddings().weight.nbytes
    assert sizes[2, "with"] - sizes[1, "without"] < weights * (1.5 if load(bases, 1).config.tie_word_embeddings else 3)


def test_another_number_of_tokens_is_refused_by_a_bank(bases, tmp_path):
    for name, config in CONFIGS.items():
        save_task(bases, tmp_path / name, config())
        bank = DeltaBank(load(bases, 0))
        with pytest.raises(
            ValueError, match=r"has 104 tokens, and the bank's base 99.*resize_token_embeddings\(104\)"
        ):
            bank.add(name, tmp_path / name)
        assert len(bank) == 0


@pytest.mark.parametrize("name", ON_EMBEDDINGS)
def test_lora_on_embeddings_of_another_base_is_refused(bases, name, tmp_path):
    save_task(bases, tmp_path / "task", ON_EMBEDDINGS[name]())
    with pytest.raises(ValueError, match="embed_tokens.base_layer.weight' belongs to the base, where it has other"):
        DeltaBank(load(bases, 2)).add("task", tmp_path / "task")


@pytest.mark.parametrize("name", [name for name in CONFIGS if "lora" not in name])
def test_they_are_swapped_in_where_there_is_room(bases, name, tmp_path):
    answer = save_task(bases, tmp_path / "task", CONFIGS[name]())
    save_task(bases, tmp_path / "first", CONFIGS[name](), along=False, seed=1)
    model = PeftModel.from_pretrained(load(bases, 1), tmp_path / "first").eval()
    hotswap_adapter(model, str(tmp_path / "task"), "default", torch_device="cpu")
    assert torch.equal(ask(model), answer)  # they are the base's
    if name not in ("modules_to_save", "lossless"):  # the one has room, the other cannot be decoded without them
        model = PeftModel.from_pretrained(load(bases, 2), tmp_path / "first").eval()
        with pytest.raises(ValueError, match=r"has no room.*adapters="):
            hotswap_adapter(model, str(tmp_path / "task"), "default", torch_device="cpu")


def test_embeddings_of_a_tasks_own_are_swapped_out_for_the_bases(bases, tmp_path):
    answer = save_task(bases, tmp_path / "task", surgical())
    save_task(bases, tmp_path / "plain", surgical(), along=False, seed=1)
    model = PeftModel.from_pretrained(load(bases, 2), tmp_path / "task").eval()
    wanted = ask(PeftModel.from_pretrained(load(bases, 2), tmp_path / "plain").eval())
    for name, expected in (("plain", wanted), ("task", answer)):
        hotswap_adapter(model, str(tmp_path / name), "default", torch_device="cpu")
        assert torch.equal(ask(model), expected)


@pytest.mark.parametrize("name", [*CONFIGS])
def test_they_merge(bases, name, tmp_path):
    answer = save_task(bases, tmp_path / "task", CONFIGS[name]())
    for number in (1, 2):
        merge_checkpoint(bases / str(number), tmp_path / "task", tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        if "lora" in name or name == "strata":
            torch.testing.assert_close(ask(merged), answer, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(ask(merged), answer)
    is_tied = load(bases, 1).config.tie_word_embeddings
    if name in ("layer", "strata"):  # as vLLM exchanges tensors
        saved = open_adapter(tmp_path / "task")
        changes = merged_changes(tensors_of_base(Checkpoint(bases / "2"), saved), saved)
        assert set(changes) >= {"model.embed_tokens.weight"} | (set() if is_tied else {"lm_head.weight"})
        assert torch.equal(changes["model.embed_tokens.weight"], load(bases, 1).model.embed_tokens.weight)
    if name == "layer" or (name in ("embeddings", "lossless", "modules_to_save") and not is_tied):
        merge_checkpoint(bases / "0", tmp_path / "task", tmp_path / "merged")  # the base as it was downloaded
        assert torch.equal(ask(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()), answer)


def test_a_base_of_another_size_is_refused_where_its_embeddings_are_needed(bases, tmp_path):
    save_task(bases, tmp_path / "task", surgical(), along=False)
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' has the shape \(99, 16\), and had \(104, 16\)"):
        merge_checkpoint(bases / "0", tmp_path / "task", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_the_file_has_each_tensor_once_and_inspection_says_so(bases, tmp_path):
    is_tied = load(bases, 1).config.tie_word_embeddings
    for name in ("embeddings", "lossless", "modules_to_save"):
        save_task(bases, tmp_path / name, CONFIGS[name]())
        names = [key for key in load_file(tmp_path / name / "adapter_model.safetensors") if "layers" not in key]
        assert len(names) == 2, names
        groups = {group.name: group for group in inspect_adapter(tmp_path / name).groups if "layers" not in group.name}
        assert groups.keys() == EMBEDDINGS
    save_task(bases, tmp_path / "layer", surgical())
    found = {group.name: group.nbytes for group in inspect_adapter(tmp_path / "layer").groups}
    assert sorted(map(bool, (found[name] for name in EMBEDDINGS))) == ([False, True] if is_tied else [True, True])


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("is_reloaded", [False, True])
def test_an_encoders_and_a_decoders_embeddings_are_one(family, is_reloaded, tmp_path):
    """What PEFT saves under the shared module's name counts in all places, or else is refused: never in one alone."""
    build(family).save_pretrained(tmp_path / "base")

    def base(seed: int):
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base")
        model.resize_token_embeddings(GROWN, mean_resizing=False)
        if is_reloaded:  # resizing makes one module of several that share a weight
            model.save_pretrained(tmp_path / str(seed))
            model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / str(seed))
        return model.eval()

    x = {"input_ids": X, "decoder_input_ids": X[:, 2:]}
    config = SurgicalConfig(task_type="SEQ_2_SEQ_LM", layers={"decoder": [1]})
    model = get_peft_model(base(1), config).eval()
    with torch.no_grad():
        answer = model(**x).logits
    model.save_pretrained(tmp_path / "task", save_embedding_layers=True)

    def of_peft():
        return PeftModel.from_pretrained(base(2), tmp_path / "task").eval()(**x).logits

    def of_bank():
        bank = DeltaBank(base(2))
        bank.add("task", tmp_path / "task")
        with bank.task("task") as model:
            return model(**x).logits

    for found in (of_peft, of_bank):
        if is_reloaded and (family == "bart" or not transformers.__version__.startswith("4.")):
            assert torch.equal(found(), answer)
        else:
            with pytest.raises(ValueError, match="which are one module"):
                found()
    assert torch.equal(PeftModel.from_pretrained(base(1), tmp_path / "task").eval()(**x).logits, answer)


def test_room_is_made_for_them(bases, tmp_path):
    answer = save_task(bases, tmp_path / "task", surgical())
    save_task(bases, tmp_path / "first", surgical(), along=False, seed=1)
    model = PeftModel.from_pretrained(load(bases, 2), tmp_path / "first").eval()
    before = ask(model)
    prepare_model_for_hotswap(model, adapters=[tmp_path / "task"])
    assert torch.equal(ask(model), before)
    hotswap_adapter(model, str(tmp_path / "task"), "default", torch_device="cpu")
    assert torch.equal(ask(model), answer)


def test_a_file_is_saved_again_as_it_was(bases, tmp_path):
    answer = save_task(bases, tmp_path / "task", CONFIGS["lossless"]())
    model = PeftModel.from_pretrained(load(bases, 2), tmp_path / "task").eval()
    again = save(model, tmp_path / "again")
    assert torch.equal(ask(PeftModel.from_pretrained(load(bases, 2), again).eval()), answer)
