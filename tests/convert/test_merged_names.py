"""A merged checkpoint has the names, shapes, dtypes and files of its base's, also where loading converts them (C1)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from adapters import METHODS, make_config, outputs, shake
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from tensor_checks import assert_same_bits
from tiny_models import batch, build

from peft_surgical import StratifiedConfig, SurgicalConfig, merge_checkpoint
from peft_surgical.convert.merge import merged_changes, tensors_of_base
from peft_surgical.files.checkpoint import Checkpoint
from peft_surgical.methods.config import open_adapter


def header(folder: Path) -> dict[str, tuple]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.update(
                {n: (path.name, file.get_slice(n).get_shape(), file.get_slice(n).get_dtype()) for n in file.keys()}
            )
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["SURGICAL", "LORA"])
@pytest.mark.parametrize("family", ["mixtral", "gpt2", "t5"])
def test_a_merged_checkpoint_is_named_and_divided_as_its_base(family, method, dtype, tmp_path):
    build(family).to(dtype).save_pretrained(tmp_path / "base", max_shard_size="20KB")
    kind = type(build(family))
    base = kind.from_pretrained(tmp_path / "base", dtype=dtype)
    names = {"mixtral": ["q_proj"], "gpt2": ["c_attn"], "t5": ["q"]}[family]
    layers = {"decoder": [1, 3]} if family == "t5" else [1, 3]
    config = SurgicalConfig(layers=layers) if method == "SURGICAL" else LoraConfig(target_modules=names)
    model = shake(get_peft_model(base, config), "default").eval()
    model.save_pretrained(tmp_path / "adapter")
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    before, after = header(tmp_path / "base"), header(tmp_path / "merged")
    assert after == before
    assert len({file for file, _, _ in before.values()}) > 1
    if family == "mixtral" and int(transformers.__version__[0]) >= 5:
        assert any("experts.0.w1" in name for name in before)  # what it is about: in memory there is gate_up_proj
    again, told = kind.from_pretrained(tmp_path / "merged", dtype=dtype, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    with torch.no_grad():
        merged = model.merge_and_unload()
        assert torch.equal(again.eval()(**batch(family)).logits, merged(**batch(family)).logits)


def test_the_files_can_be_divided_otherwise(tmp_path):
    build("gpt2").save_pretrained(tmp_path / "base", max_shard_size="20KB")
    base = type(build("gpt2")).from_pretrained(tmp_path / "base")
    shake(get_peft_model(base, SurgicalConfig(layers=[1])), "default").save_pretrained(tmp_path / "adapter")
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", max_shard_size="1GB")
    assert {file for file, _, _ in header(tmp_path / "merged").values()} == {"model.safetensors"}


def save_both(folder: Path, family: str, config, dtype=torch.float32, **options):
    """Save a base and an adapter of it that is off its start; gives the adapter's model."""
    build(family, **options).to(dtype).save_pretrained(folder / "base", max_shard_size="20KB")
    base = type(build(family)).from_pretrained(folder / "base", dtype=dtype)
    model = shake(get_peft_model(base, config), "default").eval()
    model.save_pretrained(folder / "adapter")
    return model


def changes(folder: Path) -> dict[str, torch.Tensor]:
    saved = open_adapter(folder / "adapter")
    return merged_changes(tensors_of_base(Checkpoint(folder / "base"), saved), saved)


@pytest.mark.parametrize("encoding", ["values", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_changes_are_what_differs_between_the_merged_checkpoint_and_the_base(
    family, method, dtype, encoding, tmp_path
):
    save_both(tmp_path, family, make_config(method, family, [1, 3], encoding=encoding), dtype)
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    base, merged, found = Checkpoint(tmp_path / "base"), Checkpoint(tmp_path / "merged"), changes(tmp_path)
    assert_same_bits(found, {name: merged[name] for name in found})
    kept = [name for name in merged if name not in found]
    assert_same_bits({name: base[name] for name in kept}, {name: merged[name] for name in kept})
    assert 0 < len(found) < len(kept) + len(found)


UNTYING = [
    {"target_modules": ["lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]},
]


@pytest.mark.parametrize("options", UNTYING)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Setting `save_embedding_layers`")
def test_a_tied_head_that_was_tuned_is_untied_in_the_checkpoint_and_cannot_be_exchanged(options, tmp_path):
    model = save_both(tmp_path, "qwen3", SurgicalConfig(task_type="CAUSAL_LM", **options), tie_word_embeddings=True)
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = type(build("qwen3")).from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(outputs(merged, "qwen3"), outputs(model, "qwen3"))
    with pytest.raises(ValueError, match="one of two tied tensors"):
        changes(tmp_path)


@pytest.mark.parametrize("encoding", ["values", "lossless", "int8"])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"layers": [1], "extra_modules": ["model.embed_tokens", "lm_head"]},
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Setting `save_embedding_layers`")
def test_a_head_and_embeddings_that_are_tuned_together_stay_tied(options, encoding, tmp_path):
    config = SurgicalConfig(task_type="CAUSAL_LM", encoding=encoding, **options)
    save_both(tmp_path, "qwen3", config, tie_word_embeddings=True)
    base = type(build("qwen3")).from_pretrained(tmp_path / "base")
    wanted = outputs(PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), "qwen3")
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = type(build("qwen3")).from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(outputs(merged, "qwen3"), wanted)
    assert merged.config.tie_word_embeddings
    found, before = changes(tmp_path), Checkpoint(tmp_path / "base")
    assert found["model.embed_tokens.weight"].shape == before["model.embed_tokens.weight"].shape
    assert found.keys() <= set(before)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Setting `save_embedding_layers`")
def test_lora_on_a_tied_head_and_embeddings_cannot_be_exchanged(tmp_path):
    config = StratifiedConfig(task_type="CAUSAL_LM", target_modules=["embed_tokens", "lm_head"])
    save_both(tmp_path, "qwen3", config, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="one of two tied tensors"):
        changes(tmp_path)


def test_what_is_no_exchange_of_the_bases_tensors_is_refused(tmp_path):
    build("llama").save_pretrained(tmp_path / "base")
    cls = transformers.LlamaForSequenceClassification
    headed = get_peft_model(cls.from_pretrained(tmp_path / "base"), SurgicalConfig(task_type="SEQ_CLS", layers=[1]))
    headed.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="The adapter has another 'score.weight' than .*base. Merge it"):
        changes(tmp_path)
    lora = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"]))
    lora.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="is a LORA; allowed are SURGICAL and STRATIFIED"):
        changes(tmp_path)
    build("qwen3").save_pretrained(tmp_path / "base")
    get_peft_model(build("llama"), SurgicalConfig(layers=[1])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="its model type was llama, this model's is qwen3"):
        changes(tmp_path)
