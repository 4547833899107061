"""Layers that share modules or parameters with others, and what the base itself does not train."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from adapters import METHODS, shake
from peft import PeftModel, get_peft_model
from tiny_models import batch, build
from torch import nn
from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    PerceiverConfig,
    PerceiverForSequenceClassification,
)

from peft_surgical import StratifiedConfig, SurgicalConfig
from peft_surgical.methods.report import GradientWatch


def config(method: str, layers: list[int], **options):
    if method == "SURGICAL":
        return SurgicalConfig(layers=layers, **options)
    strata = [{"layers": [i], "tune": "full" if i in layers else "frozen"} for i in range(4)]
    return StratifiedConfig(strata=strata, r=2, target_modules=["query"], **options)


def sharing(kind: str) -> nn.Module:
    """A BERT whose layers 0 and 2 share a module, or a parameter."""
    model = build("bert")
    layers = model.bert.encoder.layer
    if kind == "module":
        layers[2].intermediate = layers[0].intermediate
    else:
        layers[2].intermediate.dense.weight = layers[0].intermediate.dense.weight
    return model


def trained_logits(model: nn.Module, seed: int = 3) -> torch.Tensor:
    shake(model, "default", seed)
    return logits(model)


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model.eval()(**batch("bert")).logits


@pytest.mark.filterwarnings("ignore:.*whose layer is not chosen")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layers", [[0, 2], [0], [2], [1, 2]])
@pytest.mark.parametrize("kind", ["module", "parameter"])
def test_shared_layers_are_trained_saved_loaded_and_merged_exactly(kind, layers, method, tmp_path):
    base = sharing(kind)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = get_peft_model(base, config(method, layers))
    is_told = [str(w.message) for w in told if "is shared with" in str(w.message)]
    assert bool(is_told) == (layers != [0, 2])
    if is_told:
        assert "intermediate.dense.weight" in is_told[0]
        assert "Choose that layer too" in is_told[0]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("intermediate.dense" in name and name.endswith("weight") for name in trained)
    before = logits(model)
    after = trained_logits(model)
    assert not torch.equal(before, after)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(sharing(kind), tmp_path)), after)
    assert torch.equal(logits(copy.deepcopy(model).unload()), logits(sharing(kind)))
    merged = model.merge_and_unload()
    assert torch.equal(logits(merged), after)
    if layers == [0, 2]:
        # what shares it again when it is loaded has the same answers
        again = sharing(kind)
        again.load_state_dict(merged.state_dict())
        assert torch.equal(logits(again), after)


def test_one_module_in_two_places_is_refused_by_its_names():
    model = build("bert")
    layers = model.bert.encoder.layer
    layers[2].intermediate.dense = layers[0].intermediate.dense
    with pytest.raises(ValueError, match=r"0\.intermediate\.dense and .*2\.intermediate\.dense are one module"):
        get_peft_model(model, SurgicalConfig(layers=[2]))
    chosen = get_peft_model(model, SurgicalConfig(layers=[2], exclude_modules=["intermediate"]))
    assert not any("intermediate" in name for name, p in chosen.named_parameters() if p.requires_grad)


def test_a_table_that_several_stacks_hold_is_refused_but_on_meta():
    """As T5's before transformers 5: a copy in one place would change no answer."""
    config = SurgicalConfig(layers={"encoder": [0]}, extra_modules=["shared"])
    for device in ("cpu", "meta"):  # a checkpoint is merged tensor by tensor, and its adapter checked on meta
        model = build("t5").to(device)
        model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared
        if device == "meta":
            assert get_peft_model(model, config)
            continue
        with pytest.raises(ValueError, match=r"shared and encoder\.embed_tokens and decoder\.embed_tokens are one"):
            get_peft_model(model, config)


def test_a_head_that_is_tied_to_other_embeddings_stays_tied_after_merging(tmp_path):
    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    part = BertConfig(**small, intermediate_size=16)
    whole = EncoderDecoderConfig.from_encoder_decoder_configs(part, copy.deepcopy(part))
    whole.decoder_start_token_id = whole.pad_token_id = 0
    torch.manual_seed(0)
    model = get_peft_model(EncoderDecoderModel(whole), SurgicalConfig(layers={"encoder": [1], "decoder": [0]}))
    shake(model, "default")
    merged = model.merge_and_unload().eval()
    merged.save_pretrained(tmp_path)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        right = merged(input_ids=ids, labels=ids).logits
        assert torch.equal(
            EncoderDecoderModel.from_pretrained(tmp_path).eval()(input_ids=ids, labels=ids).logits, right
        )


# ---- what the base does not train


def with_frozen_bias() -> nn.Module:
    """A BERT whose class keeps a parameter of layer 2 for itself, as routers keep corrections of their scores."""
    model = build("bert")
    model.bert.encoder.layer[2].output.dense.bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_what_the_base_does_not_train_is_not_trained(method, tmp_path):
    model = get_peft_model(with_frozen_bias(), config(method, [2]))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("2.output.dense" in name and name.endswith("default.weight") for name in trained)
    assert not any("2.output.dense" in name and name.endswith("default.bias") for name in trained)
    # nor after switching, nor in a second adapter, which finds all of the base frozen
    model.add_adapter("b", config(method, [2]))
    for name in ("b", "default"):
        model.set_adapter(name)
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert trained
        assert not any("2.output.dense" in n and n.endswith(f"{name}.bias") for n in trained)
    after = trained_logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(with_frozen_bias(), tmp_path)), after)
    assert torch.equal(logits(model.merge_and_unload()), after)


def test_a_base_that_somebody_froze_whole_is_trained_where_it_was_asked_for():
    model = build("bert").requires_grad_(False)
    model = get_peft_model(model, SurgicalConfig(layers=[2]))
    assert sum(p.requires_grad for p in model.parameters()) == len(
        list(build("bert").bert.encoder.layer[2].parameters())
    )


def messages(model: nn.Module, steps: int = 10) -> list[str]:
    model.train()
    inputs = batch("bert")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(steps):
            model(**inputs).loss.backward()
            model.zero_grad()
    return [str(w.message) for w in told if "have had no gradient" in str(w.message)]


class Experts(nn.Module):
    """Three experts, of which every token takes the first."""

    def __init__(self, dense: nn.Linear):
        super().__init__()
        self.experts = nn.ModuleList(copy.deepcopy(dense) for _ in range(3))

    def forward(self, x):
        return self.experts[0](x)


def test_a_trained_tensor_without_a_gradient_is_reported_once_by_name():
    base = build("bert")
    base.bert.encoder.layer[3].register_module("unused", nn.Linear(2, 2))
    model = get_peft_model(base, SurgicalConfig(layers=[3]))
    [told] = messages(model, 40)
    assert "2 trained tensors" in told
    assert "layer.3.unused" in told
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert messages(model) == []


def test_no_alarm_for_experts_that_no_token_reached_nor_where_all_is_reached():
    base = build("bert")
    layer = base.bert.encoder.layer[3]
    layer.output.dense = Experts(layer.output.dense)
    assert messages(get_peft_model(base, SurgicalConfig(layers=[3]))) == []
    assert messages(get_peft_model(build("bert"), SurgicalConfig(layers=[1, 2]))) == []


def test_the_watch_leaves_nothing_on_the_parameters():
    parameter, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    watch = GradientWatch([("a", parameter), ("b", other)])
    for _ in range(GradientWatch.passes):
        parameter.sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            watch.update()
    assert not parameter._post_accumulate_grad_hooks
    assert not other._post_accumulate_grad_hooks


def test_embeddings_that_are_a_parameter_and_no_module(tmp_path):
    options = {"d_latents": 8, "d_model": 8, "num_self_attention_heads": 2, "num_cross_attention_heads": 2}
    config = PerceiverConfig(num_latents=4, num_self_attends_per_block=2, vocab_size=99, **options)
    base, inputs = PerceiverForSequenceClassification(config).eval(), torch.tensor([[3, 4, 5]])
    model = get_peft_model(copy.deepcopy(base), SurgicalConfig(layers=[1]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * parameter.requires_grad)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(loaded(inputs=inputs).logits, model.eval()(inputs=inputs).logits)
