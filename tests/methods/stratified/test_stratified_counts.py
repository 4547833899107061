"""Table 2 of Arora & Wang (2024): how many numbers each model of the paper trains on BERT-large."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from transformers import BertConfig, BertForSequenceClassification

from peft_surgical import StratifiedConfig


WIDTH, INSIDE, DEPTH, RANK, LABELS = 1024, 4096, 24, 64, 3
HEAD = WIDTH * LABELS + LABELS

# name, millions as printed in the paper, exact count
TABLE_2 = [
    ("SPAFIT-8-12-I", "4.44", 4_441_091),
    ("SPAFIT-8-12-II", "5.88", 5_882_883),
    ("SPAFIT-8-16-II", "3.81", 3_806_211),
    ("SPAFIT-4-9-I", "5.65", 5_650_435),
    ("SPAFIT-4-9-II", "7.49", 7_485_443),
    ("SPAFIT-4-14-II", "4.89", 4_889_603),
    ("Full LoRA-I", "9.44", 9_440_259),
    ("Full LoRA-II", "12.59", 12_585_987),
]


@pytest.fixture
def bert_large():
    with torch.device("meta"):
        config = BertConfig(
            vocab_size=28_996,
            hidden_size=WIDTH,
            num_hidden_layers=DEPTH,
            num_attention_heads=16,
            intermediate_size=INSIDE,
            num_labels=LABELS,
        )
        return BertForSequenceClassification(config)


def make(name: str, **options) -> StratifiedConfig:
    if name.startswith("SPAFIT"):
        return StratifiedConfig.spafit(name, task_type="SEQ_CLS", **options)
    return StratifiedConfig.full_lora(name.rpartition("-")[2], task_type="SEQ_CLS", **options)


@pytest.mark.parametrize(("name", "millions", "count"), TABLE_2)
def test_the_counts_of_the_paper(bert_large, name, millions, count):
    model = get_peft_model(bert_large, make(name))
    assert model.get_nb_trainable_parameters()[0] == count
    assert f"{count / 1e6:.2f}" == millions


@pytest.mark.parametrize(("name", "millions", "count"), TABLE_2)
def test_the_counts_follow_from_the_architecture(name, millions, count):
    lora = RANK * (WIDTH + WIDTH)
    biases = {"attention": 4 * WIDTH + WIDTH, "intermediate": INSIDE, "output": WIDTH + WIDTH}
    matrices = 4 if name.endswith("II") else 3
    if name.startswith("SPAFIT"):
        n1, n2 = map(int, name.split("-")[1:3])
        bitfit = (n2 - n1) * sum(biases.values())
        group_3 = (DEPTH - 1 - n2) * (matrices * lora + biases["intermediate"] + biases["output"])
        assert HEAD + bitfit + group_3 == count
    else:
        assert HEAD + DEPTH * matrices * lora == count


def test_only_the_biases_of_the_layers_and_the_head_are_trained_by_full_bitfit(bert_large):
    model = get_peft_model(bert_large, StratifiedConfig.full_bitfit(task_type="SEQ_CLS"))
    biases = sum(p.numel() for name, p in bert_large.bert.encoder.named_parameters() if _is_base_bias(name))
    assert biases == DEPTH * 11_264
    assert model.get_nb_trainable_parameters()[0] == biases + HEAD


def test_the_papers_own_count_for_full_bitfit_needs_embeddings_and_pooler(bert_large):
    embeddings = sum(p.numel() for p in bert_large.bert.embeddings.parameters())
    pooler = sum(p.numel() for p in bert_large.bert.pooler.parameters())
    every_bias = sum(p.numel() for name, p in bert_large.named_parameters() if name.endswith("bias"))
    assert every_bias < 0.3e6
    assert every_bias + pooler < 1.4e6
    assert DEPTH * 11_264 + HEAD + embeddings + pooler == pytest.approx(31.52e6, abs=0.03e6)


@pytest.mark.parametrize("name", ["SPAFIT-4-9-II", "Full LoRA-I"])
def test_the_head_is_not_trained_without_a_task(bert_large, name):
    options = {"r": RANK, "lora_alpha": 128}
    config = StratifiedConfig.spafit(name, **options) if name.startswith("SPAFIT") else StratifiedConfig.full_lora("I")
    count = next(count for n, _, count in TABLE_2 if n == name)
    assert get_peft_model(bert_large, config).get_nb_trainable_parameters()[0] == count - HEAD


def test_the_papers_rank_and_alpha_are_the_defaults_of_its_models_and_can_be_changed(bert_large):
    config = StratifiedConfig.spafit("SPAFIT-4-9-II", task_type="SEQ_CLS", r=8)
    assert (config.r, config.lora_alpha) == (8, 128)
    model = get_peft_model(bert_large, config)
    assert model.get_nb_trainable_parameters()[0] == 7_485_443 - 14 * 4 * (RANK - 8) * 2 * WIDTH


def _is_base_bias(name: str) -> bool:
    return name.endswith(".bias") and "lora_tuned" not in name
