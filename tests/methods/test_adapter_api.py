"""Everything that PEFT's users do with adapters, for both methods, on models of six kinds."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers
from adapters import (
    METHODS,
    TASKS,
    add,
    base_outputs,
    make,
    make_config,
    merged_state,
    outputs,
    plain,
    save,
    shake,
)
from peft import (
    AutoPeftModel,
    AutoPeftModelForCausalLM,
    AutoPeftModelForSeq2SeqLM,
    AutoPeftModelForSequenceClassification,
    LoHaConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PeftType,
    get_layer_status,
    get_model_status,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from peft.utils import hotswap
from tiny_models import build
from torch import nn

from peft_surgical import StratifiedConfig, SurgicalConfig
from peft_surgical.names import PREFIX


cases = pytest.mark.parametrize(("method", "family"), [(m, f) for m in METHODS for f in TASKS])
methods = pytest.mark.parametrize("method", METHODS)
AUTO = {
    "bert": AutoPeftModelForSequenceClassification,
    "gpt2": AutoPeftModelForCausalLM,
    "llama": AutoPeftModelForCausalLM,
    "mixtral": AutoPeftModelForCausalLM,
    "t5": AutoPeftModelForSeq2SeqLM,
}
GENERATING = ["gpt2", "llama", "mixtral", "t5"]


def trainable(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


# ---- several active adapters


@pytest.mark.parametrize(("method", "family"), [(m, f) for m in METHODS for f in TASKS if f not in ("bert", "vit")])
def test_several_active_adapters_are_the_base_plus_their_differences(method, family):
    model = make(method, family, [1, 2], name="one")
    add(model, method, family, [2, 3], name="two")
    states = [merged_state(model, name) for name in ("one", "two")]
    base = build(family).state_dict()
    total = {key: (base[key].double() + sum(s[key].double() - base[key].double() for s in states)) for key in base}
    model.base_model.set_adapter(["one", "two"])
    wanted = outputs(plain(family, {key: value.float() for key, value in total.items()}), family)
    torch.testing.assert_close(outputs(model, family), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "vit"])
@methods
def test_several_heads_at_once_are_refused_and_the_active_adapter_stays(method, family):
    model = make(method, family, [1, 2], name="one")
    add(model, method, family, [2, 3], name="two")
    before = outputs(model, family)
    with pytest.raises(ValueError, match="Only one adapter can be set at a time"):
        model.base_model.set_adapter(["one", "two"])
    assert torch.equal(outputs(model, family), before)
    assert model.active_adapters == ["one"]


# ---- rows of one batch


def mixed(model, family, names, **kwargs):
    return outputs(model, family, adapter_names=names, **kwargs)


@cases
def test_rows_of_different_adapters_equal_each_row_by_itself(method, family):
    model = make(method, family, [1, 2], name="rte")
    add(model, method, family, [2, 3], name="cola")
    names = ["rte", "cola", "__base__", "cola"]
    if family == "mixtral" and method == "SURGICAL":
        with pytest.raises(TypeError, match="rows of different adapters cannot be told apart"):
            mixed(model, family, names)
        return
    found = mixed(model, family, names)
    for row, name in enumerate(names):
        if name == "__base__":
            with model.disable_adapter():
                wanted = outputs(model, family)
        else:
            wanted = outputs(model, family, name)
        torch.testing.assert_close(found[row], wanted[row], rtol=1e-4, atol=1e-5)


@methods
def test_bias_only_adapters_share_a_batch(method):
    biases = StratifiedConfig(
        task_type="SEQ_CLS", strata=[{"layers": [0], "tune": "frozen"}, {"layers": "1-3", "tune": "bitfit"}]
    )
    model = get_peft_model(build("bert"), biases, adapter_name="rte")
    model.add_adapter("cola", copy.deepcopy(biases))
    shake(shake(model, "rte", 1), "cola", 2).eval()
    found = mixed(model, "bert", ["rte", "cola", "rte", "cola"])
    for row, name in enumerate(["rte", "cola", "rte", "cola"]):
        torch.testing.assert_close(found[row], outputs(model, "bert", name)[row], rtol=1e-5, atol=1e-6)


class Routed(nn.Module):
    """A layer whose experts see the tokens that are sent to them."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        chosen = x[..., 0] > 0
        return torch.zeros_like(x).index_put((chosen,), self.experts[0](x[chosen]))


class Stack(nn.Module):
    def __init__(self, make_layer):
        super().__init__()
        self.layers = nn.ModuleList(make_layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def transformer_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)  # its attention reads out_proj's weight


@pytest.mark.parametrize(
    ("make_layer", "modules", "message"),
    [
        (Routed, None, r"experts.0 sees the tokens that are sent to it, so the rows"),
        (transformer_layer, ["out_proj"], "are read by its parent, which does not call it, so the rows"),
    ],
)
def test_a_module_that_does_not_see_the_rows_is_refused_in_a_mixed_batch(make_layer, modules, message):
    torch.manual_seed(0)
    model = get_peft_model(Stack(make_layer), SurgicalConfig(layers=[1], target_modules=modules), adapter_name="one")
    model.add_adapter("two", SurgicalConfig(layers=[1], target_modules=modules))
    shake(shake(model, "one", 1), "two", 2).eval()
    x = torch.randn(3, 5, 4)
    before = model(x)
    with pytest.raises(TypeError, match=message):
        model(x, adapter_names=["one", "two", "__base__"])
    assert torch.equal(model(x), before)
    assert torch.equal(model(x, adapter_names=["one"] * 3), before)


@methods
def test_relative_biases_do_not_see_the_rows_of_a_mixed_batch(method):
    model = make(method, "t5", [0], name="one")
    add(model, method, "t5", [0], name="two")
    if method == "SURGICAL":
        with pytest.raises(TypeError, match="relative_attention_bias sees queries first, so the rows"):
            mixed(model, "t5", ["one", "two", "one", "__base__"])
    assert torch.equal(mixed(model, "t5", ["one"] * 4), outputs(model, "t5", "one"))


def test_a_model_whose_hidden_states_have_tokens_first_is_refused_in_a_mixed_batch():
    options = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "src_vocab_size": 20, "tgt_vocab_size": 20}
    config = transformers.FSMTConfig(langs=["en", "de"], **options, **heads)
    surgical = SurgicalConfig(layers={"decoder": [1]})
    model = get_peft_model(transformers.FSMTForConditionalGeneration(config).eval(), surgical, adapter_name="one")
    model.add_adapter("two", surgical)
    with pytest.raises(TypeError, match="fsmt does not keep the rows of a batch first"):
        model.eval()(input_ids=torch.tensor([[5, 6], [7, 8]]), adapter_names=["one", "two"])


def test_longformer_whose_attention_has_tokens_first_is_refused_in_a_mixed_batch():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    base = transformers.LongformerModel(transformers.LongformerConfig(vocab_size=20, attention_window=4, **sizes))
    model = get_peft_model(base, SurgicalConfig(layers=[1], target_modules=["query"]), adapter_name="one")
    model.add_adapter("two", SurgicalConfig(layers=[1], target_modules=["query"]))
    with pytest.raises(TypeError, match="longformer does not keep the rows of a batch first"):
        model.eval()(input_ids=torch.full((4, 4), 5), adapter_names=["one", "two", "one", "two"])


class Recurrent(nn.Module):
    """Its LSTM and all around it see tokens first."""

    def __init__(self, has_tokens_first=True):
        super().__init__()
        self.has_tokens_first = has_tokens_first
        self.embeddings = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))
        self.lstm = nn.LSTM(8, 8) if has_tokens_first else None

    def forward(self, input_ids):
        x = self.embeddings(input_ids)
        if self.has_tokens_first:
            x = self.lstm(x.transpose(0, 1))[0]
        for layer in self.layers:
            x = layer(x)
        return x.mean(0 if self.has_tokens_first else 1)


@methods
@pytest.mark.parametrize("has_tokens_first", [True, False])
def test_rows_are_not_mistaken_for_as_many_tokens(method, has_tokens_first):
    def config():
        options = {"target_modules": ["layers.1.0"]}
        return SurgicalConfig(layers=[1]) if method == "SURGICAL" else StratifiedConfig(r=2, **options)

    model = get_peft_model(Recurrent(has_tokens_first), config(), adapter_name="one")
    model.add_adapter("two", config())
    shake(shake(model, "one", 1), "two", 2).eval()
    names, ids = ["one", "two", "__base__", "one"], torch.arange(16).view(4, 4)
    with pytest.raises(TypeError, match="A Linear sees a batch of 4 by 4, .*padded to another length.*per adapter"):
        model(input_ids=ids, adapter_names=names)
    with torch.no_grad():
        model.set_adapter("one")
        torch.testing.assert_close(model(input_ids=ids, adapter_names=["one"] * 4), model(input_ids=ids))
        if not has_tokens_first:
            wanted = model(input_ids=ids[:, :3])
            torch.testing.assert_close(model(input_ids=ids[:, :3], adapter_names=names)[[0, 3]], wanted[[0, 3]])


@methods
def test_a_named_adapter_is_merged_with_its_own_head_and_labels(method):
    """PEFT would take the head of the adapter that is active."""
    model = add(make(method, "bert", [1, 2], name="one"), method, "bert", [2, 3], name="two")
    expected, other = outputs(model, "bert", "one"), outputs(model, "bert", "two")
    for names in (["none"], []):
        for merge in (model.merge_and_unload, model.merge_adapter):
            with pytest.raises(ValueError, match=r"adapter_names=.*: the adapters to merge are of \['one', 'two'\]"):
                merge(adapter_names=names)
    assert torch.equal(outputs(model, "bert"), other)
    broken = copy.deepcopy(model)
    for name, parameter in broken.named_parameters():
        if ".one." in name and ".encoder." in name:
            parameter.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaNs detected"):
        broken.merge_and_unload(safe_merge=True, adapter_names=["one"])
    assert torch.equal(outputs(broken, "bert"), other)
    torch.testing.assert_close(outputs(model.merge_and_unload(adapter_names=["one"]), "bert"), expected)


@methods
def test_wrong_names_in_a_batch_raise(method):
    model = make(method, "bert", [1], name="rte")
    before = outputs(model, "bert")
    for names, message in [
        (["rte", "typo", "rte", "rte"], "non-existing adapter"),
        (["rte", "rte"], "same as the number of inputs"),
    ]:
        with pytest.raises(ValueError, match=message):
            mixed(model, "bert", names)
    model.train()
    with pytest.raises(ValueError, match="training mode"):
        mixed(model, "bert", ["rte"] * 4)
    assert torch.equal(outputs(model.eval(), "bert"), before)


@pytest.mark.parametrize(("method", "family"), [(m, f) for m in METHODS for f in ["gpt2", "llama", "t5"]])
@pytest.mark.parametrize("beams", [1, 2])
def test_rows_of_different_adapters_are_generated_together(method, family, beams):
    model = make(method, family, [1, 2], name="rte")
    add(model, method, family, [2, 3], name="cola")
    ids = torch.tensor([[5, 6, 7], [8, 9, 10], [5, 6, 7]])
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": beams}
    names = ["rte", "cola", "__base__"]
    found = model.generate(input_ids=ids, adapter_names=names, **options)
    for row, name in enumerate(names):
        if name == "__base__":
            with model.disable_adapter():
                wanted = model.generate(input_ids=ids[row : row + 1], **options)
        else:
            model.set_adapter(name)
            wanted = model.generate(input_ids=ids[row : row + 1], **options)
        assert torch.equal(found[row], wanted[0])


# ---- loading


@pytest.mark.parametrize(("method", "family"), [(m, f) for m in METHODS for f in AUTO])
def test_auto_peft_model_finds_the_base_and_the_head(method, family, tmp_path):
    build(family).save_pretrained(tmp_path / "base")
    cls = getattr(transformers, type(build(family)).__name__)
    torch.manual_seed(1)
    model = get_peft_model(cls.from_pretrained(tmp_path / "base"), make_config(method, family, [1, 2]))
    path = save(shake(model, "default").eval(), tmp_path / "adapter")
    again = AUTO[family].from_pretrained(path).eval()
    assert torch.equal(outputs(again, family), outputs(model, family))
    assert not trainable(again)
    again = AUTO[family].from_pretrained(path, is_trainable=True)
    assert trainable(again) == trainable(model)


@methods
def test_auto_peft_model_of_a_bare_model(method, tmp_path):
    build("bert", bare=True).save_pretrained(tmp_path / "base")
    base = transformers.BertModel.from_pretrained(tmp_path / "base")
    config = make_config(method, "bert", [1, 2], task_type=None)
    path = save(shake(get_peft_model(base, config), "default"), tmp_path / "adapter")
    again = AutoPeftModel.from_pretrained(path)
    ids = torch.tensor([[5, 6]])
    assert torch.equal(again.eval()(ids).last_hidden_state, base.eval()(ids).last_hidden_state)


@cases
def test_loading_for_training_restores_exactly_the_trained_set(method, family, tmp_path):
    model = make(method, family, [1, 2])
    path = save(model, tmp_path)
    again = PeftModel.from_pretrained(build(family), path, is_trainable=True)
    assert trainable(again) == trainable(model)
    assert not trainable(PeftModel.from_pretrained(build(family), path))


@pytest.mark.parametrize(
    "option",
    ["torch_device=cpu", "ephemeral_gpu_offload=True", "low_cpu_mem_usage=True", "autocast_adapter_dtype="],
)
@methods
def test_options_of_loading_are_heeded_or_without_effect(method, option, tmp_path):
    name, _, value = option.partition("=")
    options = {name: value if value == "cpu" else bool(value)}
    path = save(make(method, "bert", [1, 2], seed=2), tmp_path)
    wanted = outputs(make(method, "bert", [1, 2], seed=2), "bert")
    model = make(method, "bert", [1], name="first")
    model.load_adapter(path, adapter_name="second", **options)
    torch.testing.assert_close(outputs(model.eval(), "bert", "second"), wanted, rtol=0, atol=0)


@cases
def test_transformers_loads_the_adapter_by_itself(method, family, tmp_path):
    model = make(method, family, [1, 2])
    path = save(model, tmp_path)
    base = build(family)
    base.load_adapter(str(path))
    assert torch.equal(outputs(base.eval(), family), outputs(model, family))


COLUMNS = [{"layers": "0-1", "tune": "frozen"}, {"layers": "2-3", "tune": "columns", "columns": 4}]
NOT_AS_IT_IS = {  # what a file has otherwise than the model
    "lossless": SurgicalConfig(task_type="CAUSAL_LM", layers=[1, 2], encoding="lossless"),
    "columns": SurgicalConfig(task_type="CAUSAL_LM", layers=[1, 2], encoding="columns"),
    "int8": SurgicalConfig(task_type="CAUSAL_LM", layers=[1, 2], encoding="int8"),
    "trained columns": StratifiedConfig(task_type="CAUSAL_LM", strata=COLUMNS),
    "tied": SurgicalConfig(task_type="CAUSAL_LM", target_modules=["embed_tokens", "lm_head"]),
}


@pytest.mark.parametrize("case", NOT_AS_IT_IS)
def test_transformers_loads_by_itself_what_a_file_has_otherwise(case, tmp_path, caplog):
    config = NOT_AS_IT_IS[case]
    build("llama", tie_word_embeddings=case == "tied").save_pretrained(tmp_path / "base")
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, tmp_path / "base")
    model = shake(get_peft_model(load(), config), "default")
    path = save(model, tmp_path / "adapter")
    expected = outputs(PeftModel.from_pretrained(load(), path), "llama")
    for is_trainable in (False, True):
        base = load()
        base.load_adapter(str(path), is_trainable=is_trainable)
        assert torch.equal(outputs(base.eval(), "llama"), expected)
        trained = {n for n, p in base.named_parameters() if p.requires_grad}
        wanted = {n.removeprefix(PREFIX) for n, p in model.named_parameters() if p.requires_grad}
        assert trained == (wanted if is_trainable else set())
    base = load()
    base.load_adapter(peft_config=copy.copy(config), adapter_state_dict=get_peft_model_state_dict(model))
    assert torch.equal(outputs(base.eval(), "llama"), expected)
    whole = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(outputs(whole.eval(), "llama"), expected)
    assert "MISSING" not in caplog.text


@cases
def test_transformers_adds_an_adapter_by_itself(method, family):
    model, config = build(family), make_config(method, family, [1, 2])
    try:
        model.add_adapter(config)
    except ValueError as error:
        if "use a version >=" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} does not take PEFT {peft.__version__}: {error}")
    added = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    wrapped = get_peft_model(build(family), config).base_model.model
    assert added == {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}


@cases
def test_injecting_and_the_state_of_an_adapter(method, family):
    model = make(method, family, [1, 2])
    state = get_peft_model_state_dict(model)
    assert not any("default" in name for name in state)
    injected = inject_adapter_in_model(make_config(method, family, [1, 2]), build(family)).eval()
    bare = {name.removeprefix("base_model.model."): value for name, value in state.items()}
    result = set_peft_model_state_dict(injected, bare)
    assert not result.unexpected_keys
    assert torch.equal(outputs(injected, family), outputs(model, family))
    assert get_peft_model_state_dict(injected).keys() == bare.keys()
    empty = make(method, family, [1, 2], seed=5)
    copies = {name: value.clone() for name, value in state.items()}
    set_peft_model_state_dict(empty, state)
    assert torch.equal(outputs(empty, family), outputs(model, family))
    assert all(torch.equal(value, copies[name]) for name, value in state.items())


@cases
def test_status(method, family):
    model = make(method, family, [1, 2], name="one")
    add(model, method, family, [3], name="two")
    status = get_model_status(model)
    assert status.peft_types == {"one": method, "two": method}
    assert status.enabled is True
    assert status.active_adapters == ["one"]
    assert status.requires_grad == {"one": True, "two": False}
    assert status.trainable_params == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model.get_nb_trainable_parameters()[0] == status.trainable_params
    layers = get_layer_status(model)
    assert {name for layer in layers for name in layer.available_adapters} == {"one", "two"}
    assert not any(layer.merged_adapters for layer in layers)
    if family not in ("bert", "vit"):
        model.merge_adapter()
        # layers that only "two" tunes have nothing to merge
        assert get_model_status(model).merged_adapters in (["one"], "irregular")


# ---- using


@pytest.mark.parametrize(("method", "family"), [(m, f) for m in METHODS for f in GENERATING])
def test_generate(method, family):
    model = make(method, family, [1, 2])
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 5, "do_sample": False}
    wanted = plain(family, merged_state(model, "default")).generate(ids, **options)
    assert torch.equal(model.generate(input_ids=ids, **options), wanted)


@methods
def test_pipelines_give_the_labels_of_the_model(method, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "good", "bad", "film", "a"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    model = make(method, "bert", [1, 2])
    texts = ["a good film", "a bad film", "bad bad", "good"]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        wanted = model(**inputs).logits.argmax(-1).tolist()
    for candidate in (model, copy.deepcopy(model).merge_and_unload()):
        found = pipeline("text-classification", model=candidate, tokenizer=tokenizer)(texts)
        assert [model.config.label2id[answer["label"]] for answer in found] == wanted


@cases
def test_models_with_adapters_are_copied_and_pickled(method, family):
    model = make(method, family, [1, 2], name="one")
    add(model, method, family, [2], name="two")
    wanted = {name: outputs(model, family, name) for name in ("one", "two")}
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for name, value in wanted.items():
            assert torch.equal(outputs(again, family, name), value)
        shake(again, "one", 7)
        assert torch.equal(outputs(model, family, "one"), wanted["one"])


@methods
def test_embeddings_may_be_tuned_by_name(method, tmp_path):
    config = {"SURGICAL": SurgicalConfig, "STRATIFIED": StratifiedConfig}[method](
        task_type="CAUSAL_LM", target_modules=["embed_tokens"]
    )
    model = shake(get_peft_model(build("llama"), config), "default").eval()
    assert not torch.allclose(outputs(model, "llama"), base_outputs("llama"))
    again = PeftModel.from_pretrained(build("llama"), save(model, tmp_path)).eval()
    assert torch.equal(outputs(again, "llama"), outputs(model, "llama"))


@methods
def test_a_second_peft_model_on_the_same_base_is_refused_and_leaves_the_first_as_it_was(method, tmp_path):
    base = build("bert")
    model = shake(get_peft_model(base, make_config(method, "bert", [1])), "default").eval()
    before, folder = outputs(model, "bert"), save(model, tmp_path / "first")
    other = {"SURGICAL": "STRATIFIED", "STRATIFIED": "SURGICAL"}[method]
    seconds = (
        lambda: PeftModel.from_pretrained(base, folder),
        lambda: get_peft_model(base, make_config(method, "bert", [2])),
        lambda: get_peft_model(base, make_config(other, "bert", [2]), adapter_name="other"),
    )
    for second in seconds:
        with pytest.raises(ValueError, match=r"has the adapters \['default'\] from another call .* unload\(\)"):
            second()
    again = PeftModel.from_pretrained(build("bert"), save(model, tmp_path / "again")).eval()
    assert torch.equal(outputs(again, "bert"), before)
    get_peft_model(model.unload(), make_config(other, "bert", [2]))


@pytest.mark.parametrize("name", ["train", "half", "items", "a.b"])
@methods
def test_a_name_that_pytorch_uses_is_refused_before_anything_changes(method, name):
    model = make(method, "bert", [1], name="rte")
    before, names = outputs(model, "bert"), list(dict(model.named_modules()))
    with pytest.raises(ValueError, match="cannot be called"):
        model.add_adapter(name, make_config(method, "bert", [2]))
    assert torch.equal(outputs(model, "bert"), before)
    assert list(dict(model.named_modules())) == names
    assert list(model.peft_config) == ["rte"]


# ---- other methods beside


@methods
def test_mixing_with_other_methods_in_one_model_is_refused(method):
    refusal = f"'{method}' is not compatible with the `PeftMixedModel`"
    with pytest.raises(ValueError, match=refusal):
        get_peft_model(build("bert"), make_config(method, "bert", [1]), mixed=True)
    mixed_model = get_peft_model(build("bert"), LoraConfig(target_modules=["query"]), mixed=True)
    with pytest.raises(ValueError, match=refusal):
        mixed_model.add_adapter("more", make_config(method, "bert", [1]))
    model = make(method, "bert", [1])
    before = outputs(model, "bert")
    for other in (LoraConfig(target_modules=["query"]), LoHaConfig(target_modules=["query"])):
        with pytest.raises(ValueError, match="different peft types"):
            model.add_adapter("other", other)
    assert list(model.peft_config) == ["default"]
    assert torch.equal(outputs(model, "bert"), before)


# ---- registration


def test_every_stock_method_keeps_its_mapping_and_importing_again_changes_nothing(tmp_path):
    """And without the package PEFT's error names the method."""
    for method in METHODS:
        save(make(method, "bert", [1, 2]), tmp_path / method)
    code = """
import importlib, sys, traceback
import peft.mapping as m
from peft import PeftConfig, PeftType
from peft.utils import hotswap
for folder in sys.argv[1:]:
    try:
        PeftConfig.from_pretrained(folder)
    except KeyError as error:
        print("".join(traceback.format_exception_only(error)))
tables = (m.PEFT_TYPE_TO_CONFIG_MAPPING, m.PEFT_TYPE_TO_TUNER_MAPPING, m.PEFT_TYPE_TO_PREFIX_MAPPING, m.PEFT_TYPE_TO_MIXED_MODEL_MAPPING, hotswap.CONFIG_KEYS_TO_CHECK)
before, members = [dict(t) for t in tables], list(PeftType)
import peft_surgical
def check():
    assert list(PeftType) == [*members, PeftType.SURGICAL, PeftType.STRATIFIED], list(PeftType)
    for table, old in zip(tables, before):
        assert {k: v for k, v in table.items() if k in old} == old
        assert set(table) - set(old) <= {PeftType.SURGICAL, PeftType.STRATIFIED}
check()
import peft_surgical
importlib.reload(peft_surgical)
check()
for name in [n for n in sys.modules if n.startswith("peft_surgical")]:
    importlib.reload(sys.modules[name])
check()
for name in [n for n in sys.modules if n.startswith("peft_surgical")]:
    del sys.modules[name]
import peft_surgical
check()
assert m.PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.SURGICAL] is peft_surgical.SurgicalConfig
import torch
from peft import LoraConfig, get_peft_model
model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), peft_surgical.SurgicalConfig(target_modules=["0"]))
model(torch.ones(1, 2)).sum().backward()
get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
print("fine")
"""  # noqa: E501
    folders = [str(tmp_path / method) for method in METHODS]
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, *folders], capture_output=True, text=True)
    assert [line for line in done.stdout.splitlines() if line] == [*(f"KeyError: '{m}'" for m in METHODS), "fine"], (
        done.stderr
    )


@methods
def test_the_enum_member_behaves_like_any_other(method):
    member = PeftType(method)
    assert member is getattr(PeftType, method) is PeftType[method]
    assert member in list(PeftType)
    assert member == method
    assert copy.deepcopy(member) is member
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(member, protocol)) is member
    assert json.dumps({"type": member}) == json.dumps({"type": method})
    assert PEFT_TYPE_TO_PREFIX_MAPPING[member] == PEFT_TYPE_TO_TUNER_MAPPING[member].prefix
    assert PEFT_TYPE_TO_CONFIG_MAPPING[member] in (SurgicalConfig, StratifiedConfig)
    assert member in hotswap.CONFIG_KEYS_TO_CHECK


@methods
def test_the_config_is_read_by_peft_and_by_people(method, tmp_path):
    path = save(make(method, "bert", [1, 2]), tmp_path)
    read = PeftConfig.from_pretrained(path)
    assert type(read) is PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(method)]
    assert read.to_dict() == pickle.loads(pickle.dumps(read)).to_dict() == copy.deepcopy(read).to_dict()
    text = json.loads((path / "adapter_config.json").read_text())
    assert text["peft_type"] == method
    if method == "SURGICAL":
        assert text["layers"] == [1, 2]
    else:
        assert text["strata"][0] == {"layers": [0, 3], "tune": "frozen"}
    assert "\n  " in (path / "adapter_config.json").read_text()  # one option a line


def test_a_fresh_process_gives_the_same_logits(tmp_path):
    for method in METHODS:
        model = make(method, "bert", [1, 2])
        torch.save(outputs(model, "bert"), save(model, tmp_path / method) / "logits.pt")
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from tiny_models import batch, build
import peft_surgical
from peft import PeftModel
for folder in sys.argv[2:]:
    model = PeftModel.from_pretrained(build("bert"), folder, adapter_name="task").eval()
    with torch.no_grad():
        assert torch.equal(model(**batch("bert")).logits, torch.load(folder + "/logits.pt")), folder
"""
    arguments = [str(Path(__file__).parents[1]), *(str(tmp_path / method) for method in METHODS)]
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, *arguments], check=True)


def test_nothing_is_said_where_nothing_is_wrong(tmp_path):
    path = save(make("SURGICAL", "bert", [1, 2], name="rte"), tmp_path, "rte")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = PeftModel.from_pretrained(build("bert"), path, adapter_name="rte")
        model.load_adapter(path, adapter_name="cola")
        outputs(model.eval(), "bert", "cola")
        outputs(model.eval(), "bert", "rte")
        model.delete_adapter("cola")
