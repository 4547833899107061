"""The head is whatever lies beside the pretrained model: trained, saved, and back after loading on another draw."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from adapters import METHODS, make_config, save, shake
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import batch, build
from torch import nn

from peft_surgical import DeltaBank, SurgicalConfig, find_stacks


TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
WAV = {**TINY, "conv_dim": (8,), "conv_stride": (2,), "conv_kernel": (4,), "num_conv_pos_embeddings": 4}
WAV |= {"num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 1, "classifier_proj_size": 8, "num_labels": 3}
WHISPER = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "vocab_size": 99}
WHISPER |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8}
WHISPER |= {"max_source_positions": 10, "max_target_positions": 10, "classifier_proj_size": 8, "num_labels": 3}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SOUND = {"input_values": torch.randn(2, 64, generator=torch.Generator().manual_seed(0))}
CASES = {
    "whisper": (
        "WhisperForAudioClassification",
        lambda: transformers.WhisperConfig(**WHISPER),
        {"input_features": torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0))},
        {"projector", "classifier"},
    ),
    "wav2vec2": (
        "Wav2Vec2ForSequenceClassification",
        lambda: transformers.Wav2Vec2Config(**WAV),
        SOUND,
        {"projector", "classifier"},
    ),
    "wav2vec2-xvector": (
        "Wav2Vec2ForXVector",
        lambda: transformers.Wav2Vec2Config(
            **WAV, tdnn_dim=(8, 8), tdnn_kernel=(3, 1), tdnn_dilation=(1, 1), xvector_output_dim=8
        ),
        SOUND,
        {"projector", "tdnn", "classifier", "objective"},  # feature_extractor is also the name of a part of the body
    ),
    "clip": (
        "CLIPForImageClassification",
        lambda: transformers.CLIPConfig(
            text_config={**TINY, "vocab_size": 99}, vision_config={**TINY, "image_size": 16, "patch_size": 8}
        ),
        {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))},
        {"classifier"},
    ),
}


def make(case: str, head_seed: int) -> nn.Module:
    """The same pretrained model with another draw of the head."""
    cls, config, _, heads = CASES[case]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(config())
    torch.manual_seed(head_seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.partition(".")[0] in heads:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.eval()


@pytest.mark.filterwarnings("ignore:'feature_extractor' of Wav2Vec2ForXVector")
@pytest.mark.parametrize("case", CASES)
def test_every_part_of_the_head_is_trained_saved_and_comes_back(case, tmp_path):
    _, _, inputs, heads = CASES[case]
    base = make(case, 1)
    layers = {"encoder": [1]} if len(find_stacks(base)) > 1 else [1]
    if case == "clip":  # PEFT's class for this task type hands on arguments that CLIP does not take
        config = SurgicalConfig(layers=layers, modules_to_save=["classifier"])
    else:
        config = SurgicalConfig(task_type="SEQ_CLS", layers=layers)
    model = get_peft_model(base, config)
    trained = {name for name, p in model.named_parameters() if p.requires_grad and "modules_to_save" in name}
    assert {name.split("base_model.model.")[1].partition(".")[0] for name in trained} == heads
    shake(model, "default").eval()
    expected = model.base_model(**inputs).logits  # PEFT's class for the task type hands on texts in its older releases
    folder = save(model, tmp_path)
    names = set(load_file(folder / "adapter_model.safetensors"))
    assert {name.split("base_model.model.")[1].partition(".")[0] for name in names} >= heads
    loaded = PeftModel.from_pretrained(make(case, 2), folder).eval()
    assert torch.equal(loaded.base_model(**inputs).logits, expected)
    merged = copy.deepcopy(loaded).merge_and_unload()
    assert torch.equal(merged(**inputs).logits, expected)
    plain = make(case, 2)
    with loaded.disable_adapter():
        assert torch.equal(loaded.base_model(**inputs).logits, plain(**inputs).logits)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_base_without_a_head_is_told_which_class_to_load(method, family, tmp_path):
    kind = {"bert": "BertForSequenceClassification", "gpt2": "GPT2ForSequenceClassification"}[family]
    model = get_peft_model(build(family, head=kind), make_config(method, family, [1], task_type="SEQ_CLS"))
    model.save_pretrained(tmp_path)
    told = (
        rf"trained on a {kind}; this model is a \w+Model, which has no head. Load the base with {kind}.from_pretrained"
    )
    with pytest.raises(ValueError, match=told):
        PeftModel.from_pretrained(build(family, bare=True), tmp_path)
    bank = DeltaBank(build(family, bare=True))
    with pytest.raises(ValueError, match=told):
        bank.add("task", tmp_path)


def test_a_parameter_that_the_model_holds_itself_is_named():
    config = transformers.Wav2Vec2Config(**WAV, use_weighted_layer_sum=True)
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    with pytest.warns(UserWarning, match="layer_weights"):
        get_peft_model(model, SurgicalConfig(task_type="SEQ_CLS", layers={"encoder": [1]}))


@pytest.mark.parametrize(("family", "name"), [("llama", "norm"), ("gpt2", "te"), ("bert", "LayerNorm")])
def test_a_name_means_every_module_whose_path_ends_with_it_as_in_peft(family, name, tmp_path):
    kind = "SEQ_CLS" if family == "bert" else "CAUSAL_LM"
    model = get_peft_model(build(family), SurgicalConfig(task_type=kind, layers=[1], modules_to_save=[name]))
    lora = LoraConfig(task_type=kind, target_modules=["query", "q_proj", "c_attn"], modules_to_save=[name])
    saved = [
        {n for n, p in m.named_parameters() if p.requires_grad and "modules_to_save" in n}
        for m in (model, get_peft_model(build(family), lora))
    ]
    assert saved[0] == saved[1]
    shake(model, "default")
    with torch.no_grad():
        expected = model(**batch(family)).logits
        model.save_pretrained(tmp_path)
        assert torch.equal(PeftModel.from_pretrained(build(family), tmp_path)(**batch(family)).logits, expected)
        assert torch.equal(model.merge_and_unload()(**batch(family)).logits, expected)


def test_names_that_mean_a_module_and_one_inside_it_are_refused():
    model = build("bert")
    with pytest.raises(ValueError, match="'bert.embeddings.word_embeddings' and 'bert.embeddings' around it"):
        get_peft_model(model, SurgicalConfig(task_type="SEQ_CLS", layers=[1], modules_to_save=["embeddings"]))
    get_peft_model(model, SurgicalConfig(task_type="SEQ_CLS", layers=[1], modules_to_save=["bert.embeddings"]))
