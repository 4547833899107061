"""A config belongs to its user: what it means on a model is not written onto it, and it can be used again."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from adapters import METHODS, make, make_config, outputs, save
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors import safe_open
from tiny_models import build

from peft_surgical import StratifiedConfig, SurgicalConfig, rank_layers
from peft_surgical.files.base import base_tensors


def plain(config: PeftConfig) -> dict:
    """What a config says, without what PEFT writes onto every config itself."""
    by_peft = ("base_model_name_or_path", "modules_to_save", "inference_mode", "auto_mapping", "fan_in_fan_out")
    return {name: value for name, value in copy.deepcopy(config.to_dict()).items() if name not in by_peft}


CONFIGS = {
    "surgical-last": lambda: SurgicalConfig(task_type="SEQ_CLS", layers="last:50%"),
    "surgical-names": lambda: SurgicalConfig(task_type="SEQ_CLS", layers=[-1], target_modules=["query"]),
    "surgical-modules": lambda: SurgicalConfig(task_type="SEQ_CLS", target_modules="all-linear"),
    "stratified-fractions": lambda: StratifiedConfig(task_type="SEQ_CLS", n1=0.25, n2=0.5, r=2),
    "stratified-variant": lambda: StratifiedConfig(task_type="SEQ_CLS", n1=0, n2=1, variant="I", r=2),
    "stratified-strata": lambda: StratifiedConfig(
        task_type="SEQ_CLS", r=2, strata=[{"layers": "0-1", "tune": "frozen"}, {"layers": "2-", "tune": "lora"}]
    ),
    "stratified-lora": lambda: StratifiedConfig(task_type="SEQ_CLS", target_modules="all-linear", r=2),
    "lora": lambda: LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_one_config_serves_models_of_other_depths_labels_and_weights(name):
    config = CONFIGS[name]()
    before = plain(config)
    small = get_peft_model(build("bert", num_labels=2), config)
    large = get_peft_model(build("bert", seed=3, num_labels=5, num_hidden_layers=8), config)
    fresh = get_peft_model(build("bert", seed=3, num_labels=5, num_hidden_layers=8), CONFIGS[name]())

    assert plain(config) == before
    assert small(torch.ones(1, 3, dtype=int)).logits.shape == (1, 2)
    assert large(torch.ones(1, 3, dtype=int)).logits.shape == (1, 5)
    trained = [{n for n, p in model.named_parameters() if p.requires_grad} for model in (large, fresh)]
    assert trained[0] == trained[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_one_config_serves_two_adapters_of_a_model(name):
    config = CONFIGS[name]()
    model = get_peft_model(build("bert"), config)
    model.add_adapter("second", config)
    trained = []
    for adapter in ("default", "second"):
        model.set_adapter(adapter)
        trained.append({n.replace(f".{adapter}", "") for n, p in model.named_parameters() if p.requires_grad})
    assert trained[0] == trained[1]
    if name != "lora":
        assert model.peft_config["second"] is not model.peft_config["default"] is not config


@pytest.mark.parametrize("method", METHODS)
def test_a_config_that_was_read_serves_two_models(method, tmp_path):
    folder = save(make(method, "bert", [1, 3]), tmp_path)
    expected = outputs(PeftModel.from_pretrained(build("bert"), folder).eval(), "bert")
    config = PeftConfig.from_pretrained(folder)
    before = plain(config)
    for _ in range(2):
        model = PeftModel.from_pretrained(build("bert"), folder, config=config).eval()
        assert torch.equal(outputs(model, "bert"), expected)
    assert plain(config) == before


@pytest.mark.parametrize("method", METHODS)
def test_a_config_made_anew_is_no_way_past_the_check_of_the_base(method, tmp_path):
    folder = save(make(method, "bert", [1, 3]), tmp_path)
    expected = outputs(PeftModel.from_pretrained(build("bert"), folder).eval(), "bert")

    model = PeftModel.from_pretrained(build("bert"), folder, config=make_config(method, "bert", [1, 3])).eval()
    assert torch.equal(outputs(model, "bert"), expected)
    other = build("bert", seed=3)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ValueError, match="another base model"):
        PeftModel.from_pretrained(other, folder, config=make_config(method, "bert", [1, 3]))
    assert all(torch.equal(base_tensors(other)[name], tensor) for name, tensor in before.items())
    unchecked = make_config(method, "bert", [1, 3])
    unchecked.check_base = False
    PeftModel.from_pretrained(build("bert", seed=3), folder, config=unchecked)


def test_a_ranking_serves_two_models(tmp_path):
    data = [{"input_ids": torch.randint(3, 99, (5,)), "labels": torch.tensor(i % 2)} for i in range(8)]
    config = SurgicalConfig(
        task_type="SEQ_CLS", ranking=rank_layers(build("bert"), data, num_samples=8, progress=False), top_k=2
    )
    chosen = [get_peft_model(build("bert", seed=seed), config).peft_config["default"].layers for seed in (0, 1)]
    assert chosen[0] == chosen[1]
    assert config.layers is None
    assert config.top_k == 2


@pytest.mark.parametrize("method", METHODS)
def test_what_is_saved_is_resolved(method, tmp_path):
    """Loading needs neither data nor the depth of the model that a fraction was of."""
    folder = save(make(method, "bert", [1, 3]), tmp_path)
    saved = json.loads((folder / "adapter_config.json").read_text())
    assert saved["base"] is None  # it is in the header of the other file
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        header = json.loads(file.metadata()["peft_surgical"])
        assert set(header["checksums"]) == set(file.keys())
    assert set(header["base"]["tensors"]) == {n for n in build("bert").state_dict() if not n.startswith("classifier")}
    assert saved["labels"]["num_labels"] == 2
    assert "resolution" not in saved
    assert saved["layers"] == [1, 3] if method == "SURGICAL" else saved["strata"][0]["layers"] == [0, 2]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("version", [2, 99, "1.0", None])
def test_a_file_of_a_later_format_is_refused(method, version, tmp_path):
    folder = save(make(method, "bert", [1, 3]), tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": version}))
    base = build("bert")
    for load in (
        lambda: PeftConfig.from_pretrained(folder),
        lambda: PeftModel.from_pretrained(base, folder),
        lambda: make(method, "bert", [0]).load_adapter(folder, adapter_name="later"),
    ):
        with pytest.raises(ValueError, match="written by a later version of peft_surgical"):
            load()
    assert all("surgical" not in name and "lora" not in name for name, _ in base.named_parameters())


def test_the_same_config_object_is_written_to_by_no_operation(tmp_path):
    config = make_config("SURGICAL", "bert", [1, 2])
    before = plain(config)
    model = get_peft_model(build("bert"), config)
    model.add_adapter("other", make_config("SURGICAL", "bert", [3]))
    model.add_weighted_adapter(["default", "other"], [1.0, 1.0], "both")
    model.save_pretrained(tmp_path)
    model.set_adapter("other")
    model.delete_adapter("default")
    model.merge_and_unload()
    assert plain(config) == before


@pytest.mark.parametrize("cls", [SurgicalConfig, StratifiedConfig])
def test_the_method_of_a_folder_counts_whatever_class_reads_it(cls, tmp_path):
    """As PEFT's own classes do."""
    LoraConfig(r=3).save_pretrained(tmp_path)
    config = cls.from_pretrained(tmp_path)
    assert type(config) is LoraConfig
    assert config.r == 3
    (tmp_path / "adapter_config.json").write_text('{"foo": 1}')
    for error in (TypeError, ValueError):  # PEFT's kind, and this package's for damaged files
        with pytest.raises(error, match="missing required keys: {'peft_type'}"):
            cls.from_pretrained(tmp_path)


def test_biases_of_the_base_in_a_state_go_into_lora_alone_by_hand_and_into_nothing_else():
    """As PEFT's LoRA takes them."""
    trained = get_peft_model(build("bert"), StratifiedConfig(target_modules=["query"], r=2, bias="lora_only"))
    biases = {
        n: torch.full_like(p, 1.23) for n, p in trained.named_parameters() if n.endswith("query.base_layer.bias")
    }
    state = get_peft_model_state_dict(trained) | biases
    plain = get_peft_model(build("bert"), StratifiedConfig(target_modules=["query"], r=2))
    set_peft_model_state_dict(plain, state)
    for name, value in biases.items():
        assert torch.equal(plain.get_parameter(name), value)
    strata = [{"layers": "all", "tune": "lora", "bias": "none"}]
    divided = get_peft_model(build("bert"), StratifiedConfig(strata=strata, target_modules=["query"], r=2))
    before = {name: tensor.clone() for name, tensor in divided.state_dict().items()}
    with pytest.raises(ValueError, match="does not account for"):
        set_peft_model_state_dict(divided, state)
    assert all(torch.equal(divided.state_dict()[name], tensor) for name, tensor in before.items())
