"""A merged folder has what a GGUF file needs: its tensors under llama.cpp's names read back as the same model."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from tiny_models import batch, build
from transformers import AutoConfig, AutoModelForCausalLM

from peft_surgical import SurgicalConfig, merge_checkpoint


gguf = pytest.importorskip("gguf")


def test_a_merged_checkpoint_goes_into_gguf_and_back(tmp_path):
    # transformers reads no head size from GGUF for this family, and takes 128
    build("qwen3", head_dim=128).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = get_peft_model(base, SurgicalConfig(task_type="CAUSAL_LM", layers="alternate:50%", init_weights=False))
    tuned.save_pretrained(tmp_path / "delta")
    merge_checkpoint(tmp_path / "base", tmp_path / "delta", tmp_path / "merged")

    config = AutoConfig.from_pretrained(tmp_path / "merged")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, tensor in load_file(tmp_path / "merged/model.safetensors").items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    x = batch("qwen3", labels=False)
    with torch.no_grad():
        assert torch.equal(read(**x).logits, tuned.eval()(**x).logits)
