"""A tiny language model with a tokenizer and a chat template, and tiny rows to train it on; nothing is downloaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from datasets import Dataset
from tiny_models import VOCABULARY, build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


WORDS = [f"w{i}" for i in range(60)]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant> "
    "{% generation %}{{ m['content'] }} {{ eos_token }}{% endgeneration %}"
    "{% else %}<user> {{ m['content'] }} {% endif %} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def save_language_model(
    folder: Path, family: str = "llama", *, template: str | None = TEMPLATE, **options: Any
) -> Path:
    """A tiny causal language model and a tokenizer of whole words."""
    build(family, eos_token_id=2, bos_token_id=1, **options).save_pretrained(folder)
    special = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    assert len(vocabulary) <= VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([*special])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


def pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Questions of a few words, and answers: the words after them."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        numbers = draw.choices(range(10), k=draw.randint(2, 6))
        found.append((" ".join(WORDS[i] for i in numbers), " ".join(WORDS[i + 10] for i in numbers)))
    return found


def make_language_rows(count: int, seed: int, form: str = "messages") -> Dataset:
    """Rows in one of the formats: `messages`, `prompt` (two texts), `chat prompt`, `instruction`, `text`."""
    both = pairs(count, seed)

    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    if form == "messages":
        return Dataset.from_dict({"messages": [said("user", q) + said("assistant", a) for q, a in both]})
    if form == "chat prompt":
        columns = {"prompt": [said("user", q) for q, _ in both], "completion": [said("assistant", a) for _, a in both]}
    elif form == "prompt":
        columns = {"prompt": [q for q, _ in both], "completion": [f" {a}" for _, a in both]}
    elif form == "instruction":
        columns = {"instruction": [q for q, _ in both], "input": ["w50"] * count, "output": [a for _, a in both]}
    else:
        columns = {"text": [f"{q} {a}" for q, a in both]}
    return Dataset.from_dict(columns)


def save_language_data(folder: Path, form: str = "messages", *, train: int = 40, validation: int = 12) -> Path:
    """A folder of splits, as Parquet files."""
    folder.mkdir(parents=True, exist_ok=True)
    make_language_rows(train, 1, form).to_parquet(str(folder / "train.parquet"))
    make_language_rows(validation, 2, form).to_parquet(str(folder / "validation.parquet"))
    return folder
