"""Kinds of fault that users report of switching, merging, registering and configuring; each test has its kind's id."""

from __future__ import annotations

import copy
import gc
import json
import warnings
import weakref

import pytest
import torch
import transformers
from adapters import METHODS, add, base_outputs, make, make_config, outputs, save, shake
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors import safe_open
from tiny_models import batch, build
from torch import nn

from peft_surgical import StratifiedConfig, SurgicalConfig


methods = pytest.mark.parametrize("method", METHODS)


@methods
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_M2_adapters_of_different_layers_live_together(method, family, tmp_path):
    choices = {"one": [1], "two": [2], "both": [1, 2]}
    model = make(method, family, choices["one"], name="one", seed=1)
    for seed, name in enumerate(["two", "both"], start=2):
        torch.manual_seed(seed)
        add(model, method, family, choices[name], name=name, seed=seed)
    alone = {
        name: outputs(make(method, family, layers, name=name, seed=seed), family)
        for seed, (name, layers) in enumerate(choices.items(), start=1)
    }
    for name in ["one", "two", "both", "two", "one", "both"]:
        assert torch.equal(outputs(model, family, name), alone[name])
    for name in choices:
        model.set_adapter(name)
        model.merge_adapter()
        torch.testing.assert_close(outputs(model, family), alone[name], rtol=1e-5, atol=1e-5)
        model.unmerge_adapter()
        merged = copy.deepcopy(model).merge_and_unload()
        torch.testing.assert_close(outputs(merged, family), alone[name], rtol=1e-5, atol=1e-5)
    assert torch.equal(outputs(model.unload(), family), base_outputs(family))


@pytest.mark.slow
@methods
@pytest.mark.filterwarnings("ignore:Adapter task was active")
def test_M3_loading_and_deleting_over_and_over_frees_everything(method, tmp_path):
    path = save(make(method, "bert", [1, 2]), tmp_path)
    model = make(method, "bert", [3], name="resident")

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    counts = []
    for _ in range(50):
        model.load_adapter(path, adapter_name="task")
        outputs(model, "bert", "task")
        model.set_adapter("resident")
        model.delete_adapter("task")
        counts.append(tensors() if len(counts) in (1, 2, 49) else 0)
    assert counts[2] == counts[49]
    copies = [weakref.ref(p) for name, p in model.named_parameters() if ".resident." in name]
    plain = model.unload()
    del model
    gc.collect()
    assert all(ref() is None for ref in copies)
    assert not hasattr(plain, "peft_config")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        get_peft_model(plain, make_config(method, "bert", [1]))


@pytest.mark.slow
@methods
def test_M4_switching_among_prepared_adapters_compiles_each_once(method):
    model = make(method, "llama", [1], name="one")
    add(model, method, "llama", [2], name="two")
    ids, wanted = torch.tensor([[5, 6, 7]]), {}
    for name in ("one", "two"):
        model.set_adapter(name)
        wanted[name] = model(input_ids=ids, use_cache=False).logits
    graphs = []

    def counting_backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counting_backend)
    with torch.no_grad():
        for turn in range(5):
            for name in ("one", "two"):
                model.set_adapter(name)
                found = compiled(input_ids=ids, use_cache=False).logits
                torch.testing.assert_close(found, wanted[name], rtol=1e-5, atol=1e-5)
            counted = len(graphs) if turn == 0 else counted  # noqa: F821
    # into the same tensors it is compiled once for all: test_hotswap.py
    assert len(graphs) == counted
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_M5_merging_in_half_precision_is_a_copy(family, dtype):
    model = shake(get_peft_model(build(family).to(dtype), make_config("SURGICAL", family, [1, 2])), "default").eval()
    wanted = outputs(model, family)
    assert torch.equal(outputs(copy.deepcopy(model).merge_and_unload(), family), wanted)
    model = shake(get_peft_model(build(family).to(dtype), make_config("STRATIFIED", family, [1, 2])), "default").eval()
    merged = copy.deepcopy(model).merge_and_unload()
    own = dict(build(family).to(dtype).named_parameters())
    for path, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_A"):  # rounded once: at most half a unit in the last place away
            exact = own[f"{path}.weight"].double() + module.get_delta_weight("default").double()
            error = (merged.get_parameter(f"{path}.weight").double() - exact).abs()
            assert (error <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-7).all()


@methods
def test_M6_a_merged_model_is_saved_as_an_ordinary_one(method, tmp_path):
    model = make(method, "bert", [1, 2])
    wanted = outputs(model, "bert")
    model.merge_and_unload().save_pretrained(tmp_path)
    assert not [path.name for path in tmp_path.iterdir() if "adapter" in path.name]
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(outputs(plain, "bert"), wanted, rtol=1e-5, atol=1e-6)
    assert not hasattr(plain, "peft_config")


def test_M7_exports_are_read_without_this_package(tmp_path):
    from peft_surgical.convert.convert import export_lora

    model = make("STRATIFIED", "llama", [1, 2])
    path = save(model, tmp_path / "stratified")
    left = export_lora(path, tmp_path / "lora")
    assert left  # what LoRA cannot express is listed
    stock = PeftModel.from_pretrained(build("llama"), tmp_path / "lora")
    assert type(stock.peft_config["default"]) is LoraConfig
    state = model.state_dict()
    for name, tensor in stock.state_dict().items():
        if "lora_" in name:
            assert torch.equal(tensor, state[name])
    surgical = save(make("SURGICAL", "llama", [1]), tmp_path / "surgical")
    with safe_open(surgical / "adapter_model.safetensors", framework="pt") as file:
        names = {name.replace(".surgical_params", "").removeprefix("base_model.model.") for name in file.keys()}  # noqa: SIM118
    assert names <= set(build("llama").state_dict())  # plain names but for the mark of the method


# M8, rows of different tasks in one batch: test_adapter_api.py
def test_M8_mixed_batches_are_tested_where_the_api_is():
    import test_adapter_api

    assert test_adapter_api.test_rows_of_different_adapters_equal_each_row_by_itself
    assert test_adapter_api.test_wrong_names_in_a_batch_raise


# M9, weighted combinations with heads: test_weighted.py
def test_M9_combinations_are_tested_where_they_are():
    import test_weighted

    assert test_weighted.test_weights_one_and_zero_are_the_adapters_and_the_base


@methods
@pytest.mark.parametrize("family", ["bert", "mixtral"])
def test_M10_the_bases_own_outputs_are_there_all_the_time(method, family):
    base = build(family)
    model = get_peft_model(base, make_config(method, family, [1, 2]))
    shake(model, "default").eval()
    assert model.get_base_model() is base  # the old variable has the adapter in it
    changed = outputs(base, family)
    assert torch.equal(changed, outputs(model, family))
    with model.disable_adapter():
        assert torch.equal(outputs(model, family), base_outputs(family))
        assert torch.equal(outputs(base, family), base_outputs(family))
    assert torch.equal(outputs(model, family), changed)


# ---- registering and configuring


# R1, registration: test_adapter_api.py
def test_R1_registration_is_tested_where_the_api_is():
    import test_adapter_api
    import test_compat

    assert test_adapter_api.test_every_stock_method_keeps_its_mapping_and_importing_again_changes_nothing
    assert test_compat.test_each_name_is_checked_when_the_package_is_imported


@methods
def test_R2_configs_of_other_versions(method, tmp_path):
    path = save(make(method, "bert", [1, 2]), tmp_path) / "adapter_config.json"
    record = json.loads(path.read_text())
    assert record["format_version"] == 1
    path.write_text(json.dumps({**record, "of_the_future": True}))
    with pytest.warns(UserWarning, match="of_the_future"):
        config = PeftConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert again == {**record, "saved": None}  # it stands for a file of tensors, and was saved without one
    texts = set()
    for i in range(2):
        options = {"target_modules": {"value", "query", "key"}}
        strata = [{"layers": range(3), "tune": "frozen"}, {"layers": (3,), "tune": "lora"}]
        if method == "SURGICAL":
            config = SurgicalConfig(layers=range(1, 3), **options)
        else:
            config = StratifiedConfig(strata=strata, **options)
        config.save_pretrained(tmp_path / str(i))
        texts.add((tmp_path / str(i) / "adapter_config.json").read_text())
    assert len(texts) == 1


def test_R3_the_transposed_modules_of_gpt2_are_adapted():
    strata = [{"layers": "0-2", "tune": "frozen"}, {"layers": [3], "tune": "lora"}]
    config = StratifiedConfig(task_type="CAUSAL_LM", strata=strata, r=2, target_modules=["c_attn", "c_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = get_peft_model(build("gpt2"), config)
    layer = model.get_base_model().transformer.h[3].attn.c_attn
    assert layer.lora_A["default"].weight.shape == (2, 16)
    assert layer.lora_B["default"].weight.shape == (48, 2)
    shake(model, "default").eval()
    wanted = outputs(model, "gpt2")
    torch.testing.assert_close(outputs(model.merge_and_unload(), "gpt2"), wanted, rtol=1e-4, atol=1e-5)


@methods
def test_R4_a_quantised_module_in_a_tuned_layer_is_refused_with_advice(method):
    def quantised() -> nn.Module:
        model = build("bert")
        dense = model.bert.encoder.layer[1].output.dense
        dense.weight = nn.Parameter(torch.zeros(16, 32, dtype=torch.uint8), requires_grad=False)
        return model

    if method == "SURGICAL":
        full, other = SurgicalConfig(layers=[1]), SurgicalConfig(layers=[2])
    else:
        frozen = {"layers": [0, 3], "tune": "frozen"}
        full, other = (
            StratifiedConfig(strata=[frozen, {"layers": [1], "tune": one}, {"layers": [2], "tune": two}])
            for one, two in [("full", "frozen"), ("frozen", "full")]
        )
    with pytest.raises(ValueError, match=r"layer\.1\.output\.dense.*quantised.*(dequantize|tune='lora')"):
        get_peft_model(quantised(), full)
    get_peft_model(quantised(), other)


# R5, what is trained is compared with what was declared: test_checkpointing.py
def test_R5_the_trained_set_is_tested_where_checkpointing_is():
    import test_checkpointing

    assert test_checkpointing.test_training_that_would_do_nothing_is_warned_of_once


@pytest.mark.parametrize(
    ("config", "options", "named"),
    [
        (SurgicalConfig, {"layers": [1], "ranking": "file.json", "top_k": 1}, "layers and ranking"),
        (SurgicalConfig, {"ranking": "file.json"}, "top_k"),
        (SurgicalConfig, {"layers": [1], "top_k": 1}, "top_k=1.*ranking is None"),
        (StratifiedConfig, {"n1": 0, "n2": 1, "strata": [{"layers": "all", "tune": "full"}]}, "n1=0.*strata"),
        (StratifiedConfig, {"n1": 0, "n2": 1, "variant": "I", "target_modules": ["query"]}, "variant.*target_modules"),
        (StratifiedConfig, {"n1": 2, "n2": 1}, "n1=2.*n2=1"),
        (StratifiedConfig, {"target_modules": ["query"], "add_bias": True}, "add_bias"),
        (StratifiedConfig, {"n1": 0, "n2": 1, "layers_to_transform": [1]}, "layers_to_transform"),
    ],
)
def test_R6_options_that_contradict_one_another_are_refused_by_name(config, options, named):
    with pytest.raises(ValueError, match=named):
        config(**options)


def test_R6_strata_that_overlap_are_refused():
    strata = [{"layers": "0-2", "tune": "frozen"}, {"layers": "2-3", "tune": "full"}]
    with pytest.raises(ValueError, match="[Ll]ayer.* 2"):
        get_peft_model(build("bert"), StratifiedConfig(strata=strata))


@methods
@pytest.mark.parametrize("names", [["classifier"], ["query"], ["classifier", "query"]])
def test_R7_a_module_is_handled_by_one_mechanism(method, names, tmp_path):
    config = make_config(method, "bert", [1, 2], modules_to_save=list(names))
    if method == "STRATIFIED" and "query" in names:  # which is also to get LoRA
        with pytest.raises(ValueError, match="'query', which matches no module"):
            get_peft_model(build("bert"), config)
        return
    model = get_peft_model(build("bert"), config)
    shake(model, "default").eval()
    parameters = [name for name, _ in model.named_parameters() if ".default." in name]
    for part in [*names, "classifier"]:
        mine = [name for name in parameters if f".{part}." in name]
        assert mine
        assert all("modules_to_save" in name for name in mine)
        assert not any("surgical" in name or "lora" in name for name in mine)
    path = save(model, tmp_path)
    assert torch.equal(outputs(PeftModel.from_pretrained(build("bert"), path).eval(), "bert"), outputs(model, "bert"))


@pytest.mark.parametrize("layer", [2, 0])
def test_R8_the_position_bias_of_t5_belongs_to_layer_0(layer, tmp_path):
    model = shake(get_peft_model(build("t5"), SurgicalConfig(layers={"decoder": [layer]})), "default").eval()
    path = save(model, tmp_path)
    with safe_open(path / "adapter_model.safetensors", framework="pt") as file:
        has_bias = any("relative_attention_bias" in name for name in file.keys())  # noqa: SIM118
    assert has_bias == (layer == 0)
    again = PeftModel.from_pretrained(build("t5"), path).eval()
    assert torch.equal(outputs(again, "t5"), outputs(model, "t5"))
    model.train()(**batch("t5")).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
