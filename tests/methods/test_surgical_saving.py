"""What is on disk, and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
import warnings

import pytest
import torch
from adapters import make_config, outputs, rewrite, save, shake
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, batch, build

from peft_surgical import SurgicalConfig


WEIGHTS = "adapter_model.safetensors"
FAMILIES = {
    "bert": "SEQ_CLS",
    "distilbert": "SEQ_CLS",
    "modernbert": "SEQ_CLS",
    "electra": "SEQ_CLS",
    "gpt2": "CAUSAL_LM",
    "llama": "CAUSAL_LM",
    "mixtral": "CAUSAL_LM",
    "bart": "SEQ_2_SEQ_LM",
    "vit": "SEQ_CLS",
    "xlnet": "SEQ_CLS",
}


def trained(family="bert", layers=None, **options):
    model = build(family, **options).requires_grad_(False)
    layers = layers or ({"decoder": [1, 2]} if family == "bart" else [1, 2])
    model = get_peft_model(model, SurgicalConfig(task_type=FAMILIES[family], layers=layers))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def logits(model, family="bert"):
    with torch.no_grad():
        return model(**batch(family)).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_a_saved_adapter_gives_the_same_logits_under_any_name(family, low_cpu_mem_usage, tmp_path):
    model = trained(family)
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        base = build(family).requires_grad_(False)
        loaded = PeftModel.from_pretrained(base, tmp_path, adapter_name="another", low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(logits(loaded, family), logits(model, family))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_holds_what_was_trained_and_little_else(family, tmp_path):
    model = trained(family)
    model.save_pretrained(tmp_path)
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    expected = {n.replace(".default.", ".").replace(".modules_to_save.", "."): p for n, p in trainable.items()}
    saved = load_file(tmp_path / WEIGHTS)
    assert set(saved) == set(expected)
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    size = sum(p.numel() * p.element_size() for p in trainable.values())
    header = int.from_bytes((tmp_path / WEIGHTS).read_bytes()[:8], "little") + 8
    # the models here are so tiny that the header, some 200 bytes a tensor, is what counts beside the values
    assert (tmp_path / WEIGHTS).stat().st_size - header == size
    assert header < 300 * (len(saved) + 1) + 130 * len(model.get_base_model().state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_base_in_half_precision_is_accepted(dtype, tmp_path):
    trained().save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build("bert").to(dtype), tmp_path)
    assert logits(loaded).dtype == dtype
    saved = load_file(tmp_path / WEIGHTS)
    for name, parameter in loaded.named_parameters():
        if ".surgical_params." in name:
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, saved[name.replace(".default.", ".")])


def test_a_base_in_full_precision_is_accepted_by_an_adapter_of_half_precision(tmp_path):
    model = get_peft_model(build("bert").to(torch.bfloat16), SurgicalConfig(task_type="SEQ_CLS", layers=[1]))
    model.save_pretrained(tmp_path)
    PeftModel.from_pretrained(build("bert"), tmp_path)
    with pytest.raises(ValueError, match="other values"):
        PeftModel.from_pretrained(build("bert", seed=1), tmp_path)


WRONG_BASES = {
    "other seed": (lambda: build("bert", seed=1), "other values"),
    "other depth": (lambda: build("bert", num_hidden_layers=6), "number of layers"),
    "other vocabulary": (lambda: build("bert", vocab_size=120), r"resize_token_embeddings\(99\)"),
    "other type": (lambda: build("roberta"), "model type"),
    "other width": (lambda: build("bert", intermediate_size=48), "other base|another base|has shape"),
    "one layer further trained": (lambda: further_trained(), r"layer\.2\.output\.dense\.weight"),
}


def further_trained():
    model = build("bert")
    with torch.no_grad():
        model.bert.encoder.layer[2].output.dense.weight.add_(1e-4)
    return model


@pytest.mark.parametrize("case", WRONG_BASES)
def test_another_base_is_refused_and_left_as_it_was(case, tmp_path):
    make, message = WRONG_BASES[case]
    trained().save_pretrained(tmp_path)
    base = make().requires_grad_(False)
    before, names = logits(base), [name for name, _ in base.named_modules()]
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(base, tmp_path)
    assert [name for name, _ in base.named_modules()] == names
    assert torch.equal(logits(base), before)
    assert not hasattr(base, "peft_config")


def test_the_check_of_the_base_can_be_turned_off(tmp_path):
    trained().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "check_base": False}))
    PeftModel.from_pretrained(build("bert", seed=1), tmp_path)


def damaged(folder, how):
    path = folder / WEIGHTS
    tensors = load_file(path)
    name = next(name for name in tensors if "surgical_params" in name)
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "foreign":
        path.write_bytes(b"not a safetensors file, but long enough to look like one")
    elif how == "missing":
        rewrite(folder, {k: v for k, v in tensors.items() if k != name})
    elif how == "missing head":
        rewrite(folder, {k: v for k, v in tensors.items() if "classifier" not in k})
    elif how == "unknown":
        rewrite(folder, {**tensors, "base_model.model.bert.encoder.layer.0.surplus": torch.zeros(2)})
    elif how == "empty":
        rewrite(folder, {**tensors, name: torch.zeros(0)})
    elif how == "misshapen":
        rewrite(folder, {**tensors, name: torch.zeros(3, 3)})


DAMAGES = {
    "truncated": "cannot be read as a safetensors file",
    "foreign": "cannot be read as a safetensors file",
    "missing": "lacks the tensor 'base_model.model.bert.encoder.layer.1",
    "missing head": "lacks the tensor 'base_model.model.classifier",
    "unknown": "surplus",
    "empty": "is empty",
    "misshapen": "has shape",
}


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("second", [False, True])
def test_a_damaged_file_is_refused_by_name_and_the_model_left_as_it_was(how, second, tmp_path):
    trained().save_pretrained(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    damaged(tmp_path / "bad", how)
    base = build("bert").requires_grad_(False)
    model = PeftModel.from_pretrained(base, tmp_path / "good", adapter_name="good") if second else base
    before, names = logits(model), [name for name, _ in model.named_modules()]
    flags = [p.requires_grad for p in model.parameters()]
    load = model.load_adapter if second else lambda path, adapter_name: PeftModel.from_pretrained(base, path)
    with pytest.raises(ValueError, match=DAMAGES[how]) as error:
        load(tmp_path / "bad", adapter_name="bad")
    assert str(tmp_path / "bad" / WEIGHTS) in str(error.value)
    assert [name for name, _ in model.named_modules()] == names
    assert [p.requires_grad for p in model.parameters()] == flags
    assert torch.equal(logits(model), before)
    if second:
        assert list(model.peft_config) == ["good"]


def test_an_empty_tensor_is_refused_before_anything_is_written(tmp_path):
    # what a sharded engine leaves where nobody gathered the weights
    model = trained()
    state = model.state_dict()
    name = next(name for name in state if ".surgical_params." in name)
    with pytest.raises(ValueError, match="get_state_dict"):
        model.save_pretrained(tmp_path, state_dict={**state, name: torch.empty(0)})
    assert not (tmp_path / WEIGHTS).exists()
    state.pop(name)
    with pytest.raises(ValueError, match="lacks the tensor"):
        model.save_pretrained(tmp_path, state_dict=state)
    assert not (tmp_path / WEIGHTS).exists()


def write_again_and_again(file):
    while True:
        save_file({"x": torch.zeros(60_000_000)}, file)
        file.unlink()


def test_a_save_that_is_killed_leaves_the_old_file_whole(tmp_path):
    model = trained()
    model.save_pretrained(tmp_path)
    old = (tmp_path / WEIGHTS).read_bytes()
    # save_pretrained writes through safetensors' save_file, whose file must appear whole or not at all
    other = tmp_path / (WEIGHTS + ".other")
    process = multiprocessing.get_context("fork").Process(target=write_again_and_again, args=(other,))
    process.start()
    try:
        sizes = set()
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            try:
                sizes.add(other.stat().st_size)
            except FileNotFoundError:
                pass
        assert process.is_alive()
    finally:
        process.kill()
        process.join()
    assert len(sizes) <= 1
    assert (tmp_path / WEIGHTS).read_bytes() == old


def test_loading_leaves_the_given_state_alone():
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model = trained()
    state = get_peft_model_state_dict(model)
    kept = {name: value.clone() for name, value in state.items()}
    for _ in range(2):
        other = get_peft_model(build("bert"), SurgicalConfig(task_type="SEQ_CLS", layers=[1, 2]))
        set_peft_model_state_dict(other, state)
        assert torch.equal(logits(other.requires_grad_(False)), logits(model))
    assert list(state) == list(kept)
    assert all(torch.equal(state[name], kept[name]) for name in kept)


@pytest.mark.parametrize("method", ["SURGICAL", "STRATIFIED"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_vocabulary_that_grew_is_recorded_when_the_adapter_is_saved(method, when, tmp_path):
    def base(tokens: int = VOCABULARY):
        torch.manual_seed(5)  # new rows are drawn at random
        model = build("llama")
        if tokens != VOCABULARY:
            model.resize_token_embeddings(tokens, mean_resizing=False)
        return model.eval()

    grown = VOCABULARY + 7
    if when == "before":
        model = get_peft_model(base(grown), make_config(method, "llama", [1, 3]))
    else:
        model = get_peft_model(base(), make_config(method, "llama", [1, 3]))
        torch.manual_seed(5)
        model.resize_token_embeddings(grown, mean_resizing=False)
    shake(model, "default").eval()
    save(model, tmp_path)
    with pytest.raises(ValueError, match=rf"resize_token_embeddings\({grown}\)"):
        PeftModel.from_pretrained(base(), tmp_path)
    loaded = PeftModel.from_pretrained(base(grown), tmp_path).eval()
    assert outputs(loaded, "llama").shape[-1] == grown
    for name, tensor in load_file(tmp_path / "adapter_model.safetensors").items():
        assert torch.equal(tensor, load_file(save(loaded, tmp_path / "again") / "adapter_model.safetensors")[name])
