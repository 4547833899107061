"""PEFT's `trainable_token_indices`, which trainers write onto configs, beside copies and LoRA."""

from __future__ import annotations

import pytest
import torch
from adapters import METHODS, make_config, outputs, save
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import batch, build
from torch import nn


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
