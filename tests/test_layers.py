"""Stacks are found by object in any model, and what a user writes means exactly the layers that he expects."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from peft import LNTuningConfig, LoHaConfig, LoraConfig, PeftMixedModel, PromptTuningConfig, get_peft_model
from tiny_models import FAMILIES, LAYERS, TwoTowers, build
from torch import nn

from peft_surgical.layers import (
    choose_stack,
    describe_stacks,
    find_stacks,
    layer_indices,
    resolve_layers,
    unwrap,
)
from peft_surgical.methods.resolve import plain_layers
from peft_surgical.ranking.scores import SCORES, ScoreRequest


# family -> (class of its layers, names of its stacks). Finding modules by class is the oracle: it shares nothing with
# the rule under test.
LAYER_CLASSES = {
    "bert": ["BertLayer"],
    "roberta": ["RobertaLayer"],
    "xlnet": ["XLNetLayer"],
    "deberta-v2": ["DebertaV2Layer"],
    "distilbert": ["TransformerBlock"],
    "electra": ["ElectraLayer"],
    "mpnet": ["MPNetLayer"],
    "albert": ["AlbertLayerGroup"],
    "modernbert": ["ModernBertEncoderLayer"],
    "gpt2": ["GPT2Block"],
    "llama": ["LlamaDecoderLayer"],
    "qwen3": ["Qwen3DecoderLayer"],
    "gemma3": ["Gemma3DecoderLayer"],
    "mixtral": ["MixtralDecoderLayer"],
    "t5": ["T5Block"],
    "bart": ["BartEncoderLayer", "BartDecoderLayer"],
    "vit": ["ViTLayer"],
}


def modules_of_class(model: nn.Module, names: list[str]) -> list[tuple[str, nn.Module]]:
    return [(path, module) for path, module in model.named_modules() if type(module).__name__ in names]


def indices(layers) -> list[int]:
    return [layer.index for layer in layers]


class Block(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + self.dense(x))


class OtherBlock(Block):
    pass


class MoEBlock(nn.Module):
    """A layer with its experts in a ModuleList, which must never be taken for a stack."""

    def __init__(self, experts: int = 3, width: int = 4):
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.experts = nn.ModuleList(Block(width) for _ in range(experts))

    def forward(self, x):
        return sum(expert(self.attention(x)) for expert in self.experts)


class WithLayers(nn.Module):
    """Layers in an attribute of the root module."""

    def __init__(self, layers: nn.Module):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    """A headed BERT of 12 layers."""
    return build("bert", num_hidden_layers=12)


@pytest.fixture(scope="module")
def t5() -> nn.Module:
    return build("t5", num_layers=3, num_decoder_layers=5)


# --- finding ---------------------------------------------------------------------------------------------------------


def test_every_family_has_its_layer_class_written_down():
    assert LAYER_CLASSES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "headed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stacks_hold_exactly_the_layers_of_the_family_in_order(family, bare):
    model = build(family, bare=bare)
    expected = modules_of_class(model, LAYER_CLASSES[family])
    found = [layer for stack in find_stacks(model).values() for layer in stack.layers]
    assert [(layer.path, layer.module) for layer in found] == expected
    stacks = 2 if family in tiny_models.SEQ2SEQ else 1
    depth = 1 if family == "albert" else LAYERS
    assert indices(found) == [*range(depth)] * stacks
    assert all(model.get_submodule(layer.path) is layer.module for layer in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_bare_and_headed_models_name_and_number_alike(family):
    bare, headed = build(family, bare=True), build(family)
    shape = {name: len(stack) for name, stack in find_stacks(bare).items()}
    assert {name: len(stack) for name, stack in find_stacks(headed).items()} == shape
    # and the same number means the same object, seen from the headed model or from the bare one inside it
    inside = find_stacks(headed.base_model)
    for name, stack in find_stacks(headed).items():
        assert all(a.module is b.module for a, b in zip(stack.layers, inside[name].layers, strict=True))


@pytest.mark.parametrize("family", tiny_models.SEQ2SEQ)
def test_encoder_and_decoder_are_two_named_stacks(family):
    stacks = find_stacks(build(family))
    assert list(stacks) == ["encoder", "decoder"]
    assert all("encoder." in layer.path for layer in stacks["encoder"].layers)
    assert all("decoder." in layer.path for layer in stacks["decoder"].layers)


def test_a_model_around_a_bare_model_names_its_stack_as_that_does():
    outer = nn.Module()
    outer.model, outer.head = build("llama", bare=True), nn.Linear(2, 2)
    assert list(find_stacks(outer)) == list(find_stacks(outer.model)) == ["layers"]


def test_multimodal_model_has_a_stack_per_tower():
    stacks = find_stacks(TwoTowers())
    assert {name: len(stack) for name, stack in stacks.items()} == {"vision_tower": 2, "language_model": 4}


@pytest.mark.parametrize("head", ["T5EncoderModel", "T5ForSequenceClassification", "T5ForTokenClassification"])
def test_other_heads_keep_the_stack_names(head):
    assert set(find_stacks(build("t5", head=head))) <= {"encoder", "decoder"}


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_layers_at_the_root_are_found(family):
    # S2: PEFT's own pattern needs a prefix before the list, and finds nothing here
    model = build(family, bare=True)
    at_root = WithLayers(nn.ModuleList(layer.module for layer in choose_stack(model).layers))
    assert [layer.path for layer in resolve_layers(at_root, "all")] == [f"layers.{i}" for i in range(LAYERS)]


def test_experts_belong_to_their_layer():
    # S3: the expert's number in the path is not the layer's
    model = WithLayers(nn.ModuleList(MoEBlock() for _ in range(4)))
    (layer,) = resolve_layers(model, [1])
    chosen = {id(p) for p in layer.module.parameters()}
    names = {name for name, p in model.named_parameters() if id(p) in chosen}
    assert names == {name for name, _ in model.named_parameters() if name.startswith("layers.1.")}
    assert sum(".experts." in name for name in names) == 3 * 4


def test_experts_belong_to_their_layer_in_a_sequential():
    model = WithLayers(nn.Sequential(*(MoEBlock() for _ in range(4))))
    assert [layer.path for layer in resolve_layers(model, [1])] == ["layers.1"]


def test_hybrid_layers_of_several_classes_are_one_stack():
    config = transformers.JambaConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=4, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4, num_experts=2,
    )  # fmt: skip
    stack = choose_stack(transformers.JambaForCausalLM(config))
    assert len(stack) == 4
    assert len({type(layer.module) for layer in stack.layers}) == 2


def test_unlike_modules_without_a_mark_are_no_stack():
    model = WithLayers(nn.ModuleList([Block(), OtherBlock()]))
    assert find_stacks(model) == {}
    assert [layer.path for layer in resolve_layers(model, "all", stack="layers")] == ["layers.0", "layers.1"]


def test_a_shared_layer_is_counted_once():
    shared = Block()
    assert len(choose_stack(WithLayers(nn.ModuleList([shared, Block(), shared])))) == 2


def test_albert_is_counted_as_the_one_layer_it_has():
    model = build("albert", num_hidden_layers=12)
    assert indices(resolve_layers(model, "all")) == [0]


def test_sequential_of_named_layers_is_a_stack_with_their_paths():
    model = nn.Sequential(OrderedDict(stem=nn.Linear(4, 4)))
    model.encoder = nn.Sequential(OrderedDict(first=Block(), second=Block()))
    assert [layer.path for layer in resolve_layers(model, "all")] == ["encoder.first", "encoder.second"]


def test_the_model_itself_may_be_the_stack():
    model = nn.Sequential(Block(), Block(), Block())
    assert [layer.path for layer in resolve_layers(model, [-1])] == ["2"]
    with pytest.raises(ValueError, match=r"layers \(the model itself\), layers 0 to 2"):
        resolve_layers(model, [3])


def test_a_sequential_around_the_model_is_no_stack():
    assert list(find_stacks(nn.Sequential(build("bert", bare=True)))) == ["encoder"]


def test_a_module_list_comes_before_a_sequential():
    model = nn.Module()
    model.stem = nn.Sequential(Block(), Block())
    model.body = nn.ModuleList(Block() for _ in range(3))
    assert list(find_stacks(model)) == ["body"]


def test_lists_of_plain_or_empty_modules_are_no_stacks():
    model = nn.Module()
    model.projections = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model.activations = nn.ModuleList(nn.Sequential(nn.ReLU(), nn.ReLU()) for _ in range(3))
    model.empty = nn.ModuleList()
    assert find_stacks(model) == {}


def test_stacks_in_one_part_get_longer_names_and_others_keep_the_short_ones():
    model = nn.Module()
    model.vision, model.text = nn.Module(), nn.Module()
    model.vision.blocks = nn.ModuleList(Block() for _ in range(2))
    model.vision.mergers = nn.ModuleList(Block() for _ in range(3))
    model.text.layers = nn.ModuleList(Block() for _ in range(4))
    shape = {name: len(stack) for name, stack in find_stacks(model).items()}
    assert shape == {"vision.blocks": 2, "vision.mergers": 3, "text": 4}


# --- wrappers --------------------------------------------------------------------------------------------------------


def peft_lora(model):
    return get_peft_model(model, LoraConfig(target_modules=["query", "value"], modules_to_save=["classifier"]))


def peft_prompt(model):
    return get_peft_model(model, PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2))


def peft_mixed(model):
    config = LoraConfig(target_modules=["query"])
    wrapped = PeftMixedModel(model, config, adapter_name="one")
    wrapped.add_adapter("two", LoHaConfig(target_modules=["key"]))
    return wrapped


def distributed(model):
    # the constructor needs a process group; looking through the wrapper does not
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    return wrapped


WRAPPERS = {
    "lora": peft_lora,
    "tuner": lambda model: peft_lora(model).base_model,
    "prompt": peft_prompt,
    "mixed": peft_mixed,
    "compile": torch.compile,
    "data parallel": nn.DataParallel,
    "distributed": distributed,
    "compiled distributed peft": lambda model: torch.compile(distributed(peft_lora(model))),
    "distributed compiled peft": lambda model: distributed(torch.compile(peft_lora(model))),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_are_looked_through_and_left_alone(wrap):
    model = build("bert")
    before = [(layer.path, layer.module) for layer in resolve_layers(model, "all")]
    wrapped = wrap(model)
    modules = dict(wrapped.named_modules())
    assert unwrap(wrapped) is model
    assert [(layer.path, layer.module) for layer in resolve_layers(wrapped, "all")] == before
    assert list(find_stacks(wrapped)) == ["encoder"]
    assert dict(wrapped.named_modules()) == modules


def test_a_layer_that_peft_has_wrapped_whole_stays_in_its_stack():
    model = get_peft_model(build("bert"), LNTuningConfig(target_modules=["encoder.layer.2"]))
    assert indices(resolve_layers(model, "all")) == [*range(LAYERS)]


# --- choosing --------------------------------------------------------------------------------------------------------

ACCEPTED = [
    ([3, -1], [3, 11]),
    ([1, 10, -1], [1, 10, 11]),  # S1: not 1, 10 and everything that begins with a 1
    ([11, 0, 5], [0, 5, 11]),
    ((2,), [2]),
    ({7, 4}, [4, 7]),
    (range(2, 8, 3), [2, 5]),
    ([-12], [0]),
    (np.array([3, -1]), [3, 11]),
    ([np.int64(3), torch.tensor(4)], [3, 4]),
    ("last:3", [9, 10, 11]),
    ("last:12", [*range(12)]),
    ("first:2", [0, 1]),
    ("last:25%", [9, 10, 11]),
    ("first:25%", [0, 1, 2]),
    ("last:12.5%", [10, 11]),  # 1.5 layers: a half is rounded up
    ("last:12.4%", [11]),
    ("last:1%", [11]),  # at least one
    ("last:100%", [*range(12)]),
    ("middle:5", [3, 4, 5, 6, 7]),
    ("middle:50%", [3, 4, 5, 6, 7, 8]),
    ("spread:5", [1, 3, 6, 8, 10]),
    ("spread:1", [6]),
    ("alternate:5", [1, 3, 5, 7, 9]),
    ("alternate:8", [0, 1, 2, 3, 5, 7, 9, 11]),
    (["alternate:2", "last:1"], [1, 3, 11]),
    ("4-9", [4, 5, 6, 7, 8, 9]),
    ("4-4", [4]),
    ("10-", [10, 11]),
    ("0-", [*range(12)]),
    ("all", [*range(12)]),
    ("7", [7]),
    ("-1", [11]),
    (" last:2 ", [10, 11]),
    (["0-2", 7, "last:2"], [0, 1, 2, 7, 10, 11]),
    (["3", "-1"], [3, 11]),
]


@pytest.mark.parametrize(("spec", "expected"), ACCEPTED, ids=lambda value: str(value))
def test_accepted_forms(bert, spec, expected):
    layers = resolve_layers(bert, spec)
    assert indices(layers) == expected
    assert [layer.path for layer in layers] == [f"bert.encoder.layer.{i}" for i in expected]
    assert all(type(i) is int for i in indices(layers))


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 12, 24])
@pytest.mark.parametrize("percent", [1, 20, 25, 33.3, 50, 75, 100])
def test_shares_are_rounded_half_up_to_at_least_one(depth, percent):
    stack = choose_stack(WithLayers(nn.ModuleList(Block() for _ in range(depth))))
    exact = depth * percent / 100
    chosen = layer_indices(f"last:{percent}%", stack)
    assert chosen == [*range(depth - len(chosen), depth)]
    assert len(chosen) == 1 if exact < 0.5 else -0.5 < len(chosen) - exact <= 0.5


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 12, 18, 28])
def test_places_are_as_many_layers_as_asked_for_where_they_say(depth):
    """Against plain definitions: the nearest to the middle, steps of equal length, the order of the score."""
    stack = choose_stack(WithLayers(nn.ModuleList(Block() for _ in range(depth))))
    scores = SCORES["alternate"].function(ScoreRequest(nn.Identity(), stack.layers, [])).scores
    order = sorted(range(depth), key=scores.__getitem__, reverse=True)
    for count in range(1, depth + 1):
        near = sorted(range(depth), key=lambda i: (abs(i - (depth - 1) / 2), i))[:count]
        steps = [i * depth / count + depth / count / 2 for i in range(count)]
        assert layer_indices(f"middle:{count}", stack) == sorted(near)
        assert layer_indices(f"spread:{count}", stack) == [math.floor(step + 1e-9) for step in steps]
        assert layer_indices(f"alternate:{count}", stack) == sorted(order[:count])


ENCODER = r"encoder \(bert\.encoder\.layer\), layers 0 to 11"

REFUSED = [
    ([99], "no layer 99"),
    ([1, 99], "no layer 99"),  # S7: PEFT drops the one beyond the depth without a word
    ([12], "no layer 12"),
    ([-13], "no layer -13"),
    ("12", "no layer 12"),
    ("4-12", "no layer 12"),
    (["0", "99"], "no layer 99"),
    ([], "no layer"),
    (np.array([], dtype=int), "no layer"),
    ("9-4", "no layer"),
    ("12-", "no layer"),
    ("last:0", "1 to 12 layers"),
    ("last:13", "1 to 12 layers"),
    ("last:2.5", "1 to 12 layers"),
    ("last:0%", "share"),
    ("last:101%", "share"),
    ("spread:13", "1 to 12 layers"),
    ([3, 3], "layer 3 more than once"),
    ([11, -1], "layer 11 more than once"),
    (["0-5", 5], "layer 5 more than once"),
]


@pytest.mark.parametrize(("spec", "message"), REFUSED, ids=lambda value: str(value))
def test_refused_choices_say_why_and_list_the_stack_with_its_range(bert, spec, message):
    # S6, S7: at once, and never a silent no-op
    with pytest.raises(ValueError, match=message) as error:
        resolve_layers(bert, spec)
    assert error.match(ENCODER)


@pytest.mark.parametrize(
    "spec", ["", "lst:3", "every:3", "last", "last:", "last:x", "last:-1", "3..5", "-4--1", "1,2", "last:5%%"]
)
def test_text_that_is_not_understood_is_refused_with_the_allowed_forms(bert, spec):
    with pytest.raises(ValueError, match=r"is not understood; allowed are .*'last:3'.*'4-9'.*'all'") as error:
        resolve_layers(bert, spec)
    assert repr(spec) in str(error.value)


@pytest.mark.parametrize("spec", [None, 3, 2.0, b"all", [1.0], [None], [True], [[1]], [torch.tensor(1.5)]], ids=repr)
def test_other_types_are_type_errors_with_the_allowed_forms(bert, spec):
    with pytest.raises(TypeError, match=r"allowed are .*'last:3'.*'4-9'.*'all'"):
        resolve_layers(bert, spec)


# --- several stacks --------------------------------------------------------------------------------------------------

T5_STACKS = r"encoder \(encoder\.block\), layers 0 to 2; decoder \(decoder\.block\), layers 0 to 4"


def names(layers) -> list[tuple[str, int]]:
    return [(layer.stack, layer.index) for layer in layers]


def test_a_mapping_counts_in_each_stack_and_keeps_the_order_of_the_model(t5):
    layers = resolve_layers(t5, {"decoder": "last:2", "encoder": [0, -1]})
    assert names(layers) == [("encoder", 0), ("encoder", 2), ("decoder", 3), ("decoder", 4)]


def test_one_stack_of_several_may_be_named(t5):
    assert names(resolve_layers(t5, {"decoder": [0]})) == [("decoder", 0)]
    assert names(resolve_layers(t5, "last:1", stack="decoder")) == [("decoder", 4)]


def test_a_stack_may_be_named_by_its_path(t5):
    assert names(resolve_layers(t5, [0], stack="decoder.block")) == [("decoder", 0)]
    assert names(resolve_layers(t5, {"encoder.block": "first:1"})) == [("encoder", 0)]


def test_a_mapping_works_on_a_model_with_one_stack(bert):
    assert indices(resolve_layers(bert, {"encoder": "last:2"})) == [10, 11]


def test_any_list_may_be_given_by_its_path():
    model = WithLayers(nn.ModuleList(MoEBlock() for _ in range(4)))
    layers = resolve_layers(model, {"layers.2.experts": [1], "layers": [0]})
    assert [layer.path for layer in layers] == ["layers.0", "layers.2.experts.1"]
    assert choose_stack(model, "layers.2.experts").name == "layers.2.experts"


@pytest.mark.parametrize("spec", [[3], "last:1", "all", [0, -1]])
def test_a_bare_choice_among_several_stacks_is_refused_with_their_list(t5, spec):
    # S8: a plain index is ambiguous
    with pytest.raises(ValueError, match="several stacks") as error:
        resolve_layers(t5, spec)
    assert error.match(T5_STACKS)
    with pytest.raises(ValueError, match=r"vision_tower \(.*\), layers 0 to 1; language_model \(.*\), layers 0 to 3"):
        resolve_layers(TwoTowers(), spec)


@pytest.mark.parametrize("name", ["middle", "", "encoder.block.0", "shared", "lm_head"])
def test_an_unknown_stack_is_refused_with_the_known_ones(t5, name):
    for choose in (
        lambda: choose_stack(t5, name),
        lambda: resolve_layers(t5, [0], stack=name),
        lambda: resolve_layers(t5, {"encoder": [0], name: [0]}),
    ):
        with pytest.raises(ValueError, match=f"no stack of layers named {name!r}") as error:
            choose()
        assert error.match(T5_STACKS)


def test_an_empty_list_or_an_empty_name_is_no_stack():
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList())
    for name in ("1", ""):
        with pytest.raises(ValueError, match=f"no stack of layers named '{name}'. Stacks: none."):
            choose_stack(model, name)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "chooses no layer"),
        ({"encoder": [0], "encoder.block": [1]}, "names a stack twice"),
        ({"encoder": [0], 3: [1]}, "no stack of layers named 3"),
    ],
)
def test_bad_mappings_are_refused_with_the_list_of_stacks(t5, spec, message):
    with pytest.raises(ValueError, match=message) as error:
        resolve_layers(t5, spec)
    assert error.match(T5_STACKS)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"encoder": [0], "decoder": []}, r"no layer. Stack: decoder \(decoder\.block\), layers 0 to 4"),
        ({"encoder": [3]}, r"no layer 3. Stack: encoder \(encoder\.block\), layers 0 to 2"),
    ],
)
def test_a_fault_in_one_stack_names_that_stack(t5, spec, message):
    with pytest.raises(ValueError, match=message):
        resolve_layers(t5, spec)


def test_a_mapping_inside_a_mapping_is_a_type_error(t5):
    with pytest.raises(TypeError, match="dict"):
        resolve_layers(t5, {"encoder": {"block": [0]}})


def test_a_mapping_together_with_a_stack_is_refused(t5):
    with pytest.raises(ValueError, match="already names its stacks, so stack='encoder' has no meaning"):
        resolve_layers(t5, {"encoder": [0]}, stack="encoder")


def test_a_model_without_stacks_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match=r"No stack of layers was found in Linear: .*target_modules=.*stack="):
        resolve_layers(nn.Linear(2, 2), "last:1")


def test_a_layer_without_parameters_is_refused_by_its_path():
    model = nn.Module()
    model.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ValueError, match=r"body\.1, without parameters"):
        resolve_layers(model, "all", stack="body")
    assert indices(resolve_layers(model, [0], stack="body")) == [0]


# --- the stored form -------------------------------------------------------------------------------------------------


def test_one_stack_is_stored_as_a_list(bert):
    assert plain_layers(resolve_layers(bert, [-1, 3]), bert) == [3, 11]


def test_several_stacks_are_stored_by_name(t5):
    assert plain_layers(resolve_layers(t5, {"decoder": "last:1", "encoder": [0]}), t5) == {
        "encoder": [0],
        "decoder": [4],
    }
    assert plain_layers(resolve_layers(t5, {"decoder": [0]}), t5) == {"decoder": [0]}


def test_a_stack_that_no_rule_finds_is_stored_by_its_path():
    model = WithLayers(nn.ModuleList(MoEBlock() for _ in range(4)))
    layers = resolve_layers(model, "all", stack="layers.2.experts")
    assert plain_layers(layers, model) == {"layers.2.experts": [0, 1, 2]}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stored_form_means_the_same_layers_again(family):
    model = build(family)
    stacks = find_stacks(model)
    spec = "last:50%" if len(stacks) == 1 else dict.fromkeys(stacks, "last:50%")
    layers = resolve_layers(model, spec)
    again = resolve_layers(model, plain_layers(layers, model))
    assert [layer.module for layer in again] == [layer.module for layer in layers]


def test_no_stacks_are_described_as_none():
    assert describe_stacks({}) == "Stacks: none."
