from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch
import transformers
from adapters import rewrite
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tensor_checks import Counted, assert_same_bits
from tiny_models import FAMILIES, batch, build
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification, BertModel

from peft_surgical import SurgicalConfig
from peft_surgical.convert.change import WeightChanges, measure_changes, relative_distance
from peft_surgical.convert.diff import diff_checkpoints
from peft_surgical.convert.merge import merge_checkpoint
from peft_surgical.files import safetensors_io


TIED_ONCE = pytest.mark.skipif(
    transformers.__version__.startswith("4."),
    reason="transformers 4 writes T5's tied embeddings under several names, and the diff lists those as left out",
)


def change(model, *parts: str, size: float = 0.01) -> None:
    """Move every tensor whose name has one of these parts in it; all if none is given."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parts or any(part in name for part in parts):
                parameter.add_(size * torch.randn_like(parameter))


def fine_tune(folder, *parts: str, family: str = "bert", base_bare: bool = False, bare: bool = False, **options):
    """Save a base and a model trained from it; gives the tuned model as transformers loads it."""
    build(family, bare=base_bare).save_pretrained(folder / "base")
    cls = getattr(transformers, FAMILIES[family][2 if bare else 3])
    model = cls.from_pretrained(folder / "base", **options)
    change(model, *parts)
    model.save_pretrained(folder / "tuned")
    return cls.from_pretrained(folder / "tuned").eval()


def load(folder, cls, **options):
    return PeftModel.from_pretrained(cls.from_pretrained(folder / "base", **options), folder / "delta").eval()


def answer(model, family: str) -> torch.Tensor:
    x = batch(family, labels=family in ("t5", "bart"))
    if family in ("t5", "bart") and not hasattr(model, "lm_head"):
        x["decoder_input_ids"] = x.pop("labels")
    with torch.no_grad():
        return model(**x)[0] if "labels" not in x else model(**x).logits


def layer_distances(changes: WeightChanges) -> dict[tuple[str, int], float]:
    return {key: relative_distance(found) for key, found in changes.by_layer().items()}


# ---- diff


@pytest.mark.parametrize(
    ("family", "bare", "base_bare"),
    [
        ("bert", False, False),
        ("bert", False, True),  # the base has no prefix and no head
        ("bert", True, False),
        ("roberta", False, True),
        ("deberta-v2", False, True),
        ("distilbert", False, True),
        ("albert", False, False),
        ("modernbert", False, True),
        ("gpt2", False, False),  # tied
        ("llama", False, True),
        ("llama", True, False),  # its final norm is called like every other norm
        ("gemma3", False, False),
        ("mixtral", False, False),  # experts are stored one by one
        pytest.param("t5", False, False, marks=TIED_ONCE),
        ("bart", False, False),
        ("vit", False, True),
    ],
)
def test_the_diff_of_a_full_fine_tune_gives_the_tuned_model_bit_for_bit(family, bare, base_bare, tmp_path):
    tuned = fine_tune(tmp_path, family=family, bare=bare, base_bare=base_bare)
    found = diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    assert found.left_out == []
    loaded = load(tmp_path, type(tuned))
    assert torch.equal(answer(loaded, family), answer(tuned, family))
    assert_same_bits(loaded.merge_and_unload().state_dict(), tuned.state_dict())


def test_the_file_is_the_one_that_peft_itself_would_write(tmp_path):
    tuned = fine_tune(tmp_path, "layer.2", "classifier")
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    loaded = load(tmp_path, type(tuned))
    assert_same_bits(load_file(tmp_path / "delta" / "adapter_model.safetensors"), get_peft_model_state_dict(loaded))
    loaded.save_pretrained(tmp_path / "again")
    configs = [json.loads((tmp_path / f / "adapter_config.json").read_text()) for f in ("delta", "again")]
    heads = [config.pop("modules_to_save") for config in configs]
    assert configs[0] == configs[1]
    assert set(heads[0]) <= set(heads[1])  # PEFT adds the names of heads that other models have


def test_exactly_the_layers_that_differ_are_stored(tmp_path):
    fine_tune(tmp_path, "layer.1.output.dense.bias", "layer.3.attention.self.query.weight")
    found = diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    assert found.config.layers == [1, 3]
    assert found.config.extra_modules is None
    assert found.config.task_type == "SEQ_CLS"
    assert found.config.record["architecture"] == "BertForSequenceClassification"
    names = set(load_file(tmp_path / "delta" / "adapter_model.safetensors"))
    assert len(names) == 2 * 16 + 2
    assert "base_model.model.classifier.weight" in names


def test_stacks_are_told_apart(tmp_path):
    fine_tune(tmp_path, "decoder.block.2", family="t5")
    found = diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    assert found.config.layers == {"decoder": [2]}


def test_top_k_and_threshold_keep_the_layers_that_moved_most(tmp_path):
    build("bert").save_pretrained(tmp_path / "base")
    model = build("bert")
    for layer, size in enumerate([3e-3, 1e-4, 1e-2, 1e-3]):
        change(model, f"layer.{layer}.", size=size)
    model.save_pretrained(tmp_path / "tuned")
    paths = tmp_path / "base", tmp_path / "tuned", tmp_path / "delta"
    found = diff_checkpoints(*paths, top_k=2)
    assert found.config.layers == [0, 2]
    assert {name.split(".")[3] for name in found.left_out} == {"1", "3"}
    distances = layer_distances(found.movement)
    between = math.sqrt(distances["encoder", 1] * distances["encoder", 3])
    assert diff_checkpoints(*paths, threshold=between).config.layers == [0, 2, 3]
    with pytest.raises(ValueError, match="threshold=5: no layer moved by more than"):
        diff_checkpoints(*paths, threshold=5)
    with pytest.raises(ValueError, match="top_k=0 must be"):
        diff_checkpoints(*paths, top_k=0)


def test_movement_is_the_norm_of_the_difference_over_the_norm(tmp_path):
    tuned = fine_tune(tmp_path)
    base = build("bert")
    found = diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta").movement
    before, after = (
        np.concatenate([p.detach().double().numpy().ravel() for p in m.bert.encoder.layer[2].parameters()])
        for m in (base, tuned)
    )
    expected = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert layer_distances(found)["encoder", 2] == pytest.approx(expected, rel=1e-9)
    weights = (m.bert.encoder.layer[2].output.dense for m in (base, tuned))
    before, after = (
        np.concatenate([w.weight.detach().double().numpy().ravel(), w.bias.detach().double()]) for w in weights
    )
    expected = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert found.by_part()["encoder", 2, "output.dense"] == pytest.approx(expected, rel=1e-9)


def test_the_table_and_the_heat_map_name_layers_and_parts(tmp_path):
    fine_tune(tmp_path, "layer.1.intermediate", "word_embeddings", num_labels=5, ignore_mismatched_sizes=True)
    found = diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta").movement
    lines = str(found).splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [["encoder", str(i)] for i in range(4)]
    assert "intermediate.dense" in lines[2]
    assert lines[1].split()[2:] == ["0.000e+00", "0"]
    assert any(line.startswith("bert.embeddings.word_embeddings") for line in lines)
    assert next(line for line in lines if line.startswith("classifier")).split()[1] == "new"
    found.plot(tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000


@pytest.mark.parametrize("encoding", ["lossless", "int8"])
def test_a_diff_may_be_encoded(encoding, tmp_path):
    tuned = fine_tune(tmp_path)
    found = diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta", encoding=encoding)
    loaded = load(tmp_path, type(tuned))
    if encoding == "lossless":
        assert_same_bits(loaded.merge_and_unload().state_dict(), tuned.state_dict())
    else:
        assert found.nbytes < 0.5 * found.nbytes_tuned
        torch.testing.assert_close(answer(loaded, "bert"), answer(tuned, "bert"), atol=1e-3, rtol=0)


def test_a_head_of_another_size_keeps_its_labels(tmp_path):
    names = {0: "no", 1: "maybe", 2: "yes"}
    tuned = fine_tune(tmp_path, "layer.0.", base_bare=True, num_labels=3, id2label=names)
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    loaded = load(tmp_path, BertForSequenceClassification)
    assert torch.equal(answer(loaded, "bert"), answer(tuned, "bert"))
    assert loaded.config.id2label == names


def test_half_precision_and_mixed_dtypes_are_compared_by_value(tmp_path):
    build("bert").bfloat16().save_pretrained(tmp_path / "base")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "base", dtype=torch.float32)
    change(model, "layer.3.")
    model.save_pretrained(tmp_path / "tuned")
    found = diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    assert found.config.layers == [3]  # the others are only stored in a wider dtype
    loaded = load(tmp_path, BertForSequenceClassification, dtype=torch.float32)
    assert torch.equal(answer(loaded, "bert"), answer(model.eval(), "bert"))


# ---- embeddings


def resized(folder):
    build("bert").save_pretrained(folder / "base")
    model = BertForSequenceClassification.from_pretrained(folder / "base")
    model.resize_token_embeddings(110)
    change(model, "layer.1.", "word_embeddings")
    model.save_pretrained(folder / "tuned")
    return model.eval()


def test_resized_embeddings_are_refused_unless_asked_for(tmp_path):
    resized(tmp_path)
    with pytest.raises(
        ValueError, match=r"word_embeddings.weight' was resized; its shape was \(99, 16\).*--embeddings"
    ):
        diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_resized_embeddings_are_included_by_flag_and_need_a_resized_base(tmp_path):
    model = resized(tmp_path)
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta", embeddings=True)
    base = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"resize_token_embeddings\(110\)"):
        PeftModel.from_pretrained(base, tmp_path / "delta")
    base.resize_token_embeddings(110)
    loaded = PeftModel.from_pretrained(base, tmp_path / "delta").eval()
    assert torch.equal(answer(loaded, "bert"), answer(model, "bert"))


def test_embeddings_may_be_left_out(tmp_path):
    fine_tune(tmp_path, "layer.1.", "embeddings", "pooler")
    found = diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta", embeddings=False)
    assert found.left_out == ["bert.embeddings.word_embeddings.weight"]
    assert "bert.embeddings.position_embeddings" in found.config.extra_modules
    tensors = load_file(tmp_path / "delta" / "adapter_model.safetensors")
    assert not any("word_embeddings" in name for name in tensors)


def test_tied_embeddings_stay_tied(tmp_path):
    tuned = fine_tune(tmp_path, "wte", "h.1.", family="gpt2")
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    loaded = load(tmp_path, type(tuned))
    inner = loaded.base_model.model
    assert inner.lm_head.surgical_params["default"].weight is inner.transformer.wte.surgical_params["default"].weight
    merged = loaded.merge_and_unload()
    assert merged.lm_head.weight is merged.transformer.wte.weight


# ---- what cannot be done


def test_equal_checkpoints_and_a_changed_head_alone_are_errors(tmp_path):
    fine_tune(tmp_path, "nothing")
    with pytest.raises(ValueError, match="All layers .* are equal"):
        diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    fine_tune(tmp_path, "classifier")
    with pytest.raises(ValueError, match="All layers .* are equal"):
        diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")


@pytest.mark.parametrize(
    ("tuned", "message"),
    [
        (lambda: build("roberta"), "is a bert and .* a roberta"),
        (lambda: build("bert", num_hidden_layers=6), "num_hidden_layers=6 .* has 4"),
        (lambda: build("bert", num_hidden_layers=2), "cannot take layers away"),
        (lambda: build("bert", intermediate_size=24), "intermediate_size=24 .* has 32"),
    ],
)
def test_other_models_are_refused(tuned, message, tmp_path):
    build("bert").save_pretrained(tmp_path / "base")
    tuned().save_pretrained(tmp_path / "tuned")
    with pytest.raises(ValueError, match=message):
        diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")


def test_a_base_whose_file_lacks_a_layers_tensor_is_refused(tmp_path):
    name = "bert.encoder.layer.2.output.dense.weight"
    build("bert").save_pretrained(tmp_path / "tuned")
    build("bert").save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"base has no '{name}' of the same shape"):
        diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("bert", {"hidden_act": "relu"}),
        ("bert", {"layer_norm_eps": 0.1}),
        ("llama", {"rms_norm_eps": 0.1}),
        ("llama", {"rope_theta": 10.0}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("gpt2", {"scale_attn_weights": False}),
        ("t5", {"relative_attention_max_distance": 7}),
    ],
)
def test_a_fine_tune_that_computes_otherwise_is_refused(family, setting, tmp_path):
    fine_tune(tmp_path, "1.", family=family)
    path = tmp_path / "tuned" / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters", None)
    path.write_text(json.dumps(config | setting))
    with pytest.raises(ValueError, match="in its config.json.*Give a base with the same setting"):
        diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_settings_that_compute_nothing_may_differ(tmp_path):
    tuned = fine_tune(tmp_path, "layer.1.")
    path = tmp_path / "tuned" / "config.json"
    other = {
        "hidden_dropout_prob": 0.3,
        "id2label": {"0": "no", "1": "yes"},
        "use_cache": False,
        "unsloth_version": "1",
        "tokenizer_class": "BertTokenizer",
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | other))
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    assert torch.equal(answer(load(tmp_path, type(tuned)), "bert"), answer(tuned, "bert"))


def test_what_is_no_checkpoint_says_so(tmp_path):
    fine_tune(tmp_path, "layer.1.")
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    with pytest.raises(ValueError, match="delta is an adapter"):
        diff_checkpoints(tmp_path / "base", tmp_path / "delta", tmp_path / "x")
    with pytest.raises(ValueError, match="nobody/nothing is neither a folder nor a model on the hub"):
        diff_checkpoints(tmp_path / "base", "nobody/nothing", tmp_path / "x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no config.json"):
        diff_checkpoints(tmp_path / "base", tmp_path / "empty", tmp_path / "x")
    shutil.copy(tmp_path / "base" / "config.json", tmp_path / "empty")
    with pytest.raises(ValueError, match="no model.safetensors or pytorch_model.bin"):
        diff_checkpoints(tmp_path / "base", tmp_path / "empty", tmp_path / "x")
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(ValueError, match="cannot be read as a safetensors file"):
        diff_checkpoints(tmp_path / "base", tmp_path / "empty", tmp_path / "x")
    assert not (tmp_path / "x").exists()


# ---- files


def test_sharded_and_old_checkpoints_are_read(tmp_path):
    tuned = fine_tune(tmp_path)
    tuned.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    (tmp_path / "old").mkdir()
    torch.save(build("bert").state_dict(), tmp_path / "old" / "pytorch_model.bin")
    shutil.copy(tmp_path / "base" / "config.json", tmp_path / "old")
    diff_checkpoints(tmp_path / "old", tmp_path / "sharded", tmp_path / "delta")
    assert torch.equal(answer(load(tmp_path, type(tuned)), "bert"), answer(tuned, "bert"))
    next((tmp_path / "sharded").glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match="lacks model-00002-of-"):
        diff_checkpoints(tmp_path / "old", tmp_path / "sharded", tmp_path / "delta")


def test_a_name_on_the_hub_is_fetched(tmp_path, monkeypatch):
    fine_tune(tmp_path, "layer.1.")
    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, tuple(allow_patterns)))
        return str(tmp_path / "base")

    monkeypatch.setattr(safetensors_io, "snapshot_download", fetch)
    diff_checkpoints("someone/bert", tmp_path / "tuned", tmp_path / "delta")
    assert [name for name, _ in asked] == ["someone/bert"]
    assert "*.safetensors" in asked[0][1]
    assert "*.bin" not in asked[0][1]
    assert (
        json.loads((tmp_path / "delta" / "adapter_config.json").read_text())["base_model_name_or_path"]
        == "someone/bert"
    )


def test_never_more_than_one_tensor_of_each_checkpoint_is_compared():
    base, tuned = build("bert"), build("bert", seed=1)
    states = Counted(base.state_dict()), Counted(tuned.state_dict())
    assert all(change.differs for change in measure_changes(*states, base))
    assert [state.most for state in states] == [1, 1]


# ---- merge


def test_merging_a_diff_gives_the_tuned_checkpoint_bit_for_bit(tmp_path):
    tuned = fine_tune(tmp_path, base_bare=True, num_labels=3)
    (tmp_path / "base" / "vocab.txt").write_text("[PAD]\n")
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta", encoding="lossless")
    merge_checkpoint(tmp_path / "base", tmp_path / "delta", tmp_path / "merged", max_shard_size="30KB")
    assert len(list((tmp_path / "merged").glob("model-*.safetensors"))) > 1
    assert (tmp_path / "merged" / "vocab.txt").read_text() == "[PAD]\n"
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert_same_bits(loaded.state_dict(), tuned.state_dict())
    assert loaded.config.num_labels == 3
    assert loaded.config.architectures == ["BertForSequenceClassification"]


@pytest.mark.parametrize("family", ["gpt2", "t5", "mixtral", "vit"])
def test_other_families_merge_back_too(family, tmp_path):
    tuned = fine_tune(tmp_path, family=family)
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    merge_checkpoint(tmp_path / "base", tmp_path / "delta", tmp_path / "merged")
    loaded = type(tuned).from_pretrained(tmp_path / "merged").eval()
    assert_same_bits(loaded.state_dict(), tuned.state_dict())


def test_a_trained_adapter_merges_as_peft_merges_it_and_rounds_once(tmp_path):
    build("bert").bfloat16().save_pretrained(tmp_path / "base")
    base = BertForSequenceClassification.from_pretrained(tmp_path / "base", dtype="auto")
    model = get_peft_model(base, SurgicalConfig(task_type="SEQ_CLS", layers=[1]))
    change(model, "surgical", "modules_to_save")
    model.save_pretrained(tmp_path / "delta")
    merge_checkpoint(tmp_path / "base", tmp_path / "delta", tmp_path / "merged")
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "merged", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert_same_bits(loaded.state_dict(), model.merge_and_unload().state_dict())
    merge_checkpoint(tmp_path / "base", tmp_path / "delta", tmp_path / "wide", dtype=torch.float32)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "wide", dtype="auto")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_lora_merges_through_peft(tmp_path):
    build("bert").save_pretrained(tmp_path / "base")
    base = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", target_modules=["query"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "delta")
    merge_checkpoint(tmp_path / "base", tmp_path / "delta", tmp_path / "merged")
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert_same_bits(loaded.state_dict(), model.merge_and_unload().state_dict())


def test_merging_onto_another_base_or_onto_the_base_itself_is_refused(tmp_path):
    fine_tune(tmp_path, "layer.1.", base_bare=True)
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    with pytest.raises(ValueError, match="base itself"):
        merge_checkpoint(tmp_path / "base", tmp_path / "delta", tmp_path / "base")
    build("bert", seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(
        ValueError,
        match="delta names the base .*base.*, not .*other: .*trained on another base model: .*has other values",
    ):
        merge_checkpoint(tmp_path / "other", tmp_path / "delta", tmp_path / "merged")
    model = get_peft_model(BertModel.from_pretrained(tmp_path / "base"), SurgicalConfig(layers=[0]))
    model.save_pretrained(tmp_path / "headless")
    tensors = load_file(tmp_path / "headless" / "adapter_model.safetensors")
    rewrite(tmp_path / "headless", tensors, architecture="BertForSequenceClassification")
    with pytest.raises(ValueError, match="does not have|Neither"):
        merge_checkpoint(tmp_path / "base", tmp_path / "headless", tmp_path / "merged")


def test_a_module_outside_the_layers_must_exist():
    with pytest.raises(ValueError, match=r"extra_modules: BertForSequenceClassification has no module 'pooler'"):
        get_peft_model(build("bert"), SurgicalConfig(layers=[0], extra_modules=["pooler"]))
