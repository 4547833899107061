from __future__ import annotations

import json
import pickle

import pytest
import torch
from peft import PeftConfig, get_peft_model
from tiny_models import build

from peft_surgical import LayerRanking, SurgicalConfig
from peft_surgical.files.safetensors_io import TensorFile


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"layers": [1], "ranking": "fim.json", "top_k": 2}, ["layers", "ranking"]),
        ({"layers": [1], "top_k": 2}, ["top_k", "ranking"]),
        ({"ranking": "fim.json"}, ["ranking", "top_k"]),
        ({"ranking": "fim.json", "top_k": 0}, ["top_k"]),
    ],
)
def test_contradicting_options_are_refused_by_name(options, named):
    with pytest.raises(ValueError) as error:
        SurgicalConfig(**options)
    assert all(name in str(error.value) for name in named)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": []}, "names no module"),
        ({"layers": [9]}, "layers 0 to 3"),
        ({"layers": []}, "chooses no layer"),
        ({"layers": [1, 1]}, "more than once"),
        ({"layers": [1], "target_modules": ["nothing"]}, "is left to tune.*query"),
        ({"layers": [1], "exclude_modules": [".*"], "target_modules": ["nothing"]}, "is left to tune"),
    ],
)
def test_what_chooses_nothing_is_an_error_and_leaves_the_model_alone(options, message):
    model = build("bert")
    names = [name for name, _ in model.named_modules()]
    flags = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        get_peft_model(model, SurgicalConfig(**options))
    assert [name for name, _ in model.named_modules()] == names
    assert [p.requires_grad for p in model.parameters()] == flags


@pytest.mark.parametrize(("depth", "layers"), [(1, [0]), (4, [1, 3]), (12, [1, 3, 6, 8, 10])])
def test_by_default_layers_at_equal_distances_are_tuned(depth, layers):
    for options in ({}, {"extra_modules": ["bert.pooler"]}):
        model = get_peft_model(build("bert", num_hidden_layers=depth), SurgicalConfig(**options))
        assert model.peft_config["default"].layers == layers
    with pytest.raises(ValueError, match="decoder.*encoder|encoder.*decoder"):
        get_peft_model(build("bart"), SurgicalConfig())


def test_layers_are_stored_as_plain_numbers(tmp_path):
    model = get_peft_model(build("bert"), SurgicalConfig(task_type="SEQ_CLS", layers="last:50%"))
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "adapter_config.json").read_text())
    assert stored["layers"] == [2, 3]
    assert TensorFile(tmp_path / "adapter_model.safetensors").header.base["layers"] == {"encoder": 4}
    assert stored["labels"]["num_labels"] == 2


def test_a_config_survives_the_ways_configs_travel(tmp_path):
    config = SurgicalConfig(task_type="SEQ_CLS", layers={"decoder": "last:2"}, target_modules=["q", "v"])
    config.save_pretrained(tmp_path)
    for other in (PeftConfig.from_pretrained(tmp_path), SurgicalConfig.from_pretrained(tmp_path)):
        assert isinstance(other, SurgicalConfig)
        assert other.layers == {"decoder": "last:2"}
        assert set(other.target_modules) == {"q", "v"}
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()


def test_the_config_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    config = SurgicalConfig(layers=[1])
    config.save_pretrained(tmp_path)
    before = (tmp_path / "adapter_config.json").read_text()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(json, "dumps", fail)
    config.layers = [2]
    with pytest.raises(OSError, match="disk full"):
        config.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_config.json"]


def test_a_quantised_module_in_a_chosen_layer_is_refused_before_anything_changes():
    model = build("bert")
    weight = model.bert.encoder.layer[1].output.dense
    weight.weight = torch.nn.Parameter(torch.zeros(16, 32, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"layer\.1\.output\.dense is a quantised Linear"):
        get_peft_model(model, SurgicalConfig(layers=[1]))
    get_peft_model(model, SurgicalConfig(layers=[2]))  # a quantised frozen layer is fine


def test_a_chosen_layer_without_values_is_refused():
    model = build("bert")
    model.bert.encoder.layer[1].to("meta")
    with pytest.raises(ValueError, match="meta device"):
        get_peft_model(model, SurgicalConfig(layers=[1]))


def test_a_ranking_of_another_model_is_refused():
    ranking = LayerRanking(stack="encoder", scores=[0.1, 0.2])
    with pytest.raises(ValueError, match=r"The ranking ranks 2 layers; encoder has 4\. It is of another model"):
        get_peft_model(build("bert"), SurgicalConfig(ranking=ranking, top_k=1))


def test_a_ranking_of_the_wrong_kind_is_a_type_error():
    with pytest.raises(TypeError, match="LayerRanking"):
        get_peft_model(build("bert"), SurgicalConfig(ranking=3, top_k=1))


def test_a_name_that_matches_nothing_is_told_and_passed_over():
    config = SurgicalConfig(task_type="SEQ_CLS", target_modules=["query", "queri", "layer.0.attention.self.value"])
    with pytest.warns(UserWarning, match=r"holds 'queri', which matches no module"):
        model = get_peft_model(build("bert"), config)
    tuned = {name.split(".surgical_params")[0].split(".layer.")[1] for name, _ in model.named_parameters()
             if "surgical_params" in name}  # fmt: skip
    assert tuned == {f"{i}.attention.self.query" for i in range(4)} | {"0.attention.self.value"}
