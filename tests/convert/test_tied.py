"""Weights that a model has in two places are stored once, and are there in both by all ways in."""

from __future__ import annotations

import shutil
from copy import deepcopy

import pytest
import torch
from adapters import outputs
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file
from tiny_models import batch, build
from transformers import AutoModelForCausalLM

from peft_surgical import DeltaBank, SurgicalConfig, merge_checkpoint
from peft_surgical.convert.convert import convert_adapter
from peft_surgical.convert.diff import diff_checkpoints
from peft_surgical.convert.inspect import compare_adapters, inspect_adapter
from peft_surgical.convert.merge import merged_changes, tensors_of_base
from peft_surgical.convert.pack import pack_checkpoints
from peft_surgical.files import check
from peft_surgical.files.checkpoint import Checkpoint
from peft_surgical.methods.config import open_adapter


FAMILIES = {"llama": "model.embed_tokens", "gemma3": "model.embed_tokens", "gpt2": "transformer.wte"}
EXACT = ("values", "lossless", "rows")
FILE = "adapter_model.safetensors"


def fine_tune(folder, family: str = "llama", *, is_tied: bool = True) -> None:
    """Save a base whose head shares the embeddings' weights, and what full fine-tuning made of it."""
    build(family, tie_word_embeddings=True).save_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    if not is_tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.2" not in name:
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder / "tuned")


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def of_bank(folder, family: str, compiled: bool = False) -> torch.Tensor:
    bank = DeltaBank(load(folder / "base"), compiled=compiled)
    bank.add("task", folder / "delta")
    with bank.task("task") as model:
        found = outputs(model, family)
    with bank.task(None) as model:
        assert torch.equal(outputs(model, family), outputs(load(folder / "base"), family))
    return found


def check_all_ways(folder, family: str = "llama", wanted: torch.Tensor | None = None) -> torch.Tensor:
    """All give the same answers, those that are wanted; gives them."""
    loaded = PeftModel.from_pretrained(load(folder / "base"), folder / "delta").eval()
    found = outputs(loaded, family)
    if wanted is not None:
        assert torch.equal(found, wanted)
    for compiled in (False, True):
        assert torch.equal(of_bank(folder, family, compiled), found)
    merge_checkpoint(folder / "base", folder / "delta", folder / "merged")
    assert torch.equal(outputs(load(folder / "merged"), family), found)
    hotswap_adapter(loaded, str(folder / "delta"), "default", torch_device="cpu")
    assert torch.equal(outputs(loaded, family), found)
    return found


@pytest.mark.parametrize("encoding", ["values", "lossless", "rows", "int8", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fine_tune_of_a_tied_decoder_has_its_embeddings_once(family, encoding, tmp_path):
    if family != "llama" and encoding not in ("values", "int8"):
        pytest.skip("the encodings are the same for all")
    fine_tune(tmp_path, family)
    found = diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta", encoding=encoding)
    stored = load_file(tmp_path / "delta" / FILE)
    assert {name.split(".surgical_params")[0] for name in stored if FAMILIES[family] in name or "lm_head" in name} == {
        f"base_model.model.{FAMILIES[family]}"
    }
    inspected = inspect_adapter(tmp_path / "delta")
    assert found.nbytes == sum(tensor.nbytes for tensor in stored.values()) == inspected.nbytes
    assert inspected.values_nbytes <= found.nbytes_tuned
    wanted = outputs(load(tmp_path / "tuned"), family) if encoding != "int8" else None
    check_all_ways(tmp_path, family, wanted)
    merged = load(tmp_path / "merged")
    assert merged.config.tie_word_embeddings
    assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
    saved = open_adapter(tmp_path / "delta")
    changes = merged_changes(tensors_of_base(Checkpoint(tmp_path / "base"), saved), saved)
    assert changes.keys() <= set(Checkpoint(tmp_path / "base"))
    own = merged.state_dict()
    assert all(
        torch.equal(tensor, own[name if name in own else f"transformer.{name}"]) for name, tensor in changes.items()
    )


def test_a_bank_holds_them_once(tmp_path):
    fine_tune(tmp_path)
    nbytes = diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta").nbytes
    bank = DeltaBank(load(tmp_path / "base"))
    bank.add("task", tmp_path / "delta")
    bank.activate("task")
    assert nbytes <= bank.stats().device_bytes < nbytes + load(tmp_path / "base").lm_head.weight.nbytes


@pytest.mark.parametrize("encoding", ["values", "int8"])
def test_an_untied_fine_tune_of_a_tied_base_has_both(encoding, tmp_path):
    fine_tune(tmp_path, is_tied=False)
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta", encoding=encoding)
    names = {name.split(".surgical_params")[0] for name in load_file(tmp_path / "delta" / FILE)}
    assert names >= {"base_model.model.model.embed_tokens", "base_model.model.lm_head"}
    check_all_ways(tmp_path, wanted=outputs(load(tmp_path / "tuned"), "llama") if encoding == "values" else None)
    both = SurgicalConfig(
        task_type="CAUSAL_LM", layers=[0, 1, 3], extra_modules=["model.embed_tokens", "lm_head", "model.norm"]
    )
    tied = get_peft_model(load(tmp_path / "base"), both).eval()  # has one copy for both
    before = outputs(tied, "llama")
    with pytest.raises(ValueError, match="shares its weights in adapter 'default' with another tensor"):
        hotswap_adapter(tied, str(tmp_path / "delta"), "default", torch_device="cpu")
    state = get_peft_model_state_dict(PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "delta"))
    if encoding == "values":
        with pytest.raises(ValueError, match="shares its weights in adapter 'default' with another tensor"):
            set_peft_model_state_dict(tied, state)
    assert torch.equal(outputs(tied, "llama"), before)
    assert not load(tmp_path / "merged").config.tie_word_embeddings
    saved = open_adapter(tmp_path / "delta")
    with pytest.raises(ValueError, match="one of two tied tensors"):
        merged_changes(tensors_of_base(Checkpoint(tmp_path / "base"), saved), saved)


def test_files_that_have_them_twice_still_load(tmp_path, monkeypatch):
    fine_tune(tmp_path)
    monkeypatch.setattr(check, "_tied", lambda *args: {})
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    monkeypatch.undo()
    assert sum("lm_head" in name or "embed" in name for name in load_file(tmp_path / "delta" / FILE)) == 2
    check_all_ways(tmp_path, wanted=outputs(load(tmp_path / "tuned"), "llama"))
    shutil.copytree(tmp_path / "delta", tmp_path / "old")
    shutil.rmtree(tmp_path / "delta")
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    assert {row[3] for row in compare_adapters(tmp_path / "old", tmp_path / "delta").rows} == {True}


def test_they_are_stored_once_when_they_were_trained_together_and_when_converted(tmp_path):
    fine_tune(tmp_path)
    config = SurgicalConfig(task_type="CAUSAL_LM", layers=[1], extra_modules=["model.embed_tokens", "lm_head"])
    model = get_peft_model(load(tmp_path / "base"), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "delta")
    wanted = outputs(model.eval(), "llama")
    check_all_ways(tmp_path, wanted=wanted)
    size = inspect_adapter(tmp_path / "delta").nbytes
    shutil.move(tmp_path / "delta", tmp_path / "first")
    assert convert_adapter(tmp_path / "first", tmp_path / "delta", "lossless", base=tmp_path / "base") < size
    assert not any("lm_head" in name for name in load_file(tmp_path / "delta" / FILE))
    assert open_adapter(tmp_path / "delta").file.header is not None  # with checksums, as what it is made from
    check_all_ways(tmp_path, wanted=wanted)


def test_a_fleet_is_packed_by_the_same_rule(tmp_path):
    fine_tune(tmp_path)
    fleet = pack_checkpoints(tmp_path / "base", [tmp_path / "tuned"], tmp_path / "packed", encoding="values")
    assert not fleet.failed
    assert fleet[0].difference == 0
    assert fleet[0].nbytes < fleet[0].nbytes_tuned


def test_a_damaged_one_is_refused_by_name_in_both_places(tmp_path):
    fine_tune(tmp_path)
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    path = tmp_path / "delta" / FILE
    data = bytearray(path.read_bytes())
    weights = load_file(path)["base_model.model.model.embed_tokens.surgical_params.weight"]
    place = bytes(data).index(weights.numpy().tobytes()[:64])
    data[place] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="embed_tokens.surgical_params.weight' is damaged"):
        PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "delta")
    bank = DeltaBank(load(tmp_path / "base"))
    bank.add("task", tmp_path / "delta")
    with pytest.raises(ValueError, match="embed_tokens.surgical_params.weight' is damaged"):
        bank.activate("task")


def test_modules_may_have_been_renamed_since(tmp_path):
    fine_tune(tmp_path)
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    path = tmp_path / "delta" / "adapter_config.json"
    before = path.read_text()
    path.write_text(before.replace('"model.embed_tokens"', '"model.embed_tokens"'))
    mapping = {r"^model\.layers\.(\d+)\.mlp": r"model.layers.\1.mlp"}
    loaded = PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "delta", key_mapping=mapping).eval()
    assert torch.equal(outputs(loaded, "llama"), outputs(load(tmp_path / "tuned"), "llama"))


def test_adapters_of_one_model_merge_each_as_it_is_tied(tmp_path):
    """One tunes the embeddings alone, one the head too and alike, one both apart."""
    fine_tune(tmp_path, is_tied=False)
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "apart")
    for name, modules in (("one", ["model.embed_tokens"]), ("both", ["model.embed_tokens", "lm_head"])):
        config = SurgicalConfig(task_type="CAUSAL_LM", layers=[1], extra_modules=modules)
        model = get_peft_model(load(tmp_path / "base"), config)
        with torch.no_grad():
            model.get_input_embeddings().surgical_params["default"].weight.mul_(1.1)
        model.save_pretrained(tmp_path / name)
    names = ["one", "both", "apart"]
    model = load(tmp_path / "base")
    plain = outputs(model, "llama")
    for name in names:
        model = PeftModel.from_pretrained(model, tmp_path / name, name) if name == "one" else model
        if name != "one":
            model.load_adapter(tmp_path / name, name)
    answers = {}
    for name in names:
        model.set_adapter(name)
        answers[name] = outputs(model.eval(), "llama")
    for name in names:
        model.set_adapter(name)
        model.merge_adapter()
        assert torch.equal(outputs(model, "llama"), answers[name]), name
        model.unmerge_adapter()
        with model.disable_adapter():
            assert torch.equal(outputs(model, "llama"), plain)
    model.set_adapter("apart")
    assert torch.equal(outputs(model.merge_and_unload(), "llama"), answers["apart"])


@pytest.mark.parametrize("encoding", ["int8", "lossless"])
def test_what_is_encoded_needs_the_rows_that_it_was_encoded_against(encoding, tmp_path):
    """Rows that are added to a vocabulary are drawn anew, and no fingerprint of the base looks at them."""
    build("llama").save_pretrained(tmp_path / "base")

    def base(seed: int):
        model = load(tmp_path / "base")
        torch.manual_seed(seed)
        model.resize_token_embeddings(110, mean_resizing=False)
        model.save_pretrained(tmp_path / str(seed))
        return load(tmp_path / str(seed))

    config = SurgicalConfig(task_type="CAUSAL_LM", target_modules=["embed_tokens"], encoding=encoding)
    model = get_peft_model(base(1), config)
    with torch.no_grad():
        model.get_input_embeddings().surgical_params["default"].weight.mul_(1.01)
    model.save_pretrained(tmp_path / "delta", save_embedding_layers=True)
    assert ".base_layer." in str(sorted(load_file(tmp_path / "delta" / FILE)))
    merge_checkpoint(tmp_path / "1", tmp_path / "delta", tmp_path / "merged")
    merged = load(tmp_path / "merged").model.embed_tokens.weight
    found = PeftModel.from_pretrained(base(1), tmp_path / "delta").merge_and_unload().model.embed_tokens.weight
    assert torch.equal(found, merged)
    message = "belongs to the base, where it has other values|checksum is wrong"
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(base(2), tmp_path / "delta")
    with pytest.raises(ValueError, match=message):
        DeltaBank(base(2)).add("task", tmp_path / "delta")
    with pytest.raises(ValueError, match=message):
        merge_checkpoint(tmp_path / "2", tmp_path / "delta", tmp_path / "merged")


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_what_is_tied_is_trained_as_one_after_it_was_loaded(low_cpu_mem_usage, tmp_path):
    base = build("gpt2")
    config = SurgicalConfig(task_type="CAUSAL_LM", layers=[1], extra_modules=["transformer.wte", "lm_head"])
    made = get_peft_model(deepcopy(base), config)
    made.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base, tmp_path, is_trainable=True, low_cpu_mem_usage=low_cpu_mem_usage)
    losses = []
    for model in (made, loaded):
        optimizer = torch.optim.AdamW([p for p in model.eval().parameters() if p.requires_grad], lr=1e-2)
        for _ in range(3):
            loss = model(**batch("gpt2")).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("tuned", [[0], [1], [0, 1]], ids=["embeddings", "head", "both"])
def test_to_tie_the_weights_again_leaves_adapter_and_base_alone(family, tuned, tmp_path):
    base = build(family, tie_word_embeddings=True)
    names = [[FAMILIES[family], "lm_head"][i] for i in tuned]
    config = SurgicalConfig(task_type="CAUSAL_LM", layers=[1], extra_modules=names)
    model = get_peft_model(deepcopy(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "layers" not in name:
                parameter.mul_(1.1)
    before = outputs(model.eval(), family)
    model.get_base_model().tie_weights()
    assert torch.equal(outputs(model, family), before)
    assert torch.equal(outputs(model.unload(), family), outputs(base, family))


@pytest.mark.parametrize("copied", [False, True])
def test_an_adapter_that_is_added_while_another_one_is_merged_knows_its_base(copied, tmp_path):
    base = build("gpt2")
    config = SurgicalConfig(task_type="CAUSAL_LM", layers=[1], extra_modules=["transformer.wte"])
    model = get_peft_model(deepcopy(base), config)
    with torch.no_grad():
        model.get_input_embeddings().surgical_params["default"].weight.mul_(1.01)
    model.merge_adapter()
    model = deepcopy(model) if copied else model
    model.add_adapter("new", SurgicalConfig(task_type="CAUSAL_LM", layers=[2]))
    model.save_pretrained(tmp_path, selected_adapters=["new"])
    PeftModel.from_pretrained(base, tmp_path / "new")
