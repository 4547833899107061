"""What `StratifiedConfig` accepts, refuses, stores, and how the presets and rankings become strata."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass, field

import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.tuners.lora import LoraModel
from tiny_models import build

from peft_surgical import StratifiedConfig, StratifiedModel


@dataclass
class Ranking:
    """Stands for a `LayerRanking`: best layer first."""

    order: list[int]
    stack: str | None = None
    scores: dict = field(default_factory=dict)

    def to_dict(self):
        return {"order": self.order, "stack": self.stack}


def test_it_is_a_lora_config_and_its_tuner_a_lora_model():
    config = StratifiedConfig(n1=0, n2=1, r=3, use_rslora=True)
    assert isinstance(config, LoraConfig)
    assert config.peft_type == "STRATIFIED"
    model = get_peft_model(build("bert"), config)
    assert isinstance(model.base_model, StratifiedModel)
    assert isinstance(model.base_model, LoraModel)


def test_every_option_of_lora_config_is_there():
    ours = StratifiedConfig(target_modules=["query"])
    for name in vars(LoraConfig(target_modules=["query"])):
        assert hasattr(ours, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n1": 0, "n2": 1, "strata": [{"layers": "all", "tune": "full"}]}, "n1=0, n2=1 and strata=.*Drop one"),
        ({"n1": 0, "n2": 1, "layers_to_transform": [3]}, "layers_to_transform=.*n1, n2.*Drop one"),
        ({"strata": [{"layers": "all", "tune": "full"}], "layer_replication": [[0, 1]]}, "layer_replication.*strata"),
        ({"n1": 0, "n2": 1, "target_parameters": ["experts.down_proj"]}, "target_parameters.*Drop one"),
        ({"n1": 0, "n2": 1, "bias_beside_lora": "lora_only"}, "allowed are other, all, none"),
        ({"n1": 0, "n2": 1, "group_2": "full"}, "allowed are 'bitfit' and 'norm'"),
        ({"n1": 0, "n2": 1, "variant": "III"}, "allowed are I, II"),
        ({"n1": 0, "n2": 1, "variant": "I", "target_modules": ["query"]}, "variant and target_modules.*Drop one"),
        ({"target_modules": ["query"], "variant": "I"}, "variant='I' has no meaning"),
        ({"target_modules": ["query"], "add_bias": True}, "add_bias=True has no meaning"),
    ],
)
def test_options_that_contradict_one_another_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        StratifiedConfig(**options)


def test_a_config_that_says_nothing_is_refused_when_it_meets_a_model():
    with pytest.raises(ValueError, match="does not say what to tune"):
        get_peft_model(build("bert"), StratifiedConfig())


@pytest.mark.parametrize(("bias", "instead"), [("all", "all"), ("lora_only", "other")])
def test_pefts_bias_option_is_refused_where_layers_are_divided(bias, instead):
    with pytest.raises(TypeError, match=f"bias='{bias}'.*base model's own.*bias_beside_lora='{instead}'"):
        StratifiedConfig(n1=0, n2=1, bias=bias)


def test_dora_on_modules_whose_bias_is_trained_is_refused():
    model = build("bert")
    with pytest.raises(ValueError, match=r"DoRA.*query.*bias_beside_lora='other'"):
        get_peft_model(model, StratifiedConfig(n1=0, n2=1, use_dora=True, bias_beside_lora="all"))
    assert not any("lora" in name for name, _ in model.named_modules())


def test_an_initialisation_that_rewrites_the_base_warns():
    with pytest.warns(UserWarning, match="changes the base model's weights"):
        StratifiedConfig(n1=0, n2=1, init_lora_weights="pissa")


# ---- presets


@pytest.mark.parametrize(
    ("name", "n1", "n2", "variant"), [("SPAFIT-4-9-II", 4, 9, "II"), ("SPAFIT-0-11-I", 0, 11, "I")]
)
def test_a_preset_is_read_from_its_name(name, n1, n2, variant):
    config = StratifiedConfig.spafit(name, lora_dropout=0.2)
    assert (config.n1, config.n2, config.variant, config.r, config.lora_alpha) == (n1, n2, variant, 64, 128)
    assert config.lora_dropout == 0.2


@pytest.mark.parametrize(
    "name", ["SPAFIT-4-9", "spafit-4-9-II", "SPAFIT-4-9-III", "SPAFIT--4-9-I", "4-9-I", "SPAFIT-4-9-II "]
)
def test_a_name_of_another_form_is_refused(name):
    with pytest.raises(ValueError, match="SPAFIT-N1-N2-I or -II"):
        StratifiedConfig.spafit(name)


def test_target_modules_stand_for_the_variant_of_a_preset():
    config = StratifiedConfig.spafit("SPAFIT-0-1-II", target_modules=["layer_1"], r=2)
    model = get_peft_model(build("xlnet"), config)
    assert {
        name.split(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_A" in name
    } == {"layer_1"}


def test_full_lora_is_lora_on_all_layers_without_biases():
    model = get_peft_model(build("bert"), StratifiedConfig.full_lora("I", r=2))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 4 * 3 * 2
    assert all("lora_A" in name or "lora_B" in name for name in trained)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_full_lora_works_on_both_stacks(family):
    model = get_peft_model(build(family), StratifiedConfig.full_lora("II", r=2))
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    assert len(adapted) == 4 * 4 + 4 * 8


# ---- rankings


def test_the_best_layers_get_lora_the_next_biases_the_rest_nothing():
    config = StratifiedConfig.by_ranking(Ranking([2, 5, 0, 1, 4, 3]), lora=2, bitfit=1, variant="I", r=2)
    model = get_peft_model(build("bert", num_hidden_layers=6), config)
    config = model.peft_config["default"]
    strata = [(s["layers"], s["tune"]) for s in config.strata]
    assert strata == [([0], "bitfit"), ([1, 3, 4], "frozen"), ([2, 5], "lora")]
    assert config.ranking_record == {"order": [2, 5, 0, 1, 4, 3], "stack": None}
    layers = {name.split(".layer.")[1].split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert layers == {"0", "2", "5"}


def test_full_comes_before_lora_and_norm_after_biases():
    config = StratifiedConfig.by_ranking(Ranking([3, 2, 1, 0]), lora=1, bitfit=1, norm=1, full=1)
    assert {s["tune"]: s["layers"] for s in config.strata} == {
        "full": [3],
        "lora": [2],
        "bitfit": [1],
        "norm": [0],
    }


def test_a_ranking_of_one_stack_leaves_the_others_frozen():
    config = StratifiedConfig.by_ranking(Ranking([3, 1, 0, 2], stack="decoder"), lora=1, bitfit=2, r=2)
    model = get_peft_model(build("bart"), config)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".layers.")[1].split(".")[0] for name in trained} == {"0", "1", "3"}
    assert all(".decoder." in name for name in trained)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({}, "not all 0"),
        ({"lora": -1}, "0 or more"),
        ({"lora": 1.5}, "0 or more"),
        ({"lora": True}, "0 or more"),
        ({"lora": 3, "bitfit": 2}, "more layers than the 4"),
    ],
)
def test_counts_that_cannot_be_are_refused(counts, message):
    with pytest.raises(ValueError, match=message):
        StratifiedConfig.by_ranking(Ranking([3, 2, 1, 0]), **counts)


# ---- storing


@pytest.mark.parametrize(
    "make",
    [
        lambda: StratifiedConfig.spafit("SPAFIT-0-1-I", task_type="SEQ_CLS", r=2, rank_pattern={"query": 3}),
        lambda: StratifiedConfig.by_ranking(Ranking([3, 2, 1, 0]), lora=1, full=1, r=2),
        lambda: StratifiedConfig(target_modules=["query", "value"]),
    ],
)
def test_a_config_is_the_same_after_saving_and_reading(make, tmp_path):
    config = make()
    get_peft_model(build("bert"), config)
    config.save_pretrained(tmp_path)
    read = PeftConfig.from_pretrained(tmp_path)
    assert type(read) is StratifiedConfig
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["peft_type"] == "STRATIFIED"
    read.save_pretrained(tmp_path / "again")
    again = (tmp_path / "again" / "adapter_config.json").read_text()
    assert again == (tmp_path / "adapter_config.json").read_text()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_a_config_can_be_copied(again):
    config = StratifiedConfig(n1=0, n2=1)
    assert again(config).to_dict() == config.to_dict()


def test_a_model_can_be_copied_and_pickled():
    model = get_peft_model(build("bert"), StratifiedConfig(n1=0, n2=1, r=2, init_weights=False)).eval()
    ids = torch.arange(3, 9)[None]
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert torch.equal(again(ids).logits, model(ids).logits)


def test_target_modules_alone_may_have_the_bias_option_of_peft():
    model = get_peft_model(build("bert"), StratifiedConfig(target_modules=["query"], r=2, bias="lora_only"))
    trained = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"weight", "bias"}


def test_target_modules_alone_are_plain_lora():
    torch.manual_seed(0)
    ours = get_peft_model(build("bert"), StratifiedConfig(target_modules=["query"], r=2))
    torch.manual_seed(0)
    theirs = get_peft_model(build("bert"), LoraConfig(target_modules=["query"], r=2))
    ours, theirs = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
