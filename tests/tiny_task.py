"""A tiny base model with a tokenizer, and tiny labelled text, as folders; nothing is downloaded."""

from __future__ import annotations

import random
from pathlib import Path

from datasets import ClassLabel, Dataset, Features, Value
from tiny_models import VOCABULARY, build
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


WORDS = [f"w{i}" for i in range(60)]
GOOD, BAD = WORDS[:8], WORDS[8:16]
LABELS = ["bad", "good"]


def save_base(folder: Path, family: str = "bert", **options) -> Path:
    """A tiny bare model and its tokenizer."""
    build(family, bare=True, **options).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, pad_token: str | None = "[PAD]") -> None:
    """A tokenizer of whole words; text pairs are told apart."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    assert len(vocabulary) <= VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad_token,
        unk_token="[UNK]",
        eos_token="[SEP]",
        model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)


def make_rows(count: int, seed: int, *, pair: bool = False, regression: bool = False) -> Dataset:
    """Texts of a few words. The label tells whether a word is one of `GOOD`; as an amount, how many words are."""
    draw = random.Random(seed)
    texts, pairs, labels = [], [], []
    for i in range(count):
        words = draw.choices(WORDS[16:], k=draw.randint(3, 9))
        good = i % 2
        words[draw.randrange(len(words))] = draw.choice(GOOD if good else BAD)
        texts.append(" ".join(words))
        pairs.append(" ".join(draw.choices(WORDS[16:], k=draw.randint(2, 5))))
        labels.append(sum(word in GOOD for word in words) + 0.5 * len(words) / 9 if regression else good)
    columns = {"sentence1": texts, "sentence2": pairs} if pair else {"text": texts}
    features = {name: Value("string") for name in columns}
    features["label"] = Value("float32") if regression else ClassLabel(names=LABELS)
    return Dataset.from_dict({**columns, "label": labels}, features=Features(features))


def save_data(folder: Path, *, train: int = 60, validation: int = 30, **options) -> Path:
    """A folder of splits, as Parquet files."""
    folder.mkdir(parents=True, exist_ok=True)
    make_rows(train, 1, **options).to_parquet(str(folder / "train.parquet"))
    make_rows(validation, 2, **options).to_parquet(str(folder / "validation.parquet"))
    return folder
