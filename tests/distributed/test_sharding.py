"""What `shard_by_layer` does before FSDP takes a model over; with FSDP itself: test_distributed_engines.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from adapters import make, make_config
from peft import LoraConfig, get_peft_model
from tiny_models import build

from distributed.launch import skip_if_missing
from peft_surgical.distributed import shard_by_layer


def shard(model, *, version: int = 1, **options) -> FullyShardedDataParallelPlugin:
    skip_if_missing("fsdp1")
    options |= {"reshard_after_forward": True} if version == 2 else {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="transformer_based_wrap", **options)
    shard_by_layer(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model)
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
