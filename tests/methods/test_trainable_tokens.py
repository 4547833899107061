"""PEFT's `trainable_token_indices`, which trainers write onto configs, beside copies and LoRA."""

from __future__ import annotations

import copy

import pytest
import torch
from adapters import METHODS, make_config, outputs, save, shake
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import VOCABULARY, batch, build
from torch import nn
from transformers import AutoModelForCausalLM

from peft_surgical import DeltaBank, merge_checkpoint


NAMES = [*METHODS, "LORA"]
TOKENS = [3, 5, 7]


def config(method: str, layers: list[int], tokens=TOKENS, **options):
    if method == "LORA":
        return LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj"], r=2, trainable_token_indices=tokens, **options
        )
    return make_config(method, "llama", layers, trainable_token_indices=tokens, **options)


def train(model: nn.Module, steps: int = 2) -> None:
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        model(**batch("llama", seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tokens", [TOKENS, {"embed_tokens": TOKENS}], ids=["list", "dict"])
def test_tokens_are_trained_saved_loaded_switched_and_merged(method, tied, tokens, tmp_path):
    def base():
        model = build("llama", tie_word_embeddings=tied)
        model.tie_weights()
        return model

    plain = outputs(base(), "llama")
    before = base().get_input_embeddings().weight.detach().clone()
    model = get_peft_model(base(), config(method, [1, 3], tokens))
    train(model)
    first = outputs(model, "llama")
    rows = model.get_input_embeddings().weight.detach()
    changed = [i for i in range(len(before)) if not torch.equal(rows[i], before[i])]
    assert changed == TOKENS

    folder = save(model, tmp_path / "first")
    names = [name for name in load_file(folder / "adapter_model.safetensors") if "token" in name]
    assert names == ["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    loaded = PeftModel.from_pretrained(base(), folder).eval()
    assert torch.equal(outputs(loaded, "llama"), first)

    loaded.add_adapter("second", config(method, [0], [9]))
    loaded.set_adapter("second")
    train(loaded)
    second = outputs(loaded, "llama", "second")
    assert not torch.equal(second, first)
    assert torch.equal(outputs(loaded, "llama", "default"), first)
    with loaded.disable_adapter():
        assert torch.equal(outputs(loaded, "llama"), plain)
    again = PeftModel.from_pretrained(base(), save(loaded, tmp_path / "both", "second")).eval()
    assert torch.equal(outputs(again, "llama"), second)
    loaded.delete_adapter("second")
    assert torch.equal(outputs(loaded, "llama", "default"), first)

    merged = loaded.merge_and_unload()
    torch.testing.assert_close(outputs(merged, "llama"), first, rtol=1e-4, atol=1e-5)
    assert not any("token_adapter" in name or "lora" in name for name in merged.state_dict())


@pytest.mark.parametrize("method", METHODS)
def test_the_report_and_the_checks_before_training_know_them(method, recwarn):
    model = get_peft_model(build("llama"), config(method, [3]))
    train(model, 1)
    assert not [w for w in recwarn if "no adapter holds" in str(w.message)]
    report = model.base_model.tuning_report()
    assert report.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("method", METHODS)
def test_another_number_of_tokens_in_the_file_is_refused(method, tmp_path):
    model = get_peft_model(build("llama"), config(method, [3]))
    folder = save(model, tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace('"trainable_token_indices": [\n    3,', '"trainable_token_indices": ['))
    base = build("llama")
    with pytest.raises((ValueError, RuntimeError), match="trainable_tokens_delta"):
        PeftModel.from_pretrained(base, folder)


ADDED = list(range(VOCABULARY, VOCABULARY + 5))
OF_RESIZED = [
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens"]},
    {"trainable_token_indices": ADDED},
    {"trainable_token_indices": {"embed_tokens": ADDED}, "modules_to_save": ["lm_head"]},
]


@pytest.mark.parametrize(
    ("options", "tied"), [(options, tied) for options in OF_RESIZED for tied in (False, True)][:-1]
)
def test_what_is_trained_of_a_larger_vocabulary_loads_onto_rows_drawn_anew(options, tied, tmp_path):
    """PEFT then saves all that lies in the embeddings' wrappers too; its own LoRA is the control."""
    build("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")

    def base(seed: int):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
        return model

    assert not torch.equal(base(1).get_input_embeddings().weight, base(2).get_input_embeddings().weight)
    for method in NAMES:
        given = copy.deepcopy(options)
        model = get_peft_model(base(1), config(method, [1, 3], given.pop("trainable_token_indices", None), **given))
        train(model)
        folder = save(shake(model, "default").eval(), tmp_path / method)
        loaded = PeftModel.from_pretrained(base(2), folder).eval()
        ids = torch.tensor([ADDED, TOKENS + [1, 2]])
        assert torch.equal(loaded(ids).logits, model(ids).logits), method


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": TOKENS, "modules_to_save": ["embed_tokens"]}, "all of model.embed_tokens.weight"),
        ({"tokens": TOKENS, "modules_to_save": ["lm_head"]}, "all of lm_head.weight, which is the same tensor"),
        ({"tokens": {"lm_head": TOKENS}}, "shares its weights with model.embed_tokens.weight"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_rows_of_shared_weights_are_trained_in_all_places_or_in_none(method, options, message):
    """LoRA's adapters of the first two cannot be loaded, and of the third merge into other answers."""
    base = build("llama", tie_word_embeddings=True)
    base.tie_weights()
    with pytest.raises(ValueError, match=message):
        get_peft_model(base, config(method, [3], **options))
    assert not any("token_adapter" in name for name, _ in base.named_modules())


def test_added_rows_that_are_not_trained_must_be_the_bases_own(tmp_path):
    build("llama").save_pretrained(tmp_path / "base")
    bases = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        bases.append(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
        bases[-1].resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    model = get_peft_model(bases[0], config("SURGICAL", [3], ADDED[:-1]))
    folder = save(model, tmp_path / "adapter")
    with pytest.raises(ValueError, match="or the rows in trainable_token_indices"):
        PeftModel.from_pretrained(bases[1], folder)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_trained_rows_merge_into_a_checkpoint_and_are_refused_by_a_bank(method, tied, tmp_path):
    base = build("llama", tie_word_embeddings=tied)
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config(method, [3], TOKENS))
    folder = save(shake(model, "default").eval(), tmp_path / "adapter")
    merge_checkpoint(tmp_path / "base", folder, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not torch.equal(merged.model.embed_tokens.weight, base.model.embed_tokens.weight)
    assert torch.equal(merged(torch.tensor([TOKENS])).logits, model.merge_and_unload()(torch.tensor([TOKENS])).logits)
    bank = DeltaBank(base)
    with pytest.raises(ValueError, match="A DeltaBank does not take trainable_token_indices"):
        bank.add("task", folder)
