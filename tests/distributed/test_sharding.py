"""What `shard_by_layer` does before FSDP takes a model over; with FSDP itself: test_distributed_engines.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from adapters import make, make_config
from peft import LoraConfig, get_peft_model
from tiny_models import build
from torch.distributed.fsdp import MixedPrecisionPolicy

from distributed.launch import skip_if_missing
from peft_surgical.distributed import shard_by_layer


def shard(model, *, version: int = 1, **options) -> FullyShardedDataParallelPlugin:
    skip_if_missing("fsdp1")
    options |= {"reshard_after_forward": True} if version == 2 else {}
    options = {"cpu_ram_efficient_loading": False, "auto_wrap_policy": "transformer_based_wrap", **options}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **options)
    shard_by_layer(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), device=torch.device("cpu")), model)
    return plugin


@pytest.mark.parametrize("version", [1, 2])
def test_the_classes_of_the_layers_are_the_units(version):
    assert shard(make("SURGICAL", "bert", [1]), version=version).transformer_cls_names_to_wrap == ["BertLayer"]
    named = shard(make("SURGICAL", "bert", [1]), version=version, transformer_cls_names_to_wrap=["BertAttention"])
    assert named.transformer_cls_names_to_wrap == ["BertAttention"]


def test_a_second_model_gets_units_of_its_own():
    skip_if_missing("fsdp1")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, auto_wrap_policy="transformer_based_wrap")
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    for family, layer in [("bert", "BertLayer"), ("gpt2", "GPT2Block")]:
        shard_by_layer(accelerator, build(family))
        assert {cls.__name__ for cls in plugin.auto_wrap_policy.keywords["transformer_layer_cls"]} == {layer}


def test_a_class_that_the_model_does_not_have_is_refused():
    with pytest.raises(ValueError, match="names 'GPT2Block', but BertForSequenceClassification has no such module"):
        shard(make("SURGICAL", "bert", [1]), transformer_cls_names_to_wrap=["GPT2Block"])


def test_adapters_that_fsdp1_would_save_empty_are_refused():
    model = get_peft_model(build("bert"), LoraConfig(target_modules=["query"]))
    shard(model, version=2)
    with pytest.raises(ValueError, match="'default' is a LoraConfig of PEFT's own.*fsdp_version: 2"):
        shard(model)


@pytest.mark.parametrize("method", ["SURGICAL", "STRATIFIED"])
def test_fsdp1_takes_one_dtype_in_each_unit(method):
    half = build("bert").to(torch.bfloat16)
    shard(get_peft_model(half, make_config(method, "bert", [1, 2]), autocast_adapter_dtype=False))
    masters = get_peft_model(build("bert").to(torch.bfloat16), make_config(method, "bert", [1, 2]))
    with pytest.raises(ValueError, match="one dtype in each unit.*bfloat16 and float32.*autocast_adapter_dtype=False"):
        shard(masters)
    shard(masters, version=2)


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({}, {"weight", "bias"}),
        ({"mixed_precision_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, {"weight"}),
        ({"cpu_ram_efficient_loading": True}, set()),  # there is nothing in the other processes
        ({"cpu_offload": True}, set()),
        ({"base_copies": "device"}, set()),
    ],
    ids=["float32", "bfloat16", "loaded by one", "offloaded", "device"],
)
def test_what_has_copies_is_left_out_of_the_units_of_fsdp2(options, left_out):
    config = {name: options.pop(name) for name in list(options) if name == "base_copies"}
    model = make("SURGICAL", "bert", [1], **config)
    before = {name: p for name, p in model.named_parameters()}
    shard(model, version=2, **options)
    gone = before.keys() - dict(model.named_parameters()).keys()
    assert {name.rpartition(".")[2] for name in gone} == left_out
    assert all(".layer.1." in name and ".base_layer." in name for name in gone)
    assert any("LayerNorm" in name for name in gone) == ("bias" in left_out)
    base = model.unload()
    assert dict(base.named_parameters()).keys() == dict(build("bert").named_parameters()).keys()
